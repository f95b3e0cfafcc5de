# SPDX-License-Identifier: Apache-2.0
"""Triton kernel behind ``rms_norm`` and ``add_rms_norm``, and the functions that launch it.

A launch function takes checked, contiguous tensors on one device (``norm_ops`` does the checking),
fills preallocated outputs and returns nothing. A row's base is a 64-bit scalar, offsets inside a
row are 32-bit. The hidden size is a compile-time constant, since models have few; the row count is
not, so a new prompt or frame count compiles nothing.
"""

import torch
import triton
import triton.language as tl

from tensorrt_llm._torch.custom_ops.triton_kernels import _EXACT, e4m3_value


@triton.jit
def rms_factor(sum_of_squares, eps, SIZE: tl.constexpr):
    """1 / sqrt(mean square + eps), in FP32; 1 / SIZE is exact where SIZE is a power of two."""
    return tl.math.rsqrt(sum_of_squares * (1.0 / SIZE) + eps)


@triton.jit
def normed_value(value, factor, weight):
    """FP32 value * factor, rounded to the weight's dtype, times the weight in that dtype."""
    return (value * factor).to(weight.dtype) * weight


@triton.jit
def vector_columns(input_ptr, WIDTH: tl.constexpr):
    """0 to WIDTH - 1 for the stores of a result, contiguous by 16 bytes of the input and no more.

    Left to itself the compiler gives a thread 16 FP8 columns where it gives it 8 of 16 bits: loads
    of one thread then lie side by side instead of loads of one warp, and the sums of the FP8 form
    are ordered otherwise than those of the wide form, whose bits it is to have before quantising.
    """
    VECTOR: tl.constexpr = 128 // input_ptr.dtype.element_ty.primitive_bitwidth
    return tl.max_contiguous(tl.arange(0, WIDTH), VECTOR)


@triton.jit
def _load(pointers, columns, SIZE: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    # Columns START to START + WIDTH of a row of SIZE, zero past its end.
    if START + WIDTH <= SIZE:
        return tl.load(pointers + columns)
    else:
        return tl.load(pointers + columns, mask=columns < SIZE, other=0.0)


@triton.jit
def _store(pointers, columns, value, SIZE: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    value = value.to(pointers.dtype.element_ty)
    if START + WIDTH <= SIZE:
        tl.store(pointers + columns, value)
    else:
        tl.store(pointers + columns, value, mask=columns < SIZE)


@triton.jit
def _read(
    x_row,
    residual_row,
    total_row,
    columns,
    SIZE: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):
    value = _load(x_row, columns, SIZE, START, WIDTH)
    if ADD:
        value = _load(residual_row, columns, SIZE, START, WIDTH).to(tl.float32) + value
        value = value.to(total_row.dtype.element_ty)
        _store(total_row, columns, value, SIZE, START, WIDTH)
    return value.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    scale_ptr,
    rows,
    eps,
    SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    ADD: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A row is MAIN columns, the largest power of two that it holds, and TAIL more; 5120 is 4096 and
    # 1024, where one masked block of 8192 would idle three lanes of eight.
    main = tl.arange(0, MAIN)
    main_out = vector_columns(x_ptr, MAIN)
    main_weight = _load(weight_ptr, main, SIZE, 0, MAIN)
    if TAIL > 0:
        tail = MAIN + tl.arange(0, TAIL)
        tail_out = MAIN + vector_columns(x_ptr, TAIL)
        tail_weight = _load(weight_ptr, tail, SIZE, MAIN, TAIL)
    if QUANTIZE:
        scale = tl.load(scale_ptr)
    for index in range(BLOCK):
        row = tl.program_id(0) * BLOCK + index
        if row < rows:
            base = row.to(tl.int64) * SIZE
            x_row, out_row = x_ptr + base, out_ptr + base
            residual_row, total_row = x_row, x_row
            if ADD:
                residual_row, total_row = residual_ptr + base, total_ptr + base
            value = _read(x_row, residual_row, total_row, main, SIZE, 0, MAIN, ADD)
            squares = tl.sum(value * value, axis=0)
            if TAIL > 0:
                rest = _read(x_row, residual_row, total_row, tail, SIZE, MAIN, TAIL, ADD)
                squares += tl.sum(rest * rest, axis=0)
            factor = rms_factor(squares, eps, SIZE)
            normed = normed_value(value, factor, main_weight)
            if QUANTIZE:
                normed = e4m3_value(normed.to(tl.float32), scale)
            _store(out_row, main_out, normed, SIZE, 0, MAIN)
            if TAIL > 0:
                normed = normed_value(rest, factor, tail_weight)
                if QUANTIZE:
                    normed = e4m3_value(normed.to(tl.float32), scale)
                _store(out_row, tail_out, normed, SIZE, MAIN, TAIL)


def launch_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    eps: float,
    *,
    block: int,
    num_warps: int,
) -> None:
    """Write the norm of ``x`` to ``out``, quantised where ``scale`` is given.

    Args:
        block: Rows a program, which share one load of the weight.
    """
    _launch(x, None, weight, out, None, scale, eps, block, num_warps)


def launch_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    scale: torch.Tensor | None,
    eps: float,
    *,
    block: int,
    num_warps: int,
) -> None:
    """Write ``residual + x`` to ``total`` and its norm to ``out``; see ``launch_rms_norm``."""
    _launch(x, residual, weight, out, total, scale, eps, block, num_warps)


def _launch(x, residual, weight, out, total, scale, eps, block, num_warps) -> None:
    size = weight.numel()
    rows = x.numel() // size
    main = 1 << (size.bit_length() - 1)
    tail = 0 if main == size else triton.next_power_of_2(size - main)
    _rms_norm_kernel[(triton.cdiv(rows, block),)](
        x,
        residual,
        weight,
        out,
        total,
        scale,
        rows,
        eps,
        SIZE=size,
        MAIN=main,
        TAIL=tail,
        ADD=residual is not None,
        QUANTIZE=scale is not None,
        BLOCK=block,
        num_warps=num_warps,
        **_EXACT,
    )
