# SPDX-License-Identifier: Apache-2.0
"""Values that contradict each other: what is blamed, and that the remedy helps."""

from dataclasses import replace

import pytest

from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import SourceInfo
from tensorrt_llm._torch.visual_gen.models.cosmos3.request_rules import MAX_SOUND_SECONDS
from tests.support.cosmos3_requests import FOUR_STEPS, NANO, resolve

SOUND = {"extra_params": {"enable_audio": True}}
SMALL = {"height": 64, "width": 64}
CLIP = {"video_reference": "clip.mp4"}


def refusal(**params) -> str:
    with pytest.raises(ValueError, match="^Parameter validation failed: ") as error:
        resolve(**params)
    return str(error.value)


def test_sound_that_is_too_long_is_refused_with_its_length_and_the_ways_out():
    message = refusal(**SMALL, num_frames=1001, frame_rate=0.01, **SOUND)
    assert "num_frames / frame_rate: expected at most 120 seconds with enable_audio" in message
    assert "found '100100 seconds'" in message
    assert "Remedy: raise frame_rate, ask for fewer frames, or leave enable_audio out." in message


def test_the_limit_on_sound_is_a_length_and_the_frames_are_those_that_will_run():
    assert MAX_SOUND_SECONDS == 120
    assert resolve(num_frames=121, frame_rate=121 / 120, **SOUND).num_frames == 121
    # 118 frames are run as 121.
    assert "found '121 seconds'" in refusal(num_frames=118, frame_rate=1, **SOUND)


def test_a_silent_clip_may_be_as_slow_as_frame_rate_goes():
    assert resolve(**SMALL, num_frames=1001, frame_rate=0.01).frame_rate == 0.01


def test_a_clip_whose_rate_comes_from_its_reference_has_the_limit_too():
    slow = SourceInfo(640, 480, 0.5, 100)
    assert "found '378 seconds'" in refusal(**CLIP, **SOUND, source=slow)
    assert resolve(**CLIP, **SOUND, frame_rate=24, source=slow).enable_audio


@pytest.mark.parametrize("rate", [0, -1, "24", True])
def test_a_bad_rate_is_not_blamed_for_a_length_as_well(rate):
    message = refusal(**SMALL, num_frames=1001, frame_rate=rate, **SOUND)
    assert " frame_rate: expected" in message and "seconds" not in message


def test_a_checkpoint_without_sound_is_not_asked_for_a_shorter_one():
    silent = replace(NANO, has_sound=False)
    message = refusal(**SMALL, num_frames=1001, frame_rate=1, traits=silent, **SOUND)
    assert "enable_audio: expected False" in message and "seconds" not in message


@pytest.mark.parametrize(
    "guiding",
    [
        {"negative_prompt": "blurry"},
        {"extra_params": {"guidance_interval": [0, 500]}},
        {"negative_prompt": "blurry", "guidance_scale": 1.0},
    ],
    ids=str,
)
def test_a_4_step_build_does_not_advise_the_guidance_that_it_refuses(guiding):
    message = refusal(num_frames=1, traits=FOUR_STEPS, **guiding)
    assert "expected none with a 4-step build, which has no guidance" in message
    assert "raise guidance_scale" not in message
    assert "leave out what a 4-step build has fixed, or load a base build." in message


def test_a_4_step_build_lists_what_guides_beside_a_guidance_scale():
    extra = {"guidance_interval": [0, 500]}
    message = refusal(
        num_frames=1, traits=FOUR_STEPS, guidance_scale=6, negative_prompt="x", extra_params=extra
    )
    for name in ("guidance_scale", "negative_prompt", "extra_params.guidance_interval"):
        assert f" {name}: expected" in message


@pytest.mark.parametrize("task", [{}, CLIP], ids=str)
def test_a_task_that_a_4_step_build_lacks_is_all_that_is_wrong(task):
    message = refusal(traits=FOUR_STEPS, **task)
    assert message.startswith("Parameter validation failed: task: expected text_to_image or ")
    assert message.count(": expected") == 1


def test_values_that_were_given_are_judged_in_a_task_that_a_4_step_build_lacks_too():
    message = refusal(traits=FOUR_STEPS, num_inference_steps=35, guidance_scale=6)
    assert "num_inference_steps: expected 4" in message and "found 35" in message
    assert "guidance_scale: expected 1.0" in message and "found 6.0" in message


@pytest.mark.parametrize("bad", [{"num_inference_steps": 0}, {"guidance_scale": "6"}], ids=str)
def test_a_value_out_of_range_is_blamed_once_by_a_4_step_build(bad):
    assert refusal(traits=FOUR_STEPS, num_frames=1, **bad).count(": expected") == 1


@pytest.mark.parametrize("scale", ["6", -1, True])
def test_what_guides_is_not_blamed_where_the_scale_is_unreadable(scale):
    extra = {"guidance_interval": [0, 500]}
    message = refusal(guidance_scale=scale, negative_prompt="blurry", extra_params=extra)
    assert message.count(": expected") == 1 and " guidance_scale: expected" in message
