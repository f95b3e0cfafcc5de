# SPDX-License-Identifier: Apache-2.0
"""The Cosmos3 transformer: an understanding tower for text, a generation tower for media.

One layer number stands for a pair of layers. The understanding layer (``language_model.layers.N``)
is causal over the text alone; the generation layer (``gen_layers.N``) lets every media token attend
to the text's keys and values of the same layer and to all media tokens. Text never sees media, so
the understanding tower runs once per prompt branch (``branch_cache.py``) and a denoising step runs
the generation tower only.

``uses_static_fp8`` decides the topology. Static ModelOpt FP8 keeps q, k, v and gate, up separate,
each with its own calibrated scale; every other checkpoint fuses what reads one activation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from tensorrt_llm._torch.modules.embedding import Embedding
from tensorrt_llm._torch.modules.gated_mlp import GatedMLP
from tensorrt_llm._torch.modules.rms_norm import RMSNorm
from tensorrt_llm._torch.visual_gen.attention_backend import E4M3Operands, KeyLengths
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.branch_cache import BranchCache, TextKeys
from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import LayerGraphs, wants_graph
from tensorrt_llm._torch.visual_gen.models.cosmos3.patches import patchify, unpatchify
from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_report import (
    attention_precision,
    bound_precision,
    count_fp8_linears,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.rope import (
    apply_rotary,
    rotary_tables,
    sound_positions,
    text_positions,
    vision_positions,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import (
    StepPrecisionController,
    StepPrecisionPolicy,
    install_step_precision,
    parse_diffusion_step_policy,
    uninstall_step_precision,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.weight_names import source_prefixes
from tensorrt_llm._torch.visual_gen.modules.attention import Attention, QKVMode
from tensorrt_llm._utils import describe_error
from tensorrt_llm.logger import logger

# Sinusoid of the timestep: 256 channels, cosines first, wavelengths up to 10,000 (cosmos3.md C.5).
_TIMESTEP_CHANNELS = 256
_TIMESTEP_MAX_PERIOD = 10_000.0

MAX_MLP_ROWS = 49_152
"""Rows that go through an MLP at once. Both branches of 720p x 189 frames are 88,320: two parts
halve the MLP's tensors, 2.5 GiB of Nano, for one copy of its output, 0.3 % of the step."""


def uses_static_fp8(model_config: DiffusionModelConfig) -> bool:
    """Whether the checkpoint's own calibrated FP8 weights and activation scales are served.

    The one predicate behind the split topology, shared activation quantisation and step precision.
    """
    return (
        model_config.quant_config.quant_mode.has_fp8_qdq()
        and not model_config.dynamic_weight_quant
        and not model_config.force_dynamic_quantization
    )


def requested_step_policy(model_config: DiffusionModelConfig) -> StepPrecisionPolicy | None:
    """The step policy to follow: the checkpoint's, unless the caller's recipe replaced its own.

    Raises:
        TypeError, ValueError: a malformed policy, also where it would be dropped.
    """
    policy = parse_diffusion_step_policy(_own_recipe(model_config))
    return None if getattr(model_config, "quant_config_overridden", False) else policy


def _own_recipe(model_config: DiffusionModelConfig) -> object:
    return getattr(model_config.pretrained_config, "quantization_config", None)


def refuse_idle_fp8_attention(transformer: "Cosmos3VFMTransformer") -> None:
    """Refuse FP8 attention where it would never run: the recipe leaves q, k and v in 16 bit.

    Raises:
        NotImplementedError: no generation layer's q, k, v are static FP8 beside such a backend.
    """
    attentions = [layer.attention for layer in transformer.gen_layers]
    backend = attentions[0].backend
    if backend.quantizes and not any(a.may_attend_in_fp8 for a in attentions):
        raise NotImplementedError(
            describe_error(
                "FP8 attention follows FP8 q, k and v, which this checkpoint does not have",
                where=f"attention_config.backend {backend.name!r}",
                expected="a recipe that quantises the generation tower's q, k and v",
                found="one that excludes them",
                remedy='use the backend "FA3" for this checkpoint',
            )
        )


@dataclass(frozen=True)
class TransformerOutput:
    """Velocities of one call. ``image`` is an alias of ``video``; ``action`` isn't generated yet.

    Attributes:
        video: [B, C, T, H, W] in the model's dtype, zero at clean frames.
        image: The same tensor.
        audio: [B, C_sound, T_sound], or None without audio latents.
        action: None.
    """

    video: torch.Tensor
    image: torch.Tensor
    audio: torch.Tensor | None = None
    action: torch.Tensor | None = None


class _DecoderLayer(nn.Module):
    """Pre-norm attention and gated MLP. Subclasses name the attention and what it attends to."""

    attention_name: str

    def __init__(
        self, arch: Cosmos3Architecture, config: DiffusionModelConfig, name: str, qkv_mode: QKVMode
    ) -> None:
        super().__init__()
        static = uses_static_fp8(config)
        dtype = config.torch_dtype
        self.input_layernorm = RMSNorm(arch.hidden_size, eps=arch.rms_norm_eps, dtype=dtype)
        attention = Attention(
            hidden_size=arch.hidden_size,
            num_attention_heads=arch.num_attention_heads,
            num_key_value_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            qkv_mode=qkv_mode,
            eps=arch.rms_norm_eps,
            bias=arch.attention_bias,
            config=config,
            module_name=f"{name}.{self.attention_name}",
            share_qkv_input_quant=static,
        )
        self.add_module(self.attention_name, attention)
        self.post_attention_layernorm = RMSNorm(
            arch.hidden_size, eps=arch.rms_norm_eps, dtype=dtype
        )
        self.mlp = GatedMLP(
            hidden_size=arch.hidden_size,
            intermediate_size=arch.intermediate_size,
            bias=False,
            dtype=dtype,
            config=config,
            module_name=f"{name}.mlp",
            split_gate_up=static,
        )

    @property
    def attention(self) -> Attention:
        return getattr(self, self.attention_name)


class UnderstandingLayer(_DecoderLayer):
    """One causal layer over the text of one branch. It runs once a request, so it is plain."""

    attention_name = "self_attn"

    def __init__(self, arch: Cosmos3Architecture, config: DiffusionModelConfig, index: int) -> None:
        super().__init__(arch, config, f"language_model.layers.{index}", QKVMode.SEPARATE_QKV)

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden [1, L, H] to the layer's output and its keys and values [1, L, kv_heads, D]."""
        attention = self.attention
        q, k, v = (self._heads(x) for x in attention.get_qkv(self.input_layernorm(hidden)))
        q = apply_rotary(attention.norm_q(q), cos, sin)
        k = apply_rotary(attention.norm_k(k), cos, sin)
        attended = attention.backend.forward(q, k, v, is_causal=True).flatten(2)
        hidden = hidden + attention.to_out[0](attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), k, v

    def keys_values(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values alone: all that generation reads of the last layer."""
        attention = self.attention
        k, v = (self._heads(x) for x in attention.get_kv(self.input_layernorm(hidden)))
        return apply_rotary(attention.norm_k(k), cos, sin), v

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.attention.head_dim))


class ResidualStream:
    """The media tokens between two layers: [B, N, H] and, not yet added, [B, N, H] or None.

    A layer takes them out, so that nobody keeps the tensors of the layer before alive: 1.4 GiB of
    720p video.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        self._tensors: tuple[torch.Tensor, torch.Tensor | None] | None = (hidden, None)

    def put(self, hidden: torch.Tensor, delta: torch.Tensor) -> None:
        """Leave the stream and what the next layer has to add to it."""
        self._tensors = (hidden, delta)

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Take out what was left, once."""
        tensors, self._tensors = self._tensors, None
        return tensors


class GenerationLayer(_DecoderLayer):
    """One layer over the media tokens, which attend to the branch's text and to each other.

    A layer leaves its residual stream and, not yet added, what its MLP gave: the next layer adds it
    in the pass that norms, and where the projections behind the norm take FP8 the same pass
    quantises for all of them (``trtllm::add_rms_norm``).

    ``project`` and ``finish`` stand before and behind attention. Only attention depends on the text
    length, so compiling these two alone keeps one graph for every prompt.
    """

    attention_name = "cross_attention"

    def __init__(self, arch: Cosmos3Architecture, config: DiffusionModelConfig, index: int) -> None:
        mode = QKVMode.SEPARATE_QKV if uses_static_fp8(config) else QKVMode.FUSE_QKV
        super().__init__(arch, config, f"gen_layers.{index}", mode)
        self.index = index

    def forward(
        self,
        stream: ResidualStream,
        cos: torch.Tensor,
        sin: torch.Tensor,
        text: TextKeys,
        lengths: KeyLengths,
    ) -> None:
        """Run the layer: take [B, N, H] out of the stream, and leave the result in it.

        Args:
            stream: The media tokens.
            cos: Rotary table [B, N, D], like sin.
            sin: Rotary table.
            text: Keys and values of the B branches.
            lengths: Keys of each branch, text and media: ``text.lengths.plus(N)``.
        """
        rotary = (cos, sin, text.keys[self.index], text.values[self.index], text.lengths.device)
        fp8 = self.attention.attends_in_fp8()
        hidden, *operands = self.project(*stream.take(), *rotary, fp8)
        backend = self.attention.backend
        if fp8:
            operands = E4M3Operands(*operands)
            attended = backend.forward_e4m3(operands, lengths=lengths)
            attended = torch.ops.trtllm.add_value_mean(
                attended, operands.v_mean, self.attention.fp8_output_scale()
            )
        else:
            attended = backend.forward(*operands, lengths=lengths)
        del operands  # a third of what the MLP needs next
        output = self.attention.to_out[0](attended.flatten(2))
        del attended
        norm, scale = self.post_attention_layernorm, self.mlp.fp8_input_scale()
        normed, hidden = add_norm(norm, output, hidden, scale)
        del output
        stream.put(hidden, self._run_mlp(normed))

    def project(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        text_keys: torch.Tensor,
        text_values: torch.Tensor,
        text_lengths: torch.Tensor,
        fp8: bool,
    ) -> tuple[torch.Tensor, ...]:
        """The half before attention: the residual stream with delta added, and q, k, v.

        q is [B, N, heads, D], normed and rotated; k and v are [B, L + N, kv_heads, D], the media's
        rows behind the valid text rows of each branch. For FP8 attention the fields of
        ``E4M3Operands`` stand in their place.
        """
        attention = self.attention
        normed, hidden = add_norm(self.input_layernorm, delta, hidden, attention.fp8_input_scale())
        norm_q, norm_k = attention.norm_q, attention.norm_k
        lay_out = torch.ops.trtllm.qkv_norm_rope_e4m3 if fp8 else torch.ops.trtllm.qk_norm_rope
        operands = lay_out(
            *attention.get_qkv(normed),
            *(norm_q.weight, norm_k.weight, norm_q.eps, cos, sin),
            *(text_keys, text_values, text_lengths),
        )
        return hidden, *operands

    def finish(self, normed: torch.Tensor) -> torch.Tensor:
        """The MLP over any rows [..., H] of the normed stream."""
        return self.mlp(normed)

    def _run_mlp(self, normed: torch.Tensor) -> torch.Tensor:
        """``finish`` over [B, N, H], in even parts of at most ``MAX_MLP_ROWS`` rows."""
        parts = math.ceil(normed.shape[0] * normed.shape[1] / MAX_MLP_ROWS)
        # A dynamic recipe takes one scale for all rows.
        if parts <= 1 or self.mlp.down_proj.force_dynamic_quantization:
            return self.finish(normed)
        rows = normed.flatten(0, 1)
        out = torch.empty(rows.shape, dtype=self.input_layernorm.weight.dtype, device=rows.device)
        for source, target in zip(rows.chunk(parts), out.chunk(parts), strict=True):
            target.copy_(self.finish(source))
        return out.view(normed.shape)


def add_norm(
    norm: RMSNorm, delta: torch.Tensor | None, hidden: torch.Tensor, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``hidden + delta`` normed (FP8 codes where a scale is given), and the sum itself."""
    if delta is None:
        return torch.ops.trtllm.rms_norm(hidden, norm.weight, norm.eps, scale), hidden
    return torch.ops.trtllm.add_rms_norm(delta, hidden, norm.weight, norm.eps, scale)


class UnderstandingTower(nn.Module):
    """Token embedding and the causal layers. The checkpoint's final norm and head feed only the
    text output, which generation has no use for, so they are not built."""

    def __init__(self, arch: Cosmos3Architecture, config: DiffusionModelConfig) -> None:
        super().__init__()
        self.arch = arch
        self.embed_tokens = Embedding(arch.vocab_size, arch.hidden_size, dtype=config.torch_dtype)
        self.layers = nn.ModuleList(
            UnderstandingLayer(arch, config, i) for i in range(arch.num_hidden_layers)
        )

    def forward(self, token_ids: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Ids [1, L] to per-layer keys and values, each [1, L, kv_heads, D]."""
        hidden = self.embed_tokens(token_ids)
        positions = text_positions(token_ids.shape[1], token_ids.device)
        cos, sin = (t[None] for t in rotary_tables(self.arch, positions, hidden.dtype))
        keys, values = [], []
        *inner, last = self.layers
        for layer in inner:
            hidden, k, v = layer(hidden, cos, sin)
            keys.append(k)
            values.append(v)
        k, v = last.keys_values(hidden, cos, sin)
        return [*keys, k], [*values, v]


class TimestepEmbedder(nn.Module):
    """Scheduler timestep to an embedding, in FP32 from end to end (cosmos3.md C.5)."""

    def __init__(self, hidden_size: int, timestep_scale: float) -> None:
        super().__init__()
        self.timestep_scale = timestep_scale
        self.mlp = nn.Module()
        self.mlp.linear_1 = nn.Linear(_TIMESTEP_CHANNELS, hidden_size, dtype=torch.float32)
        self.mlp.linear_2 = nn.Linear(hidden_size, hidden_size, dtype=torch.float32)

    def forward(self, raw_timestep: torch.Tensor) -> torch.Tensor:
        """FP32 [B] timesteps to FP32 [B, H]."""
        half = _TIMESTEP_CHANNELS // 2
        steps = torch.arange(half, dtype=torch.float32, device=raw_timestep.device)
        frequencies = torch.exp(-math.log(_TIMESTEP_MAX_PERIOD) * steps / half)
        angles = (raw_timestep.float() * self.timestep_scale)[:, None] * frequencies
        wave = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return self.mlp.linear_2(F.silu(self.mlp.linear_1(wave)))


class Cosmos3VFMTransformer(nn.Module):
    """The whole model. Build it, ``load_weights``, ``post_load_weights``, then call it per step.

    Args:
        model_config: Architecture (``pretrained_config``), quantisation recipe and runtime options.

    Raises:
        NotImplementedError: a variant whose mathematics is not built, named.
        ValueError: contradictory sizes.
    """

    def __init__(self, model_config: DiffusionModelConfig) -> None:
        super().__init__()
        arch = Cosmos3Architecture.from_pretrained_config(model_config.pretrained_config)
        dtype = model_config.torch_dtype
        self.model_config = model_config
        self.arch = arch
        # A recipe's ignore list may name modules as the checkpoint does.
        layers_config = replace(model_config, checkpoint_names=source_prefixes)
        self.language_model = UnderstandingTower(arch, layers_config)
        self.gen_layers = nn.ModuleList(
            GenerationLayer(arch, layers_config, i) for i in range(arch.num_hidden_layers)
        )
        self.norm_moe_gen = RMSNorm(arch.hidden_size, eps=arch.rms_norm_eps, dtype=dtype)
        self.vae2llm = nn.Linear(arch.patch_dim, arch.hidden_size, dtype=dtype)
        self.llm2vae = nn.Linear(arch.hidden_size, arch.patch_dim, dtype=dtype)
        self.time_embedder = TimestepEmbedder(arch.hidden_size, arch.timestep_scale)
        if arch.sound_gen:
            self.audio2llm = nn.Linear(arch.sound_dim, arch.hidden_size, dtype=dtype)
            self.llm2audio = nn.Linear(arch.hidden_size, arch.sound_dim, dtype=dtype)
            self.audio_modality_embed = nn.Parameter(torch.empty(arch.hidden_size, dtype=dtype))
        self.requires_grad_(False)
        self.step_precision_controller: StepPrecisionController | None = None
        self._text_controller: StepPrecisionController | None = None
        self._precision_report: tuple | None = None
        self._cache = BranchCache(self.language_model)
        backend = self.gen_layers[0].attention.backend
        self._graphs = LayerGraphs(self._run_tokens, backend.reads_lengths_on_device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations and of the boundary layers."""
        return self.vae2llm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.vae2llm.weight.device

    @property
    def graphs(self) -> LayerGraphs:
        """The CUDA graphs of the generation layers, as far as they have been captured."""
        return self._graphs

    def captures(self, rows: int) -> bool:
        """Whether a step of so many media tokens, of all branches, is a CUDA graph on CUDA."""
        any_length = self.gen_layers[0].attention.backend.reads_lengths_on_device
        return wants_graph(self.model_config.cuda_graph.enable, any_length, rows)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        text_ids: torch.Tensor,
        text_mask: torch.Tensor,
        video_shape: tuple[int, int, int],
        raw_timestep: torch.Tensor,
        fps: float | None = None,
        noisy_frame_mask: torch.Tensor | None = None,
        audio_latents: torch.Tensor | None = None,
    ) -> TransformerOutput:
        """Velocities of one denoising evaluation for B branches.

        Args:
            hidden_states: Latents [B, C, T, H, W], any floating dtype.
            timestep: raw_timestep / num_train_timesteps, [B]. Part of the family's signature; the
                model embeds raw_timestep.
            text_ids: [B, L] int64.
            text_mask: [B, L], nonzero = token. Pass the same two objects on every step of a
                request: they are recognised without reading the device. Written to in place they
                are read again, but not as inference tensors, which don't count writes.
            video_shape: (T, H, W) of the latents.
            raw_timestep: The scheduler's timestep [B], FP32.
            fps: Frame rate; None places latent frames at whole positions.
            noisy_frame_mask: Bool [B, T], False = clean frame (no time embedding, velocity 0).
            audio_latents: [B, C_sound, T_sound].

        Raises:
            ValueError: a missing timestep, shapes that contradict each other, audio latents for a
                checkpoint without sound.
        """
        self._check_call(
            hidden_states, timestep, text_ids, video_shape, raw_timestep, audio_latents
        )
        text = self._text(text_ids, text_mask)
        time_embedding = self.time_embedder(raw_timestep).to(self.dtype)[:, None]

        vision, grid = patchify(hidden_states.to(self.dtype), self.arch.latent_patch_size)
        hidden = self.vae2llm(vision)
        noisy_tokens = None
        if noisy_frame_mask is None:
            hidden = hidden + time_embedding
        else:
            noisy_tokens = noisy_frame_mask.bool().repeat_interleave(grid[1] * grid[2], dim=1)
            noisy_tokens = noisy_tokens[..., None]
            hidden = torch.where(noisy_tokens, hidden + time_embedding, hidden)
        sound_frames = 0
        if audio_latents is not None:
            # Contiguous: oneDNN's BF16 GEMM rounds a strided input differently.
            sound = self.audio2llm(audio_latents.to(self.dtype).transpose(1, 2).contiguous())
            sound = sound + self.audio_modality_embed + time_embedding
            sound_frames = sound.shape[1]
            hidden = torch.cat((hidden, sound), dim=1)

        cos, sin = self._media_tables(text.lengths.host, grid, fps, sound_frames)
        if self._captures(hidden):
            hidden = self._graphs(self.gen_precision, hidden, cos, sin, text)
        else:
            stream = ResidualStream(hidden)
            del hidden
            hidden = self._run_layers(stream, cos, sin, text)

        vision_tokens = vision.shape[1]
        velocity = self.llm2vae(hidden[:, :vision_tokens])
        if noisy_tokens is not None:
            velocity = torch.where(noisy_tokens, velocity, 0)
        video = unpatchify(velocity, grid, self.arch.latent_patch_size, tuple(video_shape[1:]))
        audio = None
        if audio_latents is not None:
            audio = self.llm2audio(hidden[:, vision_tokens:]).transpose(1, 2)
        return TransformerOutput(video=video, image=video, audio=audio)

    def encode_text(self, text_ids: torch.Tensor, text_mask: torch.Tensor) -> None:
        """Run the understanding tower for these tensors now, so that no step has to.

        Reads the tokens back from the device (one synchronisation); later calls of ``forward`` with
        the same two objects read nothing.

        Args:
            text_ids: [B, L] int64.
            text_mask: [B, L], nonzero = token.
        """
        self._text(text_ids, text_mask)

    def end_request(self) -> None:
        """Forget the request, but for the text K/V of its last branches.

        They depend on the weights and the tokens alone, so a later request with the same negative
        prompt finds them computed, with the same bits.
        """
        self._cache.end_request()
        self._graphs.end_request()

    def reset_cache(self) -> None:
        """Forget all text K/V, position tables and captured graphs."""
        self._cache.clear()
        self._graphs.clear()

    def set_denoising_step(self, step_index: int, num_steps: int) -> None:
        """Select the precision of step ``step_index``; a model without a policy has one only."""
        if self.step_precision_controller is not None:
            self.step_precision_controller.set_step(step_index, num_steps=num_steps)

    def reset_denoising_step(self) -> None:
        """Back to the checkpoint's native precision."""
        if self.step_precision_controller is not None:
            self.step_precision_controller.reset()

    @property
    def gen_precision(self) -> str:
        """How the generation tower's linears run right now (``precision_report.py`` has the names).

        Read from the bound methods, and read again only when the controller's mode has changed.
        """
        return self._bound_precisions()[0]

    @property
    def und_precision(self) -> str:
        """How the understanding tower's linears run; read like ``gen_precision``."""
        return self._bound_precisions()[1]

    @property
    def attention_precision(self) -> str:
        """What the generation tower's attention runs on right now: "fp8", or the dtype's name."""
        return self._bound_precisions()[2]

    def fp8_linear_counts(self) -> dict[str, int]:
        """Linears with FP8 weights, per tower."""
        return {
            "understanding": count_fp8_linears(self.language_model.layers),
            "generation": count_fp8_linears(self.gen_layers),
        }

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load tensors under their checkpoint names: plan, validate everything, then copy.

        Raises:
            ValueError: every missing, surplus or unfit tensor, listed together; nothing is copied.
        """
        from tensorrt_llm._torch.visual_gen.checkpoints.weight_apply import apply_plan
        from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import plan_weights

        plan = plan_weights(self, weights)
        self.reset_cache()
        apply_plan(plan, weights)

    def post_load_weights(self) -> None:
        """Confirm shared input scales, then install the checkpoint's step precision."""
        for module in self.modules():
            if module is not self and hasattr(module, "post_load_weights"):
                module.post_load_weights()
        self._precision_report = None
        self.reset_cache()
        self._maybe_install_step_precision()

    def _maybe_install_step_precision(self) -> None:
        policy = parse_diffusion_step_policy(_own_recipe(self.model_config))
        requested = requested_step_policy(self.model_config)
        if policy is not None and requested is None:
            logger.warning(
                "The checkpoint's diffusion_step_policy is dropped: the caller's quant_config "
                "replaced the recipe that it was made for."
            )
        if requested is None:
            if self.step_precision_controller is not None:
                uninstall_step_precision(self.gen_layers)
                uninstall_step_precision(self.language_model.layers)
                self.step_precision_controller = None
            return
        controller = StepPrecisionController(policy.first_steps, policy.last_steps)
        static = uses_static_fp8(self.model_config)
        governed = install_step_precision(self.gen_layers, controller) if static else 0
        if governed == 0:
            raise ValueError(
                describe_error(
                    "diffusion_step_policy can't be served by the loaded weights",
                    where="transformer/config.json, quantization_config.runtime",
                    expected="static FP8 weights with calibrated input scales",
                    found=f"quant_algo {self.model_config.quant_config.quant_algo}, "
                    f"static: {static}",
                    remedy="use the checkpoint's fp8 revision as published, or pass a "
                    "quant_config of your own, which drops the policy",
                )
            )
        understanding = self.language_model.layers
        if policy.reasoner_high_precision:
            install_step_precision(understanding, controller, always_high=True)
        else:
            uninstall_step_precision(understanding)
        self.step_precision_controller = controller
        logger.info(
            "Step precision: the first %d and last %d steps run %d linears in 16 bit; the "
            "understanding tower is %s.",
            policy.first_steps,
            policy.last_steps,
            governed,
            "16 bit" if policy.reasoner_high_precision else "native",
        )

    def _text(self, text_ids: torch.Tensor, text_mask: torch.Tensor) -> TextKeys:
        # Each installed policy has a controller of its own, and may change the tower's precision.
        if self._text_controller is not self.step_precision_controller:
            self.reset_cache()
            self._text_controller = self.step_precision_controller
        return self._cache.text(text_ids, text_mask)

    def _captures(self, hidden: torch.Tensor) -> bool:
        """Whether a step of these media tokens [B, N, H] goes through a CUDA graph."""
        return hidden.is_cuda and self.captures(hidden.shape[0] * hidden.shape[1])

    def _run_layers(
        self,
        stream: ResidualStream,
        cos: torch.Tensor,
        sin: torch.Tensor,
        text: TextKeys,
    ) -> torch.Tensor:
        """Embedded media tokens, [B, N, H] in the stream, to the last layer's normed output."""
        lengths = text.lengths.plus(cos.shape[1])
        for layer in self.gen_layers:
            layer(stream, cos, sin, text, lengths)
        hidden, delta = stream.take()
        return add_norm(self.norm_moe_gen, delta, hidden, None)[0]

    def _run_tokens(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, text: TextKeys
    ) -> torch.Tensor:
        """``_run_layers`` for a captured graph, whose input stays alive anyway."""
        return self._run_layers(ResidualStream(hidden), cos, sin, text)

    def _bound_precisions(self) -> tuple[str, str, str]:
        controller = self.step_precision_controller
        mode = (controller, controller is not None and controller.high_precision)
        if self._precision_report is None or self._precision_report[0] != mode:
            towers = (self.gen_layers, self.language_model.layers)
            attention = attention_precision(self.gen_layers, self.dtype)
            report = (*(bound_precision(tower) for tower in towers), attention)
            self._precision_report = (mode, report)
        return self._precision_report[1]

    def _check_call(
        self, hidden_states, timestep, text_ids, video_shape, raw_timestep, audio_latents
    ) -> None:
        batch = hidden_states.shape[0]
        rules = [
            (
                "timestep and raw_timestep are required",
                timestep is not None and raw_timestep is not None,
                "two tensors [batch]",
                f"{type(timestep).__name__} and {type(raw_timestep).__name__}",
                "pass raw_timestep from the scheduler, and timestep = raw_timestep / "
                "num_train_timesteps",
            ),
            (
                "Latents and video_shape disagree",
                tuple(hidden_states.shape[2:]) == tuple(video_shape),
                tuple(video_shape),
                tuple(hidden_states.shape),
                "pass video_shape=tuple(hidden_states.shape[2:])",
            ),
            (
                "Latents and text_ids disagree about the batch",
                text_ids.shape[0] == batch,
                f"{batch} rows",
                tuple(text_ids.shape),
                "expand the latents to one row for each guidance branch",
            ),
            (
                "audio_latents given to a checkpoint without sound",
                audio_latents is None or self.arch.sound_gen,
                "None",
                "a tensor",
                "leave audio_latents out, or load a checkpoint with sound_gen true",
            ),
        ]
        for what, holds, expected, found, remedy in rules:
            if not holds:
                raise ValueError(
                    describe_error(
                        what,
                        where="Cosmos3VFMTransformer.forward",
                        expected=expected,
                        found=found,
                        remedy=remedy,
                    )
                )

    def _media_tables(
        self,
        lengths: tuple[int, ...],
        grid: tuple[int, int, int],
        fps: float | None,
        sound_frames: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables [B, N, D] of the media tokens of each branch, made once per request.

        Args:
            lengths: Text tokens of the branches.
            grid: Latent frames and patch rows and columns.
            fps: Frame rate, or None.
            sound_frames: Sound tokens.
        """

        def build() -> tuple[torch.Tensor, torch.Tensor]:
            tables = []
            for length in lengths:
                positions = vision_positions(self.arch, grid, fps, length, self.device)
                if sound_frames:
                    sound = sound_positions(self.arch, sound_frames, length, self.device)
                    positions = torch.cat((positions, sound), dim=1)
                tables.append(rotary_tables(self.arch, positions, self.dtype))
            cos, sin = zip(*tables, strict=True)
            return torch.stack(cos), torch.stack(sin)

        return self._cache.table((lengths, grid, fps, sound_frames), build)
