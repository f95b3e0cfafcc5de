# SPDX-License-Identifier: Apache-2.0
import pytest

from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization import QuantAlgo

IGNORE = ["proj_in", "time_embedder*", "lm_head", "model.visual*", "layers.1.mlp", "*_proj_out"]


def test_a_recipe_is_read_from_its_name_and_compares_by_value():
    config = QuantConfig(quant_algo="FP8", exclude_modules=["lm_head"])
    assert config.quant_algo is QuantAlgo.FP8
    assert config == QuantConfig(quant_algo=QuantAlgo.FP8, exclude_modules=["lm_head"])
    assert config != QuantConfig(quant_algo="FP8")
    assert config.quant_mode.has_fp8_qdq() and not QuantConfig().quant_mode.has_fp8_qdq()


def test_an_unknown_algorithm_is_refused_by_name():
    with pytest.raises(ValueError, match="NVFP4"):
        QuantConfig(quant_algo="NVFP4")


def test_unknown_fields_are_refused():
    with pytest.raises(ValueError, match="group_size"):
        QuantConfig(quant_algo="FP8", group_size=128)


@pytest.mark.parametrize(
    "name",
    [
        "proj_in",
        "model.proj_in",
        "time_embedder.linear_1",  # the pattern reaches it over the dot, and over its parent
        "visual.blocks.0.attn",
        "layers.1.mlp.gate_proj",
        "audio_proj_out",
    ],
)
def test_a_pattern_covers_the_module_and_what_is_inside_it(name):
    assert QuantConfig(exclude_modules=IGNORE).is_module_excluded_from_quantization(name)


@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.to_q", "layers.11.mlp.up_proj", "gen.proj_in", "lm_head2", ""]
)
def test_other_modules_stay_quantised(name):
    assert not QuantConfig(exclude_modules=IGNORE).is_module_excluded_from_quantization(name)


def test_without_patterns_nothing_is_excluded():
    assert not QuantConfig(quant_algo="FP8").is_module_excluded_from_quantization("proj_in")
