# SPDX-License-Identifier: Apache-2.0
"""Whole runs against diffusers 0.42.1 on the same weights, tokens and noise; and repeatability."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler

from tensorrt_llm.visual_gen.output import RequestCancelledError
from tensorrt_llm.visual_gen.params import VisualGenParams
from tests.support.diffusers_oracle import relative_error, velocity
from tests.support.pipelines import run_oracle, run_ours

pytestmark = pytest.mark.cosmos3

PROMPT = "A robot arm folds a towel"
# 24 fps would make the temporal modulation an identity; 5 x 7 latents are padded to whole patches.
SHAPES = {
    "image": {"height": 80, "width": 112, "num_frames": 1},
    "video": {"height": 64, "width": 96, "num_frames": 9, "frame_rate": 16.0},
}


def request_for(pipeline, medium, **params):
    extra = {"guidance_interval": [0, 1000]} if medium == "image" else {}
    extra |= params.pop("extra_params", {})
    values = SHAPES[medium] | {"num_inference_steps": 6, "guidance_scale": 6.0, "seed": 3}
    return pipeline.prepare_request(PROMPT, VisualGenParams(**values | params, extra_params=extra))


@pytest.mark.parametrize("medium", SHAPES)
def test_every_latent_of_a_guided_run_equals_diffusers(fp32_pipeline, oracle, medium, monkeypatch):
    request = request_for(fp32_pipeline, medium)
    assert len(request.prompt_ids) != len(request.negative_ids)
    found, done = run_ours(fp32_pipeline, request)
    expected, _, _ = run_oracle(oracle, request, monkeypatch)
    assert len(found) == len(expected) == 6
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    assert max(errors) <= 1e-5, errors
    assert torch.equal(done.latents, found[-1])
    assert [record.timestep for record in done.trace] == oracle.scheduler.timesteps.tolist()
    assert list(done.sigmas) == oracle.scheduler.sigmas.tolist()


@pytest.mark.parametrize("medium", SHAPES)
def test_pixels_equal_diffusers(fp32_pipeline, oracle, medium, monkeypatch):
    request = request_for(fp32_pipeline, medium, num_inference_steps=2)
    output = fp32_pipeline.generate(request)
    _, video, _ = run_oracle(oracle, request, monkeypatch, output_type="np")
    expected = (video * 255).round().astype(np.uint8)
    found = output.image[None] if medium == "image" else output.video
    assert found.shape == expected.shape
    # The latents agree to 1e-7, so a value on the edge of two codes may fall to either side.
    difference = np.abs(found.numpy().astype(int) - expected)
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3


def test_prompt_tokens_equal_diffusers_when_its_wording_is_given_in_full(fp32_pipeline, oracle):
    off = {"use_duration_template": False, "use_resolution_template": False}
    extra = off | {"use_system_prompt": True}
    theirs, theirs_negative = oracle.tokenize_prompt(
        PROMPT, "blurry", num_frames=9, height=64, width=96, fps=16.0, use_system_prompt=True
    )
    length = "The video is{} 0.6 seconds long and is{} of 16 FPS."
    both = length + " This video is{} of 64x96 resolution."
    wording, inverse = (both.format(word, word, word) for word in ("", " not"))
    request = fp32_pipeline.prepare_request(
        f"{PROMPT}. {wording}",
        VisualGenParams(
            **SHAPES["video"], negative_prompt=f"blurry. {inverse}", extra_params=extra
        ),
    )
    assert list(request.prompt_ids) == theirs
    assert list(request.negative_ids) == theirs_negative


@pytest.mark.parametrize("guidance", [1.0, 0.5])
def test_without_guidance_one_branch_runs(fp32_pipeline, oracle, guidance, monkeypatch):
    request = request_for(fp32_pipeline, "video", guidance_scale=guidance)
    found, done = run_ours(fp32_pipeline, request)
    assert request.negative_ids is None and {record.branches for record in done.trace} == {1}
    unguided = replace(request, values=replace(request.values, guidance_scale=1.0))
    expected, _, _ = run_oracle(oracle, unguided, monkeypatch)
    assert relative_error(found[-1], expected[-1]) <= 1e-5


def test_guidance_interval_equals_a_loop_by_hand(fp32_pipeline, oracle):
    scheduler = UniPCMultistepScheduler.from_config(oracle.scheduler.config)
    scheduler.set_timesteps(6)
    # Both ends of the interval are timesteps of the schedule, and inside.
    _, _, high, _, low, _ = scheduler.timesteps.tolist()
    request = request_for(fp32_pipeline, "image", extra_params={"guidance_interval": [low, high]})
    found, done = run_ours(fp32_pipeline, request)
    assert [record.branches for record in done.trace] == [1, 1, 2, 2, 2, 1]

    latents = torch.randn((1, 48, 1, 5, 7), generator=torch.Generator().manual_seed(3))
    for i, timestep in enumerate(scheduler.timesteps):
        branch = [
            velocity(oracle.transformer, latents, list(ids), timestep.item(), fps=None)[0]
            for ids in (request.prompt_ids, request.negative_ids)
        ]
        v = branch[0]
        if low <= timestep <= high:
            v = branch[1] + 6.0 * (branch[0] - branch[1])
        latents = scheduler.step(v, timestep, latents, return_dict=False)[0]
        assert relative_error(found[i], latents) <= 1e-5


def bits(latents):
    return torch.stack([x.view(torch.int32) for x in latents])


def test_a_seed_gives_the_same_bits_twice_and_another_seed_other_ones(fp8_pipeline):
    first, _ = run_ours(fp8_pipeline, request_for(fp8_pipeline, "video"))
    again, _ = run_ours(fp8_pipeline, request_for(fp8_pipeline, "video"))
    other, _ = run_ours(fp8_pipeline, request_for(fp8_pipeline, "video", seed=4))
    assert torch.equal(bits(first), bits(again))
    assert not torch.equal(bits(first), bits(other))


FRESH_PROCESS = """
import sys, torch
from tests.support import pipelines
from tests.unittest._torch.visual_gen.models.cosmos3 import test_pipeline_parity as parity
torch.set_num_threads(int(sys.argv[3]))
pipeline = pipelines.load_pipeline(sys.argv[1])
latents, _ = pipelines.run_ours(pipeline, parity.request_for(pipeline, "video"))
torch.save(latents, sys.argv[2])
"""


@pytest.fixture(scope="module")
def fresh_process_latents(tiny_fp8_checkpoint, tmp_path_factory):
    """The request of ``request_for`` as the first one of another process."""
    out = tmp_path_factory.mktemp("fresh") / "latents.pt"
    threads = str(torch.get_num_threads())
    command = [sys.executable, "-c", FRESH_PROCESS, tiny_fp8_checkpoint, out, threads]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[6])
    return torch.load(out)


def raise_at_step_3(step, latents):
    if step == 3:
        raise ZeroDivisionError("a caller's mistake")


def disturb_nothing(pipeline):
    pass


def disturb_by_error(pipeline):
    request = request_for(pipeline, "image", seed=9, num_inference_steps=8)
    with pytest.raises(ZeroDivisionError):
        pipeline.denoise(request, on_latents=raise_at_step_3)


def disturb_by_cancel(pipeline):
    steps = []
    request = request_for(pipeline, "video", extra_params={"flow_shift": 10.0}, seed=9)
    with pytest.raises(RequestCancelledError):
        pipeline.generate(
            request,
            on_step=lambda done, total: steps.append(done),
            should_cancel=lambda: len(steps) == 2,
        )
    assert steps == [1, 2]


@pytest.mark.parametrize("disturb", [disturb_nothing, disturb_by_error, disturb_by_cancel])
def test_a_request_equals_a_fresh_process_whatever_came_before(
    fp8_pipeline, fresh_process_latents, disturb
):
    disturb(fp8_pipeline)
    latents, _ = run_ours(fp8_pipeline, request_for(fp8_pipeline, "video"))
    assert torch.equal(bits(latents), bits(fresh_process_latents))
