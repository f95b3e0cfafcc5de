# SPDX-License-Identifier: Apache-2.0
"""SwiGLU as functions, the Python faces of the ops ``silu_and_mul`` and ``silu_and_mul_2in``."""

import torch

import tensorrt_llm._torch.custom_ops  # noqa: F401  registers the ops


def swiglu(
    x: torch.Tensor,
    quant_scale: torch.Tensor | None = None,
    quant_type: torch.dtype | None = None,
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    swiglu_beta: float | None = None,
) -> torch.Tensor:
    """SwiGLU of gate and up in one tensor, computed in FP32 and rounded once.

    ``y = a * sigmoid(alpha * a) * (b + beta)`` with ``a = min(gate, limit)`` and
    ``b = clamp(up, -limit, limit)``.

    Args:
        x: [..., 2I], gate then up, contiguous; BF16, FP16 or FP32.
        quant_scale: 0-d FP32 on ``x``'s device; given for FP8 output, and only then.
        quant_type: Output dtype: torch.float8_e4m3fn (``clamp(y / quant_scale, -448, 448)``), BF16,
            FP16 or FP32; ``x``'s when None.
        swiglu_limit: Bound >= 0 on gate (from above) and up (both sides); none when None.
        swiglu_alpha: Factor inside the sigmoid, 1.0 when None.
        swiglu_beta: Added to up, 0.0 when None.

    Returns:
        [..., I], contiguous. NaN in gives NaN out.

    Raises:
        ValueError: "quant_type is required" or "quant_scale is required" when one is given without
            the other; an unsupported dtype, shape, stride or device; a negative or NaN limit.
    """
    return torch.ops.trtllm.silu_and_mul(
        x, quant_scale, quant_type, swiglu_limit, swiglu_alpha, swiglu_beta
    )


def swiglu_2in(
    gate: torch.Tensor,
    up: torch.Tensor,
    quant_scale: torch.Tensor | None = None,
    quant_type: torch.dtype | None = None,
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    swiglu_beta: float | None = None,
) -> torch.Tensor:
    """``swiglu`` of two tensors; bit-equal to it on their concatenation along the last dimension.

    Args:
        gate: Any shape, contiguous; BF16, FP16 or FP32.
        up: Shape, dtype and device of ``gate``, contiguous.
        quant_scale, quant_type, swiglu_limit, swiglu_alpha, swiglu_beta: As in ``swiglu``.

    Returns:
        A contiguous tensor of ``gate``'s shape. NaN in gives NaN out.

    Raises:
        ValueError: As ``swiglu``, and "same shape", "same dtype", "same device" or "contiguous"
            when the two tensors differ or are strided.
    """
    return torch.ops.trtllm.silu_and_mul_2in(
        gate, up, quant_scale, quant_type, swiglu_limit, swiglu_alpha, swiglu_beta
    )
