# SPDX-License-Identifier: Apache-2.0
"""How much room a job is expected to take in the media folder."""

import numpy as np
import pytest
import torch

from tensorrt_llm.serve.intake import Submission, encoded_bytes
from tensorrt_llm.visual_gen.output import VisualGenOutput

RESOLVED = {"width": 64, "height": 64, "num_frames": 9, "frame_rate": 0.9}


def submission(**params):
    return Submission(kind="video", prompt="a", params=params, format="mp4", origins={})


@pytest.mark.parametrize("extra", [None, {}, {"enable_audio": None}, {"enable_audio": False}])
def test_a_silent_clip_is_its_pixels(extra):
    assert encoded_bytes(submission(extra_params=extra), RESOLVED) == 64 * 64 * 3 * 9 // 2


def test_the_sound_of_a_clip_counts_by_its_length():
    silent = encoded_bytes(submission(), RESOLVED)
    loud = submission(extra_params={"enable_audio": True})
    short, long = (encoded_bytes(loud, RESOLVED | {"frame_rate": rate}) for rate in (0.9, 0.09))
    assert long - silent == 10 * (short - silent) > 0


@pytest.mark.parametrize("kind", ["noise", "chord"])
def test_a_file_with_sound_takes_no_more_than_was_expected(tmp_path, kind):
    rng = np.random.default_rng(0)
    if kind == "noise":
        sound = rng.uniform(-1, 1, (2, 480_000))
    else:
        times = np.arange(480_000) / 48_000
        sound = 0.3 * np.sin(2 * np.pi * np.outer([440, 557], times))
    output = VisualGenOutput(
        video=torch.zeros(9, 64, 64, 3, dtype=torch.uint8),
        audio=torch.from_numpy(sound).float(),
        frame_rate=0.9,
        audio_sample_rate=48_000,
    )
    path = output.save(tmp_path / "clip.mp4")
    expected = encoded_bytes(submission(extra_params={"enable_audio": True}), RESOLVED)
    assert 0.2 * expected < path.stat().st_size <= expected


def test_pictures_count_each():
    pictures = Submission("image", "a", {"num_images_per_prompt": 3}, "webp", {})
    resolved = {"width": 64, "height": 64, "num_frames": 1, "frame_rate": None}
    assert encoded_bytes(pictures, resolved) == 64 * 64 * 3 * 3
