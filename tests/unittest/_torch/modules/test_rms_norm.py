# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from tensorrt_llm._torch.modules.rms_norm import RMSNorm


def random_norm(size, eps, dtype):
    norm = RMSNorm(size, eps, dtype)
    norm.weight.copy_(torch.rand(size) + 0.5)
    return norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 4, 16)])
def test_bit_equal_to_the_rms_norm_of_diffusers(dtype, shape):
    from diffusers.models.normalization import RMSNorm as Reference

    torch.manual_seed(0)
    norm = random_norm(shape[-1], 1e-6, dtype)
    reference = Reference(shape[-1], 1e-6)
    reference.weight = norm.weight
    x = (torch.randn(shape) * 3).to(dtype)
    result, expected = norm(x), reference(x)
    assert result.dtype == expected.dtype == dtype
    assert torch.equal(result, expected)


def test_the_result_is_rounded_before_the_weight_is_applied():
    torch.manual_seed(1)
    norm = random_norm(64, 1e-6, torch.bfloat16)
    x = torch.randn(32, 64).bfloat16()
    exact = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    late = (exact * norm.weight.float()).bfloat16()
    assert torch.equal(norm(x), exact.bfloat16() * norm.weight)
    assert not torch.equal(norm(x), late)


def test_eps_bounds_a_vanishing_input():
    norm = random_norm(8, 1e-2, torch.float32)
    x = torch.full((1, 8), 1e-3)
    expected = norm.weight * 1e-3 / (1e-6 + 1e-2) ** 0.5
    torch.testing.assert_close(norm(x)[0], expected)


def test_the_weight_is_frozen_and_goes_where_it_is_told():
    norm = RMSNorm(8, 1e-6, dtype=torch.bfloat16, device="meta")
    assert norm.weight.is_meta and norm.weight.dtype == torch.bfloat16
    assert not norm.weight.requires_grad
