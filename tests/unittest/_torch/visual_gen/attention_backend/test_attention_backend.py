# SPDX-License-Identifier: Apache-2.0
"""Attention backends: the contract, the choice at load, and no fallback for what was asked for."""

import pytest
import torch

from tensorrt_llm._torch.visual_gen import attention_backend
from tensorrt_llm._torch.visual_gen.attention_backend import (
    KeyLengths,
    create_attention_backend,
    fa3,
    resolve_attention_backend,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def reference(q, k, v, is_causal):
    """Softmax attention in FP64, written out; each key head serves neighbouring query heads."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def random_qkv(heads, kv_heads, q_len, kv_len, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, q_len, heads, 16), (2, kv_len, kv_heads, 16), (2, kv_len, kv_heads, 16)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def lengths_of(*numbers, on_host=True):
    device = torch.tensor(numbers, dtype=torch.int32)
    return KeyLengths(device, tuple(numbers) if on_host else None)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("q_len, kv_len, is_causal", [(7, 7, True), (7, 7, False), (5, 11, False)])
def test_vanilla_follows_the_softmax_formula(heads, kv_heads, q_len, kv_len, is_causal):
    q, k, v = random_qkv(heads, kv_heads, q_len, kv_len)
    found = create_attention_backend("VANILLA").forward(q, k, v, is_causal=is_causal)
    assert found.shape == (2, q_len, heads, 16) and found.is_contiguous()
    torch.testing.assert_close(found.double(), reference(q, k, v, is_causal), rtol=0, atol=2e-6)


def test_vanilla_leaves_the_rows_behind_each_length_out():
    q, k, v = random_qkv(4, 2, 5, 11)
    found = create_attention_backend("VANILLA").forward(q, k, v, lengths=lengths_of(11, 4))
    assert torch.equal(found[:1], create_attention_backend("VANILLA").forward(q[:1], k[:1], v[:1]))
    expected = reference(q[1:], k[1:, :4], v[1:, :4], False)
    torch.testing.assert_close(found[1:].double(), expected, rtol=0, atol=2e-6)


def test_vanilla_refuses_lengths_that_only_the_device_knows():
    q, k, v = random_qkv(4, 2, 5, 11)
    with pytest.raises(ValueError, match="from the host alone"):
        create_attention_backend("VANILLA").forward(
            q, k, v, lengths=lengths_of(11, 4, on_host=False)
        )


@pytest.mark.parametrize("kv_len, lengths", [(4, None), (9, None), (7, lengths_of(7, 5))])
@pytest.mark.parametrize("name", ["VANILLA", "FA3"])
def test_causal_attention_over_sequences_of_different_length_is_refused(name, kv_len, lengths):
    q, k, v = random_qkv(2, 2, 7, kv_len)
    with pytest.raises(ValueError, match="as many keys as queries"):
        create_attention_backend(name).forward(q, k, v, is_causal=True, lengths=lengths)


@pytest.mark.parametrize("name", ["TRTLLM", "fa3", "vanilla", ""])
def test_an_unknown_backend_is_refused_by_name(name):
    for choose in (create_attention_backend, lambda n: resolve(n)):
        with pytest.raises(NotImplementedError) as caught:
            choose(name)
        assert repr(name) in str(caught.value) and "VANILLA" in str(caught.value)


def test_lengths_grow_on_host_and_device_alike():
    grown = lengths_of(3, 5).plus(10)
    assert grown.host == (13, 15) and grown.device.tolist() == [13, 15]
    assert grown.device.dtype == torch.int32
    assert lengths_of(3, on_host=False).plus(1).host is None


# --- the choice at load -------------------------------------------------------------------------


def resolve(name, *, device=CPU, dtype=torch.bfloat16, head_dim=128, static_fp8=True):
    return resolve_attention_backend(
        name, device=device, dtype=dtype, head_dim=head_dim, static_fp8=static_fp8
    )


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper GPU with fa3-fwd, as far as the choice looks."""
    monkeypatch.setattr(fa3, "get_sm_version", lambda index: 90)
    monkeypatch.setattr(fa3, "_interface", lambda: object())
    return monkeypatch


@pytest.fixture
def messages(monkeypatch):
    found = []
    logger = attention_backend.logger
    monkeypatch.setattr(logger, "info", lambda text, *args: found.append(text % args))
    return found


def test_auto_takes_fa3_on_hopper_and_says_so_once(hopper, messages):
    assert resolve("AUTO", device=CUDA) == "FA3"
    assert messages == ["Attention backend: FA3 (AUTO)."]


@pytest.mark.parametrize(
    "facts, reason",
    [
        ({"device": CPU}, "CUDA"),
        ({"device": CUDA, "dtype": torch.float32}, "bfloat16"),
        ({"device": CUDA, "dtype": torch.float16}, "bfloat16"),
        ({"device": CUDA, "head_dim": 12}, "head_dim"),
        ({"device": CUDA, "head_dim": 512}, "head_dim"),
    ],
)
def test_what_fa3_does_not_serve_is_vanilla_for_auto_and_refused_by_name(
    hopper, messages, facts, reason
):
    assert resolve("AUTO", **facts) == "VANILLA"
    assert len(messages) == 1 and "VANILLA" in messages[0] and reason in messages[0]
    for name in ("FA3", "FA3_FP8"):
        with pytest.raises(ValueError, match=reason) as caught:
            resolve(name, **facts)
        assert name in str(caught.value) and "Remedy" in str(caught.value)


def test_another_gpu_is_vanilla_for_auto_and_refused_by_name(hopper, messages):
    hopper.setattr(fa3, "get_sm_version", lambda index: 100)
    assert resolve("AUTO", device=CUDA) == "VANILLA"
    with pytest.raises(ValueError, match="sm_100"):
        resolve("FA3", device=CUDA)


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("undefined symbol")])
def test_a_missing_or_broken_package_is_refused_with_the_extra_to_install(hopper, messages, error):
    def fail():
        raise error

    hopper.setattr(fa3, "_interface", fail)
    assert resolve("AUTO", device=CUDA) == "VANILLA"
    with pytest.raises(ValueError, match=r"tensorrt-llm-cosmos3\[hopper\]") as caught:
        resolve("FA3", device=CUDA)
    assert str(error) in str(caught.value)


def test_fp8_attention_is_never_chosen_by_auto_and_needs_a_static_fp8_checkpoint(hopper, messages):
    assert resolve("FA3_FP8", device=CUDA) == "FA3_FP8"
    with pytest.raises(NotImplementedError, match="static FP8"):
        resolve("FA3_FP8", device=CUDA, static_fp8=False)
    # FP8 tensor-core operands need twice the alignment.
    with pytest.raises(ValueError, match="head_dim"):
        resolve("FA3_FP8", device=CUDA, head_dim=72)
    assert resolve("FA3", device=CUDA, head_dim=72) == "FA3"


def test_the_extra_names_the_package_that_the_backend_imports():
    import tomllib
    from pathlib import Path

    project = Path(__file__).parents[5] / "pyproject.toml"
    extras = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert [line.partition(">=")[0] for line in extras["hopper"]] == [fa3.PACKAGE]


# --- the calls of FA3, without the package -------------------------------------------------------


class RecordedKernel:
    """Stands for ``fa3_fwd::fwd``: records its arguments and computes with the reference."""

    def __init__(self):
        self.calls = []

    @property
    def fa3_fwd_cuda(self):
        return self

    def fwd(self, q, k, v, *rest):
        out, used = rest[3], rest[8]
        self.calls.append({"q": q, "k": k, "used": used, "descales": rest[17:20]})
        assert rest[20] == q.shape[-1] ** -0.5
        for i in range(q.shape[0]):
            n = k.shape[1] if used is None else int(used[i])
            row = slice(i, i + 1)
            out[row] = reference(q[row], k[row, :n], v[row, :n], rest[21]).to(out.dtype)


@pytest.fixture
def kernel(monkeypatch):
    recorded = RecordedKernel()
    monkeypatch.setattr(fa3, "_interface", lambda: recorded)
    return recorded


@pytest.fixture
def no_step_is_short(monkeypatch):
    monkeypatch.setattr(fa3, "_ONE_CALL_ROWS", 9)  # two branches of five queries are ten


def test_fa3_calls_each_branch_over_its_own_keys_where_the_host_knows_them(
    kernel, no_step_is_short
):
    q, k, v = (x.bfloat16() for x in random_qkv(4, 2, 5, 11))
    found = create_attention_backend("FA3").forward(q, k, v, lengths=lengths_of(11, 4))
    assert [tuple(call["k"].shape) for call in kernel.calls] == [(1, 11, 2, 16), (1, 4, 2, 16)]
    assert all(call["used"] is None for call in kernel.calls)
    at_once = create_attention_backend("FA3").forward(
        q, k, v, lengths=lengths_of(11, 4, on_host=False)
    )
    assert len(kernel.calls) == 3 and kernel.calls[2]["used"].tolist() == [11, 4]
    assert torch.equal(found, at_once)
    assert found.dtype == torch.bfloat16 and found.shape == q.shape


def test_the_branches_of_a_short_step_share_one_call_of_fa3(kernel):
    q, k, v = (x.bfloat16() for x in random_qkv(4, 2, 5, 11))
    backend = create_attention_backend("FA3")
    backend.forward(q, k, v, lengths=lengths_of(11, 4))
    assert [call["used"].tolist() for call in kernel.calls] == [[11, 4]]
    backend.forward(q[:1], k[:1], v[:1], lengths=lengths_of(11))  # one branch is one call anyway
    assert kernel.calls[1]["used"] is None


def test_fa3_on_fp8_operands_hands_each_branch_its_own_descales(kernel, no_step_is_short):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in random_qkv(4, 2, 5, 11))
    scales = [torch.rand(2, 2) for _ in range(3)]
    v_mean = torch.full((2, 2, 16), 1e6)
    operands = attention_backend.E4M3Operands(q, k, v, *scales, v_mean)
    backend = create_attention_backend("FA3_FP8")
    attended = backend.forward_e4m3(operands, lengths=lengths_of(11, 4))
    assert attended.abs().max() < 1e3  # v_mean is the caller's to add
    for i, call in enumerate(kernel.calls):
        assert all(
            torch.equal(d, s[i : i + 1]) for d, s in zip(call["descales"], scales, strict=True)
        )
        assert call["q"].dtype == torch.float8_e4m3fn
    assert backend.quantizes and not create_attention_backend("FA3").quantizes


def test_fa3_on_16_bit_operands_passes_no_descales(kernel):
    q, k, v = (x.bfloat16() for x in random_qkv(4, 2, 7, 7))
    for name in ("FA3", "FA3_FP8"):
        create_attention_backend(name).forward(q, k, v, is_causal=True)
    assert [call["descales"] for call in kernel.calls] == [(None, None, None)] * 2
