# SPDX-License-Identifier: Apache-2.0
"""The norm ops on a CUDA device against the torch form on that device."""

import pytest
import torch

import tensorrt_llm._torch.custom_ops  # noqa: F401
from tests.support.fp8_modules import assert_bit_equal
from tests.support.qkv_inputs import assert_within_ulps, poisoned, rms_norm

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPS = torch.ops.trtllm
DEVICE = "cuda"
EPS = 1e-6


def normal(*shape, dtype=BF16, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).mul_(2).to(dtype)


def norm_inputs(shape, dtype=BF16):
    return normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1), weight_of(shape, dtype)


def weight_of(shape, dtype):
    return (normal(shape[-1], dtype=FP32, seed=2) * 0.1 + 1).to(dtype)


def scale_of(value=0.0123):
    return torch.tensor(value, device=DEVICE)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((5, 64), BF16),
        ((13, 4096), BF16),
        ((1760, 5120), BF16),
        ((8192, 4096), BF16),
        ((8192, 4096), FP16),
    ],
    ids=str,
)
def test_norms_are_near_the_torch_form_and_the_total_and_the_codes_are_exact(shape, dtype):
    x, residual, weight = norm_inputs(shape, dtype)
    total = residual + x
    # One unit before the product with the weight is up to two after it.
    for factor, bound in ((torch.ones_like(weight), 1), (weight, 2)):
        for _ in range(2):
            poisoned(x)
        normed = OPS.rms_norm(x, factor, EPS)
        assert_within_ulps(normed, rms_norm(x, factor, EPS), bound)
        codes = OPS.rms_norm(x, factor, EPS, scale_of())
        assert_bit_equal(codes, OPS.quantize_e4m3_static(normed, scale_of()))
        normed, found_total = OPS.add_rms_norm(x, residual, factor, EPS)
        assert_bit_equal(found_total, total)
        assert_within_ulps(normed, rms_norm(total, factor, EPS), bound)
        codes, found_total = OPS.add_rms_norm(x, residual, factor, EPS, scale_of())
        assert_bit_equal(found_total, total)
        assert_bit_equal(codes, OPS.quantize_e4m3_static(normed, scale_of()))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_norms_whose_squares_sum_exactly_are_bit_equal_to_the_torch_form(dtype):
    x, residual = (normal(130, 4096, seed=s).clamp(-4, 4).round().to(dtype) for s in (5, 6))
    weight = weight_of(x.shape, dtype)
    assert_bit_equal(OPS.rms_norm(x, weight, EPS), rms_norm(x, weight, EPS))
    normed, total = OPS.add_rms_norm(x, residual, weight, EPS)
    assert_bit_equal(normed, rms_norm(total, weight, EPS))


def test_norms_of_fp32_and_of_mixed_dtypes_are_near_the_torch_form():
    x, residual, weight = norm_inputs((13, 4096), FP32)
    normed, total = OPS.add_rms_norm(x, residual, weight, EPS)
    assert_bit_equal(total, residual + x)
    torch.testing.assert_close(normed, rms_norm(total, weight, EPS), rtol=1e-6, atol=1e-7)
    mixed = OPS.rms_norm(x, weight.bfloat16(), EPS)
    assert_within_ulps(mixed, rms_norm(x, weight.bfloat16(), EPS), 2)


def test_norm_launches_write_every_element_of_several_rows_a_program():
    from tensorrt_llm._torch.custom_ops import norm_kernels

    x, residual, weight = norm_inputs((37, 5120))
    launch = {"block": 8, "num_warps": 4}
    out, total, codes = poisoned(x), poisoned(x), poisoned(x.to(FP8))
    norm_kernels.launch_add_rms_norm(x, residual, weight, out, total, None, EPS, **launch)
    assert_bit_equal(total, residual + x)
    assert_within_ulps(out, rms_norm(total, weight, EPS), 2)
    norm_kernels.launch_rms_norm(total, weight, codes, scale_of(), EPS, **launch)
    assert_bit_equal(codes, OPS.quantize_e4m3_static(out, scale_of()))


def test_strided_and_empty_rows_are_normed_like_their_copies():
    weight = weight_of((80,), BF16)  # a width that needs a mask
    for x in (normal(5, 7, 240)[..., 80:160], normal(80, 5, 7).permute(1, 2, 0)):
        normed, total = OPS.add_rms_norm(x, x, weight, EPS)
        assert normed.is_contiguous() and total.is_contiguous()
        assert_bit_equal(normed, OPS.rms_norm((x + x).contiguous(), weight, EPS))
        assert_within_ulps(normed, rms_norm(x + x, weight, EPS), 2)
    assert OPS.rms_norm(normal(0, 80), weight, EPS, scale_of()).shape == (0, 80)
    assert OPS.add_rms_norm(normal(3, 0), normal(3, 0), weight[:0], EPS)[0].shape == (3, 0)


def test_opcheck_passes():
    x, residual, weight = norm_inputs((2, 3, 64))
    for scale in (None, scale_of()):
        torch.library.opcheck(OPS.rms_norm.default, (x, weight, EPS, scale))
        torch.library.opcheck(OPS.add_rms_norm.default, (x, residual, weight, EPS, scale))


def test_tensors_of_two_devices_are_refused():
    x, residual, weight = norm_inputs((4, 64))
    with pytest.raises(ValueError, match="same device.*residual"):
        OPS.add_rms_norm(x, residual.cpu(), weight, EPS)
