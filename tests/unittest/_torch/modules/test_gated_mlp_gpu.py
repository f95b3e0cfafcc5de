# SPDX-License-Identifier: Apache-2.0
"""GatedMLP on CUDA: split against fused, compiled and captured against eager, and the formulas."""

import functools

import pytest
import torch
import torch.nn.functional as F

from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.modules.gated_mlp import GatedMLP
from tensorrt_llm._torch.modules.swiglu import swiglu_2in
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import (
    StepPrecisionController,
    install_step_precision,
)
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
# (hidden, intermediate, rows): Nano's MLP at a row count that no tile divides, and a tiny one.
SIZES = [(4096, 12288, 1760), (64, 128, 33)]
# amax of the activations below is about 5 (input) and 8 (SwiGLU of two unit normals).
SCALE, DOWN_SCALE = 5 / 448, 8 / 448
# Steps of a 3-step schedule with windows 1/0.
HIGH_STEP, NATIVE_STEP = 0, 1


@functools.lru_cache(maxsize=4)
def shards(hidden, intermediate, quant="static", equal=False):
    fp8 = quant is not None
    options = {"device": "cuda", "input_scale": SCALE if fp8 else None}
    tensors = {
        "gate": shard(intermediate, hidden, seed=1, **options),
        "up": shard(intermediate, hidden, seed=2, gain=1 if equal else 3, **options),
        "down": shard(
            hidden, intermediate, seed=3, device="cuda", input_scale=DOWN_SCALE if fp8 else None
        ),
    }
    if equal and fp8:
        tensors["up"]["weight_scale"] = tensors["gate"]["weight_scale"]
    return tensors


def build(size, split=True, quant="static", equal=False):
    hidden, intermediate, _ = size
    config = ModelConfig(quant_config=QuantConfig(quant_algo=None if quant is None else "FP8"))
    tensors = shards(hidden, intermediate, quant, equal)
    with torch.device("cuda"):
        mlp = GatedMLP(
            hidden_size=hidden, intermediate_size=intermediate, bias=False, dtype=BF16,
            config=config, split_gate_up=split,
        )  # fmt: skip
    if split:
        mlp.gate_proj.load_weights([tensors["gate"]])
        mlp.up_proj.load_weights([tensors["up"]])
    else:
        mlp.gate_up_proj.load_weights([tensors["gate"], tensors["up"]])
    mlp.down_proj.load_weights([tensors["down"]])
    mlp.post_load_weights()
    controller = StepPrecisionController(1, 0)
    install_step_precision(mlp, controller)
    return mlp, tensors, controller


def activation(size, seed=7):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size[2], size[0], generator=generator, device="cuda").to(BF16)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("quant, step", [(None, 1), ("static", NATIVE_STEP), ("static", HIGH_STEP)])
def test_split_is_bit_equal_to_fused_with_equal_scales(size, quant, step):
    x = activation(size)
    outputs = []
    for split in (True, False):
        mlp, _, controller = build(size, split, quant, equal=True)
        controller.set_step(step, num_steps=3)
        outputs.append(mlp(x))
    assert_bit_equal(*outputs)


@pytest.mark.parametrize("size", SIZES)
def test_static_fp8_follows_the_formulas(size):
    """3e-2 bounds the whole MLP: fast accumulation moves gate and up by about 2e-3, which turns
    some 3 % of the FP8 codes of the hidden activation to a neighbour, up to 6 % away."""
    mlp, tensors, _ = build(size)
    x = activation(size)
    hidden = F.silu(w8a8(x, tensors["gate"]).float()) * w8a8(x, tensors["up"]).float()
    expected = w8a8(quantize(hidden, tensors["down"]["input_scale"]), tensors["down"])
    error = relative_error(mlp(x), expected)
    assert error < 3e-2, f"{size}: {error:.2e}"
    gate_error = relative_error(mlp.gate_proj(x), w8a8(x, tensors["gate"]))
    assert gate_error < 5e-3, f"{size}: {gate_error:.2e}"


@pytest.mark.parametrize("size", SIZES)
def test_a_16_bit_step_equals_the_bf16_mlp_with_dequantised_weights(size):
    mlp, tensors, controller = build(size)
    controller.set_step(HIGH_STEP, num_steps=3)
    x = activation(size)
    hidden = swiglu_2in(w8a16(x, tensors["gate"]), w8a16(x, tensors["up"]))
    assert_bit_equal(mlp(x), w8a16(hidden, tensors["down"]))


def test_one_fp8_storage_on_a_native_step_and_no_fp8_tensor_on_a_16_bit_step():
    size = SIZES[1]
    mlp, _, controller = build(size)
    with seen_inputs(mlp) as seen:
        mlp(activation(size))
    assert set(seen.dtypes().values()) == {FP8}
    assert seen.one_storage("gate_proj", "up_proj")
    controller.set_step(HIGH_STEP, num_steps=3)
    with seen_inputs(mlp) as seen:
        mlp(activation(size))
    assert set(seen.dtypes().values()) == {BF16}


@pytest.mark.parametrize("size", SIZES)
def test_sharing_is_bit_equal_to_not_sharing(size):
    mlp, _, _ = build(size)
    x = activation(size) * 3  # some values clamp
    shared = mlp(x)
    mlp._maybe_share_gate_up_quantize = False
    assert_bit_equal(mlp(x), shared)


@pytest.mark.parametrize("size", SIZES)
def test_rank_3_equals_its_rank_2_view(size):
    mlp, _, _ = build(size)
    x = activation(size)
    x = torch.stack((x, x.flip(0)))
    assert_bit_equal(mlp(x).flatten(0, 1), mlp(x.flatten(0, 1)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("quant", [None, "static"])
def test_compiled_fullgraph_is_bit_equal_to_eager_in_both_modes(size, split, quant):
    torch.compiler.reset()
    mlp, _, controller = build(size, split, quant, equal=True)
    compiled = torch.compile(mlp, fullgraph=True, dynamic=False)
    x = activation(size)
    for step in (HIGH_STEP, NATIVE_STEP, HIGH_STEP):
        controller.set_step(step, num_steps=3)
        assert_bit_equal(compiled(x), mlp(x))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("step", [HIGH_STEP, NATIVE_STEP])
@pytest.mark.parametrize("split", [True, False])
def test_a_cuda_graph_replays_what_eager_computes(size, step, split):
    mlp, _, controller = build(size, split, equal=True)
    controller.set_step(step, num_steps=3)
    static_input = activation(size)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up: compile kernels, create cuBLAS workspaces
        mlp(static_input)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static_output = mlp(static_input)
    for seed in (8, 9):
        x = activation(size, seed)
        static_input.copy_(x)
        graph.replay()
        assert_bit_equal(static_output, mlp(x))
