# SPDX-License-Identifier: Apache-2.0
"""The ops of namespace ``trtllm``: definitions, CPU and CUDA implementations, shape functions.

=========================== ======================================================================
``silu_and_mul``            SwiGLU of x [..., 2I], gate then up -> [..., I]
``silu_and_mul_2in``        SwiGLU of gate and up, two contiguous tensors of one shape, any rank
``quantize_e4m3_static``    x, 0-d FP32 scale -> codes ``clamp(float32(x) / scale, -448, 448)``
``quantize_e4m3_dynamic``   x -> (codes, 0-d FP32 scale = amax / 448, or 1.0 where that is zero)
``dequantize_e4m3``         codes, scale, dtype -> ``codes.to(dtype) * scale.to(dtype)``
``scaled_mm_e4m3``          [M, K], [N, K] -> [M, N], ``(x . w) * (input_scale * weight_scale)``
=========================== ======================================================================

The contract of all: inputs are BF16, FP16, FP32 or the codes (float8_e4m3fn); results are new
contiguous tensors on the inputs' device; nothing is mutated, nothing is synchronised; a ValueError
about the arguments comes before any device work; NaN in gives NaN out (the code 0x7F). There is no
backward.

SwiGLU is computed in FP32: a = min(gate, limit), b = clamp(up, -limit, limit) where a limit is
given, y = a * sigmoid(alpha * a) * (b + beta) with alpha 1.0 and beta 0.0 by default, then rounded
to the output dtype, for FP8 after the static quantisation. Both forms give the same bits for the
same numbers.
"""

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F

from tensorrt_llm._torch.custom_ops.op_arguments import (
    FP8,
    check_e4m3,
    check_gate_up,
    check_scale,
    check_scaled_mm,
    check_wide_dtype,
    fused_out_shape,
    swiglu_out_dtype,
)
from tensorrt_llm._torch.custom_ops.registration import device_guard, register_op
from tensorrt_llm._utils import describe_error, get_sm_version
from tensorrt_llm.quantization.scales import E4M3_MAX


@dataclass(frozen=True)
class _LaunchParams:
    """(elements a program, warps a program) by output width."""

    fp8_output: tuple[int, int]
    wide_output: tuple[int, int]


# A block is a power of two and divisible by 32 * num_warps.
_SILU_AND_MUL_2IN_LAUNCH_PARAMS: dict[int, _LaunchParams] = {
    # H200, 88,320 x 12,288 from BF16, medians of benchmarks/results/ops_h200.json. To FP8: 1.21 ms
    # at (8192, 8), 1.25 at (2048, 4), 1.27 at (4096, 8). To BF16: 1.48 ms from (1024, 4) to
    # (2048, 8).
    90: _LaunchParams(fp8_output=(8192, 8), wide_output=(1024, 4)),
    # Not measured: no Blackwell machine was at hand. The values of sm_90; sm_103 equals sm_100.
    100: _LaunchParams(fp8_output=(8192, 8), wide_output=(1024, 4)),
    103: _LaunchParams(fp8_output=(8192, 8), wide_output=(1024, 4)),
}

# Any other SM version: as sm_90, not measured.
_FALLBACK_LAUNCH_PARAMS = _LaunchParams(fp8_output=(8192, 8), wide_output=(1024, 4))

# The fused form reads rows of gate and up in turn and has its own best block, the same on every SM
# version: 1.22 ms at (2048, 4), 1.44 at (8192, 16) for FP8 output, same machine and shape.
_SILU_AND_MUL_LAUNCH = {FP8: (2048, 4)}
_SILU_AND_MUL_WIDE_LAUNCH = (1024, 4)

# The conversions, for every SM version. H200, same file: quantise 88,320 x 4,096 in 0.252 ms at
# (2048, 4), 0.275 at (1024, 4); dequantise 12,288 x 4,096 in 0.040 ms at (2048, 4).
_QUANTIZE_LAUNCH = {"block": 2048, "num_warps": 4}
_DEQUANTIZE_LAUNCH = {"block": 2048, "num_warps": 4}


def _silu_and_mul_2in_launch_params(sm_version: int, out_dtype: torch.dtype) -> tuple[int, int]:
    """Return (block_elements, num_warps) of the two-input SwiGLU kernel.

    Args:
        sm_version: Compute capability as an int, 90 for sm_90. A version without a row in the table
            takes ``_FALLBACK_LAUNCH_PARAMS``.
        out_dtype: The output's dtype.
    """
    params = _SILU_AND_MUL_2IN_LAUNCH_PARAMS.get(sm_version, _FALLBACK_LAUNCH_PARAMS)
    return params.fp8_output if out_dtype == FP8 else params.wide_output


@functools.cache
def _kernels() -> ModuleType:
    """Import the Triton kernels, on the first CUDA call: the CPU path works without Triton."""
    try:
        from tensorrt_llm._torch.custom_ops import triton_kernels
    except ImportError as error:
        raise RuntimeError(
            describe_error(
                "The CUDA ops of this package are Triton kernels, and Triton did not import",
                where="tensorrt_llm/_torch/custom_ops/triton_kernels.py",
                expected="an importable triton",
                found=error,
                remedy="install the triton release that your torch release names",
            )
        ) from error
    return triton_kernels


# ---- SwiGLU ----


def _swiglu_cpu(
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    limit: float | None,
    alpha: float | None,
    beta: float | None,
) -> torch.Tensor:
    gate, up = gate.float(), up.float()
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit)
    alpha, beta = _alpha_beta(alpha, beta)
    # alpha * gate is a new contiguous tensor in both forms: a vectorised loop may round exp
    # otherwise than its scalar remainder does, so equal bits need equal layouts.
    value = gate * torch.sigmoid(alpha * gate) * (up + beta)
    return value.to(out_dtype) if scale is None else _to_e4m3_cpu(value, scale)


def _alpha_beta(alpha: float | None, beta: float | None) -> tuple[float, float]:
    return 1.0 if alpha is None else alpha, 0.0 if beta is None else beta


def _silu_and_mul_cpu(
    x, scale=None, dtype=None, swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None
):
    out_dtype = swiglu_out_dtype("trtllm::silu_and_mul", x, scale, dtype, swiglu_limit)
    fused_out_shape("trtllm::silu_and_mul", x)
    gate, up = x.chunk(2, dim=-1)
    return _swiglu_cpu(gate, up, scale, out_dtype, swiglu_limit, swiglu_alpha, swiglu_beta)


def _silu_and_mul_cuda(
    x, scale=None, dtype=None, swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None
):
    out = _silu_and_mul_fake(x, scale, dtype, swiglu_limit, swiglu_alpha, swiglu_beta)
    if out.numel() > 0:
        alpha, beta = _alpha_beta(swiglu_alpha, swiglu_beta)
        block, num_warps = _SILU_AND_MUL_LAUNCH.get(out.dtype, _SILU_AND_MUL_WIDE_LAUNCH)
        with device_guard(x):
            _kernels().launch_silu_and_mul(
                x, out, scale, swiglu_limit, alpha, beta, block=block, num_warps=num_warps
            )
    return out


def _silu_and_mul_fake(
    x, scale=None, dtype=None, swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None
):
    out_dtype = swiglu_out_dtype("trtllm::silu_and_mul", x, scale, dtype, swiglu_limit)
    return x.new_empty(fused_out_shape("trtllm::silu_and_mul", x), dtype=out_dtype)


def _silu_and_mul_2in_cpu(
    gate, up, scale=None, dtype=None, swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None
):
    out_dtype = swiglu_out_dtype("trtllm::silu_and_mul_2in", gate, scale, dtype, swiglu_limit)
    check_gate_up("trtllm::silu_and_mul_2in", gate, up)
    return _swiglu_cpu(gate, up, scale, out_dtype, swiglu_limit, swiglu_alpha, swiglu_beta)


def _silu_and_mul_2in_cuda(
    gate, up, scale=None, dtype=None, swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None
):
    out = _silu_and_mul_2in_fake(gate, up, scale, dtype, swiglu_limit, swiglu_alpha, swiglu_beta)
    if out.numel() > 0:
        alpha, beta = _alpha_beta(swiglu_alpha, swiglu_beta)
        block, num_warps = _launch_params(out)
        with device_guard(gate):
            _kernels().launch_silu_and_mul_2in(
                gate, up, out, scale, swiglu_limit, alpha, beta, block=block, num_warps=num_warps
            )
    return out


def _silu_and_mul_2in_fake(
    gate, up, scale=None, dtype=None, swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None
):
    out_dtype = swiglu_out_dtype("trtllm::silu_and_mul_2in", gate, scale, dtype, swiglu_limit)
    check_gate_up("trtllm::silu_and_mul_2in", gate, up)
    return gate.new_empty(gate.shape, dtype=out_dtype)


def _launch_params(out: torch.Tensor) -> tuple[int, int]:
    return _silu_and_mul_2in_launch_params(get_sm_version(out.device.index), out.dtype)


# ---- Quantisation and its inverse ----


def _to_e4m3_cpu(value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # The explicit clamp: casts above 448 saturate in some torch versions and give NaN in others.
    # NaN becomes the positive one first, so that its code is the 0x7F of the GPU's conversion.
    quotient = (value.float() / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return torch.nan_to_num(quotient, nan=float("nan")).to(FP8)


def _quantize_e4m3_static_cpu(x, scale):
    _quantize_e4m3_static_check(x, scale)
    return _to_e4m3_cpu(x.contiguous(), scale)


def _quantize_e4m3_static_cuda(x, scale):
    out = _quantize_e4m3_static_fake(x, scale)
    if out.numel() > 0:
        with device_guard(x):
            _kernels().launch_quantize_e4m3_static(x.contiguous(), out, scale, **_QUANTIZE_LAUNCH)
    return out


def _quantize_e4m3_static_fake(x, scale):
    _quantize_e4m3_static_check(x, scale)
    return x.new_empty(x.shape, dtype=FP8)


def _quantize_e4m3_static_check(x, scale):
    check_wide_dtype(x.dtype, "trtllm::quantize_e4m3_static, x")
    check_scale(scale, x.device, "trtllm::quantize_e4m3_static, scale")


def _amax(x: torch.Tensor) -> torch.Tensor:
    # One pass over x, NaN kept; abs().amax() writes the absolute values first.
    return torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)


def _quantize_e4m3_dynamic_cpu(x):
    check_wide_dtype(x.dtype, "trtllm::quantize_e4m3_dynamic, x")
    if x.numel() == 0:
        return x.new_empty(x.shape, dtype=FP8), x.new_ones((), dtype=torch.float32)
    scale = _amax(x) / E4M3_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    return _to_e4m3_cpu(x.contiguous(), scale), scale


def _quantize_e4m3_dynamic_cuda(x):
    out, scale = _quantize_e4m3_dynamic_fake(x)
    if out.numel() == 0:
        return out, scale.fill_(1.0)
    x = x.contiguous()
    with device_guard(x):
        _kernels().launch_quantize_e4m3_dynamic(x, out, _amax(x), scale, **_QUANTIZE_LAUNCH)
    return out, scale


def _quantize_e4m3_dynamic_fake(x):
    check_wide_dtype(x.dtype, "trtllm::quantize_e4m3_dynamic, x")
    return x.new_empty(x.shape, dtype=FP8), x.new_empty((), dtype=torch.float32)


def _dequantize_e4m3_cpu(weight, scale, dtype):
    _dequantize_e4m3_check(weight, scale, dtype)
    return weight.contiguous().to(dtype) * scale.to(dtype)


def _dequantize_e4m3_cuda(weight, scale, dtype):
    out = _dequantize_e4m3_fake(weight, scale, dtype)
    if out.numel() > 0:
        with device_guard(weight):
            dequantize_e4m3_into(weight.contiguous(), out, scale)
    return out


def dequantize_e4m3_into(weight: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
    """Write ``weight.to(out.dtype) * scale.to(out.dtype)`` to ``out``; arguments are checked."""
    _kernels().launch_dequantize_e4m3(weight, out, scale, **_DEQUANTIZE_LAUNCH)


def _dequantize_e4m3_fake(weight, scale, dtype):
    _dequantize_e4m3_check(weight, scale, dtype)
    return weight.new_empty(weight.shape, dtype=dtype)


def _dequantize_e4m3_check(weight, scale, dtype):
    check_e4m3(weight, "trtllm::dequantize_e4m3, weight")
    check_scale(scale, weight.device, "trtllm::dequantize_e4m3, scale")
    check_wide_dtype(dtype, "trtllm::dequantize_e4m3, dtype")


# ---- FP8 matrix product ----


def _scaled_mm_e4m3_cpu(x, weight, input_scale, weight_scale, out_dtype):
    check_scaled_mm("trtllm::scaled_mm_e4m3", x, weight, input_scale, weight_scale, out_dtype)
    return (F.linear(x.float(), weight.float()) * (input_scale * weight_scale)).to(out_dtype)


def _scaled_mm_e4m3_cuda(x, weight, input_scale, weight_scale, out_dtype):
    check_scaled_mm("trtllm::scaled_mm_e4m3", x, weight, input_scale, weight_scale, out_dtype)
    if weight.shape[0] % 16 != 0 or weight.shape[1] % 16 != 0:
        raise ValueError(
            describe_error(
                "The FP8 matrix product on CUDA needs features in multiples of 16",
                where="trtllm::scaled_mm_e4m3, weight [out features, in features]",
                expected="multiples of 16",
                found=tuple(weight.shape),
                remedy="exclude this linear from quantisation (the recipe's ignore list), or run "
                "on the CPU",
            )
        )
    if x.shape[0] == 0 or weight.numel() == 0:
        return x.new_zeros((x.shape[0], weight.shape[0]), dtype=out_dtype)
    return scaled_mm_e4m3_unchecked(x, weight, input_scale, weight_scale, out_dtype)


def scaled_mm_e4m3_unchecked(
    x: torch.Tensor,
    weight: torch.Tensor,
    input_scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """What ``scaled_mm_e4m3`` runs on CUDA, for a caller who has checked the arguments before.

    Args:
        x: [M, K] float8_e4m3fn, contiguous, M above 0.
        weight: [N, K] float8_e4m3fn, contiguous; N and K are multiples of 16.
        input_scale: 0-d FP32.
        weight_scale: 0-d FP32.
        out_dtype: Of the result [M, N].
    """
    # Fast accumulation: 5 to 10 % faster on an H200, error 1.3e-3 against 1.3e-4, both far below
    # the quantisation error (interfaces.md, Arithmetic).
    return torch._scaled_mm(
        x,
        weight.t(),
        scale_a=input_scale,
        scale_b=weight_scale,
        out_dtype=out_dtype,
        use_fast_accum=True,
    )


def _scaled_mm_e4m3_fake(x, weight, input_scale, weight_scale, out_dtype):
    check_scaled_mm("trtllm::scaled_mm_e4m3", x, weight, input_scale, weight_scale, out_dtype)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


# ---- Registration ----

_SWIGLU_OPTIONS = (
    "Tensor? scale=None, ScalarType? dtype=None, float? swiglu_limit=None, "
    "float? swiglu_alpha=None, float? swiglu_beta=None"
)
register_op(
    f"silu_and_mul(Tensor x, {_SWIGLU_OPTIONS}) -> Tensor",
    _silu_and_mul_cpu,
    _silu_and_mul_cuda,
    _silu_and_mul_fake,
)
register_op(
    f"silu_and_mul_2in(Tensor gate, Tensor up, {_SWIGLU_OPTIONS}) -> Tensor",
    _silu_and_mul_2in_cpu,
    _silu_and_mul_2in_cuda,
    _silu_and_mul_2in_fake,
)
register_op(
    "quantize_e4m3_static(Tensor x, Tensor scale) -> Tensor",
    _quantize_e4m3_static_cpu,
    _quantize_e4m3_static_cuda,
    _quantize_e4m3_static_fake,
)
register_op(
    "quantize_e4m3_dynamic(Tensor x) -> (Tensor, Tensor)",
    _quantize_e4m3_dynamic_cpu,
    _quantize_e4m3_dynamic_cuda,
    _quantize_e4m3_dynamic_fake,
)
register_op(
    "dequantize_e4m3(Tensor weight, Tensor scale, ScalarType dtype) -> Tensor",
    _dequantize_e4m3_cpu,
    _dequantize_e4m3_cuda,
    _dequantize_e4m3_fake,
)
register_op(
    "scaled_mm_e4m3(Tensor x, Tensor weight, Tensor input_scale, Tensor weight_scale, "
    "ScalarType out_dtype) -> Tensor",
    _scaled_mm_e4m3_cpu,
    _scaled_mm_e4m3_cuda,
    _scaled_mm_e4m3_fake,
)
