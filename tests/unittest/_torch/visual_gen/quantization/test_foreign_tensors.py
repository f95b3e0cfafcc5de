# SPDX-License-Identifier: Apache-2.0
import pytest

from tensorrt_llm._torch.visual_gen.quantization.foreign_tensors import foreign_scheme


@pytest.mark.parametrize(
    ("key", "scheme"),
    [
        ("pre_quant_scale", "SmoothQuant"),
        ("input_quantizer._pre_quant_scale", "SmoothQuant"),
        ("weight_scale_2", "NVFP4"),
        ("weight_quantizer._double_scale", "NVFP4"),
        ("input_global_scale", "NVFP4"),
        ("weight_scale_inv", "block scales"),
        ("weight_packed", "integer codes"),
        ("weight_zero_point", "zero points"),
        ("k_scale", "KV cache"),
        ("q_bmm_quantizer._amax", "attention"),
        ("softmax_quantizer._amax", "attention"),
        ("output_quantizer._amax", "outputs"),
    ],
)
def test_a_tensor_of_another_scheme_is_known_by_its_last_names(key, scheme):
    assert scheme in foreign_scheme(f"layers.0.self_attn.to_q.{key}")


@pytest.mark.parametrize(
    "key",
    [
        *("weight", "bias", "weight_scale", "input_scale", "weight_quantizer._amax"),
        *("weight_quantizer._scale", "input_quantizer._amax", "extra", "scales_of_something"),
    ],
)
def test_other_names_say_nothing(key):
    assert foreign_scheme(f"layers.0.self_attn.to_q.{key}") is None
