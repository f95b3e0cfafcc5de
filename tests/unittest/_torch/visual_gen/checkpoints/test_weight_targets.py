# SPDX-License-Identifier: Apache-2.0
"""Bytes that arrive piece by piece, in any order, make the tensor that they make as a whole."""

import random

import pytest
import torch

from tensorrt_llm._torch.modules.linear import Linear, WeightMode, WeightsLoadingConfig
from tensorrt_llm._torch.modules.linear_methods import rescale_e4m3
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import TensorSpec
from tensorrt_llm._torch.visual_gen.checkpoints.weight_targets import (
    Converted,
    JointQuantization,
    Rescaled,
    StoredBytes,
)
from tensorrt_llm._torch.visual_gen.quantization.ops import quantize_fp8_jointly
from tensorrt_llm.models.modeling_utils import QuantConfig
from tests.support.checkpoint_dialects import bits

FP8, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
K = 48
PIECE = 80  # bytes: a multiple of 16 that no row is


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as a file has them, at an odd address."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return torch.cat((torch.zeros(1, dtype=torch.uint8), flat))[1:]


def pieces(tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    data = stored(tensor)
    return [(start, data[start : start + PIECE]) for start in range(0, len(data), PIECE)]


def random_codes(*shape: int) -> torch.Tensor:
    return (torch.randint(0, 127, shape) | (torch.randint(0, 2, shape) << 7)).byte().view(FP8)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    random.seed(0)


@pytest.mark.parametrize("dtype", [FP8, BF16, FP32])
def test_stored_bytes_fill_a_row_block_and_nothing_else(dtype):
    whole = torch.full((20, K), 3.0).to(dtype)
    before = whole.clone()
    rows = random_codes(7, K * dtype.itemsize).view(torch.uint8).view(dtype)
    target = StoredBytes(whole[4:11])
    for start, data in random.sample(pieces(rows), k=len(pieces(rows))):
        target.put(start, data)
    assert bits(whole[4:11]) == bits(rows)
    assert bits(whole[:4]) == bits(before[:4]) and bits(whole[11:]) == bits(before[11:])


def test_host_memory_is_offered_for_reading_and_is_the_parameter_itself():
    parameter = torch.nn.Parameter(torch.zeros(3, K, dtype=BF16), requires_grad=False)
    target = StoredBytes(parameter[1:2])
    assert len(target.memory) == K * 2
    target.memory[:2] = b"\x80\x3f"
    assert parameter[1, 0].item() == 1.0 and parameter.sum().item() == 1.0


def test_a_scalar_parameter_is_one_element():
    parameter = torch.zeros((), dtype=FP32)
    StoredBytes(parameter).put(0, stored(torch.tensor(2.5)))
    assert parameter.item() == 2.5


@pytest.mark.parametrize(("dtype", "wanted"), [(BF16, FP32), (FP16, FP32), (FP32, BF16)])
def test_each_piece_is_cast_like_the_whole(dtype, wanted):
    tensor = torch.randn(7, K).to(dtype)
    found = torch.empty(7, K, dtype=wanted)
    target = Converted(found, dtype)
    assert target.memory is None
    for start, data in random.sample(pieces(tensor), k=len(pieces(tensor))):
        target.put(start, data)
    assert bits(found) == bits(tensor.to(wanted))


def test_each_piece_is_rescaled_like_the_whole():
    codes, scale, fused = random_codes(7, K), torch.tensor(0.0123), torch.tensor(0.0456)
    found = torch.zeros(7, K).to(FP8)
    target = Rescaled(found, scale, fused)
    assert target.memory is None
    for start, data in random.sample(pieces(codes), k=len(pieces(codes))):
        target.put(start, data)
    assert bits(found) == bits(rescale_e4m3(codes, scale, fused)) != bits(codes)


# ---- Quantising together ----


def fused_linear() -> Linear:
    linear = Linear(
        K,
        40,
        bias=False,
        dtype=BF16,
        quant_config=QuantConfig(quant_algo="FP8"),
        weights_loading_config=WeightsLoadingConfig(WeightMode.FUSED_QKV_LINEAR),
        force_dynamic_quantization=True,
    )
    linear.weight.view(torch.uint8).fill_(0x5A)
    return linear


def shards(dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    return [torch.randn(rows, K).to(dtype) * gain for rows, gain in ((24, 1), (8, 3), (8, 0.2))]


def joint(linear: Linear, weights: list[torch.Tensor]) -> JointQuantization:
    return JointQuantization(
        linear, [TensorSpec(w.dtype, tuple(w.shape), "file", 0) for w in weights]
    )


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_shards_are_quantised_together_whatever_order_their_pieces_come_in(dtype):
    linear, weights = fused_linear(), shards(dtype)
    whole = joint(linear, weights)
    work = [(t, *p) for t, w in zip(whole.targets, weights, strict=True) for p in pieces(w)]
    random.shuffle(work)
    untouched = bits(linear.weight)
    for index, (target, start, data) in enumerate(work):
        assert target.memory is None
        assert bits(linear.weight) == untouched, f"written after {index} of {len(work)} pieces"
        target.put(start, data)
    codes, scale = quantize_fp8_jointly(weights)
    assert bits(linear.weight) == b"".join(map(bits, codes))
    assert bits(linear.weight_scale) == bits(scale)


def test_what_was_gathered_is_let_go_when_it_is_quantised():
    linear, weights = fused_linear(), shards()
    whole = joint(linear, weights)
    for target, weight in zip(whole.targets, weights, strict=True):
        assert target is whole.targets[0] or whole._gathered
        target.put(0, stored(weight))
    assert whole._gathered == []


def test_nothing_is_gathered_before_the_first_byte():
    whole = joint(fused_linear(), shards())
    assert whole._gathered == []
