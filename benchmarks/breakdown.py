# SPDX-License-Identifier: Apache-2.0
"""Where the time of a denoising step goes: its kernels by family, against the families' ceilings.

``kernels_of`` runs a step under torch.profiler; ``breakdown_rows`` sorts the kernels by their names
and sets each family against what it can't be faster than: linears and attention against their times
in the sustained mix, everything else against its counted bytes at the run's copy bandwidth. A
kernel that no pattern knows goes to "other" by its name, so nothing hides in a sum.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from benchmarks.common import Case, Family, synchronize
from benchmarks.counted_work import DEQUANTIZE, attention_flops, counted_bytes, linear_flops

# Family of a kernel: the first pattern that is found in its name. The names on an H200 are those of
# our Triton kernels, cuBLASLt ("nvjet_q..." multiplies E4M3), cuDNN, fa3-fwd and PyTorch.
KERNEL_FAMILIES = (
    ("attention", r"flash|fmha|sdpa"),
    ("qk norm + RoPE", r"rope|qkv?_|_(write|statistics|join)_kernel"),
    ("norm + residual", r"rms_?norm|layer_norm"),
    ("SwiGLU", r"silu|swiglu"),
    ("dequantise", r"dequant|w8a16"),
    ("quantise", r"quant|e4m3_static|add_value_mean"),
    ("FP8 GEMM", r"nvjet_(sm\d+_)?q|e4m3.*gemm|gemm.*e4m3|fp8.*gemm"),
    ("BF16 GEMM", r"nvjet|gemm|cutlass|cublas|splitk"),
    (
        "copies and elementwise",
        r"mem(cpy|set)|copy|cat|elementwise|reduce|index|gather|scatter|fill|triton_(poi|red|per)",
    ),
)
OTHER = "other"
IDLE = "idle"
# Counted bytes (counted_work.py) that a family of kernels moves.
_BYTES_OF = {
    "norm + residual": ("norm_residual",),
    "qk norm + RoPE": ("qk_norm_rope", "attention_fp8"),
    "SwiGLU": ("swiglu",),
    "quantise": ("quantize_attended",),
    "dequantise": (DEQUANTIZE,),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill on the device: its name, start and duration in seconds."""

    name: str
    start: float
    seconds: float


def family_of(kernel: str) -> str:
    """The family of a kernel of this name."""
    for family, pattern in KERNEL_FAMILIES:
        if re.search(pattern, kernel, re.IGNORECASE):
            return family
    return OTHER


def kernels_of(device: torch.device, call: Callable[[], object]) -> list[Kernel]:
    """What a warm call runs on a CUDA device, in order of start."""
    from torch.profiler import ProfilerActivity, profile

    synchronize(device)
    # Without the host's side, which would slow down the launches and so add idle time.
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        synchronize(device)
    kernels = [
        Kernel(event.name, event.time_range.start / 1e6, event.time_range.elapsed_us() / 1e6)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def idle_seconds(kernels: Iterable[Kernel]) -> float:
    """Seconds between the first start and the last end in which nothing ran."""
    idle, end = 0.0, None
    for kernel in kernels:
        if end is not None:
            idle += max(0.0, kernel.start - end)
        end = max(end or 0.0, kernel.start + kernel.seconds)
    return idle


def breakdown_rows(
    kernels: list[Kernel],
    family: Family,
    case: Case,
    mode: str,
    attention: str,
    ceiling: dict,
) -> list[dict]:
    """One row a kernel family, the largest first, and one for the idle time.

    Args:
        kernels: Of one step.
        family: Sizes of the transformer.
        case: Size of the request.
        mode: "w8a8" or "w8a16".
        attention: "bf16" or "fp8".
        ceiling: The row of section "ceiling" of this mode and attention.

    Returns:
        Rows with ``kernel_family``, ``seconds``, ``share`` of the step, ``count``, ``bytes`` or
        ``flops`` where they are counted, ``ceiling_s`` and ``of_ceiling`` (seconds over it), and
        the family's ``kernels`` by name: [count, seconds].
    """
    groups: dict[str, dict[str, list]] = {}
    for kernel in kernels:
        entry = groups.setdefault(family_of(kernel.name), {}).setdefault(kernel.name, [0, 0.0])
        entry[0] += 1
        entry[1] += kernel.seconds
    idle = idle_seconds(kernels)
    total = idle + sum(seconds for names in groups.values() for _, seconds in names.values())
    rows = []
    for name, names in groups.items():
        seconds = sum(spent for _, spent in names.values())
        row = {
            "kernel_family": name,
            "seconds": seconds,
            "share": seconds / total,
            "count": sum(count for count, _ in names.values()),
            **_ceiling_of(name, family, case, mode, attention, ceiling),
            "kernels": dict(sorted(names.items(), key=lambda item: -item[1][1])),
        }
        if row.get("ceiling_s"):
            row["of_ceiling"] = seconds / row["ceiling_s"]
        rows.append(row)
    rows.sort(key=lambda row: -row["seconds"])
    return [*rows, {"kernel_family": IDLE, "seconds": idle, "share": idle / total}]


def _ceiling_of(
    name: str, family: Family, case: Case, mode: str, attention: str, ceiling: dict
) -> dict:
    counted = counted_bytes(family, case, mode, attention)
    copy = ceiling["copy_gb_s"] * 1e9
    linears = "FP8 GEMM" if mode == "w8a8" else "BF16 GEMM"
    if name == "attention":
        flops = attention_flops(family, case)
        return {"flops": flops, "ceiling_s": ceiling["attention_s"]}
    if name == linears:
        # On 16-bit steps the mix's linears dequantise too; that part has a row of its own.
        seconds = ceiling["linears_s"] - counted.get(DEQUANTIZE, 0) / copy
        return {"flops": linear_flops(family, case), "ceiling_s": seconds}
    size = sum(counted.get(part, 0) for part in _BYTES_OF.get(name, ()))
    return {"bytes": size, "ceiling_s": size / copy} if size else {}
