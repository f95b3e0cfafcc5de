# SPDX-License-Identifier: Apache-2.0
"""Attention on CUDA at Nano's sizes: within stated bounds of FP32, compiled, captured, shared.

The bounds are relative L2 errors of the whole module. Measured values are printed with ``-s``.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import (
    StepPrecisionController,
    install_step_precision,
)
from tensorrt_llm._torch.visual_gen.modules import Attention, QKVMode
from tensorrt_llm.models.modeling_utils import QuantConfig
from tests.support.fp8_modules import (
    FP8,
    assert_bit_equal,
    quantize,
    relative_error,
    seen_inputs,
    shard,
    w8a8,
    w8a16,
)

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4096, 32, 8, 128, 1760
QKV = ("to_q", "to_k", "to_v")
ROWS = dict(zip(QKV, (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), strict=True))
# amax of the activations below: about 5 at the input, 1 after attention over 1760 keys.
SCALE, OUT_SCALE = 5 / 448, 1 / 448

# BF16 projections, norms and attention kernel against FP32 on the same weights.
BOUND_16_BIT = 1e-2
# FP8 projections: fast accumulation (3e-3) turns some FP8 codes of to_out's input to a neighbour.
BOUND_FP8 = 3e-2
# Inductor keeps the norms' intermediates in FP32 where eager rounds them to BF16.
BOUND_COMPILED = 1e-2


def build(quant="static", share=True, mode=QKVMode.SEPARATE_QKV):
    fp8 = quant is not None
    tensors = {
        name: shard(
            rows, HIDDEN, seed=i, gain=2.0**i, device="cuda", input_scale=SCALE if fp8 else None
        )
        for i, (name, rows) in enumerate(ROWS.items())
    }
    tensors["to_out"] = shard(
        HIDDEN, HEADS * HEAD_DIM, seed=9, device="cuda", input_scale=OUT_SCALE if fp8 else None
    )
    config = DiffusionModelConfig(
        pretrained_config=SimpleNamespace(dtype="bfloat16"),
        quant_config=QuantConfig(quant_algo="FP8" if fp8 else None),
    )
    with torch.device("cuda"):
        attention = Attention(
            HIDDEN, HEADS, KV_HEADS, HEAD_DIM, mode, bias=False, config=config,
            share_qkv_input_quant=share,
        )  # fmt: skip
    if mode is QKVMode.SEPARATE_QKV:
        for name in QKV:
            getattr(attention, name).load_weights([tensors[name]])
    else:
        attention.qkv_proj.load_weights([tensors[name] for name in QKV])
    attention.to_out[0].load_weights([tensors["to_out"]])
    generator = torch.Generator("cuda").manual_seed(20)
    for norm in (attention.norm_q, attention.norm_k):
        norm.weight.copy_(torch.rand(HEAD_DIM, generator=generator, device="cuda") + 0.5)
    attention.post_load_weights()
    controller = StepPrecisionController(1, 0)
    install_step_precision(attention, controller)
    return attention, tensors, controller


def activation(seed=7, length=LENGTH):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(1, length, HIDDEN, generator=generator, device="cuda").to(BF16)


def reference(x, tensors, attention, linear):
    """FP32 with everything but the projections written out; ``linear(x, name)`` projects."""

    def norm(y, module):
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + module.eps) * module.weight

    q, k, v = (linear(x, name).view(1, -1, ROWS[name] // HEAD_DIM, HEAD_DIM) for name in QKV)
    q, k = norm(q, attention.norm_q), norm(k, attention.norm_k)
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (k, v))
    weights = (q @ k.transpose(-1, -2) / HEAD_DIM**0.5).softmax(-1)
    return linear((weights @ v).transpose(1, 2).flatten(2), "to_out")


def check(found, expected, bound, what):
    error = relative_error(found, expected)
    print(f"{what}: relative error {error:.2e}, bound {bound:.0e}")
    assert error < bound, f"{what}: {error:.2e}"


@pytest.mark.parametrize("mode", QKVMode)
def test_bf16_is_near_fp32(mode):
    attention, tensors, _ = build(None, share=False, mode=mode)
    x = activation()
    expected = reference(
        x, tensors, attention, lambda y, name: F.linear(y.float(), tensors[name]["weight"].float())
    )
    check(attention(x), expected, BOUND_16_BIT, f"BF16, {mode.value}")


def test_static_fp8_is_near_fp32_with_the_same_quantised_operands():
    attention, tensors, controller = build()
    x = activation()
    expected = reference(
        x, tensors, attention, lambda y, name: w8a8(y, tensors[name], torch.float32)
    )
    check(attention(x), expected, BOUND_FP8, "W8A8")
    for name, found in zip(QKV, attention.get_qkv(x), strict=True):
        check(found, w8a8(x, tensors[name]), 3e-3, f"W8A8 {name}")

    controller.set_step(0, num_steps=3)
    for name, found in zip(QKV, attention.get_qkv(x), strict=True):
        assert_bit_equal(found, w8a16(x, tensors[name]))
    expected = reference(
        x,
        tensors,
        attention,
        lambda y, name: F.linear(
            y.float(), tensors[name]["weight"].float() * tensors[name]["weight_scale"].bfloat16()
        ),
    )
    check(attention(x), expected, BOUND_16_BIT, "W8A16")


def test_one_storage_on_a_native_step_and_no_fp8_tensor_on_a_16_bit_step():
    attention, _, controller = build()
    x = activation(length=33)
    with seen_inputs(attention) as seen:
        attention(x)
    assert {seen.dtypes()[name] for name in QKV} == {FP8}
    assert seen.one_storage(*QKV)
    controller.set_step(0, num_steps=3)
    with seen_inputs(attention) as seen:
        attention(x)
    assert set(seen.dtypes().values()) == {BF16}


def test_sharing_is_bit_equal_to_not_sharing():
    x = activation() * 3  # some values clamp
    outputs = [build(share=share)[0](x) for share in (True, False)]
    assert_bit_equal(*outputs)


def test_an_fp8_activation_passes_straight_through():
    attention, tensors, _ = build()
    x = activation()
    assert_bit_equal(attention(quantize(x, tensors["to_q"]["input_scale"])), attention(x))


@pytest.mark.parametrize("quant", [None, "static"])
@pytest.mark.parametrize("mode", QKVMode)
def test_compiled_fullgraph_is_near_eager_in_both_modes(quant, mode):
    torch.compiler.reset()
    attention, _, controller = build(quant, mode is QKVMode.SEPARATE_QKV, mode)
    compiled = torch.compile(attention, fullgraph=True, dynamic=False)
    projected = torch.compile(attention.get_qkv, fullgraph=True, dynamic=False)
    x = activation()
    for step in (0, 1):
        controller.set_step(step, num_steps=3)
        what = f"compiled, {quant}, {mode.value}, step {step}"
        bound = BOUND_FP8 if quant and step else BOUND_COMPILED
        check(compiled(x), attention(x), bound, what)
        for found, expected in zip(projected(x), attention.get_qkv(x), strict=True):
            assert_bit_equal(found, expected)  # no norm in between: the same bits


@pytest.mark.parametrize("step", [0, 1])
def test_a_cuda_graph_replays_what_eager_computes(step):
    attention, _, controller = build()
    controller.set_step(step, num_steps=3)
    static_input = activation()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attention(static_input)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static_output = attention(static_input)
    for seed in (8, 9):
        x = activation(seed)
        static_input.copy_(x)
        graph.replay()
        assert_bit_equal(static_output, attention(x))
