# SPDX-License-Identifier: Apache-2.0
"""The SwiGLU ops on the CPU: values, rejections, the custom-op contract, the launch table."""

import pytest
import torch
import torch.nn.functional as F

import tensorrt_llm._torch.custom_ops  # noqa: F401
from tensorrt_llm._torch.custom_ops.torch_custom_ops import (
    _SILU_AND_MUL_2IN_LAUNCH_PARAMS,
    _silu_and_mul_2in_launch_params,
)
from tests.support.fp8_modules import assert_bit_equal, bits, quantize

FP8 = torch.float8_e4m3fn
OPS = torch.ops.trtllm
WIDE = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(5,), (8, 4), (13, 257), (2, 3, 70)]
OPTIONS = [(None, None, None), (0.8, None, None), (None, 1.702, 1.0), (0.8, 1.702, 1.0)]


def gate_up(shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).mul(3).to(dtype) for _ in range(2))


def reference(gate, up, limit, alpha, beta):
    """The formula of interfaces.md in FP64."""
    gate, up = gate.double(), up.double()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    alpha, beta = 1.0 if alpha is None else alpha, 0.0 if beta is None else beta
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_forms_give_the_same_bits_and_the_formula(shape, dtype, options):
    gate, up = gate_up(shape, dtype)
    x = torch.cat([gate, up], dim=-1)
    scale = torch.tensor(0.0123)
    for out in (None, *WIDE, FP8):
        out_scale = scale if out == FP8 else None
        two = OPS.silu_and_mul_2in(gate, up, out_scale, out, *options)
        assert_bit_equal(OPS.silu_and_mul(x, out_scale, out, *options), two)
        assert two.dtype == (dtype if out is None else out) and two.shape == gate.shape
    expected = reference(gate, up, *options)
    found = OPS.silu_and_mul_2in(gate, up, None, torch.float32, *options)
    assert (found.double() - expected).norm() / expected.norm() < 5e-7


def test_wide_output_is_the_fp32_value_rounded_once():
    gate, up = gate_up((13, 257))
    value = OPS.silu_and_mul_2in(gate, up, None, torch.float32)
    for dtype in WIDE:
        assert_bit_equal(OPS.silu_and_mul_2in(gate, up, None, dtype), value.to(dtype))


def test_fp8_output_is_the_static_quantisation_of_the_fp32_value():
    gate, up = gate_up((13, 257))
    scale = torch.tensor(0.0123)  # saturates at both ends
    value = OPS.silu_and_mul_2in(gate, up, None, torch.float32, 9.0, 1.1, 0.2)
    found = OPS.silu_and_mul_2in(gate, up, scale, FP8, 9.0, 1.1, 0.2)
    assert_bit_equal(found, quantize(value, scale))
    assert set(bits(found).unique().tolist()) >= {0x7E, 0xFE}


def test_alpha_one_and_beta_zero_are_bit_identical_to_none():
    gate, up = gate_up((13, 257))
    for out, scale in ((None, None), (FP8, torch.tensor(0.1))):
        plain = OPS.silu_and_mul_2in(gate, up, scale, out)
        assert_bit_equal(OPS.silu_and_mul_2in(gate, up, scale, out, None, 1.0, 0.0), plain)


@pytest.mark.parametrize("options", [(None,), (7.0,)])
def test_nan_and_outliers_reach_the_output(options):
    nan, inf = float("nan"), float("inf")
    gate = torch.tensor([nan, 1.0, 3.0, 1e30, 1e30, inf, -inf, -200.0])
    up = torch.tensor([1.0, nan, nan, 1e5, -1e5, 1.0, 1.0, 1.0])
    value = OPS.silu_and_mul_2in(gate, up, None, None, *options)
    assert value.isnan().tolist() == [True] * 3 + [False] * 3 + [True, False]
    codes = bits(OPS.silu_and_mul_2in(gate, up, torch.tensor(0.01), FP8, *options)).tolist()
    assert codes == [0x7F, 0x7F, 0x7F, 0x7E, 0xFE, 0x7E, 0x7F, 0x80]


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (2, 0, 6)])
def test_empty_tensors_give_empty_results(shape):
    gate, up = gate_up(shape)
    scale = torch.tensor(1.0)
    assert OPS.silu_and_mul_2in(gate, up, scale, FP8).shape == shape
    assert OPS.silu_and_mul(torch.cat([gate, up], -1), scale, FP8).shape == shape


def test_inputs_are_not_changed_and_results_are_new():
    gate, up = gate_up((4, 6), torch.float32)
    x, kept = torch.cat([gate, up], -1), (gate.clone(), up.clone())
    for result in (OPS.silu_and_mul_2in(gate, up, None, None, 0.5), OPS.silu_and_mul(x)):
        assert result.data_ptr() not in (gate.data_ptr(), up.data_ptr(), x.data_ptr())
        assert result.is_contiguous()
    assert torch.equal(gate, kept[0]) and torch.equal(up, kept[1])


def call_both(gate, up, *options):
    """Each refusal is shown for both ops."""
    return (
        lambda: OPS.silu_and_mul_2in(gate, up, *options),
        lambda: OPS.silu_and_mul(torch.cat([gate, up], -1), *options),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((torch.tensor(1.0),), "quant_type is required"),
        ((None, FP8), "quant_scale is required"),
        ((torch.tensor(1.0), torch.bfloat16), "Only FP8 output takes a quant_scale"),
        ((torch.tensor(1.0), torch.float8_e5m2), "float8_e5m2"),
        ((None, torch.int8), "torch.int8"),
        ((torch.ones(1), FP8), r"0-d torch.float32.*\(1,\)"),
        ((torch.tensor(1.0, dtype=torch.float64), FP8), "float64"),
        ((torch.empty((), device="meta"), FP8), "same device"),
        ((None, None, -1.0), "swiglu_limit"),
        ((None, None, float("nan")), "swiglu_limit"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    for call in call_both(*gate_up((4, 6)), *options):
        with pytest.raises(ValueError, match=message):
            call()


def test_input_dtypes_other_than_the_three_are_refused_by_name():
    gate, up = (t.double() for t in gate_up((4, 6)))
    for call in call_both(gate, up):
        with pytest.raises(ValueError, match="float64"):
            call()


def test_tensors_that_differ_are_refused_by_what_differs():
    gate, up = gate_up((4, 6))
    strided = gate_up((4, 12))[0][:, ::2]
    for args, message in [
        ((gate, up[:3]), "same shape"),
        ((gate, up.view(6, 4)), "same shape"),
        ((gate, up.half()), "same dtype"),
        ((gate, up.to("meta")), "same device"),
        ((strided, up), r"contiguous.*gate"),
        ((gate, strided), r"contiguous.*up"),
    ]:
        with pytest.raises(ValueError, match=message):
            OPS.silu_and_mul_2in(*args)


def test_fused_input_must_be_contiguous_with_an_even_last_dimension():
    for x, message in [
        (torch.ones(4, 5), r"2I"),
        (torch.ones(()), r"2I"),
        (torch.ones(6, 4).t(), "contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            OPS.silu_and_mul(x)


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6)])
@pytest.mark.parametrize(
    "options",
    [(), (torch.tensor(0.05), FP8), (None, torch.float16, 0.9, 1.702, 1.0)],
    ids=["plain", "fp8", "all"],
)
def test_opcheck_passes(shape, options):
    gate, up = gate_up(shape)
    torch.library.opcheck(OPS.silu_and_mul_2in.default, (gate, up, *options))
    torch.library.opcheck(OPS.silu_and_mul.default, (torch.cat([gate, up], -1), *options))


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_opcheck_passes_for_inputs_that_require_grad():
    gate, up = (t.requires_grad_() for t in gate_up((4, 6)))
    torch.library.opcheck(OPS.silu_and_mul_2in.default, (gate, up))


def test_compiled_fullgraph_equals_eager_bit_for_bit():
    def forward(x, scale):
        gate, up = (part.contiguous() for part in x.chunk(2, -1))
        return (
            OPS.silu_and_mul(x, scale, FP8),
            OPS.silu_and_mul_2in(gate, up, scale, FP8, 0.9, 1.702, 1.0),
            OPS.silu_and_mul_2in(gate, up),
        )

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=True)
    scale = torch.tensor(0.05)
    for rows in (3, 8):
        x = torch.cat(gate_up((rows, 10)), -1)
        for found, expected in zip(compiled(x, scale), forward(x, scale), strict=True):
            assert_bit_equal(found, expected)


def test_default_output_agrees_with_torch_silu():
    gate, up = gate_up((13, 257), torch.float32)
    torch.testing.assert_close(OPS.silu_and_mul_2in(gate, up), F.silu(gate) * up)


def test_launch_table_has_the_documented_rows():
    assert {90, 100, 103} <= set(_SILU_AND_MUL_2IN_LAUNCH_PARAMS)
    assert all(type(sm) is int for sm in _SILU_AND_MUL_2IN_LAUNCH_PARAMS)
    assert _SILU_AND_MUL_2IN_LAUNCH_PARAMS[103] == _SILU_AND_MUL_2IN_LAUNCH_PARAMS[100]


@pytest.mark.parametrize("sm_version", [80, 89, 90, 100, 103, 120, 999])
@pytest.mark.parametrize("dtype", [*WIDE, FP8])
def test_every_launch_is_a_power_of_two_divisible_by_its_threads(sm_version, dtype):
    block, num_warps = _silu_and_mul_2in_launch_params(sm_version, dtype)
    assert block & (block - 1) == 0 and num_warps & (num_warps - 1) == 0
    assert block % (32 * num_warps) == 0
