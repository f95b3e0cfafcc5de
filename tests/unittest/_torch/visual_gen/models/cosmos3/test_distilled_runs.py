# SPDX-License-Identifier: Apache-2.0
"""Whole runs of a 4-step build: the tiny checkpoint with its scheduler folder replaced."""

import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniTransformer

from tensorrt_llm import VisualGen, VisualGenArgs, VisualGenParams
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tests.support.cosmos3_requests import T_LIST
from tests.support.diffusers_oracle import relative_error, velocity

pytestmark = pytest.mark.cosmos3

PROMPT = "A robot arm folds a towel"
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "stochastic_sampling": True,
    "fixed_step_requires_explicit_sigmas": True,
    "fixed_step_sampler_config": {"t_list": T_LIST, "sample_type": "sde"},
}
PICTURE = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
TASKS = {
    "text_to_image": {"height": 80, "width": 112, "num_frames": 1},
    "image_to_video": {
        "height": 64,
        "width": 96,
        "num_frames": 9,
        "frame_rate": 16.0,
        "image_reference": PICTURE,
    },
}


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def distil(checkpoint, path):
    """Copy a base checkpoint and give it what a published 4-step one has, and lacks."""
    shutil.copytree(checkpoint, path)
    (path / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    edit_json(
        path / "model_index.json",
        lambda index: index.update(
            scheduler=["diffusers", SCHEDULER["_class_name"]], default_use_system_prompt=True
        ),
    )
    return path


@pytest.fixture(scope="module")
def fp32_checkpoint(tiny_bf16_checkpoint, tmp_path_factory):
    path = distil(tiny_bf16_checkpoint, tmp_path_factory.mktemp("distilled") / "fp32")
    edit_json(path / "transformer" / "config.json", lambda config: config.update(dtype="float32"))
    return path


@pytest.fixture(scope="module")
def pipeline(fp32_checkpoint):
    args = VisualGenArgs(model=str(fp32_checkpoint), compilation_config={"skip_warmup": True})
    return PipelineLoader(args, device="cpu").load()


@pytest.fixture(scope="module")
def visual_gen(tiny_fp8_checkpoint, tmp_path_factory):
    """Static FP8, without a step policy, as the published 4-step builds are (cosmos3.md A.1)."""
    path = distil(tiny_fp8_checkpoint, tmp_path_factory.mktemp("distilled") / "fp8")
    edit_json(
        path / "transformer" / "config.json",
        lambda config: config["quantization_config"].pop("runtime"),
    )
    args = VisualGenArgs(compilation_config={"resolutions": [[32, 32]], "num_frames": [1, 5]})
    with VisualGen(str(path), args) as visual_gen:
        yield visual_gen


def reference_run(checkpoint, request, picture):
    """The distilled loop once more, with diffusers' transformer and VAE (cosmos3.md E.3)."""
    model = Cosmos3OmniTransformer.from_pretrained(checkpoint / "transformer").float()
    generator = torch.Generator().manual_seed(request.values.seed)
    x = torch.randn((1, 48, *request.values.latent_shape), generator=generator)
    given, clean = (), None
    if picture is not None:
        vae = AutoencoderKLWan.from_pretrained(checkpoint / "vae", low_cpu_mem_usage=False)
        frame = torch.from_numpy(picture).float().permute(2, 0, 1)[None, :, None] / 127.5 - 1
        with torch.no_grad():
            clean = vae.encode(frame).latent_dist.mode()
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        clean = (clean - mean) / std
        given, x[:, :, :1] = (0,), clean
    samples = []
    for sigma, next_sigma in zip(T_LIST, (*T_LIST[1:], 0.0), strict=True):
        v, _ = velocity(
            model,
            x,
            list(request.prompt_ids),
            1000 * sigma,
            fps=request.values.frame_rate,
            clean_frames=given,
        )
        x = x - sigma * v
        if next_sigma > 0:
            x = (1 - next_sigma) * x + next_sigma * torch.randn(x.shape, generator=generator)
        if clean is not None:
            x[:, :, :1] = clean
        samples.append(x.clone())
    return samples


@pytest.mark.parametrize("task", TASKS)
def test_every_latent_equals_the_reference(pipeline, fp32_checkpoint, task):
    request = pipeline.prepare_request(PROMPT, VisualGenParams(**TASKS[task], seed=3))
    assert request.values.task == task and request.negative_ids is None
    found = []
    done = pipeline.denoise(request, on_latents=lambda i, x: found.append(x.clone()))
    expected = reference_run(fp32_checkpoint, request, TASKS[task].get("image_reference"))
    assert len(found) == len(expected) == 4
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    assert max(errors) <= 1e-5, errors
    assert torch.equal(done.latents, found[-1])
    assert done.sigmas == pytest.approx((*T_LIST, 0.0))
    assert [record.timestep for record in done.trace] == pytest.approx([1000 * t for t in T_LIST])
    if task == "image_to_video":
        firsts = torch.stack([x[:, :, 0] for x in found]).view(torch.int32)
        assert (firsts == firsts[0]).all()


def test_the_builds_own_system_prompt_flag_is_read(pipeline):
    values = pipeline.prepare_request(PROMPT, VisualGenParams(**TASKS["text_to_image"])).values
    assert values.use_system_prompt is True


@pytest.mark.parametrize("task", TASKS)
def test_a_static_fp8_run_is_native_in_all_four_steps(visual_gen, task):
    output = visual_gen.generate(PROMPT, VisualGenParams(**TASKS[task], seed=3))
    trace = output.metadata["precision_trace"]
    assert [step["generation"] for step in trace] == ["w8a8"] * 4
    assert [step["understanding"] for step in trace] == ["w8a8"] * 4
    assert [step["branches"] for step in trace] == [1] * 4
    report = output.metadata["request"]
    assert (report["num_inference_steps"], report["guidance_scale"]) == (4, 1.0)
    assert output.metadata["sigmas"] == pytest.approx([*T_LIST, 0.0])
    pixels = output.image if task == "text_to_image" else output.video
    again = visual_gen.generate(PROMPT, VisualGenParams(**TASKS[task], seed=3))
    assert torch.equal(pixels, again.image if task == "text_to_image" else again.video)


def test_each_of_several_images_is_one_that_can_be_made_alone(visual_gen):
    several = VisualGenParams(**TASKS["text_to_image"], seed=3, num_images_per_prompt=2)
    images = visual_gen.generate(PROMPT, several).image
    for index, image in enumerate(images):
        alone = VisualGenParams(**TASKS["text_to_image"], seed=3 + index)
        assert torch.equal(visual_gen.generate(PROMPT, alone).image, image)
    assert not torch.equal(*images)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("num_inference_steps", {"num_inference_steps": 35}),
        ("guidance_scale", {"guidance_scale": 6.0}),
        ("negative_prompt", {"negative_prompt": "blurry"}),
        ("extra_params.flow_shift", {"extra_params": {"flow_shift": 5.0}}),
        ("extra_params.guidance_interval", {"extra_params": {"guidance_interval": [0, 1]}}),
        ("extra_params.enable_audio", {"extra_params": {"enable_audio": True}}),
        ("task", {"num_frames": 9}),
        ("task", {"num_frames": 9, "video_reference": "unread.mp4"}),
    ],
)
def test_what_a_distilled_build_can_not_do_is_refused_by_name(visual_gen, name, params):
    request = VisualGenParams(**{"height": 64, "width": 64, "num_frames": 1} | params)
    with pytest.raises(ValueError, match=f"[:;] {name}: expected"):
        visual_gen.generate(PROMPT, request)
