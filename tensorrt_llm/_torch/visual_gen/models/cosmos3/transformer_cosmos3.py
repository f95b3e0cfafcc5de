# SPDX-License-Identifier: Apache-2.0
"""The Cosmos3 transformer: what stands around its two towers (``towers.py``), and its state.

The understanding tower reads the text, once per prompt branch (``branch_cache.py``). A denoising
step embeds the media's latents, runs the generation tower over them, through a CUDA graph where it
is short (``layer_graphs.py``), and projects back to velocities.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from tensorrt_llm._torch.modules.rms_norm import RMSNorm
from tensorrt_llm._torch.visual_gen.checkpoints.weight_apply import apply_plan
from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import plan_weights
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.branch_cache import BranchCache, TextKeys
from tensorrt_llm._torch.visual_gen.models.cosmos3.call_checks import check_call
from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import LayerGraphs, wants_graph
from tensorrt_llm._torch.visual_gen.models.cosmos3.patches import patchify, unpatchify
from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_policy import (
    follow_step_policy,
    uses_static_fp8,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_report import (
    attention_precision,
    bound_precision,
    count_fp8_linears,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.rope import (
    rotary_tables,
    sound_positions,
    vision_positions,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import StepPrecisionController
from tensorrt_llm._torch.visual_gen.models.cosmos3.towers import (
    GenerationLayer,
    ResidualStream,
    UnderstandingTower,
    add_norm,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.weight_names import source_prefixes

__all__ = ["Cosmos3VFMTransformer", "TransformerOutput", "uses_static_fp8"]

# Sinusoid of the timestep: 256 channels, cosines first, wavelengths up to 10,000 (cosmos3.md C.5).
_TIMESTEP_CHANNELS = 256
_TIMESTEP_MAX_PERIOD = 10_000.0


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
        check_call(
            self.arch,
            hidden_states,
            timestep,
            text_ids,
            video_shape,
            raw_timestep,
            noisy_frame_mask,
            audio_latents,
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
        self.step_precision_controller = follow_step_policy(
            self.model_config,
            self.gen_layers,
            self.language_model.layers,
            self.step_precision_controller,
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
