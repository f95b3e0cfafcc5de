# SPDX-License-Identifier: Apache-2.0
import copy
import json

import pytest
import torch

from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig, DiffusionPipelineConfig
from tensorrt_llm._torch.visual_gen.config_fields import (
    AttentionConfig,
    ParallelConfig,
    TorchCompileConfig,
)
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.visual_gen.args import VisualGenArgs

FP8_SPEC = {"dynamic": False, "num_bits": 8, "type": "float"}
STATIC_RECIPE = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "config_groups": {
        "group_0": {"weights": FP8_SPEC, "input_activations": FP8_SPEC, "targets": ["Linear"]}
    },
    "ignore": ["proj_in", "time_embedder*"],
    "runtime": {"diffusion_step_policy": {"reasoner": "a16"}},
}
CONFIG = {
    "hidden_size": 64,
    "dtype": "bfloat16",
    "rope_scaling": {"mrope_section": [4, 2, 2]},
    "quantization_config": STATIC_RECIPE,
}
PARALLEL_AXES = ["cfg_size", "ulysses_size", "ring_size", "tp_size", "parallel_vae_size"]


def write_checkpoint(root, config=CONFIG):
    (root / "transformer").mkdir()
    (root / "transformer" / "config.json").write_text(json.dumps(config))
    return root


def test_a_static_checkpoint_without_arguments(tmp_path):
    config = DiffusionPipelineConfig.from_pretrained(
        write_checkpoint(tmp_path)
    ).primary_model_config
    assert config.quant_config.quant_mode.has_fp8_qdq()
    assert config.quant_config.exclude_modules == ["proj_in", "time_embedder*"]
    assert config.dynamic_weight_quant is False and config.force_dynamic_quantization is False
    assert config.quant_config_overridden is False
    assert config.mapping == Mapping()
    assert config.pretrained_config.hidden_size == 64
    assert config.pretrained_config.rope_scaling == {"mrope_section": [4, 2, 2]}
    assert config.pretrained_config.quantization_config == STATIC_RECIPE
    assert config.get_quant_config("time_embedder.linear_1") == QuantConfig()
    assert config.get_quant_config("layers.0.mlp.up_proj") == config.quant_config


def test_a_checkpoint_without_a_recipe_is_high_precision(tmp_path):
    write_checkpoint(tmp_path, {"hidden_size": 64})
    config = DiffusionPipelineConfig.from_pretrained(str(tmp_path)).primary_model_config
    assert config.quant_config == QuantConfig()
    assert config.torch_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("override", "algorithm", "dynamic"),
    [
        ({"quant_algo": "FP8"}, "FP8", True),
        (QuantConfig(quant_algo="FP8", exclude_modules=["lm_head"]), "FP8", True),
        (copy.deepcopy(STATIC_RECIPE), "FP8", False),
        ({}, None, False),
        (QuantConfig(), None, False),
    ],
)
def test_the_callers_recipe_replaces_the_checkpoints(tmp_path, override, algorithm, dynamic):
    args = VisualGenArgs(model="m", quant_config=override)
    config = DiffusionPipelineConfig.from_pretrained(write_checkpoint(tmp_path), args=args)
    config = config.primary_model_config
    assert config.quant_config.quant_algo == algorithm
    assert (config.dynamic_weight_quant, config.force_dynamic_quantization) == (dynamic, dynamic)
    assert config.quant_config_overridden is True
    if isinstance(override, QuantConfig):
        assert config.quant_config == override


def test_the_callers_options_arrive(tmp_path):
    args = VisualGenArgs(
        model="m",
        attention_config=AttentionConfig(backend="OTHER"),
        torch_compile_config=TorchCompileConfig(enable=True, enable_fullgraph=True),
    )
    config = DiffusionPipelineConfig.from_pretrained(write_checkpoint(tmp_path), args=args)
    config = config.primary_model_config
    assert config.attention.backend == "OTHER"
    assert config.torch_compile == TorchCompileConfig(enable=True, enable_fullgraph=True)
    assert config.quant_config_overridden is False
    assert config.quant_config.quant_mode.has_fp8_qdq()


@pytest.mark.parametrize("axis", PARALLEL_AXES)
def test_a_parallel_axis_above_one_is_refused_by_name(tmp_path, axis):
    args = VisualGenArgs(model="m", parallel_config=ParallelConfig(**{axis: 2}))
    with pytest.raises(NotImplementedError, match=axis):
        DiffusionPipelineConfig.from_pretrained(write_checkpoint(tmp_path), args=args)


def test_the_models_dtype_follows_the_mutable_namespace(tmp_path):
    config = DiffusionPipelineConfig.from_pretrained(
        write_checkpoint(tmp_path)
    ).primary_model_config
    assert config.torch_dtype == torch.bfloat16
    config.pretrained_config.dtype = "float32"
    assert config.torch_dtype == torch.float32
    config.pretrained_config.dtype = "float8_e4m3fn"
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        _ = config.torch_dtype


def test_a_config_made_by_hand_has_the_documented_defaults():
    config = DiffusionModelConfig()
    assert config.pretrained_config is None and config.mapping is None
    assert config.quant_config == QuantConfig() and config.torch_dtype == torch.bfloat16
    assert not config.dynamic_weight_quant and not config.force_dynamic_quantization
    assert not config.skip_create_weights_in_init and not config.quant_config_overridden
    assert config.attention.backend == "AUTO"
    with pytest.raises(NotImplementedError, match="ring_size"):
        DiffusionModelConfig(parallel=ParallelConfig(ring_size=2))


def test_a_module_is_excluded_by_its_own_name_or_by_all_its_names_in_the_checkpoint():
    names = {"ours.fused": ["theirs.a", "theirs.b"], "ours.one": ["theirs.c"]}

    def algo(name, *exclude):
        recipe = QuantConfig(quant_algo="FP8", exclude_modules=list(exclude))
        config = DiffusionModelConfig(quant_config=recipe, checkpoint_names=names.__getitem__)
        return config.get_quant_config(name).quant_algo

    assert algo("ours.one", "ours.one") is algo("ours.one", "*.c") is None
    assert algo("ours.fused", "theirs.a", "theirs.b") is algo("ours.fused", "theirs") is None
    assert algo("ours.fused", "theirs.a") == algo("ours.one", "theirs.a") == "FP8"
    assert algo(None, "*") == "FP8"


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_configuration_that_cannot_be_read_is_a_value_error_with_its_path(tmp_path, content):
    (tmp_path / "transformer").mkdir()
    if content is not None:
        (tmp_path / "transformer" / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json"):
        DiffusionPipelineConfig.from_pretrained(tmp_path)


def test_a_recipe_that_is_refused_is_refused_with_the_checkpoint(tmp_path):
    recipe = STATIC_RECIPE | {"quant_algo": "NVFP4"}
    write_checkpoint(tmp_path, CONFIG | {"quantization_config": recipe})
    with pytest.raises(ValueError, match="NVFP4"):
        DiffusionPipelineConfig.from_pretrained(tmp_path)
