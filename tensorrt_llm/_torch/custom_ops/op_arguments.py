# SPDX-License-Identifier: Apache-2.0
"""Argument checks of the ``trtllm`` ops. They read metadata alone: no device work, no waiting."""

import torch

from tensorrt_llm._utils import describe_error

FP8 = torch.float8_e4m3fn
WIDE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_wide_dtype(dtype: torch.dtype, where: str) -> None:
    """Require BF16, FP16 or FP32 of the input, or of the requested output, that ``where`` names."""
    if dtype not in WIDE_DTYPES:
        raise ValueError(
            describe_error(
                "Unsupported dtype",
                where=where,
                expected="torch.bfloat16, torch.float16 or torch.float32",
                found=dtype,
                remedy="cast with .to(torch.bfloat16), or ask for one of these as output dtype",
            )
        )


def check_e4m3(tensor: torch.Tensor, where: str) -> None:
    """Require float8_e4m3fn of the operand that ``where`` names."""
    if tensor.dtype != FP8:
        raise ValueError(
            describe_error(
                "Unsupported dtype",
                where=where,
                expected=FP8,
                found=tensor.dtype,
                remedy="quantise it first with torch.ops.trtllm.quantize_e4m3_static",
            )
        )


def check_scale(scale: torch.Tensor, device: torch.device, where: str) -> None:
    """Require a 0-d FP32 scale on the operands' device."""
    if scale.dtype != torch.float32 or scale.dim() != 0:
        raise ValueError(
            describe_error(
                "A scale must be one FP32 number",
                where=where,
                expected="a 0-d torch.float32 tensor",
                found=f"{scale.dtype} of shape {tuple(scale.shape)}",
                remedy="pass torch.tensor(scale, dtype=torch.float32), without a dimension",
            )
        )
    check_same_device(scale, device, where)


def check_same_device(tensor: torch.Tensor, device: torch.device, where: str) -> None:
    """Require a tensor to be on the device of the op's first operand."""
    if tensor.device != device:
        raise ValueError(
            describe_error(
                "All tensors must be on the same device",
                where=where,
                expected=device,
                found=tensor.device,
                remedy="move it there with .to(device)",
            )
        )


def check_contiguous(tensor: torch.Tensor, where: str) -> None:
    """Require a contiguous tensor."""
    if not tensor.is_contiguous():
        raise ValueError(
            describe_error(
                "Inputs must be contiguous",
                where=where,
                expected="a contiguous tensor",
                found=f"shape {tuple(tensor.shape)} with strides {tuple(tensor.stride())}",
                remedy="call .contiguous() on it first",
            )
        )


def swiglu_out_dtype(
    op: str,
    source: torch.Tensor,
    scale: torch.Tensor | None,
    dtype: torch.dtype | None,
    limit: float | None,
) -> torch.dtype:
    """Check what both SwiGLU ops share and return the output's dtype.

    Raises:
        ValueError: "quant_type is required" (a scale, no dtype); "quant_scale is required" (FP8, no
            scale); a scale beside a dtype other than FP8; an unsupported dtype; a scale that is no
            0-d FP32 tensor on ``source``'s device; a limit that is negative or NaN.
    """
    if dtype is None:
        if scale is not None:
            raise ValueError(
                describe_error(
                    "quant_type is required with a quant_scale",
                    where=op,
                    expected=FP8,
                    found="no dtype",
                    remedy="pass quant_type=torch.float8_e4m3fn, or leave quant_scale out",
                )
            )
    elif dtype == FP8:
        if scale is None:
            raise ValueError(
                describe_error(
                    "quant_scale is required for FP8 output",
                    where=op,
                    expected="a 0-d torch.float32 tensor",
                    found="no scale",
                    remedy="pass the next linear's input_scale, or ask for a 16-bit output",
                )
            )
    elif dtype not in WIDE_DTYPES:
        raise ValueError(
            describe_error(
                "Unsupported output dtype",
                where=op,
                expected=f"{FP8} with a scale, or torch.bfloat16, torch.float16 or torch.float32",
                found=dtype,
                remedy="leave the dtype out: the output then has the input's",
            )
        )
    elif scale is not None:
        raise ValueError(
            describe_error(
                "Only FP8 output takes a quant_scale",
                where=op,
                expected=f"dtype {FP8}, or no scale",
                found=f"dtype {dtype} with a scale",
                remedy="leave the scale out, or ask for torch.float8_e4m3fn",
            )
        )
    check_wide_dtype(source.dtype, op)
    if scale is not None:
        check_scale(scale, source.device, f"{op}, scale")
    if limit is not None and not limit >= 0:
        raise ValueError(
            describe_error(
                "swiglu_limit is no bound",
                where=op,
                expected="a number >= 0",
                found=limit,
                remedy="pass a limit of 0 or more, or None for no limit",
            )
        )
    return source.dtype if dtype is None else dtype


def check_gate_up(op: str, gate: torch.Tensor, up: torch.Tensor) -> None:
    """Require gate and up to agree in shape, dtype and device, and to be contiguous."""
    if gate.shape != up.shape:
        raise ValueError(
            describe_error(
                "gate and up must have the same shape",
                where=op,
                expected=f"up of shape {tuple(gate.shape)}",
                found=tuple(up.shape),
                remedy=(
                    "take both from projections of equal width, or use the fused op on [gate, up]"
                ),
            )
        )
    if gate.dtype != up.dtype:
        raise ValueError(
            describe_error(
                "gate and up must have the same dtype",
                where=op,
                expected=f"up of {gate.dtype}",
                found=up.dtype,
                remedy="cast one to the other's dtype",
            )
        )
    check_same_device(up, gate.device, f"{op}, up")
    check_contiguous(gate, f"{op}, gate")
    check_contiguous(up, f"{op}, up")


def fused_out_shape(op: str, x: torch.Tensor) -> tuple[int, ...]:
    """Require [..., 2I], contiguous, and return [..., I]."""
    if x.dim() == 0 or x.shape[-1] % 2 != 0:
        raise ValueError(
            describe_error(
                "The last dimension must hold gate and up",
                where=op,
                expected="shape [..., 2I]",
                found=tuple(x.shape),
                remedy="concatenate gate and up, equally wide, along the last dimension",
            )
        )
    check_contiguous(x, f"{op}, x")
    return (*x.shape[:-1], x.shape[-1] // 2)


def check_scaled_mm(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> None:
    """Check ``scaled_mm_e4m3``: x [M, K] and weight [N, K], both e4m3 and contiguous."""
    for name, operand in (("x", x), ("weight", weight)):
        check_e4m3(operand, f"{op}, {name}")
        check_same_device(operand, x.device, f"{op}, {name}")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            describe_error(
                "x and weight do not multiply",
                where=op,
                expected="x [M, K] and weight [N, K]",
                found=f"x {tuple(x.shape)} and weight {tuple(weight.shape)}",
                remedy=(
                    "flatten x to two dimensions, and store the weight as [out features, in "
                    "features]"
                ),
            )
        )
    check_contiguous(x, f"{op}, x")
    check_contiguous(weight, f"{op}, weight")
    check_scale(input_scale, x.device, f"{op}, input_scale")
    check_scale(weight_scale, x.device, f"{op}, weight_scale")
    check_wide_dtype(out_dtype, f"{op}, out_dtype")
