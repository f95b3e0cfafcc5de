# SPDX-License-Identifier: Apache-2.0
"""``VisualGen.resolve``: what a request would run with, before it is queued."""

import asyncio

import pytest

from tensorrt_llm import VisualGen, VisualGenArgs, VisualGenParams

pytestmark = pytest.mark.cosmos3


@pytest.fixture(scope="module")
def visual_gen(tiny_fp8_checkpoint):
    args = VisualGenArgs(compilation_config={"skip_warmup": True})
    with VisualGen(str(tiny_fp8_checkpoint), args) as visual_gen:
        yield visual_gen


def test_it_reports_what_a_generation_of_the_same_seed_reports(visual_gen):
    params = VisualGenParams(height=64, width=96, num_frames=8, num_inference_steps=2)
    report = visual_gen.resolve("A robot arm.", params)
    assert report["num_frames"] == 9 and report["frame_rate"] == 24.0
    again = params.model_copy(update={"seed": report["seed"]})
    output = visual_gen.generate("A robot arm.", again)
    assert output.metadata["request"] == report
    # It drew a seed and queued nothing.
    assert visual_gen.resolve("A robot arm.", params)["seed"] != report["seed"]
    assert asyncio.run(visual_gen.get_stats_async())["completed"] == 1


def test_it_refuses_what_a_generation_would_refuse(visual_gen):
    with pytest.raises(ValueError, match="^Parameter validation failed: height.*seed"):
        visual_gen.resolve("a", VisualGenParams(height=100, seed=-1))
    with pytest.raises(ValueError, match="Bad params.*dict"):
        visual_gen.resolve("a", {"height": 64})


def test_it_refuses_what_can_not_fit(visual_gen, monkeypatch):
    params = VisualGenParams(height=64, width=96, num_frames=1)
    assert visual_gen.resolve("a", params)["width"] == 96
    monkeypatch.setattr(visual_gen, "_capacity", 1000)
    with pytest.raises(MemoryError, match="doesn't fit the memory.*height 64, width 96"):
        visual_gen.resolve("a", params)
