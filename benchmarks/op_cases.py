# SPDX-License-Identifier: Apache-2.0
"""The memory-bound kernels of a step at full size, each with the launches that are tried.

Rows are those of Cosmos3 with both guidance branches at 720p x 189 frames, where no other size is
named. A variant without launch
parameters is the op itself, with what it ships with, and allocates its output.
"""

import torch
import triton
import triton.language as tl

import tensorrt_llm._torch.custom_ops  # noqa: F401
from benchmarks.common import CASES, FAMILIES, Case, Family
from benchmarks.op_timing import Variant, nbytes
from tensorrt_llm._torch.custom_ops import (
    attention_kernels,
    attention_scale_kernels,
    norm_kernels,
    value_mean_kernels,
)
from tensorrt_llm._torch.custom_ops import triton_kernels as kernels
from tensorrt_llm._torch.custom_ops.attention_arguments import QkvInputs
from tensorrt_llm._torch.custom_ops.triton_kernels import e4m3_value

DEVICE = "cuda"
FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
OPS = torch.ops.trtllm
CASE = CASES["720p"]
SCALE = 2.15625 / 448  # amax / 448: a scale on which BF16 inputs meet rounding boundaries
COPY_ELEMENTS = 2**30
FLAT = [(1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8), (8192, 16), (16384, 16)]
FUSED = [(1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 16)]
ROWWISE = [(1, 4), (1, 8), (2, 4), (2, 8), (4, 4), (4, 8), (8, 8)]
WARPS = (2, 4, 8)
STATISTICS = [(8, 4), (12, 4), (16, 4), (32, 4), (64, 2), (64, 4), (64, 8), (128, 4)]
# (rows a program of the statistics, partials at a time, warps)
SCALES = [(12, 64, 8), (12, 128, 8), (12, 128, 16), (64, 64, 8), (64, 128, 8), (64, 128, 16)]
DIVISIONS = ("div_rn", "slash", "shared")


@triton.jit
def divide(value, scale, DIVISION: tl.constexpr):
    if DIVISION == "div_rn":
        return tl.clamp(tl.div_rn(value, scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    elif DIVISION == "slash":
        return tl.clamp(value / scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        return e4m3_value(value, scale)


@triton.jit
def quantize_division_kernel(
    x_ptr, out_ptr, scale_ptr, numel, DIVISION: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    value = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    value = divide(value, tl.load(scale_ptr), DIVISION)
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=mask)


def quantize_dividing(x, out, scale, division: str) -> None:
    """Quantise with one of ``DIVISIONS``."""
    quantize_division_kernel[(triton.cdiv(x.numel(), 1024),)](
        x,
        out,
        scale,
        x.numel(),
        DIVISION=division,
        BLOCK=1024,
        num_warps=4,
        enable_fp_fusion=False,
    )


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def one_scale() -> torch.Tensor:
    return torch.tensor(SCALE, device=DEVICE)


def copy_variant() -> Variant:
    """The copy that every figure is compared with: 4 GB, read and written."""
    source, target = (torch.empty(COPY_ELEMENTS, device=DEVICE, dtype=BF16) for _ in range(2))
    source.normal_()
    size = nbytes(source, target)
    return Variant("copy", lambda: target.copy_(source), size, shape=(COPY_ELEMENTS,))


def swiglu_variants(family: Family, dtypes: tuple[torch.dtype, ...]) -> list[Variant]:
    """Both forms of SwiGLU to each dtype, every launch; and both ops to FP8."""
    rows, width = CASE.rows, family.intermediate
    gate, up = normal(rows, width), normal(rows, width)
    x = torch.cat([gate, up], -1)
    scale = one_scale()
    variants = []
    for dtype in dtypes:
        out = torch.empty(rows, width, device=DEVICE, dtype=dtype)
        label = str(dtype).removeprefix("torch.")
        out_scale = scale if dtype == FP8 else None
        for name, function, sources, launches in (
            ("two inputs", kernels.launch_silu_and_mul_2in, (gate, up), FLAT),
            ("fused input", kernels.launch_silu_and_mul, (x,), FUSED),
        ):
            for block, num_warps in launches:
                launch = {"block": block, "num_warps": num_warps}

                def run(function=function, sources=sources, out=out, s=out_scale, launch=launch):
                    function(*sources, out, s, None, 1.0, 0.0, **launch)

                variants.append(
                    Variant(
                        f"swiglu {name} -> {label}",
                        run,
                        nbytes(gate, up, out),
                        (out,),
                        label,
                        (rows, width),
                        **launch,
                    )
                )
    for name, op, sources in (
        ("two inputs", OPS.silu_and_mul_2in, (gate, up)),
        ("fused input", OPS.silu_and_mul, (x,)),
    ):
        # The names of the launches, beside which goals.py reads these rows.
        label, size = f"swiglu {name} -> float8_e4m3fn", nbytes(gate, up) + rows * width

        def call(op=op, sources=sources):
            op(*sources, scale, FP8)

        variants.append(Variant(label, call, size, shape=(rows, width)))
    return variants


def quantize_variants(family: Family) -> list[Variant]:
    """The quantisation of an attention output, and of its 16-bit inverse, a weight."""
    x, scale = normal(CASE.rows, family.heads * family.head_dim), one_scale()
    out = torch.empty_like(x, dtype=FP8)
    weight = normal(family.intermediate, family.hidden).to(FP8)
    wide = torch.empty_like(weight, dtype=BF16)
    variants = []
    for block, num_warps in FLAT:
        launch = {"block": block, "num_warps": num_warps}

        def run(launch=launch):
            kernels.launch_quantize_e4m3_static(x, out, scale, **launch)

        def back(launch=launch):
            kernels.launch_dequantize_e4m3(weight, wide, scale, **launch)

        size = nbytes(x, out)
        variants.append(Variant("quantise static", run, size, (out,), "codes", x.shape, **launch))
        size = nbytes(weight, wide)
        variants.append(
            Variant("dequantise", back, size, (wide,), "weights", weight.shape, **launch)
        )
    for division in DIVISIONS:
        # `/` may differ in a code, which the section on divisions counts; it is only timed here.
        variants.append(
            Variant(
                f"quantise static, {division}",
                lambda division=division: quantize_dividing(x, out, scale, division),
                nbytes(x, out),
                (out,),
                None if division == "slash" else "codes",
                x.shape,
                1024,
                4,
            )
        )
    # The dynamic form reads x twice: once for amax.
    dynamic = nbytes(x, x, out)
    variants.append(
        Variant("quantise dynamic", lambda: OPS.quantize_e4m3_dynamic(x), dynamic, shape=x.shape)
    )
    return variants


def norm_variants(family: Family) -> list[Variant]:
    """RMSNorm and residual addition with RMSNorm, to FP8 and to 16 bit."""
    x, residual = normal(CASE.rows, family.hidden), normal(CASE.rows, family.hidden)
    weight, scale, total = normal(family.hidden), one_scale(), torch.empty_like(x)
    variants = []
    for dtype in (FP8, BF16):
        out = torch.empty_like(x, dtype=dtype)
        label = str(dtype).removeprefix("torch.")
        out_scale = scale if dtype == FP8 else None
        for block, num_warps in ROWWISE:
            launch = {"block": block, "num_warps": num_warps}

            def plain(out=out, s=out_scale, launch=launch):
                norm_kernels.launch_rms_norm(x, weight, out, s, 1e-6, **launch)

            def add(out=out, s=out_scale, launch=launch):
                norm_kernels.launch_add_rms_norm(x, residual, weight, out, total, s, 1e-6, **launch)

            # Each number of warps adds up in an order of its own.
            key = f"{label}, {num_warps} warps"
            variants.append(
                Variant(
                    f"norm -> {label}",
                    plain,
                    nbytes(x, out),
                    (out,),
                    f"norm {key}",
                    x.shape,
                    **launch,
                )
            )
            variants.append(
                Variant(
                    f"add and norm -> {label}",
                    add,
                    nbytes(x, residual, out, total),
                    (out, total),
                    f"add {key}",
                    x.shape,
                    **launch,
                )
            )
    return variants


def qkv_inputs(family: Family, case: Case) -> QkvInputs:
    """q, k, v of both branches with their tables and texts."""
    tokens, d, length = case.tokens, family.head_dim, max(case.text)
    q = normal(2, tokens, family.heads * d)
    k, v = (normal(2, tokens, family.kv_heads * d) for _ in range(2))
    angles = torch.rand(2, tokens, d // 2, device=DEVICE).repeat(1, 1, 2) * 100
    texts = (normal(2, length, family.kv_heads, d) for _ in range(2))
    lengths = torch.tensor(case.text, dtype=torch.int32, device=DEVICE)
    tables = (angles.cos().to(BF16), angles.sin().to(BF16))
    return QkvInputs(q, k, v, normal(d), normal(d), 1e-6, *tables, *texts, lengths)


def qkv_variants(family: Family, case: Case = CASE) -> list[Variant]:
    """Norm, rotation and layout of q, K and V: 16 bit, and the passes of the FP8 form."""
    inputs = qkv_inputs(family, case)
    shape = (*inputs.q.shape[:2], family.heads, family.kv_heads, family.head_dim)
    read = nbytes(inputs.q, inputs.k, inputs.v, inputs.cos, inputs.sin)
    # Of each branch's text the valid rows are read, and rows of K and V written for all.
    text = nbytes(inputs.text_k, inputs.text_v)
    valid = text * sum(case.text) // (2 * max(case.text))
    wide, codes = OPS.qk_norm_rope(*inputs), OPS.qkv_norm_rope_e4m3(*inputs)
    descales, means = codes[3:6], (torch.zeros_like(codes[6]), codes[6])
    variants = []
    for num_warps in WARPS:

        def write(num_warps=num_warps):
            attention_kernels.launch_qk_norm_rope(inputs, *wide, num_warps=num_warps)

        size = read + valid + nbytes(*wide)
        variants.append(
            Variant("q, k, v", write, size, (), None, shape, block=1, num_warps=num_warps)
        )
    for block, num_warps in STATISTICS:
        launch = {"block": block, "num_warps": num_warps}

        def statistics(launch=launch):
            attention_scale_kernels.launch_qkv_statistics(inputs, **launch)

        variants.append(
            Variant("q, k, v statistics", statistics, read + valid, (), None, shape, **launch)
        )
    for rows, block, num_warps in SCALES:
        launch = {"block": block, "num_warps": num_warps}
        partials = attention_scale_kernels.launch_qkv_statistics(inputs, block=rows, num_warps=4)

        def join(launch=launch, partials=partials):
            attention_scale_kernels.launch_qkv_descales(
                inputs, partials, *means, *descales, **launch
            )

        name = f"q, k, v scales of {rows} rows"
        variants.append(Variant(name, join, nbytes(*partials[:3]), (), None, shape, **launch))
    for num_warps in WARPS:

        def quantise(num_warps=num_warps):
            attention_kernels.launch_qkv_quantize(
                inputs, *codes[:3], *means, *descales, num_warps=num_warps
            )

        size = read + valid + nbytes(*codes[:3])
        variants.append(
            Variant(
                "q, k, v -> codes", quantise, size, (), None, shape, block=1, num_warps=num_warps
            )
        )
    for name, op, size in (
        ("q, k, v (op)", OPS.qk_norm_rope, read + valid + nbytes(*wide)),
        ("q, k, v -> codes (op)", OPS.qkv_norm_rope_e4m3, 2 * (read + valid) + nbytes(*codes[:3])),
    ):
        variants.append(Variant(name, lambda op=op: op(*inputs), size, shape=shape))
    return [*variants, *value_mean_variants(family, case)]


def value_mean_variants(family: Family, case: Case) -> list[Variant]:
    """Adding the mean values to the output of FP8 attention, to FP8 and to 16 bit."""
    attended = normal(2, case.tokens, family.heads, family.head_dim)
    v_mean, scale = normal(2, family.kv_heads, family.head_dim, dtype=FP32), one_scale()
    variants = []
    for dtype in (FP8, BF16):
        out = torch.empty_like(attended, dtype=dtype)
        label = str(dtype).removeprefix("torch.")
        out_scale = scale if dtype == FP8 else None
        for block, num_warps in ROWWISE:
            launch = {"block": block, "num_warps": num_warps}

            def run(out=out, s=out_scale, launch=launch):
                value_mean_kernels.launch_add_value_mean(attended, v_mean, out, s, **launch)

            name, size = f"add value mean -> {label}", nbytes(attended, v_mean, out)
            variants.append(Variant(name, run, size, (out,), name, attended.shape, **launch))
    return variants


SECTIONS = {
    "swiglu": lambda: [copy_variant(), *swiglu_variants(FAMILIES["nano"], (BF16, FP8))],
    "swiglu super": lambda: [copy_variant(), *swiglu_variants(FAMILIES["super"], (FP8,))],
    "quantise": lambda: [copy_variant(), *quantize_variants(FAMILIES["nano"])],
    "norm": lambda: [copy_variant(), *norm_variants(FAMILIES["nano"])],
    "norm super": lambda: [copy_variant(), *norm_variants(FAMILIES["super"])],
    "qkv": lambda: [copy_variant(), *qkv_variants(FAMILIES["nano"])],
    "qkv super": lambda: [copy_variant(), *qkv_variants(FAMILIES["super"])],
    "qkv image": lambda: [copy_variant(), *qkv_variants(FAMILIES["nano"], CASES["image"])],
}
"""Makers of the variants that take turns, by section; each has its own copy."""
