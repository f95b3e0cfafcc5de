# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that make the scales of ``qkv_norm_rope_e4m3``, and their launch functions.

The first pass keeps, for each run of rows of a branch, what a scale is made of: the largest
magnitude of q per head, and sum, minimum and maximum of k and v per head and dimension. A
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
    load_halves,
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


@triton.jit
def _seen(total, low, high, value):
    # Sum, minimum and maximum with one more value. The extremes drop NaN: the sum has it.
    value = value.to(tl.float32)
    return total + value, tl.minimum(low, value), tl.maximum(high, value)


@triton.jit(do_not_specialize=[*RUNTIME, "media_programs", "block"])
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
    # A program takes ``block`` rows in turn, and keeps what the scales need of them in registers:
    # the media's rows of q, then those of k and v, then the text's. ``block`` is a number of the
    # call, so that short and long sequences share one kernel. Two rows at a time hide the wait for
    # one: 0.36 ms for both branches of 720p instead of 0.43 (H200, by hand).
    branch, program, length = place(lengths_ptr, text_rows, media_programs + programs)
    D: tl.constexpr = 2 * HALF
    if program < media_programs:
        start = program * block
        q_amax = tl.zeros([Q_TILE, HALF], tl.float32)
        for index in tl.range(0, tl.minimum(block, media_rows - start), loop_unroll_factor=2):
            row = (start + index).to(tl.int64)
            table = (branch * media_rows + row) * D
            q_from = q_ptr + branch * q_batch + row * q_row
            first, second = load_halves(q_from, Q_HEADS, Q_TILE, HALF)
            first, second = normed_rotated(
                first, second, q_weight_ptr, cos_ptr + table, sin_ptr + table, eps, Q_TILE, HALF
            )
            q_amax = _grown(_grown(q_amax, first), second)
        q_heads = tl.arange(0, Q_TILE)
        q_to = q_amax_ptr + (branch * media_programs + program) * Q_HEADS + q_heads
        store_heads(q_to, _row_amax(q_amax), q_heads, Q_HEADS, Q_TILE)
    else:
        run = program - media_programs
        is_media = run < media_programs
        start = tl.where(is_media, run, run - media_programs) * block
        rows = tl.where(is_media, media_rows, length)
        if start < rows:  # else a run behind the text, of which the join reads nothing
            heads = tl.arange(0, KV_TILE)[:, None]
            lanes, whole = tl.arange(0, HALF)[None, :], tl.arange(0, D)[None, :]
            v_tile = heads * D + whole
            v_sum = tl.zeros([KV_TILE, D], tl.float32)
            v_min = tl.full([KV_TILE, D], float("inf"), tl.float32)
            v_max = tl.full([KV_TILE, D], float("-inf"), tl.float32)
            sum_first = tl.zeros([KV_TILE, HALF], tl.float32)
            sum_second = tl.zeros([KV_TILE, HALF], tl.float32)
            min_first = tl.full([KV_TILE, HALF], float("inf"), tl.float32)
            min_second = tl.full([KV_TILE, HALF], float("inf"), tl.float32)
            max_first = tl.full([KV_TILE, HALF], float("-inf"), tl.float32)
            max_second = tl.full([KV_TILE, HALF], float("-inf"), tl.float32)
            if is_media:
                for index in tl.range(0, tl.minimum(block, rows - start), loop_unroll_factor=2):
                    row = (start + index).to(tl.int64)
                    table = (branch * media_rows + row) * D
                    k_from = k_ptr + branch * k_batch + row * k_row
                    first, second = load_halves(k_from, KV_HEADS, KV_TILE, HALF)
                    v_from = v_ptr + branch * v_batch + row * v_row + v_tile
                    value = load_heads(v_from, heads, KV_HEADS, KV_TILE)
                    first, second = normed_rotated(
                        first,
                        second,
                        k_weight_ptr,
                        cos_ptr + table,
                        sin_ptr + table,
                        eps,
                        KV_TILE,
                        HALF,
                    )
                    sum_first, min_first, max_first = _seen(sum_first, min_first, max_first, first)
                    sum_second, min_second, max_second = _seen(
                        sum_second, min_second, max_second, second
                    )
                    v_sum, v_min, v_max = _seen(v_sum, v_min, v_max, value)
            else:
                for index in tl.range(0, tl.minimum(block, rows - start), loop_unroll_factor=2):
                    text_from = (branch * text_rows + (start + index).to(tl.int64)) * (KV_HEADS * D)
                    first, second = load_halves(text_k_ptr + text_from, KV_HEADS, KV_TILE, HALF)
                    value = load_heads(text_v_ptr + text_from + v_tile, heads, KV_HEADS, KV_TILE)
                    sum_first, min_first, max_first = _seen(sum_first, min_first, max_first, first)
                    sum_second, min_second, max_second = _seen(
                        sum_second, min_second, max_second, second
                    )
                    v_sum, v_min, v_max = _seen(v_sum, v_min, v_max, value)
            to = (branch * programs + run) * (KV_HEADS * 3 * D) + heads * (3 * D)
            v_to = v_range_ptr + to + whole
            store_heads(v_to, v_sum, heads, KV_HEADS, KV_TILE)
            store_heads(v_to + D, v_min, heads, KV_HEADS, KV_TILE)
            store_heads(v_to + 2 * D, v_max, heads, KV_HEADS, KV_TILE)
            k_to = k_range_ptr + to + lanes
            store_heads(k_to, sum_first, heads, KV_HEADS, KV_TILE)
            store_heads(k_to + HALF, sum_second, heads, KV_HEADS, KV_TILE)
            store_heads(k_to + D, min_first, heads, KV_HEADS, KV_TILE)
            store_heads(k_to + D + HALF, min_second, heads, KV_HEADS, KV_TILE)
            store_heads(k_to + 2 * D, max_first, heads, KV_HEADS, KV_TILE)
            store_heads(k_to + 2 * D + HALF, max_second, heads, KV_HEADS, KV_TILE)


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


@triton.jit(do_not_specialize=[*RUNTIME, "media_programs", "block"])
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
    media_programs,
    programs,
    block,
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
        while start < media_programs:
            here = steps + start
            partial = branch * media_programs + here
            q_from = q_amax_ptr + (partial * KV_HEADS + head) * GROUP + group
            inside = (here < media_programs) & (group < GROUP)
            q_amax = _grown(q_amax, tl.load(q_from, mask=inside, other=0.0))
            start += BLOCK
        tl.store(q_scale_ptr + to, _descale(q_amax))
    else:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + branch).to(tl.int32), 0), text_rows)
        rows = media_rows + length
        # A graph has many runs of padding: with them its join would read twice as much.
        written = media_programs + (length + block - 1) // block
        first = (branch * programs * KV_HEADS + head) * (3 * D)
        stride = KV_HEADS * 3 * D
        lanes = tl.arange(0, D)[None, :]
        if kind == 1:
            mean, scale = _joined_range(k_range_ptr, first, stride, written, rows, D, BLOCK)
            tl.store(k_mean_ptr + to * D + lanes, mean)
            tl.store(k_scale_ptr + to, scale)
        else:
            mean, scale = _joined_range(v_range_ptr, first, stride, written, rows, D, BLOCK)
            tl.store(v_mean_ptr + to * D + lanes, mean)
            tl.store(v_scale_ptr + to, scale)


class Partials(NamedTuple):
    """What the programs of the first pass leave of each run of ``block`` rows.

    Attributes:
        q_amax: FP32 [B, media runs, Hq], the largest magnitude of q.
        k_range: FP32 [B, media runs + text runs, Hk, 3, D], sum, minimum and maximum of k. Runs
            behind a branch's text are not written.
        v_range: Like k_range, of v.
        block: Rows of a run.
    """

    q_amax: torch.Tensor
    k_range: torch.Tensor
    v_range: torch.Tensor
    block: int


def launch_qkv_statistics(inputs: QkvInputs, *, block: int, num_warps: int) -> Partials:
    """Run the first pass over runs of ``block`` rows, and return what it leaves."""
    tensors, numbers, sizes = launch_arguments(inputs)
    media_programs = triton.cdiv(inputs.media_rows, block)
    programs = media_programs + triton.cdiv(inputs.text_rows, block)
    ranges = (programs, inputs.kv_heads, 3, inputs.head_dim)
    partials = Partials(
        *(
            inputs.q.new_empty((inputs.batch, *shape), dtype=torch.float32)
            for shape in ((media_programs, inputs.query_heads), ranges, ranges)
        ),
        block,
    )
    _statistics_kernel[(inputs.batch * (media_programs + programs),)](
        *tensors,
        *partials[:3],
        *numbers,
        media_programs,
        programs,
        block,
        **sizes,
        num_warps=num_warps,
        **_EXACT,
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
        *partials[:3],
        inputs.text_lengths,
        k_mean,
        v_mean,
        q_descale,
        k_descale,
        v_descale,
        inputs.media_rows,
        inputs.text_rows,
        partials.q_amax.shape[1],
        partials.k_range.shape[1],
        partials.block,
        KV_HEADS=inputs.kv_heads,
        GROUP=group,
        GROUP_TILE=triton.next_power_of_2(group),
        D=inputs.head_dim,
        BLOCK=block,
        num_warps=num_warps,
        **_EXACT,
    )
