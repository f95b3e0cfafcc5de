# SPDX-License-Identifier: Apache-2.0
"""Which quantisation dicts are a recipe, which are none, and which are refused."""

import copy

import pytest

from tensorrt_llm._torch.visual_gen.config import DiffusionPipelineConfig
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization import QuantAlgo

load = DiffusionPipelineConfig.load_diffusion_quant_config

# The shape that published checkpoints have (ModelOpt 0.44.0), cosmos3.md D.1 and D.2.
PUBLISHED = {
    "quant_method": "modelopt",
    "quant_type": "FP8_FP8",
    "quant_algo": "FP8",
    "weight_only": False,
    "config_groups": {
        "group_0": {
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "ignore": ["proj_in", "proj_out", "time_embedder*", "lm_head", "model.visual*"],
    "producer": {"name": "modelopt", "version": "0.44.0"},
    "modelopt_config": {"quant_cfg": [{"quantizer_name": "*", "enable": False}]},
    "runtime": {"diffusion_step_policy": {"schema_version": 1}},
}


def changed(path, value):
    """The published recipe with one nested key set."""
    recipe = copy.deepcopy(PUBLISHED)
    *parents, last = path
    inner = recipe
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return recipe


GROUP = ("config_groups", "group_0")
WEIGHTS = (*GROUP, "weights")
INPUTS = (*GROUP, "input_activations")


def test_the_published_recipe_is_static_fp8_with_its_ignore_list():
    config, layers, dynamic_weight, dynamic_activation = load(PUBLISHED)
    assert config == QuantConfig(quant_algo="FP8", exclude_modules=PUBLISHED["ignore"])
    assert layers is None
    assert dynamic_weight is False and dynamic_activation is False
    assert config.is_module_excluded_from_quantization("time_embedder.linear_1")
    assert not config.is_module_excluded_from_quantization("layers.0.self_attn.to_q")


@pytest.mark.parametrize(
    "recipe",
    [
        None,
        {},
        {"quant_algo": None},
        # What ModelOpt exports when it failed to quantise anything (cosmos3.md G.2).
        {"ignore": [], "quant_method": "modelopt", "producer": {"name": "modelopt"}},
    ],
)
def test_no_recipe(recipe):
    assert load(recipe) == (QuantConfig(), None, False, False)


@pytest.mark.parametrize("recipe", [{"quant_algo": "FP8"}, {"quant_algo": "FP8", "dynamic": True}])
def test_an_algorithm_without_groups_quantises_while_loading(recipe):
    assert load(recipe) == (QuantConfig(quant_algo=QuantAlgo.FP8), None, True, True)


def test_exclude_modules_is_another_name_of_ignore():
    config, *_ = load({"quant_algo": "FP8", "ignore": ["a"], "exclude_modules": ["b*"]})
    assert config.exclude_modules == ["a", "b*"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [((*WEIGHTS, "dynamic"), (True, False)), ((*INPUTS, "dynamic"), (False, True))],
)
def test_each_half_of_a_group_can_be_dynamic(path, expected):
    assert load(changed(path, True))[2:] == expected


def test_groups_that_agree_are_one_recipe():
    recipe = changed(("config_groups", "group_1"), PUBLISHED["config_groups"]["group_0"])
    assert load(recipe) == load(PUBLISHED)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("strategy", "tensor"), ("axis", None), ("block_sizes", None), ("symmetric", True)),
        *(("observer", "minmax"), ("observer_kwargs", {"averaging": 0.01})),
    ],
)
def test_options_that_say_per_tensor_are_accepted(key, value):
    assert load(changed((*WEIGHTS, key), value)) == load(PUBLISHED)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("modules_to_not_convert", []), ("weight_block_size", None), ("per_channel", False)),
        *(("activation_scheme", "static"), ("fmt", "e4m3"), ("fmt", "float8_e4m3fn")),
        *(("granularity", "per_tensor"), ("quant_type", "FP8"), ("quant_type", None)),
        # What diffusers 0.42.1 writes beside ModelOpt's FP8.
        *(("modules_to_not_convert", ["time_embedder"]), ("channel_quantize", None)),
        *(("granularity", "per-tensor"), ("fmt", "E4M3"), ("fmt", "float8")),
        ("whatever_a_later_exporter_adds", {"a": 1}),
    ],
)
def test_a_key_of_the_checkpoint_that_changes_no_meaning_is_accepted(key, value):
    assert load(changed((key,), value)) == load(PUBLISHED)


SECOND_GROUP = {
    "weights": {"dynamic": False, "num_bits": 4, "type": "float"},
    "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
    "targets": ["Linear"],
}
DYNAMIC_GROUP = SECOND_GROUP | {"weights": {"dynamic": True, "num_bits": 8, "type": "float"}}

REFUSED = [
    (changed(("quant_algo",), "NVFP4"), "NVFP4"),
    (changed(("quant_algo",), "FP8_BLOCK_SCALES"), "FP8_BLOCK_SCALES"),
    (changed(("quant_algo",), "MIXED_PRECISION"), "MIXED_PRECISION"),
    (changed(("quant_algo",), 8), "Unknown quantisation algorithm 8"),
    (changed(("quant_algo",), "W4A16_AWQ"), "W4A16_AWQ fails closed for unverified algos"),
    (changed(("quant_algo",), None), "groups and no algorithm"),
    (changed(("quant_method",), "compressed-tensors"), "compressed-tensors"),
    (changed(("weight_only",), True), "weight_only"),
    (changed(("weight_only",), 1), "weight_only"),
    (changed(("ignore",), "lm_head"), "ignore"),
    (changed(("ignore",), [1]), "ignore"),
    (changed(("kv_cache_quant_algo",), "FP8"), "kv_cache_quant_algo"),
    (changed(("quantized_layers",), {"layers.0": {}}), "quantized_layers"),
    (changed(("config_groups",), {}), "config_groups names no group"),
    (changed(("config_groups",), [1]), "config_groups names no group"),
    (changed(GROUP, None), "config_groups.group_0"),
    (changed((*GROUP, "targets"), ["re:.*to_q"]), "Mixed config groups"),
    (changed((*GROUP, "output_activations"), {"num_bits": 8}), "output_activations"),
    (changed(WEIGHTS, None), "group_0.weights"),
    (changed(INPUTS, None), "group_0.input_activations"),
    (changed((*WEIGHTS, "num_bits"), 4), "num_bits 4"),
    (changed((*INPUTS, "type"), "int"), "type 'int'"),
    (changed((*WEIGHTS, "axis"), 0), "weights.axis"),
    (changed((*WEIGHTS, "block_sizes"), {"-1": 128}), "weights.block_sizes"),
    (changed((*WEIGHTS, "group_size"), 128), "weights.group_size"),
    (changed((*WEIGHTS, "strategy"), "channel"), "weights.strategy"),
    (changed((*INPUTS, "strategy"), "token"), "input_activations.strategy"),
    (changed((*WEIGHTS, "symmetric"), False), "Zero points"),
    (changed((*WEIGHTS, "dynamic"), "false"), "no boolean"),
    (changed(("config_groups", "group_1"), SECOND_GROUP), "group_1.weights"),
    (changed(("config_groups", "group_1"), DYNAMIC_GROUP), "Mixed config groups"),
    (changed(("dynamic",), True), "dynamic contradicts config_groups"),
    (
        {"quant_algo": "FP8", "modules_to_not_convert": ["a"]},
        "modules_to_not_convert is not followed",
    ),
    ({"quant_algo": "FP8", "ignored_layers": ["a"]}, "ignored_layers is not followed"),
    (changed(("weight_block_size",), [128, 128]), "weight_block_size"),
    (changed(("per_channel",), True), "per_channel"),
    (changed(("granularity",), "block"), "granularity"),
    (changed(("fmt",), "e5m2"), "e5m2"),
    (changed(("fmt",), ["e4m3"]), "fmt"),
    (changed(("quant_type",), "NVFP4"), "quant_type"),
    (changed(("activation_scheme",), "dynamic"), "activation_scheme contradicts"),
    ({"quant_algo": "FP8", "activation_scheme": "static"}, "activation_scheme contradicts"),
    ({"activation_scheme": "dynamic"}, "activation_scheme without an algorithm"),
    ({"quant_algo": "FP8", "dynamic": False}, "static recipe needs its groups"),
    ({"quant_algo": "FP8", "dynamic": "yes"}, "no boolean"),
    ({"quantization": {"quant_algo": "FP8"}}, "quantization is not supported"),
    ("FP8", "no mapping"),
]


@pytest.mark.parametrize(("recipe", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_is_not_one_recipe_of_per_tensor_fp8_is_refused_by_name(recipe, message):
    with pytest.raises(ValueError) as error:
        load(recipe)
    assert message in str(error.value)
