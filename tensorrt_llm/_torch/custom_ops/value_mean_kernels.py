# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel behind ``add_value_mean``, and its launch function."""

import torch
import triton
import triton.language as tl

from tensorrt_llm._torch.custom_ops.triton_kernels import _EXACT, e4m3_value


@triton.jit(do_not_specialize=["media_rows", "rows"])
def _add_value_mean_kernel(
    attended_ptr,
    mean_ptr,
    out_ptr,
    scale_ptr,
    media_rows,
    rows,
    WIDTH: tl.constexpr,
    MEANS: tl.constexpr,
    HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    # The query heads of a group share the mean of their key head.
    mean_columns = columns // (GROUP * HEAD) * HEAD + columns % HEAD
    for index in range(BLOCK):
        row = tl.program_id(0) * BLOCK + index
        if row < rows:
            base = row.to(tl.int64) * WIDTH
            mean_row = mean_ptr + row // media_rows * MEANS
            value = tl.load(attended_ptr + base + columns, mask=inside).to(tl.float32)
            value += tl.load(mean_row + mean_columns, mask=inside)
            value = value.to(attended_ptr.dtype.element_ty)
            if QUANTIZE:
                value = e4m3_value(value.to(tl.float32), tl.load(scale_ptr))
            value = value.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + base + columns, value, mask=inside)


def launch_add_value_mean(
    attended: torch.Tensor,
    v_mean: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor | None,
    *,
    block: int,
    num_warps: int,
) -> None:
    """Write ``attended + v_mean`` to ``out``, quantised where ``scale`` is given.

    Args:
        block: Rows a program.
    """
    batch, media_rows, heads, head_dim = attended.shape
    rows, width = batch * media_rows, heads * head_dim
    kv_heads = v_mean.shape[1]
    _add_value_mean_kernel[(triton.cdiv(rows, block),)](
        attended,
        v_mean,
        out,
        scale,
        media_rows,
        rows,
        WIDTH=width,
        MEANS=kv_heads * head_dim,
        HEAD=head_dim,
        GROUP=heads // kv_heads,
        TILE=triton.next_power_of_2(width),
        QUANTIZE=scale is not None,
        BLOCK=block,
        num_warps=num_warps,
        **_EXACT,
    )
