# SPDX-License-Identifier: Apache-2.0
"""Triton kernels behind the CUDA side of the ``trtllm`` ops, and the functions that launch them.

A launch function takes checked, contiguous tensors on one device (``torch_custom_ops`` does the
checking), fills a preallocated output and returns nothing. All offsets are 64-bit. Arithmetic is
FP32 and written once: both SwiGLU kernels call ``swiglu_value``, and every FP8 output goes through
``e4m3_value``, so two kernels that see the same numbers store the same bits.
"""

import torch
import triton
import triton.language as tl

# A compiler that contracts a product and a sum differently in two kernels would break their
# equality.
_EXACT = {"enable_fp_fusion": False}


@triton.jit
def swiglu_value(gate, up, limit, alpha, beta, HAS_LIMIT: tl.constexpr):
    """a * sigmoid(alpha * a) * (b + beta) of FP32 values; NaN stays NaN.

    The sigmoid is one division by 1 + 2^(-alpha * log2(e) * a), whose factor is the same for every
    element: 6 of 32 instructions an element fewer than ``tl.sigmoid`` (sm_90 code of Triton 3.6.0).
    """
    if HAS_LIMIT:
        # Triton's minimum and clamp drop NaN unless told otherwise.
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp2((alpha * -1.4426950408889634) * gate)) * (up + beta)


@triton.jit
def divide_by_shared(value, divisor):
    """The correctly rounded FP32 quotients of many values by one divisor in [2^-90, 2^90].

    ``tl.div_rn`` repeats the reciprocal and a branch for every element; here the reciprocal is made
    once, with its own error, and each element takes a multiplication and three FMAs. The first
    quotient is off by less than one unit in the last place, so its remainder is exact and one
    correction rounds correctly (Markstein's theorem; the reciprocal must be the correctly rounded
    one). Magnitudes are cut at 512 * divisor, past every FP8 value, so that nothing overflows; the
    sign, of zero too, is put back at the end. Quotients below 2^-13, all of which round to the FP8
    zero, may be off.
    """
    reciprocal = tl.div_rn(1.0, divisor)
    reciprocal_error = tl.fma(-divisor, reciprocal, 1.0) * reciprocal
    magnitude = tl.minimum(tl.abs(value), 512.0 * divisor, propagate_nan=tl.PropagateNan.ALL)
    quotient = tl.fma(magnitude, reciprocal, magnitude * reciprocal_error)
    remainder = tl.fma(quotient, -divisor, magnitude)
    quotient = tl.fma(remainder, reciprocal, quotient)
    sign = value.to(tl.uint32, bitcast=True) & 0x80000000
    return (quotient.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(value, scale):
    """The IEEE FP32 quotient value / scale, clamped to the finite E4M3 range; NaN stays NaN."""
    # 2^-90 and 2^90. A scale outside, zero or NaN takes the division instruction itself.
    if (scale >= 8.077935669463161e-28) & (scale <= 1.2379400392853803e27):
        quotient = divide_by_shared(value, scale)
    else:
        quotient = tl.div_rn(value, scale)
    return tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_span(numel, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """This program's (start, offsets behind it, mask) in a flat array of ``numel`` elements.

    The start is one 64-bit scalar and the offsets are 32-bit, and where BLOCK divides numel
    (EVEN) the mask is constant: fewer instructions an element.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    if EVEN:  # noqa: SIM108 - decided while compiling
        mask = tl.full((BLOCK,), True, tl.int1)
    else:
        mask = offsets < numel - start
    return start, offsets, mask


@triton.jit
def _silu_and_mul_2in_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    scale_ptr,
    numel,
    limit,
    alpha,
    beta,
    HAS_LIMIT: tl.constexpr,
    QUANTIZE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start, offsets, mask = block_span(numel, EVEN, BLOCK)
    gate = tl.load(gate_ptr + start + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + start + offsets, mask=mask).to(tl.float32)
    value = swiglu_value(gate, up, limit, alpha, beta, HAS_LIMIT)
    if QUANTIZE:
        value = e4m3_value(value, tl.load(scale_ptr))
    tl.store(out_ptr + start + offsets, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _silu_and_mul_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    width,
    limit,
    alpha,
    beta,
    HAS_LIMIT: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCKS_PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One grid axis: axis 1 ends at 65,535 programs. A model has few widths, so the blocks of a row
    # are a compile-time constant and the division costs a multiplication and a shift.
    row = (tl.program_id(0) // BLOCKS_PER_ROW).to(tl.int64)
    block = (tl.program_id(0) % BLOCKS_PER_ROW).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate_ptrs = x_ptr + row * 2 * width + columns
    gate = tl.load(gate_ptrs, mask=mask).to(tl.float32)
    up = tl.load(gate_ptrs + width, mask=mask).to(tl.float32)
    value = swiglu_value(gate, up, limit, alpha, beta, HAS_LIMIT)
    if QUANTIZE:
        value = e4m3_value(value, tl.load(scale_ptr))
    tl.store(out_ptr + row * width + columns, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantize_e4m3_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    scale_out_ptr,
    numel,
    DYNAMIC: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = tl.load(scale_ptr)
    if DYNAMIC:
        # scale_ptr holds amax. Zero (an all-zero tensor, or an underflow) would divide 0 by 0.
        scale = tl.div_rn(scale, 448.0)
        scale = tl.where(scale == 0.0, 1.0, scale)
        if tl.program_id(0) == 0:
            tl.store(scale_out_ptr, scale)
    start, offsets, mask = block_span(numel, EVEN, BLOCK)
    value = e4m3_value(tl.load(x_ptr + start + offsets, mask=mask).to(tl.float32), scale)
    tl.store(out_ptr + start + offsets, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dequantize_e4m3_kernel(
    weight_ptr, out_ptr, scale_ptr, numel, EVEN: tl.constexpr, BLOCK: tl.constexpr
):
    # The scale is rounded to the output dtype first. Code times rounded scale is exact in FP32 (for
    # FP32 output it is the one rounding itself), so the store rounds once.
    scale = tl.load(scale_ptr).to(out_ptr.dtype.element_ty).to(tl.float32)
    start, offsets, mask = block_span(numel, EVEN, BLOCK)
    value = tl.load(weight_ptr + start + offsets, mask=mask).to(tl.float32) * scale
    tl.store(out_ptr + start + offsets, value.to(out_ptr.dtype.element_ty), mask=mask)


def launch_silu_and_mul_2in(
    gate: torch.Tensor,
    up: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    limit: float | None,
    alpha: float,
    beta: float,
    *,
    block: int,
    num_warps: int,
) -> None:
    """Write SwiGLU of ``gate`` and ``up`` to ``out``, quantised where ``scale`` is given."""
    numel = out.numel()
    _silu_and_mul_2in_kernel[(triton.cdiv(numel, block),)](
        gate,
        up,
        out,
        scale,
        numel,
        0.0 if limit is None else limit,
        alpha,
        beta,
        HAS_LIMIT=limit is not None,
        QUANTIZE=scale is not None,
        EVEN=numel % block == 0,
        BLOCK=block,
        num_warps=num_warps,
        **_EXACT,
    )


def launch_silu_and_mul(
    x: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    limit: float | None,
    alpha: float,
    beta: float,
    *,
    block: int,
    num_warps: int,
) -> None:
    """Write SwiGLU of ``x`` [..., 2I] to ``out`` [..., I], quantised where ``scale`` is given."""
    width = out.shape[-1]
    rows = out.numel() // width
    blocks_per_row = triton.cdiv(width, block)
    _silu_and_mul_kernel[(rows * blocks_per_row,)](
        x,
        out,
        scale,
        width,
        0.0 if limit is None else limit,
        alpha,
        beta,
        HAS_LIMIT=limit is not None,
        QUANTIZE=scale is not None,
        BLOCKS_PER_ROW=blocks_per_row,
        BLOCK=block,
        num_warps=num_warps,
        **_EXACT,
    )


def launch_quantize_e4m3_static(
    x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, *, block: int, num_warps: int
) -> None:
    """Write ``clamp(x / scale)`` to ``out``."""
    numel = out.numel()
    _quantize_e4m3_kernel[(triton.cdiv(numel, block),)](
        x,
        out,
        scale,
        None,
        numel,
        DYNAMIC=False,
        EVEN=numel % block == 0,
        BLOCK=block,
        num_warps=num_warps,
        **_EXACT,
    )


def launch_quantize_e4m3_dynamic(
    x: torch.Tensor,
    out: torch.Tensor,
    amax: torch.Tensor,
    scale_out: torch.Tensor,
    *,
    block: int,
    num_warps: int,
) -> None:
    """Write ``amax / 448``, or 1.0, to ``scale_out`` and ``clamp(x / scale_out)`` to ``out``."""
    numel = out.numel()
    _quantize_e4m3_kernel[(triton.cdiv(numel, block),)](
        x,
        out,
        amax,
        scale_out,
        numel,
        DYNAMIC=True,
        EVEN=numel % block == 0,
        BLOCK=block,
        num_warps=num_warps,
        **_EXACT,
    )


def launch_dequantize_e4m3(
    weight: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, *, block: int, num_warps: int
) -> None:
    """Write ``weight * scale`` to ``out``, the scale rounded to the dtype of ``out`` first."""
    numel = out.numel()
    _dequantize_e4m3_kernel[(triton.cdiv(numel, block),)](
        weight,
        out,
        scale,
        numel,
        EVEN=numel % block == 0,
        BLOCK=block,
        num_warps=num_warps,
        **_EXACT,
    )
