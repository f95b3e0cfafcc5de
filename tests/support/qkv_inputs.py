# SPDX-License-Identifier: Apache-2.0
"""Inputs of the norm and attention ops, their unfused form, and ways to compare results."""

import torch

from tensorrt_llm._torch.custom_ops.attention_arguments import QkvInputs
from tests.support.fp8_modules import bits

EPS = 1e-6


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula, written again without the product's code."""
    exact = x.float()
    normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(weight.dtype) * weight


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Likewise."""
    (first, second), half = x.chunk(2, -1), x.shape[-1] // 2
    cos, sin = cos[..., None, :], sin[..., None, :]
    low = first * cos[..., :half] - second * sin[..., :half]
    high = second * cos[..., half:] + first * sin[..., half:]
    return torch.cat((low, high), -1)


def qkv_inputs(
    heads: tuple[int, int, int],
    rows: tuple[int, int, int],
    lengths: list[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    fused: bool = False,
    seed: int = 0,
) -> QkvInputs:
    """Inputs of (Hq, Hk, D) heads and (B, N, L) rows; text padding is NaN.

    q and k hold small integers: their squares add up exactly in any order, so that two devices
    must agree in every bit. Every column of v has a mean of its own, as a layer's has. ``fused``
    makes q, k, v views of one tensor.
    """
    query_heads, kv_heads, head_dim = heads
    batch, media, text = rows
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    def integers(low, width):
        shape = (batch, media, width * head_dim)
        x = torch.randint(low, low + 7, shape, dtype=torch.int8, generator=generator, device=device)
        return x.to(dtype)

    # k leans to one side, so that its mean is far from zero.
    q, k = integers(-3, query_heads), integers(-1, kv_heads)
    width = kv_heads * head_dim
    v = (normal(batch, media, width) + 3 * normal(width)).to(dtype)
    if fused:
        widths = [x.shape[-1] for x in (q, k, v)]
        q, k, v = torch.cat((q, k, v), dim=-1).split(widths, dim=-1)
    angles = 10 * normal(batch, media, head_dim)
    text_k, text_v = (normal(batch, text, kv_heads, head_dim).add(1).to(dtype) for _ in range(2))
    for branch, length in enumerate(lengths):
        text_k[branch, length:] = float("nan")
        text_v[branch, length:] = float("nan")
    return QkvInputs(
        q,
        k,
        v,
        (normal(head_dim) * 0.2 + 1).to(dtype),
        (normal(head_dim) * 0.2 + 1).to(dtype),
        EPS,
        angles.cos().to(dtype),
        angles.sin().to(dtype),
        text_k,
        text_v,
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def unfused(inputs: QkvInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, K and V by the steps that the generation layer took one by one."""
    heads = (*inputs.q.shape[:2], -1, inputs.q_weight.shape[0])
    q = rms_norm(inputs.q.view(heads), inputs.q_weight, inputs.eps)
    k = rms_norm(inputs.k.view(heads), inputs.k_weight, inputs.eps)
    q, k = (rotary(x, inputs.cos, inputs.sin) for x in (q, k))
    keys, values = [], []
    for branch, length in enumerate(inputs.text_lengths.tolist()):
        for joined, text, media in (
            (keys, inputs.text_k, k),
            (values, inputs.text_v, inputs.v.view(heads)),
        ):
            text = text[branch]
            padding = torch.zeros_like(text[length:])
            joined.append(torch.cat((text[:length], media[branch], padding)))
    return q, torch.stack(keys), torch.stack(values)


def valid_rows(inputs: QkvInputs) -> list[int]:
    """Keys of each branch: its text and its media."""
    return [length + inputs.q.shape[1] for length in inputs.text_lengths.tolist()]


def centred(
    inputs: QkvInputs, joined: torch.Tensor, mean: torch.Tensor | None = None
) -> torch.Tensor:
    """K or V less the mean of the valid rows in FP64, or less ``mean`` in FP32; then zeros."""
    exact = joined.double() if mean is None else joined.float()
    result = torch.zeros_like(exact)
    for branch, end in enumerate(valid_rows(inputs)):
        used = exact[branch, :end]
        result[branch, :end] = used - (used.mean(0) if mean is None else mean[branch])
    return result


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """A tensor like another, filled with a pattern that is no result."""
    size = like.numel() * like.element_size()
    raw = torch.full((size,), 0x5A, dtype=torch.uint8, device=like.device)
    return raw.view(like.dtype).view(like.shape)


def assert_within_ulps(found: torch.Tensor, expected: torch.Tensor, bound: int) -> None:
    """16-bit floats differ by ``bound`` units in the last place at most, and hardly ever."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    ordered = []
    for x in (found, expected):
        pattern = bits(x).int()
        ordered.append(torch.where(pattern < 0, -(pattern & 0x7FFF), pattern))
    distance = (ordered[0] - ordered[1]).abs()
    assert distance.max() <= bound
    assert (distance > 0).float().mean() < 1e-2
