# SPDX-License-Identifier: Apache-2.0
"""Attention backends: the contract of the one that exists, and no fallback for others."""

import pytest
import torch

from tensorrt_llm._torch.visual_gen.attention_backend import create_attention_backend


def reference(q, k, v, is_causal):
    """Softmax attention in FP64, written out; each key head serves neighbouring query heads."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(-1) @ v


def random_qkv(heads, kv_heads, q_len, kv_len, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, heads, q_len, 16), (2, kv_heads, kv_len, 16), (2, kv_heads, kv_len, 16)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("q_len, kv_len, is_causal", [(7, 7, True), (7, 7, False), (5, 11, False)])
def test_vanilla_follows_the_softmax_formula(heads, kv_heads, q_len, kv_len, is_causal):
    q, k, v = random_qkv(heads, kv_heads, q_len, kv_len)
    found = create_attention_backend("VANILLA").forward(q, k, v, is_causal)
    assert found.shape == (2, heads, q_len, 16)
    torch.testing.assert_close(found.double(), reference(q, k, v, is_causal), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kv_len", [4, 9])
def test_causal_attention_over_sequences_of_different_length_is_refused(kv_len):
    q, k, v = random_qkv(2, 2, 7, kv_len)
    with pytest.raises(ValueError, match="as many keys as queries"):
        create_attention_backend("VANILLA").forward(q, k, v, is_causal=True)


@pytest.mark.parametrize("name", ["TRTLLM", "FA3", "vanilla", ""])
def test_an_unknown_backend_is_refused_by_name(name):
    with pytest.raises(NotImplementedError) as caught:
        create_attention_backend(name)
    assert repr(name) in str(caught.value) and "VANILLA" in str(caught.value)
