# SPDX-License-Identifier: Apache-2.0
"""Whole runs, of the product's pipeline and of diffusers' with the same tokens and noise."""

import torch
from diffusers import Cosmos3OmniPipeline, UniPCMultistepScheduler

from tensorrt_llm._torch.visual_gen.models.cosmos3.loop_inputs import Cosmos3Request
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen.args import CompilationConfig, VisualGenArgs


def load_pipeline(path, device: str = "cpu"):
    """The pipeline of a checkpoint folder, without its warm-up."""
    args = VisualGenArgs(model=str(path), compilation_config=CompilationConfig(skip_warmup=True))
    return PipelineLoader(args, device=device).load()


def run_ours(pipeline, request: Cosmos3Request):
    """Latents after each step, and what ``denoise`` returns."""
    latents = []
    done = pipeline.denoise(request, on_latents=lambda i, x: latents.append(x.clone()))
    return latents, done


def run_oracle(
    oracle: Cosmos3OmniPipeline,
    request: Cosmos3Request,
    monkeypatch,
    output_type: str = "latent",
    **reference,
):
    """A run of diffusers' own pipeline, its tokens replaced by the request's.

    Args:
        oracle: Its pipeline.
        request: Ours; every value that both know is taken from it.
        output_type: Of diffusers.
        reference: Its ``image`` or ``video`` and what belongs to them.

    Returns:
        Latents after each step, its video, and its final sound latents [C, T] or None.
    """
    values, latents, sound = request.values, [], []
    ids = (list(request.prompt_ids), list(request.negative_ids or request.prompt_ids))
    monkeypatch.setattr(oracle, "tokenize_prompt", lambda *args, **kwargs: ids)
    monkeypatch.setattr(oracle, "decode_sound", lambda final: sound.append(final))
    if values.flow_shift is not None:
        config = dict(oracle.scheduler.config)
        config |= {"flow_shift": values.flow_shift, "use_karras_sigmas": False}
        monkeypatch.setattr(oracle, "scheduler", UniPCMultistepScheduler.from_config(config))

    def keep(pipe, step, timestep, tensors):
        latents.append(tensors["latents"].clone())
        return {}

    result = oracle(
        prompt="",
        num_frames=values.num_frames,
        height=values.height,
        width=values.width,
        fps=values.frame_rate or 24.0,
        num_inference_steps=values.num_inference_steps,
        guidance_scale=values.guidance_scale,
        enable_sound=values.enable_audio,
        generator=torch.Generator().manual_seed(values.seed),
        callback_on_step_end=keep,
        output_type=output_type,
        **reference,
    )
    return latents, result.video, sound[0] if sound else None
