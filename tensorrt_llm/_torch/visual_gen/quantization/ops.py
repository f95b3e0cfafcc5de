# SPDX-License-Identifier: Apache-2.0
"""Quantising weights while they load, over the ``torch.ops.trtllm`` ops."""

from collections.abc import Sequence

import torch

import tensorrt_llm._torch.custom_ops  # noqa: F401  (registers torch.ops.trtllm)
from tensorrt_llm.quantization.scales import E4M3_MAX


def quantize_fp8_jointly(
    weights: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Quantise weights to float8_e4m3fn with the one scale that fits them all.

    The scale is the joint absolute maximum over 448, so that the codes can stand beside one another
    in a fused Linear and each value is rounded once. One weight alone gives what
    ``quantize_e4m3_dynamic`` gives.

    Args:
        weights: FP32, BF16 or FP16 tensors of any shapes, on one device.

    Returns:
        (codes of the weights' shapes, 0-d FP32 scale). The scale is 1.0 if all values are zero, and
        NaN or infinite if one value is.
    """
    # aminmax and not abs().amax(): a weight of full size is not copied for it.
    extremes = torch.stack([torch.stack(torch.aminmax(weight)).float() for weight in weights])
    amax = extremes.abs().amax()
    # A tensor as divisor: on CUDA, PyTorch divides by a number through its rounded reciprocal.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    scale = torch.where(scale == 0, 1.0, scale)
    return [torch.ops.trtllm.quantize_e4m3_static(weight, scale) for weight in weights], scale
