# SPDX-License-Identifier: Apache-2.0
"""Nano and Super at full size, on the meta device: names, shapes and counts, no memory."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import Cosmos3OmniTransformer

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import plan_weights
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_report import count_fp8_linears
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer
from tensorrt_llm._torch.visual_gen.models.cosmos3.weight_names import is_unused
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization.mode import QuantAlgo

pytestmark = pytest.mark.cosmos3

SOUND_AND_ACTION = {
    "sound_gen": True,
    "sound_dim": 64,
    "action_gen": True,
    "action_dim": 64,
    "rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
}
NANO = SOUND_AND_ACTION  # the class defaults of diffusers are Nano's sizes
SUPER = SOUND_AND_ACTION | {
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
}
FAMILIES = [pytest.param(NANO, 252, id="nano"), pytest.param(SUPER, 448, id="super")]
# lm_head, norm, two action projections with fc and bias, action_modality_embed.
UNUSED_COUNT = 7


def reference_state(config: dict) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        reference = Cosmos3OmniTransformer(**config)
    state = {name: t.to(torch.bfloat16) for name, t in reference.state_dict().items()}
    return {n: t.float() if n.startswith("time_embedder") else t for n, t in state.items()}


def with_fp8(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The published FP8 form: 2-D weights inside layers become FP8, with their scales beside."""
    out = {}
    for name, tensor in state.items():
        quantised = name.startswith("layers.") and tensor.ndim == 2
        out[name] = tensor.to(torch.float8_e4m3fn) if quantised else tensor
        if quantised:
            prefix = name.removesuffix(".weight")
            out[f"{prefix}.weight_scale"] = torch.tensor(0.01)
            out[f"{prefix}.input_scale"] = torch.tensor(0.02)
    return out


def meta_model(config: dict, quant_config: QuantConfig) -> Cosmos3VFMTransformer:
    pretrained = SimpleNamespace(**config, dtype="bfloat16")
    with torch.device("meta"):
        return Cosmos3VFMTransformer(
            DiffusionModelConfig(pretrained_config=pretrained, quant_config=quant_config)
        )


def planned_names(plan) -> set[str]:
    return {n for d in plan.destinations for shard in d.shards for n in shard.values()}


@pytest.mark.parametrize(("config", "count"), FAMILIES)
def test_static_fp8_tree_expects_exactly_the_published_names_and_shapes(config, count):
    state = with_fp8(reference_state(config))
    model = meta_model(config, QuantConfig(quant_algo=QuantAlgo.FP8))

    plan = plan_weights(model, state)

    unused = {name for name in state if is_unused(name)}
    assert len(unused) == UNUSED_COUNT
    assert planned_names(plan) == set(state) - unused
    assert count_fp8_linears(model.language_model.layers) == count
    assert count_fp8_linears(model.gen_layers) == count


@pytest.mark.parametrize(("config", "count"), FAMILIES)
def test_bf16_tree_expects_exactly_diffusers_names_and_fuses_the_generation_tower(config, count):
    state = reference_state(config)
    model = meta_model(config, QuantConfig())

    plan = plan_weights(model, state)

    assert planned_names(plan) == {name for name in state if not is_unused(name)}
    layers = count // 7
    understanding = [m for m in model.language_model.layers.modules() if isinstance(m, Linear)]
    generation = [m for m in model.gen_layers.modules() if isinstance(m, Linear)]
    assert len(understanding) == layers * 6  # q, k, v, out, gate_up, down
    assert len(generation) == layers * 4  # qkv, out, gate_up, down
    assert count_fp8_linears(model) == 0


def test_every_parameter_of_the_tree_has_a_planned_source():
    """Nothing can be left uninitialised: each parameter's key is among its destination's shards."""
    model = meta_model(NANO, QuantConfig(quant_algo=QuantAlgo.FP8))
    plan = plan_weights(model, with_fp8(reference_state(NANO)))
    filled = {
        f"{d.name}.{key}" if d.name else key
        for d in plan.destinations
        for shard in d.shards
        for key in shard
    }
    assert {name for name, _ in model.named_parameters()} == filled
