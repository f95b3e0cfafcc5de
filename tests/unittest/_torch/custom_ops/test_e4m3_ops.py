# SPDX-License-Identifier: Apache-2.0
"""Quantise, dequantise and the FP8 product on the CPU, and what the package's import needs."""

import subprocess
import sys

import pytest
import torch

import tensorrt_llm._torch.custom_ops  # noqa: F401
from tests.support.fp8_modules import assert_bit_equal, bits, quantize

FP8 = torch.float8_e4m3fn
OPS = torch.ops.trtllm
WIDE = [torch.bfloat16, torch.float16, torch.float32]
# opcheck's schema test compares inputs with allclose, which FP8 lacks; mutation is tested beside
# it.
FP8_INPUT_CHECKS = (
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
ONE = torch.tensor(1.0)
CALIBRATED = 2.15625 / 448


def normal(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def every_bf16():
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def every_code():
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8)


@pytest.mark.parametrize("scale", [1.0, 0.0371, CALIBRATED, 2.0**-20, 448.0 / 3.0])
def test_static_codes_are_those_of_an_fp32_division_for_every_bf16_value(scale):
    x, scale = every_bf16(), torch.tensor(scale)
    number = ~x.isnan()
    codes = bits(OPS.quantize_e4m3_static(x, scale))
    assert torch.equal(codes[number], bits(quantize(x, scale))[number])
    assert set(codes[~number].tolist()) == {0x7F}
    assert codes[x == float("inf")] == 0x7E and codes[x == -float("inf")] == 0xFE


def test_static_division_is_neither_a_reciprocal_nor_a_16_bit_one():
    # Scales that calibration makes (amax / 448, amax a BF16 number) tell the formulas apart: about
    # one in five has BF16 inputs on a rounding boundary. Random scales almost never do.
    x, scale = every_bf16().float(), torch.tensor(CALIBRATED)
    codes = bits(OPS.quantize_e4m3_static(every_bf16(), scale))
    number = ~x.isnan()
    for other in (x * (1 / scale), (x.bfloat16() / scale.bfloat16()).float()):
        different = bits(other.clamp(-448, 448).to(FP8)) != codes
        assert different[number].any()


@pytest.mark.parametrize("dtype", WIDE)
def test_dynamic_scale_is_amax_over_448(dtype):
    x = normal(7, 33, dtype=dtype)
    codes, scale = OPS.quantize_e4m3_dynamic(x)
    assert_bit_equal(scale, x.abs().amax().float() / 448)
    assert_bit_equal(codes, quantize(x, scale))
    assert bits(codes).bitwise_and(0x7F).max() == 0x7E


@pytest.mark.parametrize("x", [torch.zeros(3, 4), torch.empty(0, 4), torch.full((2,), 1e-45)])
def test_dynamic_scale_is_one_where_amax_over_448_is_zero(x):
    codes, scale = OPS.quantize_e4m3_dynamic(x)
    assert_bit_equal(scale, ONE)
    assert codes.shape == x.shape and not bits(codes).any()


def test_dynamic_nan_reaches_scale_and_codes():
    x = normal(3, 4)
    x[1, 2] = float("nan")
    codes, scale = OPS.quantize_e4m3_dynamic(x)
    assert scale.isnan() and set(bits(codes).flatten().tolist()) == {0x7F}


def test_strided_input_quantises_to_a_contiguous_result():
    x = normal(6, 5, 8).transpose(0, 2)[:, ::2]
    codes = OPS.quantize_e4m3_static(x, ONE)
    assert codes.is_contiguous() and codes.shape == x.shape
    assert_bit_equal(codes, quantize(x, ONE))
    dynamic, scale = OPS.quantize_e4m3_dynamic(x)
    assert dynamic.is_contiguous()
    assert_bit_equal(dynamic, quantize(x, scale))


@pytest.mark.parametrize("dtype", WIDE)
def test_dequantised_weight_is_one_rounded_product_with_the_rounded_scale(dtype):
    scale = torch.tensor(1 / 3)  # whose rounding to 16 bits changes products
    found = OPS.dequantize_e4m3(every_code().view(16, 16), scale, dtype)
    expected = (every_code().double() * scale.to(dtype).double()).to(dtype).view(16, 16)
    number = ~expected.isnan()
    assert found.dtype == dtype and found.shape == (16, 16)
    assert torch.equal(bits(found)[number], bits(expected)[number])
    assert found.isnan().sum() == 2


def test_dequantised_strided_weight_is_contiguous():
    weight = every_code().view(16, 16).t()
    found = OPS.dequantize_e4m3(weight, ONE, torch.float32)
    assert found.is_contiguous() and found[1, 0] == weight.float()[1, 0]


@pytest.mark.parametrize("out_dtype", WIDE)
def test_scaled_mm_is_the_scaled_product_rounded_once(out_dtype):
    x, weight = quantize(normal(5, 48), ONE), quantize(normal(32, 48, seed=1), ONE)
    scales = torch.tensor(0.0371), torch.tensor(0.0029)
    found = OPS.scaled_mm_e4m3(x, weight, *scales, out_dtype)
    exact = x.double() @ weight.double().t() * (scales[0].double() * scales[1].double())
    assert found.dtype == out_dtype and found.shape == (5, 32)
    bound = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}[out_dtype]
    assert (found.double() - exact).norm() / exact.norm() < bound


def test_scaled_mm_takes_no_rows_and_any_row_count():
    weight = quantize(normal(16, 32), ONE)
    for rows in (0, 1, 3):
        x = quantize(normal(rows, 32), ONE)
        assert OPS.scaled_mm_e4m3(x, weight, ONE, ONE, torch.bfloat16).shape == (rows, 16)


def test_operands_are_not_changed():
    x, scale = normal(4, 16), torch.tensor(0.02)
    codes, weight = quantize(x, scale), quantize(normal(16, 16), scale)
    tensors = (x, codes, weight, scale)
    before = [bits(t).clone() for t in tensors]
    OPS.quantize_e4m3_static(x, scale)
    OPS.quantize_e4m3_dynamic(x)
    OPS.dequantize_e4m3(weight, scale, torch.bfloat16)
    OPS.scaled_mm_e4m3(codes, weight, scale, scale, torch.bfloat16)
    assert all(torch.equal(bits(t), b) for t, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OPS.quantize_e4m3_static(normal(2, 3).double(), ONE), "float64"),
        (lambda: OPS.quantize_e4m3_static(quantize(normal(2, 3), ONE), ONE), "float8_e4m3fn"),
        (lambda: OPS.quantize_e4m3_static(normal(2, 3), torch.ones(1)), r"0-d.*\(1,\)"),
        (lambda: OPS.quantize_e4m3_static(normal(2, 3), ONE.bfloat16()), "bfloat16"),
        (lambda: OPS.quantize_e4m3_static(normal(2, 3), ONE.to("meta")), "same device"),
        (lambda: OPS.quantize_e4m3_dynamic(normal(2, 3).double()), "float64"),
        (lambda: OPS.dequantize_e4m3(normal(2, 3), ONE, torch.bfloat16), "weight.*bfloat16"),
        (lambda: OPS.dequantize_e4m3(every_code(), ONE, torch.float64), "float64"),
        (lambda: OPS.dequantize_e4m3(every_code(), torch.ones(2), torch.float16), "0-d"),
    ],
)
def test_operands_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_scaled_mm_refuses_operands_that_do_not_multiply():
    x, weight = quantize(normal(4, 16), ONE), quantize(normal(8, 16), ONE)
    bf16 = torch.bfloat16
    for args, message in [
        ((normal(4, 16), weight, ONE, ONE, bf16), "x.*bfloat16"),
        ((x, normal(8, 16), ONE, ONE, bf16), "weight.*bfloat16"),
        ((x, weight[:, :8].contiguous(), ONE, ONE, bf16), "do not multiply"),
        ((x.view(2, 2, 16), weight, ONE, ONE, bf16), "do not multiply"),
        ((x, quantize(normal(16, 8), ONE).t(), ONE, ONE, bf16), r"contiguous.*weight"),
        ((x, weight, torch.ones(1), ONE, bf16), "input_scale"),
        ((x, weight, ONE, torch.ones(8), bf16), "weight_scale"),
        ((x, weight, ONE, ONE, FP8), "out_dtype.*float8_e4m3fn"),
    ]:
        with pytest.raises(ValueError, match=message):
            OPS.scaled_mm_e4m3(*args)


@pytest.mark.parametrize("shape", [(4, 16), (2, 3, 16)])
def test_opcheck_passes(shape):
    x, scale = normal(*shape), torch.tensor(0.02)
    codes = quantize(x, scale)
    torch.library.opcheck(OPS.quantize_e4m3_static.default, (x, scale))
    torch.library.opcheck(OPS.quantize_e4m3_static.default, (x.transpose(0, -1), scale))
    torch.library.opcheck(OPS.quantize_e4m3_dynamic.default, (x,))
    torch.library.opcheck(
        OPS.dequantize_e4m3.default, (codes, scale, torch.bfloat16), test_utils=FP8_INPUT_CHECKS
    )
    rows, weight = codes.view(-1, 16), quantize(normal(32, 16), scale)
    torch.library.opcheck(
        OPS.scaled_mm_e4m3.default,
        (rows, weight, scale, scale, torch.bfloat16),
        test_utils=FP8_INPUT_CHECKS,
    )


def test_compiled_fullgraph_equals_eager_bit_for_bit():
    def forward(x, weight, scale):
        codes = OPS.quantize_e4m3_static(x, scale)
        dynamic, dynamic_scale = OPS.quantize_e4m3_dynamic(x)
        return (
            OPS.scaled_mm_e4m3(codes, weight, scale, scale, torch.bfloat16),
            OPS.scaled_mm_e4m3(dynamic, weight, dynamic_scale, scale, torch.bfloat16),
            OPS.dequantize_e4m3(weight, scale, torch.bfloat16),
        )

    scale = torch.tensor(0.02)
    args = normal(4, 16), quantize(normal(32, 16), scale), scale
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(*args), forward(*args), strict=True):
        assert_bit_equal(found, expected)


def test_import_and_cpu_ops_work_without_triton_and_the_cuda_path_names_it():
    program = """
import sys
sys.modules["triton"] = None
import torch
from tensorrt_llm._torch.custom_ops import torch_custom_ops
from tensorrt_llm._torch.modules.swiglu import swiglu
swiglu(torch.ones(2, 4))
try:
    torch_custom_ops._kernels()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Triton did not import" in done.stdout and "Remedy" in done.stdout
