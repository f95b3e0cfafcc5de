# SPDX-License-Identifier: Apache-2.0
"""Measure the memory-bound kernels on one GPU, against the copy bandwidth of the same run.

``python -m benchmarks.ops_h200 --out FILE.json`` prints a table and writes every sample with the
device, the versions and the shapes. Random data; device events; all variants of a section take
turns, so that clock and temperature changes meet them alike; medians. Each variant's output is
first compared bit for bit with the section's first one of its kind, in a poisoned buffer. The last
parts ask whether ``/`` or the shared reciprocal may stand for the IEEE division, and what one call
costs on the host.
"""

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.common import Record, device_of, say
from benchmarks.op_cases import (
    BF16,
    DEVICE,
    DIVISIONS,
    FP8,
    FP32,
    OPS,
    SECTIONS,
    normal,
    one_scale,
    quantize_dividing,
)
from benchmarks.op_timing import ROUNDS, Row, check, measure
from tensorrt_llm._torch.custom_ops.torch_custom_ops import _silu_and_mul_2in_launch_params
from tensorrt_llm._utils import get_sm_version


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
                    quantize_dividing(x, outs[division], scale, division)
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
    scale, weight = one_scale(), normal(64)
    codes, w8 = gate.to(FP8), normal(64, 64).to(FP8)
    calls = {
        "silu_and_mul_2in -> fp8": lambda: OPS.silu_and_mul_2in(gate, up, scale, FP8),
        "quantize_e4m3_static": lambda: OPS.quantize_e4m3_static(gate, scale),
        "add_rms_norm -> fp8": lambda: OPS.add_rms_norm(gate, up, weight, 1e-6, scale),
        "scaled_mm_e4m3": lambda: OPS.scaled_mm_e4m3(codes, w8, scale, scale, BF16),
        "linear_w8a16": lambda: OPS.linear_w8a16(gate, w8, scale),
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


def time_section(name: str) -> list[Row]:
    """Check and time one section; ``of_copy`` is against the copy that took turns with it."""
    variants = SECTIONS[name]()
    check(variants)
    rows = measure(name, variants)
    copy = next(row for row in rows if row.name == "copy").gb_per_s
    for row in rows:
        row.of_copy = row.gb_per_s / copy
        # Sections of another family take turns of their own, and are read like the first's.
        row.section = name.removesuffix(" super").removesuffix(" image")
        low, high = min(row.samples_ms), max(row.samples_ms)
        launch = f"{row.block or '':>6} {row.num_warps or '':>3}"
        say(
            f"{row.name:36s} {'x'.join(map(str, row.shape)):>22s} {launch} {row.median_ms:8.4f} "
            f"{low:8.4f}-{high:8.4f} {row.gb_per_s:6.0f}  {row.of_copy:5.3f}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--kernels-only", action="store_true", help="without divisions and host")
    arguments = parser.parse_args()
    device = device_of(DEVICE)
    torch.manual_seed(0)
    sm_version = get_sm_version()
    table = {
        str(dtype): _silu_and_mul_2in_launch_params(sm_version, dtype) for dtype in (BF16, FP8)
    }
    record = Record(arguments.out, device, rounds=ROUNDS, launch_table=table)
    say(f"{'kernel':36s} {'shape':>22s}  block warps    ms         range          GB/s of copy")
    for name in arguments.sections:
        with record.part(name):
            for row in time_section(name):
                values = asdict(row)
                record.add(values.pop("section"), **values)
        torch.cuda.empty_cache()
    if not arguments.kernels_only:
        with record.part("divisions"):
            record.content["divisions"] = divisions = compare_divisions()
            for name, counts in divisions.items():
                say(
                    f"{name}: {counts['codes_that_differ']} codes differ from div.rn, "
                    f"at {counts['scales_with_a_difference']} of {counts['scales']} scales"
                )
        with record.part("host"):
            record.content["host_microseconds"] = host = host_microseconds()
            for name, microseconds in host.items():
                say(f"host, {name}: {microseconds:.1f} us a call")


if __name__ == "__main__":
    main()
