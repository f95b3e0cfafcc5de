# SPDX-License-Identifier: Apache-2.0
"""Whether a request can fit the device, told from its sizes before any work.

The estimate is a lower bound, so that a request which would fit is never refused (but for one with
a guidance interval that none of its steps lies in: it counts as guided); one that is let
through may still run out of memory. Nano's step at 480x832 and 720x1280 with 189 frames peaks at
1.2 times its part of it (benchmarks/results/step_nano_h200.json), as does the VAE's decoding.

A request whose steps are captured keeps its graphs' inputs and pool until its end, so they come on
top. Graphs of other sizes do not: where they leave it too little, they are dropped before it runs.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import ShapeKey
from tensorrt_llm._torch.visual_gen.models.cosmos3.loop_inputs import Cosmos3Request
from tensorrt_llm._torch.visual_gen.models.cosmos3.patches import token_count
from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_policy import requested_step_policy
from tensorrt_llm._torch.visual_gen.models.cosmos3.resolved_request import ResolvedRequest
from tensorrt_llm._torch.visual_gen.models.cosmos3.sound import SoundDecoder
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import step_uses_high_precision
from tensorrt_llm._torch.visual_gen.models.cosmos3.towers import mlp_parts
from tensorrt_llm._torch.visual_gen.models.cosmos3.vae_decoding import (
    TILES,
    decode_bytes,
    decoder_channels,
)
from tensorrt_llm._utils import describe_error
from tensorrt_llm.logger import logger

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.pipeline_loader import Cosmos3Components

_GIB = 2**30
# Frames that the VAE decodes at once, and how many tensors of its last and widest level live at one
# moment, the convolutions' caches included: 21 in diffusers 0.42.1 with the published sizes.
_CHUNK_FRAMES = 4
_DECODER_TENSORS = 18
_CGROUP = Path("/sys/fs/cgroup")
# By how much a request may exceed the bounds: a step by a fifth, a graph's pool by half. To drop
# graphs without need costs a capture, to keep them could cost the request.
_AMPLE = 1.5
# The allocator's id of the pool that serves everything but graphs.
_DEFAULT_POOL = (0, 0)


def estimate_bytes(request: Cosmos3Request, components: "Cosmos3Components") -> int:
    """Bytes beside the weights that a request needs on the device, at least."""
    graphs = graph_bytes(request, components)
    if graphs == 0:
        return eager_bytes(request.values, components)
    decoding = _decode_bytes_at_least(request.values, components)
    if _modes(request.values, components) == 1:
        return graphs + decoding
    # Before the second mode is captured it runs eagerly, beside the first one's graph.
    return graphs + max(_denoise_bytes(request.values, components), decoding)


def eager_bytes(values: ResolvedRequest, components: "Cosmos3Components") -> int:
    """``estimate_bytes`` without CUDA graphs."""
    denoising = _denoise_bytes(values, components)
    return max(denoising, _decode_bytes_at_least(values, components))


def graph_bytes(request: Cosmos3Request, components: "Cosmos3Components") -> int:
    """Bytes that the graphs of a request keep, at least; 0 where its steps are not captured.

    The inputs of its largest step, and in the graphs' own pool the activations of that step.
    """
    values, transformer = request.values, components.transformer
    shape = next(iter(_graph_shapes(request, components)), None)
    if shape is None or shape.media[0] < _branches(values):
        return 0  # steps with one branch may be short enough where those with two are not
    inputs = shape.input_bytes(transformer.arch, transformer.dtype)
    return inputs + _denoise_bytes(values, components)


def release_graphs(request: Cosmos3Request, components: "Cosmos3Components") -> None:
    """Drop the CUDA graphs where those of other sizes leave a request too little.

    Too little is also what would make it decode in tiles, which change the pixels. All graphs are
    dropped, since they share one pool; the request captures its own again.
    """
    graphs, values, vae = components.transformer.graphs, request.values, components.vae
    own = _graph_shapes(request, components)
    if graphs.shapes.issubset(own):
        return
    size = (values.height, values.width, values.num_frames, decoder_channels(vae.config))
    at_once = decode_bytes(*size) * vae.dtype.itemsize // 2  # the count is of BF16
    sound = _sound_decode_bytes(values, components)
    need = max(_denoise_bytes(values, components), at_once, sound)
    if not (own and own[0] in graphs.shapes):
        need += graph_bytes(request, components)
    capacity = idle_capacity(components.device)
    if _AMPLE * need > capacity:
        logger.info(
            "Dropping %d CUDA graphs: a request may need %.2f GiB, and beside them %.2f are free.",
            *(len(graphs), _AMPLE * need / _GIB, capacity / _GIB),
        )
        graphs.clear()


def _graph_shapes(request: Cosmos3Request, components: "Cosmos3Components") -> list[ShapeKey]:
    """The shapes of the request's steps that are captured, the largest first."""
    values, transformer = request.values, components.transformer
    texts = [(len(request.prompt_ids),)]
    if values.is_guided:
        pair = (len(request.prompt_ids), len(request.negative_ids))
        texts = [pair, *(texts if values.guidance_interval else ())]
    tokens = _media_tokens(values, components)
    return [
        transformer.graphs.shape_key((len(lengths), tokens, transformer.arch.hidden_size), lengths)
        for lengths in texts
        if transformer.captures(len(lengths) * tokens)
    ]


def _modes(values: ResolvedRequest, components: "Cosmos3Components") -> int:
    """How many precision modes the steps of a request run in."""
    policy = requested_step_policy(components.transformer.model_config)
    if policy is None:
        return 1
    steps = values.num_inference_steps
    return len({step_uses_high_precision(policy, step, steps) for step in range(steps)})


def _media_tokens(values: ResolvedRequest, components: "Cosmos3Components") -> int:
    """Tokens of one branch: patches of the latent frames, and the sound's latent frames."""
    arch = components.transformer.arch
    tokens = token_count(values.latent_shape, arch.latent_patch_size)
    if values.enable_audio:
        sound = SoundDecoder(components.sound_tokenizer, arch)
        tokens += sound.latent_shape(values)[-1]
    return tokens


def _decode_bytes_at_least(values: ResolvedRequest, components: "Cosmos3Components") -> int:
    """Decoding at once or in the smallest tiles, whichever takes less, and then the sound."""
    at_once = _decode_bytes(values, components, values.height, values.width)
    side = TILES[-1].size
    in_tiles = _decode_bytes(values, components, min(side, values.height), min(side, values.width))
    return max(min(at_once, in_tiles), _sound_decode_bytes(values, components))


def _sound_decode_bytes(values: ResolvedRequest, components: "Cosmos3Components") -> int:
    if not values.enable_audio:
        return 0
    sound = SoundDecoder(components.sound_tokenizer, components.transformer.arch)
    return sound.decode_bytes(values)


def _branches(values: ResolvedRequest) -> int:
    return 2 if values.is_guided else 1


def _denoise_bytes(values: ResolvedRequest, components: "Cosmos3Components") -> int:
    """In the MLP of a generation layer: the stream and its norm; gate, up and product of a part."""
    arch = components.transformer.arch
    size = components.transformer.dtype.itemsize
    tokens = _branches(values) * _media_tokens(values, components)
    dynamic = components.transformer.model_config.force_dynamic_quantization
    parts = mlp_parts(tokens, dynamic)
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
    """Bytes that may be taken on a device which does nothing, beside weights and CUDA graphs."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if not _has_segments():
            return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        # What the graphs' own pool keeps free, only another capture can take.
        segments = _segments(device, private=False)
        return free + sum(s["total_size"] - s["allocated_size"] for s in segments)
    return min(_available_host_bytes(), _cgroup_room())


def request_capacity(components: "Cosmos3Components") -> int:
    """Bytes that a request may take on a device which does nothing, beside the weights.

    With what the CUDA graphs hold: ``release_graphs`` drops them where a request needs it. Those of
    another model in this process count too, though nothing drops them.
    """
    capacity = idle_capacity(components.device) + components.transformer.graphs.input_bytes
    if components.device.type == "cuda" and _has_segments():
        capacity += sum(s["total_size"] for s in _segments(components.device, private=True))
    return capacity


def check_fits(request: Cosmos3Request, components: "Cosmos3Components", capacity: int) -> None:
    """Refuse a request that can't fit.

    Args:
        request: From ``prepare_request``.
        components: The checkpoint.
        capacity: Bytes, from ``request_capacity``.

    Raises:
        MemoryError: with what it needs and what there is.
    """
    need, values = estimate_bytes(request, components), request.values
    if need <= capacity:
        return
    found = f"at least {need / _GIB:.2f} GiB"
    remedy = "ask for a smaller height and width or fewer frames"
    if values.is_guided and _decode_bytes_at_least(values, components) <= capacity:
        remedy += ", or set guidance_scale 1"
    where = f"height {values.height}, width {values.width}, num_frames {values.num_frames}"
    if values.enable_audio:
        where += f" at frame_rate {values.frame_rate:g} with sound"
        silent = replace(request, values=replace(values, enable_audio=False))
        if estimate_bytes(silent, components) <= capacity:
            remedy = f"raise frame_rate or leave enable_audio out; or {remedy}"
    graphs = graph_bytes(request, components)
    if graphs > 0:
        found += f", of which CUDA graphs keep {graphs / _GIB:.2f}"
    if eager_bytes(values, components) <= capacity:
        remedy = (
            "load with cuda_graph_config: {enable: false}, without which the request would fit; or "
            + remedy
        )
    raise MemoryError(
        describe_error(
            "The request doesn't fit the memory",
            where=f"{where} on {components.device}",
            expected=f"at most {capacity / _GIB:.2f} GiB beside the weights",
            found=found,
            remedy=remedy,
        )
    )


def _has_segments() -> bool:
    """Whether torch's allocator tells them; that of the driver (cudaMallocAsync) does not."""
    return torch.cuda.get_allocator_backend() == "native"


def _segments(device: torch.device, private: bool) -> list[dict[str, Any]]:
    """What torch's allocator holds on a CUDA device in the graphs' pools, or for all else."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index
        and (tuple(segment["segment_pool_id"]) != _DEFAULT_POOL) == private
    ]


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
    """Bytes that the container still allows; infinity without a limit (or without cgroup v2).

    Pages of files count as used, the checkpoint's after a load; the kernel drops those that nobody
    has touched for a while before it runs out.
    """
    try:
        limit, used = (
            int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):  # ValueError: "max"
        return math.inf
    return limit - used + _inactive_file_bytes()


def _inactive_file_bytes() -> int:
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
