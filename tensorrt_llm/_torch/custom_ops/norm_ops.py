# SPDX-License-Identifier: Apache-2.0
"""RMSNorm, and residual addition with RMSNorm, as ops of namespace ``trtllm``.

=================== ============================================================================
``rms_norm``        x [..., H], weight [H], eps -> [..., H] in the weight's dtype, or codes
``add_rms_norm``    x, residual [..., H], weight, eps -> (the norm of total, total = residual + x)
=================== ============================================================================

The contract of ``torch_custom_ops`` holds: new contiguous results, nothing mutated, nothing
synchronised, ValueError before device work, no backward. Inputs are BF16, FP16 or FP32, of any
strides on both devices (CUDA copies what is not contiguous); x and residual share one dtype, which
``total`` has, rounded once.

The norm is that of ``modules/rms_norm.py``: ``x * rsqrt(mean(x^2) + eps)`` in FP32, rounded to the
weight's dtype, times the weight in that dtype. With a 0-d FP32 ``scale`` the result is quantised
statically to float8_e4m3fn after that rounding, as ``quantize_e4m3_static`` does.

The CPU computes exactly the module's torch arithmetic. On CUDA ``total`` has the same bits; the sum
of squares is added in another order, so before the product with the weight an element may differ
by one unit in the last place of a 16-bit dtype, after it by two (in fact few do), and by 1e-6
relatively in FP32. FP8 codes are those of the op's own unquantised result.
"""

import functools
from types import ModuleType

import torch

from tensorrt_llm._torch.custom_ops import torch_custom_ops
from tensorrt_llm._torch.custom_ops.op_arguments import (
    FP8,
    check_contiguous,
    check_same_device,
    check_scale,
    check_wide_dtype,
)
from tensorrt_llm._torch.custom_ops.registration import device_guard, register_op
from tensorrt_llm._utils import describe_error

# Rows (block) and warps a program, for every SM version and output dtype; measured on an H200 at
# 88,320 rows (benchmarks/results/ops_h200.json). Addition and norm to FP8: 0.602 ms at H 4096 and
# 0.738 ms at H 5120 with (1, 4), 0.99 and 1.01 of the copy bandwidth; 0.602 and 0.779 with (1, 8).
_RMS_NORM_LAUNCH = {"block": 1, "num_warps": 4}
_ADD_RMS_NORM_LAUNCH = {"block": 1, "num_warps": 4}


@functools.cache
def _kernels() -> ModuleType:
    torch_custom_ops._kernels()  # whose error says what to do where Triton does not import
    from tensorrt_llm._torch.custom_ops import norm_kernels

    return norm_kernels


def rms_norm_formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm over the last dimension in plain torch operations, in the weight's dtype."""
    exact = x.float()
    variance = exact.pow(2).mean(-1, keepdim=True)
    normed = exact * torch.rsqrt(variance + eps)
    return normed.to(weight.dtype) * weight


def _normed_cpu(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None
) -> torch.Tensor:
    # Contiguous at the end alone: a copy before could change the order of the sums.
    normed = rms_norm_formula(x, weight, eps).contiguous()
    return normed if scale is None else torch_custom_ops._to_e4m3_cpu(normed, scale)


# ---- rms_norm ----


def _rms_norm_cpu(x, weight, eps, scale=None):
    _check("trtllm::rms_norm", x, weight, scale)
    return _normed_cpu(x, weight, eps, scale)


def _rms_norm_cuda(x, weight, eps, scale=None):
    out = _rms_norm_fake(x, weight, eps, scale)
    if out.numel() > 0:
        with device_guard(x):
            _kernels().launch_rms_norm(x.contiguous(), weight, out, scale, eps, **_RMS_NORM_LAUNCH)
    return out


def _rms_norm_fake(x, weight, eps, scale=None):
    _check("trtllm::rms_norm", x, weight, scale)
    return x.new_empty(x.shape, dtype=weight.dtype if scale is None else FP8)


# ---- add_rms_norm ----


def _add_rms_norm_cpu(x, residual, weight, eps, scale=None):
    _check_add(x, residual, weight, scale)
    total = residual + x
    return _normed_cpu(total, weight, eps, scale), total.contiguous()


def _add_rms_norm_cuda(x, residual, weight, eps, scale=None):
    out, total = _add_rms_norm_fake(x, residual, weight, eps, scale)
    if out.numel() > 0:
        x, residual = x.contiguous(), residual.contiguous()
        with device_guard(x):
            _kernels().launch_add_rms_norm(
                x, residual, weight, out, total, scale, eps, **_ADD_RMS_NORM_LAUNCH
            )
    return out, total


def _add_rms_norm_fake(x, residual, weight, eps, scale=None):
    _check_add(x, residual, weight, scale)
    out = x.new_empty(x.shape, dtype=weight.dtype if scale is None else FP8)
    return out, x.new_empty(x.shape)


# ---- Checks ----


def _check_add(x, residual, weight, scale) -> None:
    op = "trtllm::add_rms_norm"
    _check(op, x, weight, scale)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            describe_error(
                "x and residual must have the same shape and dtype",
                where=op,
                expected=f"a residual of {x.dtype} and shape {tuple(x.shape)}",
                found=f"{residual.dtype} of shape {tuple(residual.shape)}",
                remedy="add in the layer's own dtype: cast the one that differs",
            )
        )
    check_same_device(residual, x.device, f"{op}, residual")


def _check(op: str, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
    check_wide_dtype(x.dtype, f"{op}, x")
    check_wide_dtype(weight.dtype, f"{op}, weight")
    if weight.dim() != 1 or x.dim() == 0 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            describe_error(
                "The weight does not fit the last dimension",
                where=op,
                expected="x [..., H] and weight [H]",
                found=f"x {tuple(x.shape)} and weight {tuple(weight.shape)}",
                remedy="pass the weight of a norm over x's last dimension",
            )
        )
    check_same_device(weight, x.device, f"{op}, weight")
    check_contiguous(weight, f"{op}, weight")
    if scale is not None:
        check_scale(scale, x.device, f"{op}, scale")


# ---- Registration ----

register_op(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? scale=None) -> Tensor",
    _rms_norm_cpu,
    _rms_norm_cuda,
    _rms_norm_fake,
)
register_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, Tensor? scale=None) "
    "-> (Tensor, Tensor)",
    _add_rms_norm_cpu,
    _add_rms_norm_cuda,
    _add_rms_norm_fake,
)
