# SPDX-License-Identifier: Apache-2.0
"""What the loader puts into a module, and what it refuses before it changes anything."""

import logging

import pytest
import torch
from torch import nn

from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.modules.embedding import Embedding
from tensorrt_llm._torch.modules.linear import Linear, WeightMode, WeightsLoadingConfig
from tensorrt_llm._torch.modules.rms_norm import RMSNorm
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.quantization.loader import DynamicLinearWeightLoader
from tensorrt_llm.models.modeling_utils import QuantConfig

FP8 = torch.float8_e4m3fn
RECIPE = QuantConfig(quant_algo="FP8")
STATIC = DynamicLinearWeightLoader(DiffusionModelConfig(quant_config=RECIPE))
DYNAMIC = DynamicLinearWeightLoader(
    DiffusionModelConfig(
        quant_config=RECIPE, dynamic_weight_quant=True, force_dynamic_quantization=True
    ),
    params_map={"qkv_proj": ["to_q", "to_k", "to_v"], "gate_up_proj": ["gate_proj", "up_proj"]},
)
PLAIN = DynamicLinearWeightLoader(ModelConfig())
NAME = "layers.0.self_attn.to_q"
K = 32


def linear(rows=16, recipe=RECIPE, mode=WeightMode.VANILLA, bias=False, dynamic=False):
    config = WeightsLoadingConfig(weight_mode=mode)
    module = Linear(
        K,
        rows,
        bias,
        torch.bfloat16,
        quant_config=recipe,
        weights_loading_config=config,
        force_dynamic_quantization=dynamic,
    )
    for parameter in module.parameters():
        parameter.fill_(0.5)
    return module


def bf16(rows=16, factor=1.0, seed=0):
    torch.manual_seed(seed)
    return torch.randn(rows, K).bfloat16() * factor


def fp8(rows=16, scale=0.01, seed=0):
    return {
        "weight": (bf16(rows, 100, seed).float()).clamp(-448, 448).to(FP8),
        "weight_scale": torch.tensor(scale),
        "input_scale": torch.tensor(0.02),
    }


def codes(tensor):
    return tensor.detach().view(torch.uint8)


def raw(module):
    return {name: codes(p.reshape(-1)).clone() for name, p in module.named_parameters()}


def refused(loader, module, dicts, message, name=NAME):
    before = raw(module)
    with pytest.raises(ValueError, match=message) as error:
        loader.load_linear_weights(module, name, dicts)
    after = raw(module)
    assert all(torch.equal(after[key], before[key]) for key in before)
    return str(error.value)


# ---- FP8 weights from the file ----


@pytest.mark.parametrize("loader", [STATIC, DYNAMIC])
def test_stored_fp8_is_loaded_byte_for_byte_and_never_quantised_again(loader):
    module = linear(dynamic=loader is DYNAMIC)
    tensors = fp8()
    loader.load_linear_weights(module, NAME, [tensors])
    assert torch.equal(codes(module.weight), codes(tensors["weight"]))
    assert torch.equal(module.weight_scale, tensors["weight_scale"])
    if loader is STATIC:
        assert torch.equal(module.input_scale, tensors["input_scale"])


@pytest.mark.parametrize("both", [False, True])
def test_modelopts_buffers_are_read_alone_or_beside_the_scales(both):
    amax, input_amax = (torch.tensor(v, dtype=torch.bfloat16) for v in (3.296875, 17.25))
    tensors = {
        "weight": fp8()["weight"],
        "weight_quantizer._amax": amax,
        "weight_quantizer._scale": amax / 448,
        "input_quantizer._amax": input_amax,
    }
    if both:
        tensors |= {"weight_scale": amax.float() / 448, "input_scale": input_amax.float() / 448}
    module = linear()
    STATIC.load_linear_weights(module, NAME, [tensors])
    assert torch.equal(module.weight_scale, amax.float() / 448)
    assert torch.equal(module.input_scale, input_amax.float() / 448)


def test_dialects_that_disagree_are_refused():
    tensors = fp8() | {"weight_quantizer._amax": torch.tensor(9.0)}
    message = refused(STATIC, linear(), [tensors], "disagree")
    assert NAME in message


# ---- High-precision weights ----


@pytest.mark.parametrize("with_scales", [False, True])
def test_a_static_recipe_refuses_a_weight_that_is_not_quantised(with_scales):
    tensors = (fp8() if with_scales else {}) | {"weight": bf16()}
    message = refused(STATIC, linear(), [tensors], "appears to be unquantized")
    assert f"{NAME}.weight" in message and "torch.bfloat16" in message
    assert "fp8 revision" in message and "quant_algo" in message


def test_a_linear_built_for_fp8_refuses_bf16_weights_also_without_a_recipe():
    refused(PLAIN, linear(), [{"weight": bf16()}], "appears to be unquantized")


@pytest.mark.parametrize(
    "module",
    [nn.Linear(K, 16), nn.Embedding(16, K), RMSNorm(K), Embedding(16, K), nn.LayerNorm(K)],
    ids=lambda module: f"{type(module).__module__}.{type(module).__name__}",
)
@pytest.mark.parametrize("loader", [STATIC, DYNAMIC, PLAIN])
def test_a_high_precision_destination_loads_high_precision_under_any_recipe(loader, module):
    module.requires_grad_(False)
    tensors = {key: torch.randn(p.shape).bfloat16() for key, p in module.named_parameters()}
    loader.load_linear_weights(module, "layers.0.self_attn.to_q", [tensors])
    for key, parameter in module.named_parameters():
        assert torch.equal(parameter, tensors[key].float())


def test_an_excluded_linear_loads_high_precision_inside_a_static_checkpoint():
    module = linear(recipe=None)
    STATIC.load_linear_weights(module, NAME, [{"weight": bf16()}])
    assert torch.equal(module.weight, bf16())


def test_a_destination_of_unknown_kind_is_refused():
    unknown = nn.Identity()
    refused(STATIC, unknown, [{"weight": bf16()}], "appears to be unquantized")
    refused(PLAIN, unknown, [{"weight": bf16()}], "destination of a weight is unknown")
    refused(STATIC, unknown, [fp8()], "destination of a weight is unknown")


@pytest.mark.parametrize(
    "module", [linear(recipe=None), nn.Linear(K, 16, bias=False), nn.Embedding(16, K)]
)
@pytest.mark.parametrize("loader", [STATIC, PLAIN])
def test_an_fp8_weight_for_a_high_precision_destination_is_refused(loader, module):
    message = refused(loader, module, [fp8()], "built in high precision")
    assert f"{NAME}.weight" in message and "float8_e4m3fn" in message


# ---- Quantising while loading ----


def test_a_dynamic_recipe_quantises_once_with_the_weights_own_scale():
    module = linear(dynamic=True)
    weight = bf16(factor=3.0)
    DYNAMIC.load_linear_weights(module, NAME, [{"weight": weight}])
    scale = weight.float().abs().amax() / 448
    assert torch.equal(module.weight_scale, scale)
    expected = (weight.float() / scale).clamp(-448, 448).to(FP8)
    assert torch.equal(codes(module.weight), codes(expected))


def test_a_fused_destination_gets_one_joint_scale_and_no_second_rounding(caplog):
    module = linear(32, mode=WeightMode.FUSED_QKV_LINEAR, dynamic=True)
    weights = [bf16(16, 1.0, 1), bf16(8, 0.3, 2), bf16(8, 4.0, 3)]
    with caplog.at_level(logging.WARNING, logger="tensorrt_llm"):
        DYNAMIC.load_linear_weights(module, "l.qkv_proj", [{"weight": w} for w in weights])
    joined = torch.cat(weights).float()
    scale = joined.abs().amax() / 448
    assert torch.equal(module.weight_scale, scale)
    expected = (joined / scale).clamp(-448, 448).to(FP8)
    assert torch.equal(codes(module.weight), codes(expected))
    assert not caplog.records


def test_a_calibrated_input_scale_beside_a_weight_that_is_quantised_here_is_used():
    loader = DynamicLinearWeightLoader(ModelConfig(quant_config=RECIPE, dynamic_weight_quant=True))
    module = linear()
    loader.load_linear_weights(
        module, NAME, [{"weight": bf16(), "input_scale": torch.tensor([0.125])}]
    )
    assert module.input_scale.item() == 0.125
    refused(loader, module, [{"weight": bf16()}], "without input_scale")


def test_the_recipe_is_read_at_every_call():
    config = ModelConfig(quant_config=RECIPE, force_dynamic_quantization=True)
    loader = DynamicLinearWeightLoader(config)
    module = linear(dynamic=True)
    refused(loader, module, [{"weight": bf16()}], "appears to be unquantized")
    config.dynamic_weight_quant = True
    loader.load_linear_weights(module, NAME, [{"weight": bf16()}])
    assert module.weight_scale > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_cannot_be_quantised(value):
    weight = bf16()
    weight[3, 4] = value
    refused(DYNAMIC, linear(dynamic=True), [{"weight": weight}], "finite and positive")


def test_shards_of_different_precision_are_refused():
    module = linear(32, mode=WeightMode.FUSED_GATE_UP_LINEAR, dynamic=True)
    refused(DYNAMIC, module, [{"weight": bf16()}, fp8()], "for all shards alike")


# ---- Refusals ----


@pytest.mark.parametrize("algo", ["W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL"])
def test_algorithms_of_unverified_layout_fail_closed(algo):
    loader = DynamicLinearWeightLoader(ModelConfig(quant_config=QuantConfig(quant_algo=algo)))
    for module, tensors in ((linear(), fp8()), (nn.Linear(K, 16, False), {"weight": bf16()})):
        message = refused(loader, module, [tensors], "fails closed for unverified algos")
        assert algo in message and NAME in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale": None}, f"without weight_scale .*{NAME}.weight_scale"),
        ({"input_scale": None}, f"{NAME}: .*without input_scale"),
        ({"weight_scale": torch.tensor(0.0)}, f"positive .*{NAME}.weight_scale"),
        ({"weight_scale": torch.tensor(float("nan"))}, f"finite .*{NAME}.weight_scale"),
        ({"weight_scale": torch.ones(16, 1)}, f"one element .*{NAME}.weight_scale"),
        ({"input_scale": torch.tensor(-1.0)}, f"positive .*{NAME}.input_scale"),
        ({"weight_scale_2": torch.tensor(1.0)}, "nothing consumes .*weight_scale_2"),
        ({"pre_quant_scale": torch.ones(K)}, "nothing consumes .*pre_quant_scale"),
        ({"weight": None}, f"missing .*{NAME}.weight"),
        ({"weight": torch.zeros(16, K).to(torch.float8_e5m2)}, "float8_e5m2"),
        ({"weight": torch.zeros(16, K, dtype=torch.int8)}, "int8"),
        ({"weight": torch.zeros(16, K + 1).to(FP8)}, f"{NAME}: .*another shape"),
        ({"bias": torch.zeros(16)}, f"{NAME}: .*unknown .*bias"),
    ],
)
def test_an_fp8_shard_that_does_not_fit_is_refused_by_name(change, message):
    tensors = {key: tensor for key, tensor in (fp8() | change).items() if tensor is not None}
    refused(STATIC, linear(), [tensors], message)


@pytest.mark.parametrize("key", ["weight_scale", "input_scale", "weight_quantizer._amax"])
@pytest.mark.parametrize("module", [linear(recipe=None), nn.Linear(K, 16, bias=False)])
def test_scales_of_a_high_precision_weight_are_refused(module, key):
    tensors = {"weight": bf16(), key: torch.tensor(1.0)}
    refused(STATIC, module, [tensors], f"nothing consumes .*{key}")


def test_a_weight_scale_of_a_weight_that_is_quantised_here_is_refused():
    tensors = {"weight": bf16(), "weight_scale": torch.tensor(1.0)}
    refused(DYNAMIC, linear(dynamic=True), [tensors], "nothing consumes .*weight_scale")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": torch.zeros(16, K + 1), "bias": torch.zeros(16)}, "another shape"),
        ({"weight": torch.zeros(16, K), "bias": torch.zeros(15)}, "another shape"),
        ({"weight": torch.zeros(16, K)}, "not those of the module"),
        ({"weight": torch.zeros(16, K), "bias": torch.zeros(16, dtype=torch.int32)}, "int32"),
    ],
)
def test_a_boundary_layer_refuses_what_does_not_fit(tensors, message):
    module = nn.Linear(K, 16).requires_grad_(False)
    refused(STATIC, module, [tensors], f"{NAME}: .*{message}")


def test_a_boundary_layer_on_meta_is_refused():
    module = nn.Linear(K, 16, bias=False, device="meta")
    with pytest.raises(ValueError, match="to_empty"):
        STATIC.load_linear_weights(module, NAME, [{"weight": bf16()}])


# ---- params_map ----


def test_the_params_map_names_the_sources_of_fused_destinations():
    assert DYNAMIC.source_names("gen_layers.0.mlp.gate_up_proj") == [
        "gen_layers.0.mlp.gate_proj",
        "gen_layers.0.mlp.up_proj",
    ]
    assert DYNAMIC.source_names("gen_layers.0.mlp.down_proj") == ["gen_layers.0.mlp.down_proj"]
    assert DYNAMIC.source_names("qkv_proj") == ["to_q", "to_k", "to_v"]


def test_an_error_about_a_part_of_a_fused_destination_names_its_source():
    module = linear(32, mode=WeightMode.FUSED_GATE_UP_LINEAR, dynamic=True)
    parts = [{"weight": bf16(seed=1)}, {"bias": bf16()}]
    message = refused(DYNAMIC, module, parts, "A weight is missing", "l.mlp.gate_up_proj")
    assert "l.mlp.up_proj.weight" in message
