# SPDX-License-Identifier: Apache-2.0
"""Whether a request can fit the device, told from its sizes before any work.

The estimate is a lower bound, so that a request which would fit is never refused; one that is let
through may still run out of memory. Nano's step at 480x832 and 720x1280 with 189 frames peaks at
1.2 times its part of it (benchmarks/results/step_nano_h200.json), as does the VAE's decoding.
"""

import math
from typing import TYPE_CHECKING

import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.resolved_request import ResolvedRequest
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import MAX_MLP_ROWS
from tensorrt_llm._torch.visual_gen.models.cosmos3.vae_decoding import TILES, decoder_channels
from tensorrt_llm._utils import describe_error

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.pipeline_loader import Cosmos3Components

_GIB = 2**30
# Frames that the VAE decodes at once, and how many tensors of its last and widest level live at one
# moment, the convolutions' caches included: 21 in diffusers 0.42.1 with the published sizes.
_CHUNK_FRAMES = 4
_DECODER_TENSORS = 18
_CGROUP_LIMIT = "/sys/fs/cgroup/memory.max"
_CGROUP_USED = "/sys/fs/cgroup/memory.current"


def estimate_bytes(values: ResolvedRequest, components: "Cosmos3Components") -> int:
    """Bytes beside the weights that a request needs on the device, at least."""
    at_once = _decode_bytes(values, components, values.height, values.width)
    side = TILES[-1].size
    in_tiles = _decode_bytes(values, components, min(side, values.height), min(side, values.width))
    return max(_denoise_bytes(values, components), min(at_once, in_tiles))


def _denoise_bytes(values: ResolvedRequest, components: "Cosmos3Components") -> int:
    """In the MLP of a generation layer: the stream and its norm; gate, up and product of a part."""
    arch = components.transformer.arch
    size = components.transformer.dtype.itemsize
    frames, rows, columns = values.latent_shape
    patch = arch.latent_patch_size
    tokens = frames * math.ceil(rows / patch) * math.ceil(columns / patch)
    tokens *= 2 if values.is_guided else 1
    parts = math.ceil(tokens / MAX_MLP_ROWS)
    # Norm and product are FP8 where the linears behind them take FP8: one byte.
    per_token = arch.hidden_size * (size + 1 + (size if parts > 1 else 0))
    return tokens * per_token + tokens // parts * arch.intermediate_size * (2 * size + 1)


def _decode_bytes(
    values: ResolvedRequest, components: "Cosmos3Components", height: int, width: int
) -> int:
    """The decoder's last level at ``height`` x ``width``, beside all pixels so far and a copy."""
    config = components.vae.config
    size = components.vae.dtype.itemsize
    patch = config.patch_size or 1
    frames = min(_CHUNK_FRAMES, values.num_frames)
    features = _DECODER_TENSORS * decoder_channels(config) * frames * height * width // patch**2
    return (features + 2 * 3 * values.num_frames * values.height * values.width) * size


def idle_capacity(device: torch.device) -> int:
    """Bytes that a request may take on a device which holds the weights and does nothing."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    return min(_available_host_bytes(), _cgroup_room())


def check_fits(values: ResolvedRequest, components: "Cosmos3Components", capacity: int) -> None:
    """Refuse a request that can't fit.

    Raises:
        MemoryError: with what it needs and what there is.
    """
    need = estimate_bytes(values, components)
    if need > capacity:
        raise MemoryError(
            describe_error(
                "The request doesn't fit the memory",
                where=f"height {values.height}, width {values.width}, "
                f"num_frames {values.num_frames} on {components.device}",
                expected=f"at most {capacity / _GIB:.2f} GiB beside the weights",
                found=f"at least {need / _GIB:.2f} GiB",
                remedy=(
                    "ask for a smaller height and width or fewer frames, or set guidance_scale 1"
                ),
            )
        )


def _available_host_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(
        describe_error(
            "No MemAvailable",
            where="/proc/meminfo",
            expected="a line 'MemAvailable: N kB'",
            found="none",
            remedy="run on Linux 3.14 or later with /proc mounted",
        )
    )


def _cgroup_room() -> float:
    """Bytes that the container still allows; infinity without a limit (or without cgroup v2)."""
    try:
        with (
            open(_CGROUP_LIMIT, encoding="ascii") as limit,
            open(_CGROUP_USED, encoding="ascii") as used,
        ):
            return int(limit.read()) - int(used.read())
    except (OSError, ValueError):  # ValueError: "max"
        return math.inf
