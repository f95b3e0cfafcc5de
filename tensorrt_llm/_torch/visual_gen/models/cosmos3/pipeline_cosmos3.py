# SPDX-License-Identifier: Apache-2.0
"""The Cosmos3 pipeline: a request in, pixels out.

A request runs through pure functions (``defaults``, ``prompts``, ``sampling``, ``denoising``)
around one flat loop, ``_denoise_one``. Nothing of a request outlives it: the scheduler is its own,
and the transformer's text cache and step are reset however the request ends.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import (
    EXTRA_PARAMS,
    NANO_AND_SUPER,
    ResolvedRequest,
    resolve_request,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.denoising import (
    Denoised,
    Progress,
    StepRecord,
    TextBatch,
    check_latents,
    combine_branches,
    denormalize_latents,
    draw_noise,
    guided_steps,
    pad_branches,
    stop_if,
    summarize_trace,
    to_uint8,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.prompts import (
    packaged_negative_prompt,
    tokenize_request,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.sampling import (
    Cosmos3SamplingPolicy,
    HostCoefficientUniPC,
)
from tensorrt_llm.logger import logger
from tensorrt_llm.visual_gen.output import VisualGenMetrics, VisualGenOutput
from tensorrt_llm.visual_gen.params import ExtraParamSchema, VisualGenParams

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.pipeline_loader import Cosmos3Components

# (step, number of steps) that between them reach every mode of any policy: one step alone is
# native, the two steps of a short run lie in the first and in the last window.
_WARMUP_STEPS = ((0, 1), (0, 2), (1, 2))

OnLatents = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True)
class Cosmos3Request:
    """A request that is ready to run.

    Attributes:
        values: Every resolved value.
        prompt_ids: Token ids of the conditional branch.
        negative_ids: Token ids of the unconditional branch; None without guidance.
    """

    values: ResolvedRequest
    prompt_ids: tuple[int, ...]
    negative_ids: tuple[int, ...] | None


class Cosmos3OmniMoTPipeline:
    """Text to image and text to video with a loaded checkpoint.

    One request runs at a time: step precision and the text cache are the transformer's state, so a
    second caller waits.

    Args:
        components: What ``PipelineLoader`` has loaded.

    Raises:
        NotImplementedError: the checkpoint's scheduler belongs to a distilled build.
        ValueError: its scheduler is unknown.
    """

    def __init__(self, components: "Cosmos3Components") -> None:
        self.components = components
        self.transformer = components.transformer
        self.sampling = Cosmos3SamplingPolicy.from_scheduler(
            components.scheduler, use_native_flow_schedule=components.use_native_flow_schedule
        )
        self._lock = threading.RLock()

    @property
    def default_params(self) -> VisualGenParams:
        """The defaults of text to video; the seed, which is drawn, and the negative prompt, which
        depends on the task, stay None."""
        row = asdict(NANO_AND_SUPER["text_to_video"])
        del row["guidance_interval"]
        return VisualGenParams(**row, num_images_per_prompt=1)

    @property
    def extra_param_specs(self) -> dict[str, ExtraParamSchema]:
        """The keys of ``extra_params`` that this pipeline takes."""
        return dict(EXTRA_PARAMS)

    def prepare_request(self, prompt: str, params: VisualGenParams | None = None) -> Cosmos3Request:
        """Resolve and tokenize a request, on the host alone.

        Raises:
            ValueError: every violation, after "Parameter validation failed:".
            NotImplementedError: an option that a later version builds, by name.
        """
        negative = self.components.negative_prompt
        values = resolve_request(
            prompt,
            VisualGenParams() if params is None else params,
            default_use_system_prompt=self.components.default_use_system_prompt,
            video_negative_prompt=packaged_negative_prompt() if negative is None else negative,
        )
        return Cosmos3Request(values, *tokenize_request(self.components.tokenizer, values))

    def generate(
        self,
        request: Cosmos3Request,
        *,
        on_step: Callable[[int, int], None] | None = None,
        should_cancel: Callable[[], bool] | None = None,
    ) -> VisualGenOutput:
        """Run a request to its pixels.

        Args:
            request: From ``prepare_request``.
            on_step: Called after each denoising step with (steps done, steps of the request).
            should_cancel: Asked before each step and before the decoding.

        Raises:
            RequestCancelledError: ``should_cancel`` said so.
            RuntimeError: the latents came out constant or not finite.
        """
        with self._lock:
            started = time.perf_counter()
            denoised = self.denoise(request, on_step=on_step, should_cancel=should_cancel)
            decoding = time.perf_counter()
            stop_if(should_cancel)
            check_latents(denoised.latents)
            pixels = self.decode(denoised.latents)
            ended = time.perf_counter()
        metrics = VisualGenMetrics(
            generation=ended - started,
            pre_denoise=denoised.pre_denoise,
            denoise=denoised.denoise,
            post_denoise=ended - decoding,
        )
        return self._output(request.values, pixels, denoised, metrics)

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
            schedule = self._new_schedule(values)
            guided = guided_steps(values, schedule.timesteps.tolist())
            texts = self._make_texts(request, guided)
            generator = torch.Generator("cpu").manual_seed(values.seed)
            noises = self._draw_noises(values, generator)
            step_kwargs = self.sampling.scheduler_step_kwargs(generator)
            latents = []
            total = len(noises) * len(guided)
            self.transformer.reset_cache()
            try:
                for text in texts.values():
                    self.transformer.encode_text(text.ids, text.mask)
                timesteps = schedule.timesteps.to(self.components.device, torch.float32)
                looping = self._now()
                with Progress(total, on_step, should_cancel) as progress:
                    for noise in noises:
                        final, trace = self._denoise_one(
                            noise,
                            values,
                            guided,
                            texts,
                            timesteps,
                            step_kwargs,
                            progress,
                            on_latents,
                        )
                        latents.append(final)
            finally:
                self.transformer.reset_denoising_step()
                self.transformer.reset_cache()
            ended = self._now()
        logger.info("Precision of %d steps: %s.", len(trace), summarize_trace(trace))
        return Denoised(
            latents=torch.cat(latents),
            sigmas=tuple(schedule.sigmas.tolist()),
            trace=trace,
            pre_denoise=looping - started,
            denoise=ended - looping,
        )

    def _denoise_one(
        self,
        latents: torch.Tensor,
        values: ResolvedRequest,
        guided: list[bool],
        texts: dict[bool, TextBatch],
        timesteps: torch.Tensor,
        step_kwargs: dict[str, Any],
        progress: Progress,
        on_latents: OnLatents | None,
    ) -> tuple[torch.Tensor, tuple[StepRecord, ...]]:
        """The loop. It neither reads from the device nor uploads: all of that is done before."""
        scheduler = self._new_schedule(values)
        trace = []
        for i, timestep in enumerate(scheduler.timesteps.tolist()):
            progress.before_step()
            self.transformer.set_denoising_step(i, len(timesteps))
            text = texts[guided[i]]
            velocity = self._velocity(latents, timesteps[i : i + 1], text, values)
            velocity = combine_branches(velocity, values.guidance_scale)
            (latents,) = scheduler.step(
                velocity, timestep, latents, return_dict=False, **step_kwargs
            )
            trace.append(
                StepRecord(
                    timestep=timestep,
                    generation=self.transformer.gen_precision,
                    understanding=self.transformer.und_precision,
                    branches=len(text.ids),
                )
            )
            if on_latents is not None:
                on_latents(i, latents)
            progress.after_step()
        return latents, tuple(trace)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents [N, C, T, H, W] to uint8 RGB [N, frames, height, width, 3] on the CPU."""
        vae = self.components.vae
        config = vae.config
        pixels = [
            to_uint8(
                vae.decode(
                    denormalize_latents(image, config.latents_mean, config.latents_std, vae.dtype),
                    return_dict=False,
                )[0]
            )
            for image in latents.split(1)
        ]
        return torch.cat(pixels)

    @torch.no_grad()
    def warmup(self, resolutions: Iterable[tuple[int, int]], num_frames: Iterable[int]) -> None:
        """Run every precision mode once at every shape, so that what is missing fails at load.

        Args:
            resolutions: (height, width) pairs in pixels.
            num_frames: Frame counts; 1 is an image.

        Raises:
            RuntimeError: a mode gives values that are constant or not finite.
        """
        shapes = [(height, width, n) for height, width in resolutions for n in num_frames]
        with self._lock:
            for height, width, frames in shapes:
                params = VisualGenParams(height=height, width=width, num_frames=frames, seed=0)
                self._warm_shape(self.prepare_request("A warm-up run.", params))

    def _warm_shape(self, request: Cosmos3Request) -> None:
        values = request.values
        (noise,) = self._draw_noises(values, torch.Generator("cpu").manual_seed(values.seed))
        texts = self._make_texts(request, [True, False])
        timestep = torch.full((1,), 500.0, device=self.components.device)
        seen = set()
        self.transformer.reset_cache()
        try:
            for step, num_steps in _WARMUP_STEPS:
                self.transformer.set_denoising_step(step, num_steps)
                mode = self.transformer.gen_precision
                if mode in seen:
                    continue
                seen.add(mode)
                for text in texts.values():
                    velocity = self._velocity(noise, timestep, text, values)
                    check_latents(combine_branches(velocity, values.guidance_scale))
        finally:
            self.transformer.reset_denoising_step()
            self.transformer.reset_cache()
        self.decode(noise)
        logger.info(
            "Warm-up at %dx%d, %d frames: %s.",
            values.height,
            values.width,
            values.num_frames,
            ", ".join(sorted(seen)),
        )

    def _velocity(
        self,
        latents: torch.Tensor,
        raw_timestep: torch.Tensor,
        text: TextBatch,
        values: ResolvedRequest,
    ) -> torch.Tensor:
        """Velocity [B, C, T, H, W] of the text's B branches for latents [1, C, T, H, W]."""
        branches = len(text.ids)
        raw_timestep = raw_timestep.expand(branches)
        num_train_timesteps = self.components.scheduler.config.num_train_timesteps
        return self.transformer(
            hidden_states=latents.to(self.transformer.dtype).expand(branches, -1, -1, -1, -1),
            timestep=raw_timestep / num_train_timesteps,
            text_ids=text.ids,
            text_mask=text.mask,
            video_shape=values.latent_shape,
            raw_timestep=raw_timestep,
            fps=values.frame_rate,
        ).video

    def _new_schedule(self, values: ResolvedRequest) -> HostCoefficientUniPC:
        scheduler = self.sampling.new_scheduler(self.components.scheduler, values.flow_shift)
        self.sampling.set_timesteps(scheduler, num_inference_steps=values.num_inference_steps)
        return scheduler

    def _make_texts(self, request: Cosmos3Request, guided: list[bool]) -> dict[bool, TextBatch]:
        """The text of guided and of unguided steps, made once: the transformer knows it again."""
        branches = {False: (request.prompt_ids,), True: (request.prompt_ids, request.negative_ids)}
        return {flag: pad_branches(branches[flag], self.components.device) for flag in set(guided)}

    def _draw_noises(
        self, values: ResolvedRequest, generator: torch.Generator
    ) -> list[torch.Tensor]:
        """Initial latents [1, C, T, H, W] of every image, from one generator in turn."""
        shape = (1, self.components.vae.config.z_dim, *values.latent_shape)
        return [
            draw_noise(shape, generator, self.components.device)
            for _ in range(values.num_images_per_prompt)
        ]

    def _output(
        self,
        values: ResolvedRequest,
        pixels: torch.Tensor,
        denoised: Denoised,
        metrics: VisualGenMetrics,
    ) -> VisualGenOutput:
        metadata = {
            "request": values.report(),
            "model": self.components.model,
            "revision": self.components.revision,
            "commit": self.components.commit,
            "fp8_linears": self.transformer.fp8_linear_counts(),
            "precision_trace": [asdict(record) for record in denoised.trace],
            "sigmas": list(denoised.sigmas),
        }
        if not values.is_image:
            return VisualGenOutput(
                video=pixels[0], frame_rate=values.frame_rate, metrics=metrics, metadata=metadata
            )
        images = pixels[:, 0]
        image = images[0] if len(images) == 1 else images
        return VisualGenOutput(image=image, metrics=metrics, metadata=metadata)

    def _now(self) -> float:
        """Wall-clock seconds with the device idle; used at the edges of phases, not in the loop."""
        if self.components.device.type == "cuda":
            torch.cuda.synchronize(self.components.device)
        return time.perf_counter()
