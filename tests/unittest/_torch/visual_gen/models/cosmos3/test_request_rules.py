# SPDX-License-Identifier: Apache-2.0
"""Values that contradict each other: what is blamed, and that the remedy helps."""

from dataclasses import replace

import pytest

from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import SourceInfo
from tensorrt_llm._torch.visual_gen.models.cosmos3.request_rules import MAX_SOUND_SECONDS
from tests.support.cosmos3_requests import NANO, resolve

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
