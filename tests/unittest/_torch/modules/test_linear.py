# SPDX-License-Identifier: Apache-2.0
"""What a Linear computes, against formulas that are written out here once more."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tensorrt_llm._torch.modules.linear import (
    FP8QDQLinearMethod,
    Linear,
    UnquantizedLinearMethod,
    W8A16FP8LinearMethod,
)
from tensorrt_llm.models.modeling_utils import QuantConfig

FP8 = torch.float8_e4m3fn
STATIC = QuantConfig(quant_algo="FP8")

# device, in_features, out_features, rows, tolerance of W8A8 (relative L2): on CUDA the sizes of
# Cosmos3-Nano with an odd number of rows, and the bounds that fast accumulation holds there.
CASES = [
    ("cpu", 64, 48, 5, 1e-3),
    ("cpu", 100, 36, 1, 1e-3),
    pytest.param("cuda", 4096, 4096, 257, 3e-3, marks=pytest.mark.gpu),
    pytest.param("cuda", 4096, 1024, 1, 3e-3, marks=pytest.mark.gpu),
    pytest.param("cuda", 4096, 12288, 1761, 3e-3, marks=pytest.mark.gpu),
    pytest.param("cuda", 12288, 4096, 257, 5e-3, marks=pytest.mark.gpu),
]


def quantize(x, scale):
    """The static quantisation of the specification: an FP32 division, clamped, to nearest even."""
    return (x.float() / scale).clamp(-448, 448).to(FP8)


def w8a8(x, weight, weight_scale, input_scale, dtype):
    """Exact products of the codes (FP64 on CUDA, FP32 on CPU), scaled, rounded once."""
    wide = torch.float64 if x.is_cuda else torch.float32
    product = F.linear(quantize(x, input_scale).to(wide), weight.to(wide))
    return (product * (input_scale * weight_scale)).to(dtype)


def bits(x):
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def relative_error(result, expected):
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def fp8_linear(
    in_features, out_features, device="cpu", dtype=torch.bfloat16, bias=False, **options
):
    torch.manual_seed(0)
    with torch.device(device):
        linear = Linear(in_features, out_features, bias, dtype, quant_config=STATIC, **options)
    weight = torch.randn(out_features, in_features) * 0.02
    weight_scale = weight.abs().amax() / 448
    tensors = {
        "weight": quantize(weight, weight_scale),
        "weight_scale": weight_scale,
        "input_scale": torch.tensor(4.0 / 448),
    }
    if bias:
        tensors["bias"] = torch.randn(out_features).to(dtype)
    linear.load_weights([tensors])
    return linear


class SeenByGemm(TorchDispatchMode):
    """Records the activation codes and scales that reach the FP8 product, CPU or CUDA."""

    def __init__(self):
        super().__init__()
        self.codes, self.scales = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "scaled_mm" in str(func):
            self.codes.append(args[0])
            self.scales.append(args[2] if len(args) > 2 else kwargs["scale_a"])
        return func(*args, **kwargs)


@pytest.mark.parametrize(("device", "in_features", "out_features", "rows", "tolerance"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_w8a8_is_the_scaled_product_of_exact_codes(
    device, in_features, out_features, rows, tolerance, dtype
):
    linear = fp8_linear(in_features, out_features, device, dtype)
    x = torch.randn(rows, in_features, device=device).to(dtype)
    x[0, :3] = torch.tensor([100.0, -100.0, 4.0])  # beyond the calibrated range: saturates
    with SeenByGemm() as seen:
        result = linear(x)
    expected = w8a8(x, linear.weight, linear.weight_scale, linear.input_scale, dtype)
    assert result.dtype == dtype and result.shape == (rows, out_features)
    (codes,) = seen.codes
    assert same_bits(codes, quantize(x, linear.input_scale))
    error = relative_error(result, expected)
    assert error <= tolerance, (device, in_features, out_features, rows, error)
    # The tolerance tells the modes apart: 16-bit activations give something else.
    weight = linear.weight.to(dtype) * linear.weight_scale.to(dtype)
    assert relative_error(F.linear(x, weight), expected) > 2 * tolerance


@pytest.mark.parametrize(("device", "in_features", "out_features", "rows", "tolerance"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_w8a16_is_bit_equal_to_f_linear_with_dequantised_weights(
    device, in_features, out_features, rows, tolerance, dtype, bias
):
    linear = fp8_linear(in_features, out_features, device, dtype, bias=bias)
    linear.quant_method = W8A16FP8LinearMethod()
    x = torch.randn(rows, in_features, device=device).to(dtype)
    weight = linear.weight.to(dtype) * linear.weight_scale.to(dtype)
    assert same_bits(linear(x), F.linear(x, weight, linear.bias))


def test_w8a16_rounds_the_scale_before_the_product():
    linear = fp8_linear(64, 48)
    linear.quant_method = W8A16FP8LinearMethod()
    linear.weight_scale.fill_(1.0038)  # nearly half way between two BF16 values
    x = torch.eye(64).bfloat16()
    late = (linear.weight.float() * linear.weight_scale).bfloat16()
    assert not same_bits(linear(x), F.linear(x, late))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_bias_is_added_after_the_product_was_rounded(device):
    linear = fp8_linear(64, 48, device, bias=True)
    x = torch.randn(5, 64, device=device).bfloat16()
    bias, linear.bias = linear.bias, None
    without = linear(x)
    linear.bias = bias
    assert same_bits(linear(x), without + bias)


@pytest.mark.parametrize("in_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_output_has_the_modules_dtype_whatever_the_input(in_dtype, out_dtype):
    linear = fp8_linear(64, 48, dtype=out_dtype)
    x = torch.randn(5, 64).to(in_dtype)
    expected = w8a8(x, linear.weight, linear.weight_scale, linear.input_scale, out_dtype)
    assert linear(x).dtype == out_dtype
    assert relative_error(linear(x), expected) <= 1e-3


def test_an_fp8_input_passes_straight_through():
    linear = fp8_linear(64, 48)
    x = torch.randn(5, 64).bfloat16()
    codes = quantize(x, linear.input_scale)
    with SeenByGemm() as seen:
        result = linear(codes)
    assert seen.codes[0].data_ptr() == codes.data_ptr()
    assert same_bits(result, linear(x))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["static", "dynamic", "w8a16", "bf16"])
def test_any_rank_and_strided_inputs_equal_their_rows(device, kind):
    if kind == "bf16":
        with torch.device(device):
            linear = Linear(64, 48, False, torch.bfloat16)
        linear.weight.copy_(torch.randn(48, 64))
    else:
        linear = fp8_linear(64, 48, device, force_dynamic_quantization=kind == "dynamic")
    if kind == "w8a16":
        linear.quant_method = W8A16FP8LinearMethod()
    x = torch.randn(6, 64, device=device).bfloat16()
    rows = linear(x)
    strided = torch.empty(64, 6, dtype=x.dtype, device=device).t().copy_(x)
    assert not strided.is_contiguous()
    assert same_bits(linear(strided), rows)
    assert same_bits(linear(x.view(2, 3, 64)), rows.view(2, 3, 48))
    assert same_bits(linear(strided.t().view(64, 2, 3).permute(1, 2, 0)), rows.view(2, 3, 48))
    if kind == "static":
        assert same_bits(linear(quantize(strided, linear.input_scale)), rows)
        assert same_bits(linear(x[0]), rows[0])


def test_a_wrong_feature_count_is_an_error_and_no_reshape():
    linear = fp8_linear(64, 48)
    with pytest.raises(ValueError, match=r"\(2, 128\)"):
        linear(torch.randn(2, 128).bfloat16())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_dynamic_recipe_takes_the_scale_of_each_input(device):
    linear = fp8_linear(64, 48, device, force_dynamic_quantization=True)
    assert linear.input_scale is None and linear.inv_input_scale is None
    for factor in (1.0, 100.0):
        x = torch.randn(5, 64, device=device).bfloat16() * factor
        with SeenByGemm() as seen:
            result = linear(x)
        scale = (x.float().abs().amax().cpu() / 448).to(device)  # CUDA has no exact one by a number
        assert same_bits(seen.scales[0], scale)
        assert same_bits(seen.codes[0], quantize(x, scale))
        expected = w8a8(x, linear.weight, linear.weight_scale, scale, torch.bfloat16)
        assert relative_error(result, expected) <= 3e-3


def test_a_dynamic_recipe_refuses_an_fp8_input_that_has_no_scale():
    linear = fp8_linear(64, 48, force_dynamic_quantization=True)
    with pytest.raises(ValueError, match="without a scale"):
        linear(torch.zeros(5, 64).to(FP8))


@pytest.mark.parametrize("dtype", [FP8, torch.float32])
def test_a_16_bit_step_refuses_other_activations(dtype):
    linear = fp8_linear(64, 48)
    linear.quant_method = W8A16FP8LinearMethod()
    with pytest.raises(RuntimeError, match="16-bit activation.*found " + str(dtype)):
        linear(torch.zeros(5, 64).to(dtype))


def test_w8a16_refuses_weights_that_are_not_fp8():
    linear = Linear(64, 48, False, torch.bfloat16)
    linear.quant_method = W8A16FP8LinearMethod()
    with pytest.raises(RuntimeError, match="float8_e4m3fn weights.*found torch.bfloat16"):
        linear(torch.zeros(5, 64).bfloat16())


@pytest.mark.parametrize("bias", [False, True])
def test_high_precision_is_f_linear(bias):
    linear = Linear(64, 48, bias, torch.bfloat16)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(5, 64).bfloat16()
    assert same_bits(linear(x), F.linear(x, linear.weight, linear.bias))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", [FP8QDQLinearMethod, W8A16FP8LinearMethod])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_fullgraph_equals_eager_bit_for_bit(device, method, dynamic):
    linear = fp8_linear(64, 48, device, bias=True, force_dynamic_quantization=dynamic)
    linear.quant_method = method()
    x = torch.randn(5, 64, device=device).bfloat16()
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(linear, fullgraph=True, backend=backend)
    assert same_bits(compiled(x), linear(x))


def test_the_recipe_and_the_bound_method_answer_for_themselves():
    linear = fp8_linear(64, 48)
    native = linear.quant_method
    assert isinstance(native, FP8QDQLinearMethod)
    assert linear.has_fp8_qdq and not linear.requires_unquantized_activation
    linear.quant_method = W8A16FP8LinearMethod()
    assert linear.has_fp8_qdq and linear.requires_unquantized_activation
    linear.create_weights()  # idempotent: neither the parameters nor the binding change
    assert isinstance(linear.quant_method, W8A16FP8LinearMethod)
    plain = Linear(64, 48)
    assert isinstance(plain.quant_method, UnquantizedLinearMethod)
    assert not plain.has_fp8_qdq and plain.requires_unquantized_activation


def test_inv_input_scale_follows_input_scale():
    linear = fp8_linear(64, 48)
    linear.input_scale.fill_(0.25)
    assert same_bits(linear.inv_input_scale, torch.tensor(4.0))
    assert "inv_input_scale" not in dict(linear.named_parameters())
