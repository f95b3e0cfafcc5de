# SPDX-License-Identifier: Apache-2.0
"""The Cosmos3 pipeline: a request in, pixels and sound out.

A request runs through pure functions (``defaults``, ``conditioning``, ``prompts``, ``sampling``,
``denoising``, ``sound``) around one flat loop, ``_denoise_one``, which is the same for every task.
Nothing of a request outlives it but the text K/V of its last branches, which the weights and the
tokens determine: the schedulers are its own, and the transformer's tables and step are reset
however the request ends.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.checkpoint_traits import CheckpointTraits
from tensorrt_llm._torch.visual_gen.models.cosmos3.conditioning import read_reference
from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import (
    EXTRA_PARAMS,
    ResolvedRequest,
    default_params,
    resolve_request,
    task_defaults,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.denoising import (
    Denoised,
    Progress,
    StepRecord,
    check_decoded,
    check_latents,
    combine_branches,
    denormalize_latents,
    stop_if,
    summarize_trace,
    to_uint8,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.guardrails import (
    guard_pixels,
    guard_texts,
    require_guardrails,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.loop_inputs import (
    Cosmos3Request,
    LoopInputs,
    Start,
    draw_start,
    guided_steps,
    image_seeds,
    lay_out,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.memory_estimate import (
    idle_capacity,
    release_graphs,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.prompts import tokenize_request
from tensorrt_llm._torch.visual_gen.models.cosmos3.sampling import Cosmos3SamplingPolicy
from tensorrt_llm._torch.visual_gen.models.cosmos3.sound import SoundDecoder
from tensorrt_llm._torch.visual_gen.models.cosmos3.vae_decoding import Tile, choose_tile, tiled
from tensorrt_llm._torch.visual_gen.models.cosmos3.warmup import warm_shape
from tensorrt_llm.logger import logger
from tensorrt_llm.visual_gen.media_refs import MediaPolicy
from tensorrt_llm.visual_gen.output import VisualGenMetrics, VisualGenOutput
from tensorrt_llm.visual_gen.params import ExtraParamSchema, VisualGenParams

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.pipeline_loader import Cosmos3Components

OnLatents = Callable[[int, torch.Tensor], None]


class Cosmos3OmniMoTPipeline:
    """Every generation task of a loaded checkpoint: text, image or video to image or video.

    One request runs at a time: step precision and the text cache are the transformer's state, so a
    second caller waits.

    Args:
        components: What ``PipelineLoader`` has loaded.

    Attributes:
        media_policy: Limits on the references of requests; a server sets a stricter one.

    Raises:
        ValueError: the checkpoint's scheduler is unknown, or its sound tokenizer contradicts its
            transformer.
    """

    def __init__(self, components: "Cosmos3Components") -> None:
        self.components = components
        self.transformer = components.transformer
        self.traits = CheckpointTraits.from_components(components)
        self.sampling = Cosmos3SamplingPolicy.from_scheduler(components.scheduler)
        self.sound = None
        if self.traits.has_sound:
            self.sound = SoundDecoder(components.sound_tokenizer, self.transformer.arch)
        self.media_policy = MediaPolicy()
        self._lock = threading.RLock()

    @property
    def default_params(self) -> VisualGenParams:
        """What all tasks share; the rest stays None and is in ``task_defaults``."""
        return default_params(self.traits)

    @property
    def task_defaults(self) -> dict[str, dict[str, Any]]:
        """The default values of each task that the checkpoint serves, by their names."""
        return task_defaults(self.traits)

    @property
    def extra_param_specs(self) -> dict[str, ExtraParamSchema]:
        """The keys of ``extra_params`` that this pipeline takes."""
        return dict(EXTRA_PARAMS)

    def prepare_request(self, prompt: str, params: VisualGenParams | None = None) -> Cosmos3Request:
        """Resolve and tokenize a request and read its reference, on the host alone.

        Raises:
            ValueError: every violation, after "Parameter validation failed:"; a reference that
                can't be read or exceeds ``media_policy``; guardrails that are wanted and not there.
        """
        params = VisualGenParams() if params is None else params
        values = resolve_request(prompt, params, self.traits)
        # Only a request that is otherwise right has its reference read; size and rate follow it.
        reference = read_reference(params, values, self.media_policy)
        frames = report = None
        if reference is not None:
            values = resolve_request(prompt, params, self.traits, reference.source)
            frames, report = reference.fitted(values), reference.report()
        require_guardrails(values, self.components.guardrails)
        tokens = tokenize_request(
            self.components.tokenizer, values, default_negative=params.negative_prompt is None
        )
        return Cosmos3Request(values, *tokens, frames, report)

    def generate(
        self,
        request: Cosmos3Request,
        *,
        on_step: Callable[[int, int], None] | None = None,
        should_cancel: Callable[[], bool] | None = None,
    ) -> VisualGenOutput:
        """Run a request to its pixels and its sound.

        Args:
            request: From ``prepare_request``.
            on_step: Called after each denoising step with (steps done, steps of the request).
            should_cancel: Asked before each step and before the decoding.

        Raises:
            RequestCancelledError: ``should_cancel`` said so.
            RequestBlockedError: (a ValueError) the guardrails refuse a text or the frames.
            RuntimeError: the latents came out constant or not finite.
        """
        values, guardrails = request.values, self.components.guardrails
        with self._lock:
            started = time.perf_counter()
            guard_texts(values, guardrails, self.traits.video_negative_prompt)
            denoised = self.denoise(request, on_step=on_step, should_cancel=should_cancel)
            decoding = time.perf_counter()
            stop_if(should_cancel)
            check_latents(denoised.latents)
            tile = self.decoding_tile(values)
            pixels = guard_pixels(values, guardrails, self.decode(denoised.latents, tile))
            audio = None
            if denoised.sound is not None:
                check_latents(denoised.sound, "sound")
                audio = self.sound.decode(denoised.sound, values)
            ended = time.perf_counter()
        metrics = VisualGenMetrics(
            generation=ended - started,
            pre_denoise=denoised.pre_denoise,
            denoise=denoised.denoise,
            post_denoise=ended - decoding,
        )
        metadata = self._metadata(request, denoised, tile)
        if values.is_image:
            images = pixels[:, 0]
            image = images[0] if len(images) == 1 else images
            return VisualGenOutput(image=image, metrics=metrics, metadata=metadata)
        return VisualGenOutput(
            video=pixels[0],
            audio=audio,
            frame_rate=values.frame_rate,
            audio_sample_rate=None if audio is None else self.sound.sampling_rate,
            metrics=metrics,
            metadata=metadata,
        )

    @torch.no_grad()
    def denoise(
        self,
        request: Cosmos3Request,
        *,
        on_step: Callable[[int, int], None] | None = None,
        on_latents: OnLatents | None = None,
        should_cancel: Callable[[], bool] | None = None,
    ) -> Denoised:
        """Run a request to its final latents.

        Args:
            request: From ``prepare_request``.
            on_step: As in ``generate``.
            on_latents: Called after each step with (step, FP32 latents [1, C, T, H, W]).
            should_cancel: Asked before each step.

        Raises:
            RequestCancelledError: ``should_cancel`` said so.
        """
        values = request.values
        with self._lock:
            started = self._now()
            release_graphs(request, self.components)
            schedule = self._new_schedule(values)
            guided = guided_steps(values, schedule.timesteps.tolist())
            inputs = lay_out(self.components, request, schedule.timesteps, guided)
            starts = [
                self.start(inputs, seed)
                for seed in image_seeds(values.seed, values.num_images_per_prompt)
            ]
            finals = []
            try:
                for text in inputs.texts.values():
                    self.transformer.encode_text(text.ids, text.mask)
                looping = self._now()
                total = len(starts) * len(inputs.timesteps)
                with Progress(total, on_step, should_cancel) as progress:
                    for start in starts:
                        *final, trace = self._denoise_one(start, inputs, progress, on_latents)
                        finals.append(final)
            finally:
                self.transformer.reset_denoising_step()
                self.transformer.end_request()
            ended = self._now()
        logger.info("Precision of %d steps: %s.", len(trace), summarize_trace(trace))
        latents, sounds = zip(*finals, strict=True)
        return Denoised(
            latents=torch.cat(latents),
            sound=sounds[0],
            sigmas=tuple(schedule.sigmas.tolist()),
            trace=trace,
            pre_denoise=looping - started,
            denoise=ended - looping,
        )

    def _denoise_one(
        self, start: Start, inputs: LoopInputs, progress: Progress, on_latents: OnLatents | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[StepRecord, ...]]:
        """The loop. It neither reads from the device nor uploads: all of that is done before."""
        latents, sound, condition = start.latents, start.sound, inputs.condition
        scheduler = self._new_schedule(inputs.values)
        sound_scheduler = self._new_schedule(inputs.values)
        step_kwargs = self.sampling.scheduler_step_kwargs(start.generator)
        trace = []
        for i, timestep in enumerate(scheduler.timesteps.tolist()):
            progress.before_step()
            self.transformer.set_denoising_step(i, len(inputs.timesteps))
            velocity, sound_velocity = self.velocities(latents, sound, inputs, i)
            (latents,) = scheduler.step(
                velocity, timestep, latents, return_dict=False, **step_kwargs
            )
            if condition is not None:
                latents = condition.impose(latents)
            if sound is not None:
                (sound,) = sound_scheduler.step(sound_velocity, timestep, sound, return_dict=False)
            trace.append(
                StepRecord(
                    timestep=timestep,
                    generation=self.transformer.gen_precision,
                    attention=self.transformer.attention_precision,
                    understanding=self.transformer.und_precision,
                    branches=len(inputs.text_of(i).ids),
                )
            )
            if on_latents is not None:
                on_latents(i, latents)
            progress.after_step()
        return latents, sound, tuple(trace)

    def velocities(
        self, latents: torch.Tensor, sound: torch.Tensor | None, inputs: LoopInputs, step: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Guided FP32 velocities of step ``step``: [1, C, T, H, W], and [1, C, T] with sound."""
        text, values, condition = inputs.text_of(step), inputs.values, inputs.condition
        branches, dtype = len(text.ids), self.transformer.dtype
        raw_timestep = inputs.timesteps[step : step + 1].expand(branches)
        output = self.transformer(
            hidden_states=latents.to(dtype).expand(branches, -1, -1, -1, -1),
            timestep=raw_timestep / self.components.scheduler.config.num_train_timesteps,
            text_ids=text.ids,
            text_mask=text.mask,
            video_shape=values.latent_shape,
            raw_timestep=raw_timestep,
            fps=values.frame_rate,
            noisy_frame_mask=None if condition is None else condition.noisy.expand(branches, -1),
            audio_latents=None if sound is None else sound.to(dtype).expand(branches, -1, -1),
        )
        video = combine_branches(output.video, values.guidance_scale)
        if sound is None:
            return video, None
        return video, combine_branches(output.audio, values.guidance_scale)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, tile: Tile | None = None) -> torch.Tensor:
        """Latents [N, C, T, H, W] to uint8 RGB [N, frames, height, width, 3] on the CPU.

        Args:
            latents: FP32.
            tile: Decode in tiles of this size; None decodes at once.

        Raises:
            RuntimeError: decoded values that are not finite.
        """
        vae = self.components.vae
        mean, std = vae.config.latents_mean, vae.config.latents_std
        pixels = []
        for image in latents.split(1):
            image = denormalize_latents(image, mean, std, vae.dtype)
            with tiled(vae, tile):
                decoded = vae.decode(image, return_dict=False)[0]
            check_decoded(decoded)
            pixels.append(to_uint8(decoded))
        return torch.cat(pixels)

    @torch.no_grad()
    def warmup(self, resolutions: Iterable[tuple[int, int]], num_frames: Iterable[int]) -> None:
        """Run every precision mode once at every shape, so that what is missing fails at load.

        A clip is warmed up as image to video, with sound where the checkpoint has it: that is all
        the parts that any task uses.

        Args:
            resolutions: (height, width) pairs in pixels.
            num_frames: Frame counts; 1 is an image.

        Raises:
            RuntimeError: a mode gives values that are constant or not finite.
        """
        shapes = [(height, width, n) for height, width in resolutions for n in num_frames]
        with self._lock:
            for height, width, frames in shapes:
                warm_shape(self, height, width, frames)

    def start(self, inputs: LoopInputs, seed: int) -> Start:
        """Draw the noise of one image or clip of a request."""
        values, config = inputs.values, self.components.vae.config
        sound_shape = self.sound.latent_shape(values) if values.enable_audio else None
        return draw_start(inputs, seed, config.z_dim, sound_shape, self.components.device)

    def _new_schedule(self, values: ResolvedRequest) -> Any:
        scheduler = self.sampling.new_scheduler(self.components.scheduler, values.flow_shift)
        self.sampling.set_timesteps(scheduler, num_inference_steps=values.num_inference_steps)
        return scheduler

    def decoding_tile(self, values: ResolvedRequest) -> Tile | None:
        """How a request of this size is decoded in the memory that is free now."""
        capacity = idle_capacity(self.components.device)
        size = (values.height, values.width, values.num_frames)
        return choose_tile(self.components.vae, *size, capacity)

    def _metadata(
        self, request: Cosmos3Request, denoised: Denoised, tile: Tile | None
    ) -> dict[str, Any]:
        values = request.values
        return {
            "request": values.report(),
            "reference": request.reference,
            "image_seeds": image_seeds(values.seed, values.num_images_per_prompt),
            "model": self.components.model,
            "revision": self.components.revision,
            "commit": self.components.commit,
            "fp8_linears": self.transformer.fp8_linear_counts(),
            "precision_trace": [asdict(record) for record in denoised.trace],
            "sigmas": list(denoised.sigmas),
            "decoding_tile": None if tile is None else asdict(tile),
        }

    def _now(self) -> float:
        """Wall-clock seconds with the device idle; used at the edges of phases, not in the loop."""
        if self.components.device.type == "cuda":
            torch.cuda.synchronize(self.components.device)
        return time.perf_counter()
