# SPDX-License-Identifier: Apache-2.0
"""What a request takes from its reference: size and rate."""

import math

import pytest

from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import SourceInfo
from tensorrt_llm._torch.visual_gen.models.cosmos3.source_following import (
    RESOLUTIONS,
    nearest_resolution,
)
from tests.support.cosmos3_requests import FOUR_STEPS, NANO, resolve

IMAGE = {"image_reference": "picture.png"}
CLIP = {"video_reference": "clip.mp4"}


def picture(width, height):
    return SourceInfo(width, height, None, None)


def clip(rate=30.0, width=1920, height=1080):
    return SourceInfo(width, height, rate, 300)


def test_tiers_are_names_of_exact_sizes():
    # cosmos3.md E.1. "256" is a square's side only: no other size of that tier has it as a height.
    assert RESOLUTIONS["256"]["16:9"] == (320, 192) and RESOLUTIONS["256"]["4:3"] == (320, 256)
    assert RESOLUTIONS["480"]["16:9"] == (832, 480) and RESOLUTIONS["480"]["1:1"] == (640, 640)
    assert RESOLUTIONS["704"]["16:9"] == (1280, 704) and RESOLUTIONS["704"]["4:3"] == (1088, 832)
    assert RESOLUTIONS["720"]["16:9"] == (1280, 720) and RESOLUTIONS["720"]["4:3"] == (1104, 832)
    for tier in RESOLUTIONS.values():
        assert list(tier) == ["16:9", "4:3", "1:1", "3:4", "9:16"]
        for aspect, (width, height) in tier.items():
            assert width % 16 == height % 16 == 0
            a, b = aspect.split(":")
            assert tier[f"{b}:{a}"] == (height, width)
            nearest = min(tier, key=lambda name: abs(math.log(width / height / ratio(name))))
            assert nearest == aspect


def ratio(aspect: str) -> float:
    a, b = aspect.split(":")
    return int(a) / int(b)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1920, 1080), (1280, 720)),
        ((3000, 1000), (1280, 720)),
        ((640, 480), (1104, 832)),
        ((16, 16), (960, 960)),
        ((1000, 1100), (960, 960)),
        ((3, 4), (832, 1104)),
        ((1080, 1920), (720, 1280)),
        ((10, 1000), (720, 1280)),
    ],
)
@pytest.mark.parametrize("reference", [IMAGE, CLIP])
def test_a_request_without_a_size_has_the_trained_one_nearest_in_aspect(reference, size, expected):
    values = resolve(**reference, source=picture(*size))
    assert (values.width, values.height) == expected


def test_nearness_is_measured_in_the_logarithm_of_the_aspect():
    # Between 1:1 and 4:3 of the tier (1104/832) the border is the geometric mean.
    border = math.sqrt(1104 / 832)
    assert nearest_resolution(border * 0.999, "720") == (960, 960)
    assert nearest_resolution(border * 1.001, "720") == (1104, 832)
    assert border < (1 + 1104 / 832) / 2


@pytest.mark.parametrize("traits", [NANO, FOUR_STEPS])
def test_a_size_of_the_request_wins(traits):
    values = resolve(**IMAGE, traits=traits, source=picture(100, 300), height=256, width=320)
    assert (values.height, values.width) == (256, 320)


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ({"height": 480}, (480, 640)),
        ({"width": 640}, (480, 640)),
        ({"height": 720}, (720, 960)),
        ({"width": 1280}, (960, 1280)),
        ({"height": 16}, (16, 16)),
        ({"height": 4096}, (4096, 4096)),
    ],
)
def test_one_side_keeps_the_aspect_of_the_source_to_16_pixels(side, expected):
    frames = {"num_frames": 5}
    values = resolve(**IMAGE, **frames, source=picture(400, 300), **side)
    assert (values.height, values.width) == expected


def test_text_alone_has_one_side_of_the_tasks_default():
    assert (resolve(height=480).height, resolve(height=480).width) == (480, 1280)


def test_a_bad_size_is_named_with_a_source_too():
    for value in ("720p", 0, True, 100):
        with pytest.raises(ValueError, match="Parameter validation failed: height: expected"):
            resolve(**IMAGE, source=picture(400, 300), height=value)


def test_video_to_video_has_the_rate_of_the_source():
    assert resolve(**CLIP, source=clip(29.97)).frame_rate == 29.97
    assert resolve(**CLIP, source=clip(29.97)).num_frames == 189


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({"frame_rate": 16}, 16.0), ({"num_frames": 17}, 24.0), ({"num_frames": 189}, 24.0)],
)
def test_a_rate_or_a_length_of_the_request_wins(asked, expected):
    assert resolve(**CLIP, source=clip(10.0), **asked).frame_rate == expected


def test_a_source_that_does_not_say_its_rate_has_the_tasks():
    assert resolve(**CLIP, source=clip(None)).frame_rate == 24.0


def test_image_to_video_has_the_tasks_rate():
    assert resolve(**IMAGE, source=picture(400, 300)).frame_rate == 24.0


@pytest.mark.parametrize("rate", [240.0, 0.0, math.nan, math.inf])
def test_a_rate_of_the_source_that_no_video_can_have_is_named_as_the_sources(rate):
    with pytest.raises(ValueError, match="frame_rate, which follows video_reference,: expected"):
        resolve(**CLIP, source=clip(rate))
    assert resolve(**CLIP, source=clip(rate), frame_rate=24.0).frame_rate == 24.0


@pytest.mark.parametrize("rate", [240.0, 0.0])
def test_the_remedy_for_the_rate_of_a_source_is_to_give_one(rate):
    with pytest.raises(ValueError, match="Remedy: give frame_rate, from 0.01 to 120.") as error:
        resolve(**CLIP, source=clip(rate))
    assert "leave the fields out" not in str(error.value)


def test_a_side_that_is_still_to_follow_the_source_is_not_counted_as_the_default():
    assert 2800 * 1280 * 189 > 2**29 > 2800 * 928 * 189
    resolve(**IMAGE, height=2800)
    assert resolve(**IMAGE, height=2800, source=picture(200, 600)).width == 928
    resolve(**IMAGE, width=2800)
    with pytest.raises(ValueError, match="height . width . num_frames: expected at most 53687"):
        resolve(**IMAGE, height=2800, source=picture(600, 400))


def test_a_clip_that_no_source_can_make_small_enough_is_refused_before_it_is_read():
    for task in (IMAGE, CLIP):
        with pytest.raises(ValueError, match="height . width . num_frames: expected at most 53687"):
            resolve(**task, num_frames=1001)


def test_text_alone_counts_the_default_side():
    with pytest.raises(ValueError, match="height . width . num_frames"):
        resolve(height=2800)
