# SPDX-License-Identifier: Apache-2.0
import pytest

from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm.models.modeling_utils import QuantConfig


def test_an_excluded_name_has_no_recipe_and_others_have_the_models():
    recipe = QuantConfig(quant_algo="FP8", exclude_modules=["proj_in"])
    config = ModelConfig(quant_config=recipe)
    assert config.get_quant_config() == config.get_quant_config("layers.0.mlp") == recipe
    assert config.get_quant_config("proj_in") == QuantConfig()


def test_force_dynamic_quantization_can_be_set_later():
    config = ModelConfig()
    assert config.force_dynamic_quantization is False
    config.force_dynamic_quantization = True
    assert config.force_dynamic_quantization is True


def test_two_configs_share_no_recipe_object():
    first, second = ModelConfig(), ModelConfig()
    first.quant_config.quant_algo = "FP8"
    assert second.quant_config == QuantConfig()


def fused(*exclude):
    recipe = QuantConfig(quant_algo="FP8", exclude_modules=list(exclude))
    config = ModelConfig(quant_config=recipe)
    return config.get_fused_quant_config("a.b.qkv_proj", ("to_q", "to_k", "to_v")).quant_algo


def test_a_fused_module_is_excluded_by_its_own_name_or_by_all_of_its_parts():
    assert fused() == fused("a.b.to_out", "a.c.to_q") == "FP8"
    assert fused("a.b.qkv_proj") is fused("a.b.to_?") is fused("a.b") is None
    assert fused("a.b.to_q", "a.b.to_k", "a.b.to_v") is None


def test_a_fused_module_with_some_parts_excluded_is_refused_with_all_parts():
    with pytest.raises(ValueError, match="parts of different precision") as caught:
        fused("a.b.to_k")
    message = str(caught.value)
    assert "a.b.qkv_proj" in message
    assert "to_q: FP8, to_k: excluded, to_v: FP8" in message
