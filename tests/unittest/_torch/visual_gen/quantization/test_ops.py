# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from tensorrt_llm._torch.visual_gen.quantization.ops import quantize_fp8_jointly

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(5))
def test_the_joint_scale_is_the_largest_amax_and_each_weight_is_rounded_once_with_it(device, seed):
    torch.manual_seed(seed)
    weights = [torch.randn(4, 8).bfloat16().to(device) * factor for factor in (1.0, 0.1)]
    codes, scale = quantize_fp8_jointly(weights)
    assert scale.dtype == torch.float32 and scale.shape == ()
    assert torch.equal(scale.cpu(), weights[0].cpu().float().abs().amax() / 448)
    for weight, code in zip(weights, codes, strict=True):
        expected = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(code.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(5))
def test_one_weight_gives_what_the_dynamic_op_gives(device, seed):
    torch.manual_seed(seed)
    for weight in (torch.randn(5, 16).bfloat16().to(device), torch.zeros(2, 3, device=device)):
        (codes,), scale = quantize_fp8_jointly([weight])
        op_codes, op_scale = torch.ops.trtllm.quantize_e4m3_dynamic(weight)
        assert torch.equal(codes.view(torch.uint8), op_codes.view(torch.uint8))
        assert torch.equal(scale, op_scale)
