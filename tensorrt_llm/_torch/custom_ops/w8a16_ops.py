# SPDX-License-Identifier: Apache-2.0
"""``trtllm::linear_w8a16``: a linear layer with E4M3 weights and a 16-bit activation.

``linear_w8a16(x, weight, weight_scale, bias=None)`` is ``F.linear(x, weight.to(dtype) *
weight_scale.to(dtype), bias)`` with x's dtype, bit for bit. On CUDA the dequantised weight stands
in a scratch buffer that all layers share: one a device, stream and dtype, as large as the largest
weight so far. Nothing is allocated for it from the second pass over a model on, and no 16-bit copy
of a weight stays behind. A buffer lives until ``release_scratch`` of its stream.

The dequantisation took 0.6 % of the GEMMs' time in a 720p step of Nano and 15 % in a 1024x1024
picture's (benchmarks/results/step_nano_h200.json): only there could a GEMM that reads FP8 weights
itself win something.
"""

import threading

import torch
import torch.nn.functional as F

from tensorrt_llm._torch.custom_ops.op_arguments import (
    check_e4m3,
    check_same_device,
    check_scale,
)
from tensorrt_llm._torch.custom_ops.registration import device_guard, register_op
from tensorrt_llm._torch.custom_ops.torch_custom_ops import dequantize_e4m3_into
from tensorrt_llm._utils import describe_error

_OP = "trtllm::linear_w8a16"
_16_BIT = (torch.bfloat16, torch.float16)

# (device index, stream, dtype) -> 1-d buffer. Work of one stream is in order, so the next layer
# can't overwrite a weight that a GEMM still reads; the lock keeps the threads of two engines, which
# share the default stream, from queueing between a weight and its GEMM.
_LOCK = threading.Lock()
_SCRATCH: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}


def scratch_buffers(stream: torch.cuda.Stream) -> tuple[torch.Tensor, ...]:
    """The buffers of one stream, for whoever has to keep them alive."""
    found = map(_SCRATCH.get, _keys_of(stream))
    return tuple(buffer for buffer in found if buffer is not None)


def release_scratch(stream: torch.cuda.Stream) -> None:
    """Let go of the buffers of one stream; the next layer on it makes its own.

    For finalizers: it takes no lock, which the thread that they happen to run in may hold. Whoever
    uses a buffer at this moment holds it, and its memory goes to later work of its stream alone.
    """
    for key in _keys_of(stream):
        _SCRATCH.pop(key, None)


def _keys_of(stream: torch.cuda.Stream) -> list[tuple[int, int, torch.dtype]]:
    owner = (stream.device_index, stream.cuda_stream)
    # A list first: another thread, or a finalizer in this one, may change the dict meanwhile.
    return [key for key in list(_SCRATCH) if key[:2] == owner]


def reserve_scratch(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the current stream's buffer, at least ``numel`` elements of ``dtype``, on CUDA."""
    key = (device.index, torch.cuda.current_stream(device).cuda_stream, dtype)
    buffer = _SCRATCH.get(key)
    if buffer is None or buffer.numel() < numel:
        _SCRATCH.pop(key, None)  # freed before the larger one is allocated
        del buffer
        buffer = _SCRATCH[key] = torch.empty(numel, dtype=dtype, device=device)
    return buffer


def _check(x, weight, weight_scale, bias):
    if x.dtype not in _16_BIT:
        raise ValueError(
            describe_error(
                "Unsupported dtype",
                where=f"{_OP}, x",
                expected="torch.bfloat16 or torch.float16",
                found=x.dtype,
                remedy="pass the 16-bit activation",
            )
        )
    check_e4m3(weight, f"{_OP}, weight")
    check_scale(weight_scale, weight.device, f"{_OP}, weight_scale")
    check_same_device(weight, x.device, f"{_OP}, weight")
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            describe_error(
                "x and weight do not multiply",
                where=_OP,
                expected="x [..., K] and weight [N, K]",
                found=f"x {tuple(x.shape)} and weight {tuple(weight.shape)}",
                remedy="pass the activation of this layer",
            )
        )
    if bias is None:
        return
    check_same_device(bias, x.device, f"{_OP}, bias")
    if bias.shape != weight.shape[:1] or bias.dtype != x.dtype:
        raise ValueError(
            describe_error(
                "The bias does not fit",
                where=f"{_OP}, bias",
                expected=f"{x.dtype} of shape ({weight.shape[0]},)",
                found=f"{bias.dtype} of shape {tuple(bias.shape)}",
                remedy="pass the bias of this layer in the activation's dtype",
            )
        )


def _cpu(x, weight, weight_scale, bias=None):
    _check(x, weight, weight_scale, bias)
    return F.linear(x, weight.to(x.dtype) * weight_scale.to(x.dtype), bias)


def _cuda(x, weight, weight_scale, bias=None):
    _check(x, weight, weight_scale, bias)
    if x.numel() == 0 or weight.numel() == 0:
        return F.linear(x, weight.to(x.dtype), bias)
    with _LOCK, device_guard(x):
        scratch = reserve_scratch(weight.numel(), x.dtype, x.device)
        wide = scratch[: weight.numel()].view(weight.shape)
        dequantize_e4m3_into(weight.contiguous(), wide, weight_scale)
        return F.linear(x, wide, bias)


def _fake(x, weight, weight_scale, bias=None):
    _check(x, weight, weight_scale, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


register_op(
    "linear_w8a16(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None) -> Tensor",
    _cpu,
    _cuda,
    _fake,
)
