# SPDX-License-Identifier: Apache-2.0
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
