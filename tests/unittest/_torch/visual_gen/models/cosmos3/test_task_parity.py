# SPDX-License-Identifier: Apache-2.0
"""Every task against diffusers 0.42.1: the same weights, tokens, noise and reference, in FP32.

diffusers masks the velocity of given frames and lets the solver carry them along; here they are
written again after each step. In exact arithmetic that is the same.
"""

from itertools import permutations

import numpy as np
import pytest
import torch

from tensorrt_llm.visual_gen.params import VisualGenParams
from tests.support.diffusers_oracle import relative_error
from tests.support.pipelines import run_oracle, run_ours

pytestmark = pytest.mark.cosmos3

STEPS = 3
# 24 fps would make the temporal modulation an identity; odd latents are padded to whole patches.
IMAGE = {"height": 80, "width": 112, "num_frames": 1}
VIDEO = {"height": 48, "width": 80, "num_frames": 13, "frame_rate": 16.0}


def pictures(count: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (count, height, width, 3), np.uint8)


PICTURE = pictures(1, 70, 90)[0]
# Of the target's size: another one diffusers would stretch, and here it is cropped.
CLIP = pictures(7, 48, 80)
AS_FLOATS = CLIP.astype(np.float32) / 255

# task -> (our values, our extra_params, diffusers' arguments, latent frames that are given)
TASKS = {
    "text_to_image": (IMAGE, {"guidance_interval": [0, 1000]}, {}, []),
    "text_to_video": (VIDEO, {}, {}, []),
    "image_to_video": (VIDEO | {"image_reference": PICTURE}, {}, {"image": PICTURE}, [0]),
    "video_to_video": (VIDEO | {"video_reference": CLIP}, {}, {"video": AS_FLOATS}, [0, 1]),
    "video_to_video, last": (
        VIDEO | {"video_reference": CLIP},
        {"condition_video_keep": "last", "condition_video_latent_indexes": [1]},
        {
            "video": AS_FLOATS,
            "condition_video_keep": "last",
            "condition_frame_indexes_vision": [1],
        },
        [1],
    ),
    "video_to_video, short": (
        VIDEO | {"video_reference": CLIP},
        {"condition_video_latent_indexes": [0, 3]},
        {"video": AS_FLOATS, "condition_frame_indexes_vision": [0, 3]},
        [0, 3],
    ),
}
CASES = [(task, False) for task in TASKS]
CASES += [(task, True) for task in ("text_to_video", "image_to_video", "video_to_video")]


def prepare(pipeline, task, audio=False, **changes):
    values, extra, _, _ = TASKS[task]
    # The default negative prompt of a video is some thousand tokens, which take diffusers long.
    settings = {"num_inference_steps": STEPS, "guidance_scale": 6.0, "seed": 3}
    settings["negative_prompt"] = "blurry"
    extra = extra | {"enable_audio": audio} if audio else extra
    params = VisualGenParams(**settings | values | changes, extra_params=extra)
    return pipeline.prepare_request("A robot arm folds a towel", params)


@pytest.mark.parametrize(("task", "audio"), CASES)
def test_final_latents_and_sound_equal_diffusers(fp32_pipeline, oracle, task, audio, monkeypatch):
    request = prepare(fp32_pipeline, task, audio)
    assert request.values.task == task.partition(",")[0]
    found, done = run_ours(fp32_pipeline, request)
    _, _, arguments, given = TASKS[task]
    expected, _, sound = run_oracle(oracle, request, monkeypatch, **arguments)
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    assert len(errors) == STEPS and max(errors) <= 1e-5, errors
    assert torch.equal(done.latents, found[-1])
    # The given frames don't hide an error of the others.
    noisy = [i for i in range(done.latents.shape[2]) if i not in given]
    assert relative_error(done.latents[:, :, noisy], expected[-1][:, :, noisy]) <= 1e-5
    assert torch.allclose(done.latents[:, :, given], expected[-1][:, :, given], atol=2e-6)
    if audio:
        assert relative_error(done.sound[0], sound) <= 1e-5
    else:
        assert done.sound is None and sound is None


def test_a_waveform_equals_diffusers_up_to_the_clips_end(fp32_pipeline, oracle, monkeypatch):
    request = prepare(fp32_pipeline, "text_to_video", audio=True, num_inference_steps=2)
    done = fp32_pipeline.denoise(request)
    expected = oracle.decode_sound(done.sound[0])
    found = fp32_pipeline.sound.decode(done.sound, request.values)
    # 13 frames at 16 a second.
    assert found.shape == (2, 39000) and expected.shape == (2, 40320)
    assert torch.equal(found, expected[:, :39000])
    assert found.std() > 1e-3


def test_sound_and_video_are_denoised_jointly(fp32_pipeline):
    """Each attends to the other, so either differs from a run without."""
    silent = fp32_pipeline.denoise(prepare(fp32_pipeline, "text_to_video"))
    joint = fp32_pipeline.denoise(prepare(fp32_pipeline, "text_to_video", audio=True))
    assert relative_error(joint.latents, silent.latents) > 1e-3


# Every ordering of three things is three neighbours of this walk.
WALK = "ABCABACBA"


def test_no_request_changes_the_next_ones_result_in_any_order(fp8_pipeline):
    small = {"height": 32, "width": 48, "num_inference_steps": 2}
    clip = small | {"num_frames": 5}
    requests = {
        "A": prepare(fp8_pipeline, "text_to_image", **small),
        "B": prepare(fp8_pipeline, "image_to_video", audio=True, **clip),
        "C": prepare(fp8_pipeline, "video_to_video", **clip),
    }
    assert {WALK[i : i + 3] for i in range(7)} >= {*map("".join, permutations("ABC"))}
    results = {}
    for name in WALK:
        done = fp8_pipeline.denoise(requests[name])
        parts = (part for part in (done.latents, done.sound) if part is not None)
        bits = torch.cat([part.flatten() for part in parts]).view(torch.int32)
        assert torch.equal(bits, results.setdefault(name, bits)), name
