# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest

from tensorrt_llm.quantization import QuantAlgo, QuantMode


def test_fp8_alone_is_fp8_qdq():
    assert QuantMode.from_quant_algo(QuantAlgo.FP8).has_fp8_qdq()
    others = [algo for algo in QuantAlgo if algo is not QuantAlgo.FP8]
    assert not any(QuantMode.from_quant_algo(algo).has_fp8_qdq() for algo in others)


def test_every_algorithm_quantises_and_none_does_not():
    assert all(QuantMode.from_quant_algo(algo).has_any_quant() for algo in QuantAlgo)
    assert not QuantMode.from_quant_algo(None).has_any_quant()


@pytest.mark.parametrize(
    "module",
    [
        "tensorrt_llm.quantization",
        "tensorrt_llm.models.modeling_utils",
        "tensorrt_llm.mapping",
        "tensorrt_llm._torch.model_config",
        "tensorrt_llm._torch.visual_gen.config_fields",
        "tensorrt_llm._torch.visual_gen.quantization.caller_recipe",
        "tensorrt_llm._torch.visual_gen.quantization.recipe",
    ],
)
def test_configuration_imports_without_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
