# SPDX-License-Identifier: Apache-2.0
"""Whole denoising runs from static FP8 checkpoints, each policy against its own reference.

With calibrated scales two correct implementations differ by as much as the precision modes do, so
the activation scales are divided by 16 here (cosmos3.md G.4, the contrast recipe): W8A8 saturates,
and the modes lie more than 1e-2 apart while an implementation stays within 2e-3 of its reference.
"""

from pathlib import Path

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs, VisualGenParams
from tests.support.diffusers_oracle import relative_error, use_fp32_swiglu, velocity
from tests.support.fp8_oracle import (
    FP8Reference,
    copy_checkpoint,
    dequantised_transformer,
    policy,
)

pytestmark = pytest.mark.cosmos3

STEPS = 10
PARAMS = {
    "height": 64,
    "width": 96,
    "num_frames": 9,
    "num_inference_steps": STEPS,
    "guidance_scale": 1.0,
    "seed": 7,
}
PROMPT = "A robot arm pours water into a glass."


def high(first: int, last: int) -> list[bool]:
    return [i < first or i >= STEPS - last for i in range(STEPS)]


# name -> (policy, steps of the generation tower in 16 bit, understanding tower in 16 bit)
MODES = {
    "all-16-bit": (policy(99, 99), high(99, 99), True),
    "all-fp8": (policy(0, 0, "native"), high(0, 0), False),
    "3/3": (policy(3, 3), high(3, 3), True),
    "0/3": (policy(0, 3), high(0, 3), True),
    "3/3 native reasoner": (policy(3, 3, "native"), high(3, 3), False),
}


def run(checkpoint: Path):
    pipeline = PipelineLoader(VisualGenArgs(model=str(checkpoint)), device="cpu").load(
        skip_warmup=True
    )
    request = pipeline.prepare_request(PROMPT, VisualGenParams(**PARAMS))
    return pipeline.denoise(request), request


def reference_latents(checkpoint: Path, request, evaluate) -> torch.Tensor:
    """The loop on diffusers' scheduler; evaluate(step, latents, timestep) gives a velocity."""
    scheduler = UniPCMultistepScheduler.from_pretrained(checkpoint / "scheduler")
    scheduler.set_timesteps(STEPS)
    generator = torch.Generator().manual_seed(PARAMS["seed"])
    latents = torch.randn(1, 48, 3, 4, 6, generator=generator)
    for i, timestep in enumerate(scheduler.timesteps):
        v = evaluate(i, latents, float(timestep)).float()
        latents = scheduler.step(v, timestep, latents, return_dict=False)[0]
    return latents


@pytest.fixture(scope="module")
def contrast_runs(tiny_fp8_checkpoint, tiny_bf16_checkpoint, tmp_path_factory):
    """Per mode: our latents, the reference's, and our trace."""
    folder = tmp_path_factory.mktemp("contrast")
    runs = {}
    for index, (name, (step_policy, steps, understanding)) in enumerate(MODES.items()):
        checkpoint = copy_checkpoint(
            tiny_fp8_checkpoint,
            folder / str(index),
            step_policy,
            input_scale_divisor=16.0,
            uniform_schedule=True,
        )
        denoised, request = run(checkpoint)
        reference = FP8Reference(tiny_bf16_checkpoint, checkpoint)

        def evaluate(i, latents, timestep, reference=reference, request=request, name=name):
            _, steps, understanding = MODES[name]
            reference.set_modes(understanding_high=understanding, generation_high=steps[i])
            return velocity(reference.model, latents, list(request.prompt_ids), timestep)[0]

        expected = reference_latents(checkpoint, request, evaluate)
        runs[name] = (denoised.latents, expected, denoised.trace)
    return runs


@pytest.mark.parametrize("name", MODES)
def test_a_run_follows_its_own_reference_and_no_other(contrast_runs, name):
    latents, expected, _ = contrast_runs[name]
    assert latents.dtype == torch.float32 and bool(torch.isfinite(latents).all())
    own = relative_error(latents, expected)
    assert own <= 2e-3, f"{name}: {own:.2e} from its own reference"
    for other in MODES.keys() - {name}:
        distance = relative_error(latents, contrast_runs[other][1])
        assert distance >= 1e-2, f"{name} is {distance:.2e} from the reference of {other}"


@pytest.mark.parametrize("name", MODES)
def test_the_trace_names_the_mode_of_every_step_and_tower(contrast_runs, name):
    _, steps, understanding = MODES[name]
    trace = contrast_runs[name][2]
    assert [r.generation for r in trace] == ["w8a16" if s else "w8a8" for s in steps]
    assert {r.understanding for r in trace} == {"w8a16" if understanding else "w8a8"}


def test_an_all_16_bit_run_is_bit_equal_to_diffusers_with_dequantised_weights(
    tiny_fp8_checkpoint, tiny_bf16_checkpoint, tmp_path
):
    checkpoint = copy_checkpoint(tiny_fp8_checkpoint, tmp_path / "fp8", policy(99, 99))
    denoised, request = run(checkpoint)
    reference = use_fp32_swiglu(dequantised_transformer(tiny_bf16_checkpoint, checkpoint))
    expected = reference_latents(
        checkpoint,
        request,
        lambda i, latents, t: velocity(reference, latents, list(request.prompt_ids), t)[0],
    )
    assert torch.equal(denoised.latents.view(torch.int32), expected.view(torch.int32))
