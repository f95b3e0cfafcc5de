# SPDX-License-Identifier: Apache-2.0
"""Every task on a GPU with the tiny static FP8 checkpoint: traces, given frames, sound, files."""

import av
import numpy as np
import pytest
import torch

from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs, VisualGenParams
from tests.support.diffusers_oracle import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.cosmos3]

STEPS = 10
SIZE = {"height": 64, "width": 96, "num_inference_steps": STEPS, "seed": 3}
CLIP = np.random.default_rng(5).integers(0, 256, (7, 70, 90, 3), np.uint8)
# Two devices' BF16 kernels: 2e-2 for a run from text (test_gpu_runs.py), and the encoder before it.
TOLERANCE = 3e-2
# task -> (values, latent frames that are given)
TASKS = {
    "text_to_image": ({"num_frames": 1}, []),
    "text_to_video": ({"num_frames": 13}, []),
    "image_to_video": ({"num_frames": 13, "image_reference": CLIP[0]}, [0]),
    "video_to_video": ({"num_frames": 13, "video_reference": CLIP}, [0, 1]),
}
VIDEO_TASKS = [task for task in TASKS if task != "text_to_image"]
CASES = [(task, False) for task in TASKS] + [(task, True) for task in VIDEO_TASKS]


def load(checkpoint, device, **compile_options):
    args = VisualGenArgs(model=str(checkpoint), torch_compile_config=compile_options)
    return PipelineLoader(args, device=device).load(skip_warmup=True)


@pytest.fixture(scope="module")
def eager(tiny_fp8_checkpoint):
    return load(tiny_fp8_checkpoint, "cuda", enable=False)


def prepare(pipeline, task, audio, **changes):
    values = SIZE | TASKS[task][0] | changes
    extra = {"enable_audio": True} if audio else None
    return pipeline.prepare_request(
        "A robot arm pours water", VisualGenParams(**values, extra_params=extra)
    )


@pytest.mark.parametrize(("task", "audio"), CASES)
def test_each_task_runs_with_the_policys_trace_and_gives_a_result(eager, task, audio, tmp_path):
    request = prepare(eager, task, audio)
    output = eager.generate(request)
    trace = output.metadata["precision_trace"]
    assert [r["generation"] for r in trace] == ["w8a16"] * 3 + ["w8a8"] * 4 + ["w8a16"] * 3
    assert {r["understanding"] for r in trace} == {"w8a16"}
    assert output.metadata["request"]["task"] == task
    if task == "text_to_image":
        assert output.image.shape == (64, 96, 3) and output.image.device.type == "cpu"
        return
    assert output.video.shape == (13, 64, 96, 3) and output.video.device.type == "cpu"
    assert (output.audio is not None) == audio
    if audio:
        assert output.audio.shape == (2, 26000) and output.audio.abs().max() <= 1.0
        assert output.audio.device.type == "cpu" and output.audio.std() > 1e-4
    with av.open(str(output.save(tmp_path / "clip.mp4"))) as container:
        assert len(container.streams.audio) == int(audio)
        assert len(list(container.decode(video=0))) == 13


@pytest.mark.parametrize("task", ["image_to_video", "video_to_video"])
def test_given_frames_stay_bit_for_bit_through_all_steps(eager, tiny_fp8_checkpoint, task):
    request, given = prepare(eager, task, False), TASKS[task][1]
    states = []
    done = eager.denoise(request, on_latents=lambda i, x: states.append(x[:, :, given].clone()))
    first = states[0].view(torch.int32)
    assert len(states) == STEPS
    assert all(torch.equal(state.view(torch.int32), first) for state in states)
    assert torch.equal(done.latents[:, :, given].view(torch.int32), first)
    # Encoded on another device, in BF16, which is 1e-2 away from FP32 there.
    on_cpu = load(tiny_fp8_checkpoint, "cpu")
    expected = on_cpu.denoise(prepare(on_cpu, task, False, num_inference_steps=1)).latents
    assert relative_error(states[0].cpu(), expected[:, :, given]) <= TOLERANCE


@pytest.mark.parametrize(("task", "audio"), CASES)
def test_gpu_and_cpu_give_the_same_latents_up_to_bf16_kernels(
    eager, tiny_fp8_checkpoint, task, audio
):
    # Without guidance, which enlarges differences (cosmos3.md G.4).
    values = {"guidance_scale": 1.0, "num_inference_steps": 6}
    on_cpu = load(tiny_fp8_checkpoint, "cpu")
    expected = on_cpu.denoise(prepare(on_cpu, task, audio, **values))
    found = eager.denoise(prepare(eager, task, audio, **values))
    assert relative_error(found.latents.cpu(), expected.latents) <= TOLERANCE
    if audio:
        assert relative_error(found.sound.cpu(), expected.sound) <= TOLERANCE


@pytest.mark.parametrize("task", ["image_to_video", "video_to_video"])
def test_the_loop_never_synchronises_with_given_frames_and_sound(eager, task, monkeypatch):
    request = prepare(eager, task, True)
    eager.denoise(request)  # kernels are compiled by now
    original, steps = type(eager)._denoise_one, []

    def forbid_synchronising(self, *args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(type(eager), "_denoise_one", forbid_synchronising)
    done = eager.denoise(request, on_latents=lambda step, _: steps.append(step))
    assert steps == list(range(STEPS))
    assert bool(done.latents.isfinite().all()) and bool(done.sound.isfinite().all())


def test_no_task_compiles_at_request_time_after_one_warm_up(tiny_fp8_checkpoint):
    compiled = load(tiny_fp8_checkpoint, "cuda", enable=True, enable_fullgraph=True)
    compiled.warmup(resolutions=[(64, 96)], num_frames=[13])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for task, audio in CASES:
        done = compiled.denoise(prepare(compiled, task, audio))
        assert bool(done.latents.isfinite().all()), task
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0, task
