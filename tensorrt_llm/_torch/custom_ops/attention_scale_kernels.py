# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that make the scales of ``qkv_norm_rope_e4m3``, and their launch functions.

The first pass keeps, per program of ``attention_kernels``' kind, what a scale is made of: the
largest magnitude of q per head, and sum, minimum and maximum of k and v per head and dimension. A
small kernel joins these partials in a fixed order and without atomics, so equal inputs give equal
bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tensorrt_llm._torch.custom_ops.attention_arguments import QkvInputs
from tensorrt_llm._torch.custom_ops.attention_kernels import (
    RUNTIME,
    launch_arguments,
    load_heads,
    normed_rotated,
    place,
    store_heads,
)
from tensorrt_llm._torch.custom_ops.triton_kernels import _EXACT


@triton.jit
def _row_amax(value):
    # The largest of each row [rows, columns] of magnitudes; as integers, since NaN lies above all.
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _grown(amax, value):
    magnitude = tl.abs(value.to(tl.float32))
    return tl.maximum(amax, magnitude, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=[*RUNTIME, "block"])
def _statistics_kernel(
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
    q_amax_ptr,
    k_range_ptr,
    v_range_ptr,
    q_batch,
    q_row,
    k_batch,
    k_row,
    v_batch,
    v_row,
    eps,
    media_rows,
    text_rows,
    media_programs,
    programs,
    block,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
    HALF: tl.constexpr,
):
    # Rows in turn: what the scales need of a row stays in registers. ``block`` is a number of the
    # call, so that short and long sequences share one kernel.
    branch, program, length = place(lengths_ptr, text_rows, programs)
    D: tl.constexpr = 2 * HALF
    heads = tl.arange(0, KV_TILE)[:, None]
    tile = heads * D + tl.arange(0, HALF)[None, :]
    v_tile = heads * D + tl.arange(0, D)[None, :]
    q_amax = tl.zeros([Q_TILE, HALF], tl.float32)
    v_sum = tl.zeros([KV_TILE, D], tl.float32)
    v_min = tl.full([KV_TILE, D], float("inf"), tl.float32)
    v_max = tl.full([KV_TILE, D], float("-inf"), tl.float32)
    sum_first = tl.zeros([KV_TILE, HALF], tl.float32)
    sum_second = tl.zeros([KV_TILE, HALF], tl.float32)
    min_first = tl.full([KV_TILE, HALF], float("inf"), tl.float32)
    min_second = tl.full([KV_TILE, HALF], float("inf"), tl.float32)
    max_first = tl.full([KV_TILE, HALF], float("-inf"), tl.float32)
    max_second = tl.full([KV_TILE, HALF], float("-inf"), tl.float32)
    is_media = program < media_programs
    start = tl.where(is_media, program, program - media_programs) * block
    count = tl.minimum(block, tl.where(is_media, media_rows, length) - start)
    for index in range(count):
        row = (start + index).to(tl.int64)
        if is_media:
            media = branch * media_rows + row
            cos_row, sin_row = cos_ptr + media * D, sin_ptr + media * D
            q_from = q_ptr + branch * q_batch + row * q_row
            first, second = normed_rotated(
                q_from, q_weight_ptr, cos_row, sin_row, eps, Q_HEADS, Q_TILE, HALF
            )
            q_amax = _grown(_grown(q_amax, first), second)
            k_from = k_ptr + branch * k_batch + row * k_row
            first, second = normed_rotated(
                k_from, k_weight_ptr, cos_row, sin_row, eps, KV_HEADS, KV_TILE, HALF
            )
            v_from = v_ptr + branch * v_batch + row * v_row
        else:
            text_from = (branch * text_rows + row) * (KV_HEADS * D)
            first = load_heads(text_k_ptr + text_from + tile, heads, KV_HEADS, KV_TILE)
            second = load_heads(text_k_ptr + text_from + tile + HALF, heads, KV_HEADS, KV_TILE)
            v_from = text_v_ptr + text_from
        value = load_heads(v_from + v_tile, heads, KV_HEADS, KV_TILE).to(tl.float32)
        v_sum += value
        v_min, v_max = tl.minimum(v_min, value), tl.maximum(v_max, value)
        first, second = first.to(tl.float32), second.to(tl.float32)
        sum_first += first
        sum_second += second
        # NaN may be dropped here: the sum has it.
        min_first, max_first = tl.minimum(min_first, first), tl.maximum(max_first, first)
        min_second, max_second = tl.minimum(min_second, second), tl.maximum(max_second, second)
    partial = branch * programs + program
    q_heads = tl.arange(0, Q_TILE)
    q_to = q_amax_ptr + partial * Q_HEADS
    store_heads(q_to + q_heads, _row_amax(q_amax), q_heads, Q_HEADS, Q_TILE)
    v_to = v_range_ptr + partial * (KV_HEADS * 3 * D)
    v_tile = heads * (3 * D) + tl.arange(0, D)[None, :]
    store_heads(v_to + v_tile, v_sum, heads, KV_HEADS, KV_TILE)
    store_heads(v_to + v_tile + D, v_min, heads, KV_HEADS, KV_TILE)
    store_heads(v_to + v_tile + 2 * D, v_max, heads, KV_HEADS, KV_TILE)
    k_to = k_range_ptr + partial * (KV_HEADS * 3 * D)
    tile = heads * (3 * D) + tl.arange(0, HALF)[None, :]
    store_heads(k_to + tile, sum_first, heads, KV_HEADS, KV_TILE)
    store_heads(k_to + tile + HALF, sum_second, heads, KV_HEADS, KV_TILE)
    store_heads(k_to + tile + D, min_first, heads, KV_HEADS, KV_TILE)
    store_heads(k_to + tile + D + HALF, min_second, heads, KV_HEADS, KV_TILE)
    store_heads(k_to + tile + 2 * D, max_first, heads, KV_HEADS, KV_TILE)
    store_heads(k_to + tile + 2 * D + HALF, max_second, heads, KV_HEADS, KV_TILE)


@triton.jit
def _descale(magnitudes):
    # amax / 448; 1.0 where that is zero, which would divide 0 by 0. NaN lies above all.
    bits = magnitudes.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(tl.max(bits, axis=1), axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, 448.0)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _joined_range(range_ptr, first, stride, programs, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """Mean [1, D] over ``rows`` rows, and the descale of what is left when it is subtracted."""
    steps = tl.arange(0, BLOCK)[:, None]
    lanes = tl.arange(0, D)[None, :]
    total = tl.zeros([BLOCK, D], tl.float32)
    low = tl.full([BLOCK, D], float("inf"), tl.float32)
    high = tl.full([BLOCK, D], float("-inf"), tl.float32)
    start = 0
    while start < programs:
        inside = steps + start < programs
        pointers = range_ptr + first + (steps + start) * stride + lanes
        total += tl.load(pointers, mask=inside, other=0.0)
        low = tl.minimum(low, tl.load(pointers + D, mask=inside, other=float("inf")))
        high = tl.maximum(high, tl.load(pointers + 2 * D, mask=inside, other=float("-inf")))
        start += BLOCK
    mean = tl.div_rn(tl.sum(total, axis=0)[None, :], rows.to(tl.float32))
    # Subtraction is monotonic, so a dimension's largest distance is at its minimum or maximum.
    low, high = tl.min(low, axis=0)[None, :], tl.max(high, axis=0)[None, :]
    return mean, _descale(_grown(tl.abs(high - mean), mean - low))


@triton.jit(do_not_specialize=["media_rows", "text_rows", "programs"])
def _join_kernel(
    q_amax_ptr,
    k_range_ptr,
    v_range_ptr,
    lengths_ptr,
    k_mean_ptr,
    v_mean_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    media_rows,
    text_rows,
    programs,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program a branch and key head for each of q, K and V.
    branch = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    kind = tl.program_id(1)
    to = branch * KV_HEADS + head
    if kind == 0:
        steps = tl.arange(0, BLOCK)[:, None]
        group = tl.arange(0, GROUP_TILE)[None, :]
        q_amax = tl.zeros([BLOCK, GROUP_TILE], tl.float32)
        start = 0
        while start < programs:
            here = steps + start
            partial = branch * programs + here
            q_from = q_amax_ptr + (partial * KV_HEADS + head) * GROUP + group
            inside = (here < programs) & (group < GROUP)
            q_amax = _grown(q_amax, tl.load(q_from, mask=inside, other=0.0))
            start += BLOCK
        tl.store(q_scale_ptr + to, _descale(q_amax))
    else:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + branch).to(tl.int32), 0), text_rows)
        rows = media_rows + length
        first = (branch * programs * KV_HEADS + head) * (3 * D)
        stride = KV_HEADS * 3 * D
        lanes = tl.arange(0, D)[None, :]
        if kind == 1:
            mean, scale = _joined_range(k_range_ptr, first, stride, programs, rows, D, BLOCK)
            tl.store(k_mean_ptr + to * D + lanes, mean)
            tl.store(k_scale_ptr + to, scale)
        else:
            mean, scale = _joined_range(v_range_ptr, first, stride, programs, rows, D, BLOCK)
            tl.store(v_mean_ptr + to * D + lanes, mean)
            tl.store(v_scale_ptr + to, scale)


class Partials(NamedTuple):
    """What the programs of the first pass leave, FP32.

    Attributes:
        q_amax: [B, programs, Hq], the largest magnitude of q.
        k_range: [B, programs, Hk, 3, D], sum, minimum and maximum of k.
        v_range: Like k_range, of v.
    """

    q_amax: torch.Tensor
    k_range: torch.Tensor
    v_range: torch.Tensor


def launch_qkv_statistics(inputs: QkvInputs, *, block: int, num_warps: int) -> Partials:
    """Run the first pass, ``block`` rows a program, and return what it leaves."""
    (tensors, numbers), sizes, programs = launch_arguments(inputs, block)
    outer = (inputs.batch, programs // inputs.batch)
    partials = Partials(
        *(
            inputs.q.new_empty((*outer, *shape), dtype=torch.float32)
            for shape in ((inputs.query_heads,), *[(inputs.kv_heads, 3, inputs.head_dim)] * 2)
        )
    )
    _statistics_kernel[(programs,)](
        *tensors, *partials, *numbers, block, **sizes, num_warps=num_warps, **_EXACT
    )
    return partials


def launch_qkv_descales(
    inputs: QkvInputs,
    partials: Partials,
    k_mean: torch.Tensor,
    v_mean: torch.Tensor,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    *,
    block: int,
    num_warps: int,
) -> None:
    """Write the means of K and V, FP32 [B, Hk, D], and the descales, FP32 [B, Hk].

    Args:
        block: Partials that a program reads at a time; the order of the sums depends on it.
    """
    group = inputs.query_heads // inputs.kv_heads
    _join_kernel[(inputs.batch * inputs.kv_heads, 3)](
        *partials,
        inputs.text_lengths,
        k_mean,
        v_mean,
        q_descale,
        k_descale,
        v_descale,
        inputs.media_rows,
        inputs.text_rows,
        partials.q_amax.shape[1],
        KV_HEADS=inputs.kv_heads,
        GROUP=group,
        GROUP_TILE=triton.next_power_of_2(group),
        D=inputs.head_dim,
        BLOCK=block,
        num_warps=num_warps,
        **_EXACT,
    )
