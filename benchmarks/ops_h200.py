# SPDX-License-Identifier: Apache-2.0
"""Measure the SwiGLU and FP8 conversion kernels on one GPU, against the copy bandwidth of that run.

``python benchmarks/ops_h200.py --out FILE.json`` prints a table and writes every sample with the
device, the versions and the shapes. Random data; device events; all variants of a section take
turns, so that clock and temperature changes meet them alike; medians. Each variant's output is
first compared bit for bit with the section's first one, in a poisoned buffer. The last sections ask
whether ``/`` or the shared reciprocal may stand for the IEEE division, and what one call costs on
the host.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import triton
import triton.language as tl

import tensorrt_llm._torch.custom_ops  # noqa: F401
from tensorrt_llm._torch.custom_ops import triton_kernels as kernels
from tensorrt_llm._torch.custom_ops.torch_custom_ops import _silu_and_mul_2in_launch_params
from tensorrt_llm._torch.custom_ops.triton_kernels import e4m3_value, swiglu_value
from tensorrt_llm._utils import get_sm_version

DEVICE = "cuda"
FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
OPS = torch.ops.trtllm
# Cosmos3-Nano, 720p x 189 frames, both guidance branches: rows, intermediate size, hidden size.
ROWS, WIDTH, HIDDEN = 88320, 12288, 4096
COPY_ELEMENTS = 2**30
CANDIDATES = [(512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (8192, 8)]
ROUNDS = 30
SCALE = 2.15625 / 448  # amax / 448: a scale on which BF16 inputs meet rounding boundaries


@dataclass
class Variant:
    """One thing to time: ``run`` writes ``out`` and moves ``size`` bytes, read and written."""

    name: str
    run: Callable[[], None]
    size: int
    out: torch.Tensor | None = None
    block: int | None = None
    num_warps: int | None = None


@dataclass
class Row:
    """The samples of a variant, one a round, in milliseconds."""

    section: str
    name: str
    block: int | None
    num_warps: int | None
    bytes: int
    samples_ms: list[float] = field(default_factory=list)
    median_ms: float = 0.0
    gb_per_s: float = 0.0
    of_copy: float = 0.0


@triton.jit
def divide(value, scale, DIVISION: tl.constexpr):
    if DIVISION == "div_rn":
        return tl.clamp(tl.div_rn(value, scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    elif DIVISION == "slash":
        return tl.clamp(value / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        return e4m3_value(value, scale)


@triton.jit
def swiglu_division_kernel(
    gate_ptr, up_ptr, out_ptr, scale_ptr, numel, DIVISION: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask).to(tl.float32)
    value = swiglu_value(gate, up, 0.0, 1.0, 0.0, False)
    value = divide(value, tl.load(scale_ptr), DIVISION)
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantize_division_kernel(
    x_ptr, out_ptr, scale_ptr, numel, DIVISION: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    value = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    value = divide(value, tl.load(scale_ptr), DIVISION)
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=mask)


DIVISIONS = ("div_rn", "slash", "shared")


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def check(variants: list[Variant]) -> None:
    """Refuse to time variants whose outputs differ, or leave elements unwritten."""
    expected = {}
    for variant in variants:
        if variant.out is None:
            variant.run()
            continue
        as_bytes = variant.out.view(torch.uint8)
        as_bytes.fill_(0x5A)
        variant.run()
        key = variant.out.dtype
        if key not in expected:
            expected[key] = as_bytes.clone()
        elif not torch.equal(as_bytes, expected[key]):
            different = (as_bytes != expected[key]).sum().item()
            raise SystemExit(f"{variant.name}: {different} bytes differ from the first variant's")


def measure(section: str, variants: list[Variant]) -> list[Row]:
    """Time the variants in turns; the order rotates by one each round."""
    rows = [Row(section, v.name, v.block, v.num_warps, v.size) for v in variants]
    for variant in variants * 2:
        variant.run()
    events = []
    for start in range(ROUNDS):
        for index in range(len(variants)):
            index = (index + start) % len(variants)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The device waits a little, so that the launch is queued before the clock starts.
            torch.cuda._sleep(200_000)
            begin.record()
            variants[index].run()
            end.record()
            events.append((index, begin, end))
    torch.cuda.synchronize()
    for index, begin, end in events:
        rows[index].samples_ms.append(begin.elapsed_time(end))
    for row in rows:
        row.median_ms = statistics.median(row.samples_ms)
        row.gb_per_s = row.bytes / row.median_ms / 1e6
    return rows


def swiglu_variants() -> list[Variant]:
    gate, up = normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    x = torch.cat([gate, up], -1)
    scale = torch.tensor(SCALE, device=DEVICE)
    outs = {dtype: torch.empty(ROWS, WIDTH, device=DEVICE, dtype=dtype) for dtype in (BF16, FP8)}
    variants = []
    for dtype, out in outs.items():
        label = str(dtype).removeprefix("torch.")
        out_scale = scale if dtype == FP8 else None
        for block, num_warps in CANDIDATES:
            launch = {"block": block, "num_warps": num_warps}
            for name, function, sources in (
                ("two inputs", kernels.launch_silu_and_mul_2in, (gate, up)),
                ("fused input", kernels.launch_silu_and_mul, (x,)),
            ):

                def run(function=function, sources=sources, out=out, s=out_scale, launch=launch):
                    function(*sources, out, s, None, 1.0, 0.0, **launch)

                size = nbytes(gate, up, out)
                variants.append(Variant(f"swiglu {name} -> {label}", run, size, out, **launch))
    for block, num_warps in ((1024, 4), (2048, 4)):
        for division in DIVISIONS:

            def run(division=division, block=block, num_warps=num_warps, out=outs[FP8]):
                swiglu_division_kernel[(triton.cdiv(out.numel(), block),)](
                    gate,
                    up,
                    out,
                    scale,
                    out.numel(),
                    DIVISION=division,
                    BLOCK=block,
                    num_warps=num_warps,
                    enable_fp_fusion=False,
                )

            # `/` may differ in a code, which the division section counts; it is only timed here.
            compared = None if division == "slash" else outs[FP8]
            name = f"swiglu two inputs -> fp8, {division}"
            variants.append(
                Variant(name, run, nbytes(gate, up, outs[FP8]), compared, block, num_warps)
            )
    source, target = (torch.empty(COPY_ELEMENTS, device=DEVICE, dtype=BF16) for _ in range(2))
    source.normal_()
    variants.append(Variant("copy", lambda: target.copy_(source), nbytes(source, target)))
    return variants


def quantize_variants() -> list[Variant]:
    x = normal(ROWS, HIDDEN)
    out = torch.empty(ROWS, HIDDEN, device=DEVICE, dtype=FP8)
    scale = torch.tensor(SCALE, device=DEVICE)
    variants = []
    for block, num_warps in CANDIDATES:
        launch = {"block": block, "num_warps": num_warps}

        def run(launch=launch):
            kernels.launch_quantize_e4m3_static(x, out, scale, **launch)

        variants.append(Variant("quantise static", run, nbytes(x, out), out, **launch))
    for division in DIVISIONS:

        def run(division=division):
            quantize_division_kernel[(triton.cdiv(out.numel(), 1024),)](
                x,
                out,
                scale,
                out.numel(),
                DIVISION=division,
                BLOCK=1024,
                num_warps=4,
                enable_fp_fusion=False,
            )

        compared = None if division == "slash" else out
        variants.append(
            Variant(f"quantise static, {division}", run, nbytes(x, out), compared, 1024, 4)
        )
    # The dynamic form reads x twice: once for amax.
    variants.append(
        Variant("quantise dynamic (op)", lambda: OPS.quantize_e4m3_dynamic(x), nbytes(x, x, out))
    )
    return variants


def dequantize_variants() -> list[Variant]:
    weight = normal(WIDTH, HIDDEN).to(FP8)
    out = torch.empty(WIDTH, HIDDEN, device=DEVICE, dtype=BF16)
    scale = torch.tensor(SCALE, device=DEVICE)
    variants = []
    for block, num_warps in CANDIDATES:
        launch = {"block": block, "num_warps": num_warps}

        def run(launch=launch):
            kernels.launch_dequantize_e4m3(weight, out, scale, **launch)

        variants.append(Variant("dequantise", run, nbytes(weight, out), out, **launch))
    return variants


def compare_divisions() -> dict:
    """Count the FP8 codes that ``/`` and the shared reciprocal give otherwise than div.rn.

    Inputs: every BF16 value but NaN, and 2^22 FP32 values around the codes, at each of 2,048
    scales: calibrated ones (amax / 448 for 128 BF16 amax, at 8 magnitudes) and as many random ones.
    """
    bf16 = torch.arange(65536, dtype=torch.int32, device=DEVICE).to(torch.uint16).view(BF16)
    bf16 = bf16[~bf16.isnan()]
    amax = (torch.arange(128, device=DEVICE) + 0x3F80).to(torch.int16).view(BF16).float()
    scales = {
        "calibrated": torch.cat([amax * 2.0**-k / 448 for k in range(8)]),
        "random": torch.exp2(torch.rand(1024, device=DEVICE) * 20 - 16),
    }
    near = torch.randn(2**22, device=DEVICE, dtype=FP32)
    result = {}
    for kind, values in scales.items():
        for source in ("bf16", "fp32"):
            codes = {name: 0 for name in DIVISIONS[1:]}
            at_scales = dict(codes)
            for scale in values.unbind():
                x = bf16 if source == "bf16" else near * (100 * scale)
                outs = {}
                for division in DIVISIONS:
                    outs[division] = torch.empty(x.shape, device=DEVICE, dtype=FP8)
                    quantize_division_kernel[(triton.cdiv(x.numel(), 1024),)](
                        x,
                        outs[division],
                        scale,
                        x.numel(),
                        DIVISION=division,
                        BLOCK=1024,
                        num_warps=4,
                        enable_fp_fusion=False,
                    )
                exact = outs["div_rn"].view(torch.uint8)
                for name in codes:
                    different = (outs[name].view(torch.uint8) != exact).sum().item()
                    codes[name] += different
                    at_scales[name] += different > 0
            for name in codes:
                result[f"{name}, {source} inputs, {kind} scales"] = {
                    "codes_that_differ": codes[name],
                    "scales_with_a_difference": at_scales[name],
                    "scales": len(values),
                    "inputs_per_scale": bf16.numel() if source == "bf16" else near.numel(),
                }
    return result


def host_microseconds() -> dict[str, float]:
    """What one call of an op costs the host, its kernel being shorter: median of 20 x 100."""
    gate, up = normal(8, 64), normal(8, 64)
    scale = torch.tensor(SCALE, device=DEVICE)
    calls = {
        "silu_and_mul_2in -> fp8": lambda: OPS.silu_and_mul_2in(gate, up, scale, FP8),
        "quantize_e4m3_static": lambda: OPS.quantize_e4m3_static(gate, scale),
        "torch.mul": lambda: torch.mul(gate, up),
    }
    result = {}
    for name, call in calls.items():
        samples = []
        for _ in range(21):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(100):
                call()
            samples.append((time.perf_counter() - begin) * 1e4)
        result[name] = statistics.median(samples[1:])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    out = parser.parse_args().out
    torch.manual_seed(0)
    sm_version = get_sm_version()
    print(
        torch.cuda.get_device_name(),
        f"sm_{sm_version}, torch {torch.__version__}, triton {triton.__version__}",
    )
    rows = []
    for section, make in (
        ("swiglu", swiglu_variants),
        ("quantise", quantize_variants),
        ("dequantise", dequantize_variants),
    ):
        variants = make()
        check(variants)
        rows += measure(section, variants)
        del variants
        torch.cuda.empty_cache()
    copy = next(row for row in rows if row.name == "copy").gb_per_s
    print(f"{'kernel':44s} {'block':>6s} {'warps':>5s} {'ms':>8s} {'range':>17s}   GB/s of copy")
    for row in rows:
        row.of_copy = row.gb_per_s / copy
        low, high = min(row.samples_ms), max(row.samples_ms)
        print(
            f"{row.name:44s} {row.block or '':>6} {row.num_warps or '':>5} {row.median_ms:8.4f} "
            f"{low:8.4f}-{high:8.4f} {row.gb_per_s:6.0f}  {row.of_copy:5.3f}"
        )
    divisions = compare_divisions()
    for name, counts in divisions.items():
        print(
            f"{name}: {counts['codes_that_differ']} codes differ from div.rn, "
            f"at {counts['scales_with_a_difference']} of {counts['scales']} scales"
        )
    host = host_microseconds()
    for name, microseconds in host.items():
        print(f"host, {name}: {microseconds:.1f} us a call")
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "device": torch.cuda.get_device_name(),
        "sm_version": sm_version,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shapes": {"swiglu": [ROWS, WIDTH], "quantise": [ROWS, HIDDEN], "weight": [WIDTH, HIDDEN]},
        "rounds": ROUNDS,
        "launch_table": {
            str(dtype): _silu_and_mul_2in_launch_params(sm_version, dtype) for dtype in (BF16, FP8)
        },
        "rows": [asdict(row) for row in rows],
        "divisions": divisions,
        "host_microseconds": host,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
