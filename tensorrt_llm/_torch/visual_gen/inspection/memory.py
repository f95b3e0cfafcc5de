# SPDX-License-Identifier: Apache-2.0
"""How much device memory a request needs: weights exactly, activations by formula.

Weights are counted from the model as it is loaded. The activations are an **estimate**: the tensors
that are alive at the two moments that need most, in eager execution (torch.compile needs less).

* Denoising, while the MLP of a generation layer applies SwiGLU: `layer_bytes`, plus the text's keys
  and values for a prompt of the greatest length (`text_cache_bytes`) and the latents with the
  solver's history (`latent_bytes`).
* CUDA graphs, where the request's steps are captured: `graph_bytes`, kept through both moments.
* Decoding at once, in the last stage of the VAE, or while the decoded video becomes uint8:
  `decode_bytes`. Where that does not fit, a request is decoded in tiles (``vae_decoding.py``).

Not counted: the CUDA context, the allocator's fragmentation, workspaces of GEMM, attention and
convolution, and what other processes hold.
"""

from dataclasses import dataclass
from math import ceil

import torch

from tensorrt_llm._torch.visual_gen.attention_backend import create_attention_backend
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import ShapeKey, wants_graph
from tensorrt_llm._torch.visual_gen.models.cosmos3.patches import token_count
from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_policy import (
    requested_step_policy,
    uses_static_fp8,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.resolved_request import ResolvedRequest
from tensorrt_llm._torch.visual_gen.models.cosmos3.towers import mlp_parts
from tensorrt_llm._torch.visual_gen.models.cosmos3.vae_decoding import decode_bytes

# FP32 latents alive at once: noise, sample, last sample, two model outputs, the velocities of two
# branches, their combination, and two temporaries of the solver.
_LATENT_COPIES = 10
# What the graphs' pool takes for each byte of activations: its blocks are allocated one by one and
# never joined, so that a large tensor does not find the room of several small ones. 1.1 to 1.6 for
# Nano and Super from 2,000 rows on, by the allocator's rules over a layer's tensors.
_POOL_SPACE = 1.5


@dataclass(frozen=True)
class Need:
    """Bytes on the device for one request.

    Attributes:
        transformer: Weights.
        vae: Weights.
        sound_tokenizer: Weights.
        text_cache: Keys and values of the prompt branches, for prompts of the greatest length.
        denoising: Activations and latents of a denoising step, at their peak.
        decoding: Activations of the VAE, at their peak.
        graphs: What CUDA graphs keep until the end of the request; 0 where no step is captured.
    """

    transformer: int
    vae: int
    sound_tokenizer: int
    text_cache: int
    denoising: int
    decoding: int
    graphs: int

    @property
    def total(self) -> int:
        """Weights and graphs, and the larger of the two phases that follow each other."""
        kept = self.transformer + self.vae + self.sound_tokenizer + self.graphs
        return kept + max(self.denoising + self.text_cache, self.decoding)


@dataclass(frozen=True)
class WeightSizes:
    """What doesn't depend on the request.

    Attributes:
        transformer: Bytes of the loaded transformer.
        vae: Bytes of the loaded VAE.
        sound_tokenizer: Bytes of the loaded sound tokenizer, 0 without one.
        vae_itemsize: Bytes of an element of the VAE and what it computes.
        decoder_channels: Channels of the decoder's last stage.
    """

    transformer: int
    vae: int
    sound_tokenizer: int
    vae_itemsize: int
    decoder_channels: int


def request_need(
    config: DiffusionModelConfig, sizes: WeightSizes, request: ResolvedRequest
) -> Need:
    """Estimate what a request needs on the device."""
    arch = Cosmos3Architecture.from_pretrained_config(config.pretrained_config)
    branches = 2 if request.is_guided else 1
    height, width, frames = request.height, request.width, request.num_frames
    activations = layer_bytes(config, arch, branches, vision_tokens(arch, request))
    return Need(
        transformer=sizes.transformer,
        vae=sizes.vae,
        sound_tokenizer=sizes.sound_tokenizer,
        text_cache=text_cache_bytes(config, arch, branches, request.max_sequence_length),
        denoising=activations + latent_bytes(arch, request),
        # The count is of BF16.
        decoding=decode_bytes(height, width, frames, sizes.decoder_channels)
        * sizes.vae_itemsize
        // 2,
        graphs=graph_bytes(config, arch, request),
    )


def vision_tokens(arch: Cosmos3Architecture, request: ResolvedRequest) -> int:
    """Tokens of one branch, without sound."""
    return token_count(request.latent_shape, arch.latent_patch_size)


def layer_bytes(
    config: DiffusionModelConfig, arch: Cosmos3Architecture, branches: int, tokens: int
) -> int:
    """Tensors of a generation layer alive at its peak: around SwiGLU, in the MLP.

    A row (a token of a branch) with element size e, hidden size H and intermediate size I has: the
    residual stream (e H); the MLP's normed input (e H, in FP8 H); and the rotary tables (2 e D). A
    row of the part that goes through the MLP has besides: gate and up (2 e I), and their product
    (e I, in FP8 I); where there are several parts, every row has a row of the MLP's output (e H).
    The larger of a checkpoint's two modes is told: 16 bit, where some step is. The dequantised
    weight of a 16-bit step stands in a buffer of its own (e H I).
    """
    e = config.torch_dtype.itemsize
    hidden, inner = arch.hidden_size, arch.intermediate_size
    narrow, scratch = e, 0
    if uses_static_fp8(config):
        if _has_16_bit_steps(config):
            scratch = e * hidden * inner
        else:
            narrow = 1
    rows = branches * tokens
    parts = mlp_parts(rows, config.force_dynamic_quantization)
    row = e * (hidden + 2 * arch.head_dim) + narrow * hidden
    if parts > 1:
        row += e * hidden
    return rows * row + ceil(rows / parts) * inner * (2 * e + narrow) + scratch


def text_cache_bytes(
    config: DiffusionModelConfig, arch: Cosmos3Architecture, branches: int, length: int
) -> int:
    """Keys and values of every layer for ``branches`` prompts of ``length`` tokens."""
    width = arch.num_key_value_heads * arch.head_dim
    itemsize = config.torch_dtype.itemsize
    return branches * arch.num_hidden_layers * 2 * width * length * itemsize


def graph_bytes(
    config: DiffusionModelConfig, arch: Cosmos3Architecture, request: ResolvedRequest
) -> int:
    """What the CUDA graphs of a request keep beside eager execution; 0 where no step is captured.

    Each shape has inputs of its own (``ShapeKey.input_bytes``), the text's room among them: the
    shape with two branches, and that with one where an interval lets guidance rest. All graphs
    share one pool for the activations (`layer_bytes`, less the tables, which are inputs); in it
    stay the outputs of the others.
    """
    any_length = create_attention_backend(config.attention.backend).reads_lengths_on_device
    tokens, e = vision_tokens(arch, request), config.torch_dtype.itemsize
    branches = [1]
    if request.is_guided:
        branches = [2] if request.guidance_interval is None else [2, 1]
    captured = [
        b for b in branches if wants_graph(config.cuda_graph.enable, any_length, b * tokens)
    ]
    if not captured:
        return 0
    inputs = sum(
        ShapeKey.of(
            (b, tokens, arch.hidden_size), (request.max_sequence_length,) * b, any_length
        ).input_bytes(arch, config.torch_dtype)
        for b in captured
    )
    largest = max(captured)
    tables = largest * tokens * 2 * arch.head_dim * e
    activations = layer_bytes(config, arch, largest, tokens) - tables
    modes = 2 if uses_static_fp8(config) and _has_16_bit_steps(config) else 1
    outputs = (modes * sum(captured) - largest) * tokens * arch.hidden_size * e
    return inputs + int(_POOL_SPACE * activations) + outputs


def latent_bytes(arch: Cosmos3Architecture, request: ResolvedRequest) -> int:
    """FP32 latents, the solver's history and the velocities."""
    frames, height, width = request.latent_shape
    return _LATENT_COPIES * 4 * arch.latent_channel * frames * height * width


def device_memory(device: torch.device) -> tuple[str, int, int] | None:
    """(name, free bytes, total bytes) of a CUDA device; None for another."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return torch.cuda.get_device_name(device), free, total


def _has_16_bit_steps(config: DiffusionModelConfig) -> bool:
    """Whether some denoising step may run W8A16: the step policy to follow has a window."""
    try:
        policy = requested_step_policy(config)
    except (TypeError, ValueError):
        return True  # malformed, so the plan refuses it; the larger need is told
    return policy is not None and policy.first_steps + policy.last_steps > 0
