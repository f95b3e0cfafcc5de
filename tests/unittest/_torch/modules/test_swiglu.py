# SPDX-License-Identifier: Apache-2.0
"""The Python faces pass every argument on to the ops."""

import pytest
import torch

from tensorrt_llm._torch.modules.swiglu import swiglu, swiglu_2in
from tests.support.fp8_modules import assert_bit_equal

FP8 = torch.float8_e4m3fn


@pytest.fixture
def gate_up():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(3, 5, 8, generator=generator).mul(2).bfloat16() for _ in range(2))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quant_type": torch.float32},
        {"quant_scale": torch.tensor(0.03), "quant_type": FP8},
        {"swiglu_limit": 0.7},
        {"swiglu_alpha": 1.702},
        {"swiglu_beta": 1.0},
    ],
)
def test_each_option_changes_the_result_as_in_the_op(gate_up, options):
    gate, up = gate_up
    op_names = {"quant_scale": "scale", "quant_type": "dtype"}
    op_options = {op_names.get(name, name): value for name, value in options.items()}
    found = swiglu_2in(gate, up, **options)
    assert_bit_equal(found, torch.ops.trtllm.silu_and_mul_2in(gate, up, **op_options))
    assert_bit_equal(swiglu(torch.cat([gate, up], -1), **options), found)
    if options:
        plain = swiglu_2in(gate, up)
        assert found.dtype != plain.dtype or not torch.equal(found, plain)


def test_positional_order_is_scale_type_limit_alpha_beta(gate_up):
    gate, up = gate_up
    scale = torch.tensor(0.03)
    by_name = swiglu_2in(
        gate,
        up,
        quant_scale=scale,
        quant_type=FP8,
        swiglu_limit=0.7,
        swiglu_alpha=1.702,
        swiglu_beta=1.0,
    )
    assert_bit_equal(swiglu_2in(gate, up, scale, FP8, 0.7, 1.702, 1.0), by_name)
    x = torch.cat([gate, up], -1)
    assert_bit_equal(swiglu(x, scale, FP8, 0.7, 1.702, 1.0), by_name)


def test_half_a_quantisation_is_refused(gate_up):
    for face in (lambda *a: swiglu_2in(*gate_up, *a), lambda *a: swiglu(gate_up[0], *a)):
        with pytest.raises(ValueError, match="quant_type is required"):
            face(torch.tensor(1.0))
        with pytest.raises(ValueError, match="quant_scale is required"):
            face(None, FP8)
