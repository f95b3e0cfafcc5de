# SPDX-License-Identifier: Apache-2.0
"""What becomes of a tensor's stored bytes: kept, cast, rescaled, or quantised with others.

The kinds of `Target` that a weight plan needs. All of them write to a parameter (or a row
block of it) in place; none keeps more than its own tensor in any other form.
"""

import threading
from collections.abc import Sequence

import torch

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.modules.linear_methods import rescale_e4m3
from tensorrt_llm._torch.modules.weight_copy import fill
from tensorrt_llm._torch.visual_gen.checkpoints.byte_stream import Target
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import TensorSpec
from tensorrt_llm._torch.visual_gen.quantization.ops import quantize_fp8_jointly

# Kernels are launched from several threads; a Triton kernel's first launch compiles it.
_LAUNCH = threading.Lock()


class StoredBytes(Target):
    """The destination has the stored dtype: the file's bytes are the weight.

    Args:
        tensor: A contiguous parameter, or a row block of one.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes = tensor.detach().view(-1).view(torch.uint8)
        if tensor.device.type == "cpu":
            self.memory = memoryview(self._bytes.numpy())

    def put(self, start: int, data: torch.Tensor) -> None:
        self._bytes[start : start + len(data)].copy_(data, non_blocking=True)


class Converted(Target):
    """Each piece is converted on the destination's device, element by element.

    Args:
        tensor: A contiguous parameter, or a row block of one.
        dtype: As stored.
    """

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self._flat = tensor.detach().view(-1)
        self._dtype = dtype

    def put(self, start: int, data: torch.Tensor) -> None:
        # Bytes first: on the host the staged piece is not aligned for its dtype, and a conversion
        # while copying to a device would be made by the host.
        device = self._flat.device
        piece = torch.empty(len(data), dtype=torch.uint8, device=device)
        piece.copy_(data, non_blocking=True)
        first = start // self._dtype.itemsize
        piece = self._convert(piece.view(self._dtype))
        self._flat[first : first + len(piece)].copy_(piece)

    def _convert(self, piece: torch.Tensor) -> torch.Tensor:
        return piece  # the copy casts


class Rescaled(Converted):
    """E4M3 codes that get the scale of the fused linear they become part of.

    Args:
        tensor: A row block of the linear's weight.
        scale: The shard's own scale, 0-d FP32 on the CPU.
        fused_scale: The linear's.
    """

    def __init__(
        self, tensor: torch.Tensor, scale: torch.Tensor, fused_scale: torch.Tensor
    ) -> None:
        super().__init__(tensor, tensor.dtype)
        self._scales = [each.to(tensor.device, non_blocking=True) for each in (scale, fused_scale)]

    def _convert(self, piece: torch.Tensor) -> torch.Tensor:
        with _LAUNCH:
            return rescale_e4m3(piece, *self._scales)


class JointQuantization:
    """The shards of one FP8 linear that are stored in high precision.

    They are gathered on the linear's device, and once all are there quantised with the one scale
    that fits them, into the linear's weight. Gathering begins with the first byte, so the transfers
    of one linear have to stand together: then about one linear at a time exists twice.

    Args:
        linear: Built for FP8; its weight and weight_scale are written.
        specs: The weights' headers, in shard order.
    """

    def __init__(self, linear: Linear, specs: Sequence[TensorSpec]) -> None:
        self._linear = linear
        self._specs = specs
        self._gathered: list[torch.Tensor] = []
        self._missing = sum(spec.num_bytes for spec in specs)
        self._lock = threading.Lock()
        self.targets = [_Shard(self, index) for index in range(len(specs))]

    def _put(self, shard: int, start: int, data: torch.Tensor) -> None:
        device = self._linear.weight.device
        with self._lock:
            if not self._gathered:
                self._gathered = [
                    torch.empty(spec.num_bytes, dtype=torch.uint8, device=device)
                    for spec in self._specs
                ]
            buffer = self._gathered[shard]
        buffer[start : start + len(data)].copy_(data, non_blocking=True)
        with self._lock:
            self._missing -= len(data)
            if self._missing:
                return
            # Every copy is on the stream by now; what is launched here runs after all of them.
            weights = [
                buffer.view(spec.dtype).view(spec.shape)
                for buffer, spec in zip(self._gathered, self._specs, strict=True)
            ]
            self._gathered = []
        with _LAUNCH:
            codes, scale = quantize_fp8_jointly(weights)
            fill(self._linear.weight, codes)
            self._linear.weight_scale.copy_(scale)


class _Shard(Target):
    def __init__(self, whole: JointQuantization, index: int) -> None:
        self._whole = whole
        self._index = index

    def put(self, start: int, data: torch.Tensor) -> None:
        self._whole._put(self._index, start, data)
