# SPDX-License-Identifier: Apache-2.0
"""Stopping ``VisualGenOutput.save`` in the middle of a video."""

import numpy as np
import pytest

from tensorrt_llm import VisualGenOutput
from tensorrt_llm.visual_gen import RequestCancelledError


def test_writing_stops_before_the_next_frame_and_leaves_nothing(tmp_path):
    output = VisualGenOutput(video=np.zeros((9, 32, 32, 3), dtype=np.uint8), frame_rate=24.0)
    asked = 0

    def should_stop():
        nonlocal asked
        asked += 1
        return asked == 4

    with pytest.raises(RequestCancelledError, match="while it was encoded"):
        output.save(tmp_path / "clip.mp4", should_stop=should_stop)
    assert asked == 4
    assert not list(tmp_path.iterdir())


def test_a_file_that_nobody_stops_is_complete(tmp_path):
    output = VisualGenOutput(video=np.zeros((5, 32, 32, 3), dtype=np.uint8), frame_rate=24.0)
    path = output.save(tmp_path / "clip.mp4", should_stop=lambda: False)
    assert path.read_bytes() == output.save(tmp_path / "other.mp4").read_bytes()
