# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``qk_norm_rope`` and ``qkv_norm_rope_e4m3``: their sizes and checks.

The checks read metadata alone: no device work, no waiting.
"""

from typing import NamedTuple

import torch

from tensorrt_llm._torch.custom_ops.op_arguments import (
    check_contiguous,
    check_same_device,
    check_scale,
    check_wide_dtype,
)
from tensorrt_llm._utils import describe_error


class QkvInputs(NamedTuple):
    """The arguments of both ops in their order; ``attention_ops`` says what they are."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    text_k: torch.Tensor
    text_v: torch.Tensor
    text_lengths: torch.Tensor

    @property
    def batch(self) -> int:
        """Branches, B."""
        return self.q.shape[0]

    @property
    def media_rows(self) -> int:
        """Media tokens of a branch, N."""
        return self.q.shape[1]

    @property
    def text_rows(self) -> int:
        """Text rows of a branch with their padding, L."""
        return self.text_k.shape[1]

    @property
    def head_dim(self) -> int:
        """Width of a head, D."""
        return self.q_weight.shape[0]

    @property
    def query_heads(self) -> int:
        """Query heads, Hq."""
        return self.q.shape[2] // self.head_dim

    @property
    def kv_heads(self) -> int:
        """Key and value heads, Hk."""
        return self.k.shape[2] // self.head_dim


def check_qkv(op: str, inputs: QkvInputs) -> None:
    """Require arguments that belong together.

    Raises:
        ValueError: an odd D; q or k that are no [B, N, heads * D], or without branches, rows or
            heads; query heads that are no multiple of the key heads; a tensor whose shape, dtype or
            device does not follow from q's, k's and text_k's; rows of q, k or v, or another tensor
            as a whole, that are not contiguous.
    """
    check_wide_dtype(inputs.q.dtype, f"{op}, q")
    _check_sizes(op, inputs)
    device = inputs.q.device
    for name, tensor in zip(inputs._fields, inputs, strict=True):
        if name == "eps":
            continue
        # Names are put together where they are needed: 36 calls a step pass here.
        if tensor.device != device:
            check_same_device(tensor, device, f"{op}, {name}")
        dtype = torch.int32 if name == "text_lengths" else inputs.q.dtype
        if tensor.dtype != dtype:
            raise _unfit(op, name, dtype, tensor.dtype, f"cast {name} with .to({dtype})")
        if name not in ("q", "k", "v"):
            if not tensor.is_contiguous():
                check_contiguous(tensor, f"{op}, {name}")
        elif tensor.stride(2) != 1:
            found = f"strides {tuple(tensor.stride())}"
            raise _unfit(op, name, "contiguous rows", found, f"call {name}.contiguous() first")


def _check_sizes(op: str, inputs: QkvInputs) -> None:
    weight = tuple(inputs.q_weight.shape)
    if len(weight) != 1 or weight[0] == 0 or weight[0] % 2 != 0:
        remedy = "pass the weight of a norm over one head; rotation pairs the halves of a head"
        raise _unfit(op, "q_weight", "shape [D] with an even D", weight, remedy)
    head_dim = weight[0]
    for name, rows in (("q", inputs.q), ("k", inputs.k)):
        if rows.dim() != 3 or rows.numel() == 0 or rows.shape[2] % head_dim != 0:
            expected = f"shape [B, N, heads * {head_dim}], none of them zero"
            remedy = "pass the projection's output with its heads side by side"
            raise _unfit(op, name, expected, tuple(rows.shape), remedy)
    if inputs.query_heads % inputs.kv_heads != 0:
        expected = f"a number of heads that divides q's {inputs.query_heads}"
        remedy = "give each key head the same number of query heads"
        raise _unfit(op, "k", expected, f"{inputs.kv_heads} heads", remedy)
    if inputs.text_k.dim() != 4:
        remedy = "stack the branches' text keys, padded to one length"
        raise _unfit(op, "text_k", "shape [B, L, Hk, D]", tuple(inputs.text_k.shape), remedy)
    batch, media_rows = inputs.batch, inputs.media_rows
    keys = (batch, media_rows, inputs.kv_heads * head_dim)
    table = (batch, media_rows, head_dim)
    text = (batch, inputs.text_rows, inputs.kv_heads, head_dim)
    for name, meaning, shape in (
        ("k", "[B, N, Hk * D]", keys),
        ("v", "[B, N, Hk * D]", keys),
        ("k_weight", "[D]", (head_dim,)),
        ("cos", "[B, N, D]", table),
        ("sin", "[B, N, D]", table),
        ("text_k", "[B, L, Hk, D]", text),
        ("text_v", "[B, L, Hk, D]", text),
        ("text_lengths", "[B]", (batch,)),
    ):
        found = tuple(getattr(inputs, name).shape)
        if found != shape:
            remedy = f"{name} is {meaning}, with the B, N, Hk, D of q, k, q_weight and L of text_k"
            raise _unfit(op, name, f"shape {shape}", found, remedy)


def check_value_mean(
    op: str, attended: torch.Tensor, v_mean: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Require attention's output [B, N, Hq, D] and FP32 means [B, Hk, D] whose Hk divides Hq.

    Raises:
        ValueError: other shapes, dtypes or devices, a tensor that is not contiguous, or a scale
            that is no 0-d FP32 tensor.
    """
    check_wide_dtype(attended.dtype, f"{op}, attended")
    if attended.dim() != 4:
        remedy = "pass attention's output with its heads apart"
        found = tuple(attended.shape)
        raise _unfit(op, "attended", "shape [B, N, Hq, D]", found, remedy)
    batch, _, heads, head_dim = attended.shape
    shape = tuple(v_mean.shape)
    fits = len(shape) == 3 and (shape[0], shape[2]) == (batch, head_dim)
    if not fits or shape[1] == 0 or heads % shape[1] != 0 or v_mean.dtype != torch.float32:
        expected = f"torch.float32 [{batch}, Hk, {head_dim}] with an Hk that divides {heads}"
        remedy = "pass the v_mean that qkv_norm_rope_e4m3 returned for these heads"
        raise _unfit(op, "v_mean", expected, f"{v_mean.dtype} {shape}", remedy)
    check_same_device(v_mean, attended.device, f"{op}, v_mean")
    check_contiguous(attended, f"{op}, attended")
    check_contiguous(v_mean, f"{op}, v_mean")
    if scale is not None:
        check_scale(scale, attended.device, f"{op}, scale")


def check_cuda_head_dim(op: str, head_dim: int) -> None:
    """Require a D that the CUDA kernels take.

    Raises:
        ValueError: a D that is no power of two, or below 16.
    """
    if head_dim < 16 or head_dim & (head_dim - 1) != 0:
        remedy = "run such a head on the CPU, which takes any even D"
        raise _unfit(
            op, "D", "64, 128 or another power of two from 16 on, on CUDA", head_dim, remedy
        )


def _unfit(op: str, name: str, expected: object, found: object, remedy: str) -> ValueError:
    what = f"{name} does not fit"
    return ValueError(describe_error(what, where=op, expected=expected, found=found, remedy=remedy))
