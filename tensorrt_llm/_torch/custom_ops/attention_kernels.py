# SPDX-License-Identifier: Apache-2.0
"""Triton kernels behind ``qk_norm_rope`` and ``qkv_norm_rope_e4m3``, and their launch functions.

A launch function takes checked tensors on one device (``attention_arguments`` does the checking),
fills preallocated outputs and returns nothing. Head counts and the head size are compile-time
constants, since models have few; token counts are not, so a new prompt or frame count compiles
nothing. A row's base is a 64-bit scalar, offsets inside a row are 32-bit.

A program takes one of the N media rows of a branch, or a few of the L rows that the text adds to K
and V: as many as make a tile as large as q's. Of these, row j holds text where j < length; the
others are zero and lie behind the media. Tiles are [heads, D / 2], the two halves of each head
apart, so that rotating needs no exchange between threads. Programs are short, so what counts is how
long one waits: everything is loaded before anything is computed.

The FP8 form reads its inputs twice: ``attention_scale_kernels`` makes the scales, then the rows are
computed again here and quantised.
"""

import torch
import triton
import triton.language as tl

from tensorrt_llm._torch.custom_ops.attention_arguments import QkvInputs
from tensorrt_llm._torch.custom_ops.norm_kernels import normed_value, rms_factor, vector_columns
from tensorrt_llm._torch.custom_ops.triton_kernels import _EXACT, divide_by_shared

# Arguments whose values must not decide what is compiled.
RUNTIME = ["media_rows", "text_rows", "programs"]


@triton.jit
def load_heads(pointers, heads, HEADS: tl.constexpr, TILE: tl.constexpr):
    # A tile of TILE heads, zero past HEADS.
    if HEADS == TILE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=heads < HEADS, other=0.0)


@triton.jit
def store_heads(pointers, value, heads, HEADS: tl.constexpr, TILE: tl.constexpr):
    value = value.to(pointers.dtype.element_ty)
    if HEADS == TILE:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=heads < HEADS)


@triton.jit
def place(lengths_ptr, text_rows, programs):
    # The branch, the program's place in it, and the branch's text length, cut to what text_k holds
    # so that no length makes a kernel write outside its outputs.
    branch = (tl.program_id(0) // programs).to(tl.int64)
    length = tl.load(lengths_ptr + branch).to(tl.int32)
    length = tl.minimum(tl.maximum(length, 0), text_rows)
    return branch, tl.program_id(0) % programs, length


@triton.jit
def load_halves(row_ptr, HEADS: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr):
    """The halves of the heads of a row, two tiles [TILE, HALF]."""
    heads = tl.arange(0, TILE)[:, None]
    pointers = row_ptr + heads * (2 * HALF) + tl.arange(0, HALF)[None, :]
    first = load_heads(pointers, heads, HEADS, TILE)
    return first, load_heads(pointers + HALF, heads, HEADS, TILE)


@triton.jit
def normed_rotated(
    first,
    second,
    weight_ptr,
    cos_row,
    sin_row,
    eps,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
):
    """RMSNorm of each head of a row, then the rotation: two [TILE, HALF] halves in the row's dtype.

    Every operation on 16-bit values rounds to 16 bits, as the unfused form does. Weight, cosine and
    sine are loaded as whole tiles: their rows repeat an address that the cache holds, where one row
    spread over the tile's threads would go through shared memory.
    """
    same = tl.arange(0, TILE)[:, None] * 0 + tl.arange(0, HALF)[None, :]
    first, second = first.to(tl.float32), second.to(tl.float32)
    factor = rms_factor(tl.sum(first * first + second * second, axis=1), eps, 2 * HALF)[:, None]
    first = normed_value(first, factor, tl.load(weight_ptr + same))
    second = normed_value(second, factor, tl.load(weight_ptr + same + HALF))
    out_first = first * tl.load(cos_row + same) - second * tl.load(sin_row + same)
    cos, sin = tl.load(cos_row + same + HALF), tl.load(sin_row + same + HALF)
    return out_first, second * cos + first * sin


@triton.jit
def e4m3_values(value, scale, SHARED):
    """``e4m3_value`` with a scale a row: value [rows, columns], scale [rows, 1].

    SHARED is ``scales_are_shared(scale)``, asked once where the scales are loaded.
    """
    quotient = divide_by_shared(value, scale) if SHARED else tl.div_rn(value, scale)
    return tl.clamp(quotient, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scales_are_shared(scale):
    """Whether all scales [rows, 1] lie where ``divide_by_shared`` is exact, 2^-90 to 2^90."""
    inside = (scale >= 8.077935669463161e-28) & (scale <= 1.2379400392853803e27)
    return tl.min(tl.min(inside.to(tl.int32), axis=1), axis=0) == 1


@triton.jit
def _head_scales(scale_ptr, heads, HEADS: tl.constexpr, GROUP: tl.constexpr):
    # The scale of each head's key head, [rows, 1]; 1.0 past HEADS.
    return tl.load(scale_ptr + heads // GROUP, mask=heads < HEADS, other=1.0)


@triton.jit
def _write_text(
    text_k_ptr,
    text_v_ptr,
    k_out_ptr,
    v_out_ptr,
    k_mean_ptr,
    v_mean_ptr,
    k_scale_ptr,
    v_scale_ptr,
    branch,
    program,
    length,
    media_rows,
    text_rows,
    lanes,
    v_lanes,
    KV_HEADS: tl.constexpr,
    KV_TILE: tl.constexpr,
    HALF: tl.constexpr,
    TEXT_ROWS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    # TEXT_ROWS of the rows that the text adds to K and V.
    D: tl.constexpr = 2 * HALF
    members = tl.arange(0, TEXT_ROWS * KV_TILE)[:, None]
    heads = members % KV_TILE
    tile, v_tile = heads * D + lanes, heads * D + v_lanes
    row = (program * TEXT_ROWS + members // KV_TILE).to(tl.int64)
    row_from = (branch * text_rows + row) * (KV_HEADS * D)
    inside = (heads < KV_HEADS) & (row < text_rows)
    text = inside & (row < length)
    first = tl.load(text_k_ptr + row_from + tile, mask=text, other=0.0)
    second = tl.load(text_k_ptr + row_from + tile + HALF, mask=text, other=0.0)
    value = tl.load(text_v_ptr + row_from + v_tile, mask=text, other=0.0)
    if QUANTIZE:
        scales, means = branch * KV_HEADS, branch * (KV_HEADS * D)
        k_scale = _head_scales(k_scale_ptr + scales, heads, KV_HEADS, 1)
        v_scale = _head_scales(v_scale_ptr + scales, heads, KV_HEADS, 1)
        mean_first = load_heads(k_mean_ptr + means + tile, heads, KV_HEADS, KV_TILE)
        mean_second = load_heads(k_mean_ptr + means + tile + HALF, heads, KV_HEADS, KV_TILE)
        v_mean = load_heads(v_mean_ptr + means + v_tile, heads, KV_HEADS, KV_TILE)
        k_shared, v_shared = scales_are_shared(k_scale), scales_are_shared(v_scale)
        first = e4m3_values(first.to(tl.float32) - mean_first, k_scale, k_shared)
        second = e4m3_values(second.to(tl.float32) - mean_second, k_scale, k_shared)
        value = e4m3_values(value.to(tl.float32) - v_mean, v_scale, v_shared)
        first = tl.where(text, first, 0.0)
        second = tl.where(text, second, 0.0)
        value = tl.where(text, value, 0.0)
    first_key = branch * (text_rows + media_rows)
    to = (first_key + tl.where(row < length, row, media_rows + row)) * (KV_HEADS * D)
    kind = k_out_ptr.dtype.element_ty
    tl.store(k_out_ptr + to + tile, first.to(kind), mask=inside)
    tl.store(k_out_ptr + to + tile + HALF, second.to(kind), mask=inside)
    tl.store(v_out_ptr + to + v_tile, value.to(kind), mask=inside)


@triton.jit(do_not_specialize=RUNTIME)
def _write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    text_k_ptr,
    text_v_ptr,
    lengths_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    k_mean_ptr,
    v_mean_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    q_batch,
    q_row,
    k_batch,
    k_row,
    v_batch,
    v_row,
    eps,
    media_rows,
    text_rows,
    programs,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    HALF: tl.constexpr,
    TEXT_ROWS: tl.constexpr,
    QUANTIZE: tl.constexpr,
):
    branch, program, length = place(lengths_ptr, text_rows, programs)
    D: tl.constexpr = 2 * HALF
    lanes = vector_columns(q_ptr, HALF)[None, :]
    v_lanes = vector_columns(v_ptr, D)[None, :]
    scales, means = branch * KV_HEADS, branch * (KV_HEADS * D)
    first_key = branch * (text_rows + media_rows)
    if program < media_rows:
        row = program.to(tl.int64)
        media = branch * media_rows + row
        q_heads = tl.arange(0, Q_TILE)[:, None]
        heads = tl.arange(0, KV_TILE)[:, None]
        tile, v_tile = heads * D + lanes, heads * D + v_lanes
        q_from = q_ptr + branch * q_batch + row * q_row
        q_first, q_second = load_halves(q_from, Q_HEADS, Q_TILE, HALF)
        k_from = k_ptr + branch * k_batch + row * k_row
        k_first, k_second = load_halves(k_from, KV_HEADS, KV_TILE, HALF)
        v_from = v_ptr + branch * v_batch + row * v_row
        value = load_heads(v_from + v_tile, heads, KV_HEADS, KV_TILE)
        if QUANTIZE:
            q_scale = _head_scales(q_scale_ptr + scales, q_heads, Q_HEADS, Q_HEADS // KV_HEADS)
            k_scale = _head_scales(k_scale_ptr + scales, heads, KV_HEADS, 1)
            v_scale = _head_scales(v_scale_ptr + scales, heads, KV_HEADS, 1)
            mean_first = load_heads(k_mean_ptr + means + tile, heads, KV_HEADS, KV_TILE)
            mean_second = load_heads(k_mean_ptr + means + tile + HALF, heads, KV_HEADS, KV_TILE)
            v_mean = load_heads(v_mean_ptr + means + v_tile, heads, KV_HEADS, KV_TILE)
        cos_row, sin_row = cos_ptr + media * D, sin_ptr + media * D
        first, second = normed_rotated(
            q_first, q_second, q_weight_ptr, cos_row, sin_row, eps, Q_TILE, HALF
        )
        if QUANTIZE:
            q_shared = scales_are_shared(q_scale)
            first = e4m3_values(first.to(tl.float32), q_scale, q_shared)
            second = e4m3_values(second.to(tl.float32), q_scale, q_shared)
        q_to = q_out_ptr + media * (Q_HEADS * D) + q_heads * D + lanes
        store_heads(q_to, first, q_heads, Q_HEADS, Q_TILE)
        store_heads(q_to + HALF, second, q_heads, Q_HEADS, Q_TILE)
        first, second = normed_rotated(
            k_first, k_second, k_weight_ptr, cos_row, sin_row, eps, KV_TILE, HALF
        )
        if QUANTIZE:
            k_shared, v_shared = scales_are_shared(k_scale), scales_are_shared(v_scale)
            first = e4m3_values(first.to(tl.float32) - mean_first, k_scale, k_shared)
            second = e4m3_values(second.to(tl.float32) - mean_second, k_scale, k_shared)
            value = e4m3_values(value.to(tl.float32) - v_mean, v_scale, v_shared)
        to = (first_key + length + row) * (KV_HEADS * D)
        store_heads(k_out_ptr + to + tile, first, heads, KV_HEADS, KV_TILE)
        store_heads(k_out_ptr + to + tile + HALF, second, heads, KV_HEADS, KV_TILE)
        store_heads(v_out_ptr + to + v_tile, value, heads, KV_HEADS, KV_TILE)
    else:
        _write_text(
            text_k_ptr,
            text_v_ptr,
            k_out_ptr,
            v_out_ptr,
            k_mean_ptr,
            v_mean_ptr,
            k_scale_ptr,
            v_scale_ptr,
            branch,
            program - media_rows,
            length,
            media_rows,
            text_rows,
            lanes,
            v_lanes,
            KV_HEADS,
            KV_TILE,
            HALF,
            TEXT_ROWS,
            QUANTIZE,
        )


def launch_qk_norm_rope(
    inputs: QkvInputs,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    *,
    num_warps: int,
) -> None:
    """Write q, K and V in the inputs' dtype."""
    _launch_write(inputs, (q_out, k_out, v_out), (None,) * 5, num_warps)


def launch_qkv_quantize(
    inputs: QkvInputs,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    k_mean: torch.Tensor,
    v_mean: torch.Tensor,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    *,
    num_warps: int,
) -> None:
    """Write the codes of q, K - k_mean and V - v_mean, the second pass.

    Args:
        k_mean, v_mean: Each key head's mean key and value, FP32 [B, Hk, D].
        q_descale, k_descale, v_descale: FP32 [B, Hk].
    """
    scales = (k_mean, v_mean, q_descale, k_descale, v_descale)
    _launch_write(inputs, (q_out, k_out, v_out), scales, num_warps)


def _launch_write(inputs: QkvInputs, outputs, scales, num_warps: int) -> None:
    tensors, numbers, sizes = launch_arguments(inputs)
    text_rows = max(1, sizes["Q_TILE"] // sizes["KV_TILE"])
    programs = inputs.media_rows + triton.cdiv(inputs.text_rows, text_rows)
    _write_kernel[(inputs.batch * programs,)](
        *tensors,
        *outputs,
        *scales,
        *numbers,
        programs,
        **sizes,
        TEXT_ROWS=text_rows,
        QUANTIZE=scales[0] is not None,
        num_warps=num_warps,
        **_EXACT,
    )


def launch_arguments(inputs: QkvInputs) -> tuple[tuple, tuple, dict[str, int]]:
    """Return what the kernels over rows share: the input tensors; behind each kernel's own ones,
    the numbers; and the compile-time constants by name.
    """
    tensors = (
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.q_weight,
        inputs.k_weight,
        inputs.cos,
        inputs.sin,
        inputs.text_k,
        inputs.text_v,
        inputs.text_lengths,
    )
    strides = (*_strides(inputs.q), *_strides(inputs.k), *_strides(inputs.v))
    numbers = (*strides, inputs.eps, inputs.media_rows, inputs.text_rows)
    sizes = {
        "Q_HEADS": inputs.query_heads,
        "KV_HEADS": inputs.kv_heads,
        "Q_TILE": triton.next_power_of_2(inputs.query_heads),
        "KV_TILE": triton.next_power_of_2(inputs.kv_heads),
        "HALF": inputs.head_dim // 2,
    }
    return tensors, numbers, sizes


def _strides(rows: torch.Tensor) -> tuple[int, int]:
    # The stride of a dimension of one says nothing, and its value could make the compiler
    # specialise; zero is divisible by 16 as the others are.
    return tuple(0 if rows.shape[i] == 1 else rows.stride(i) for i in (0, 1))
