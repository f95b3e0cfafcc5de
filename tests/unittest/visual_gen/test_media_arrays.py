# SPDX-License-Identifier: Apache-2.0
"""Arrays and tensors to uint8 RGB."""

import numpy as np
import pytest
import torch

from tensorrt_llm.visual_gen.media_arrays import over_white
from tensorrt_llm.visual_gen.media_policy import MediaError, MediaPolicy
from tensorrt_llm.visual_gen.media_refs import load_image, load_video
from tests.support.media_files import moving, pattern


def test_uint8_rgb_is_taken_as_it_is_and_copied():
    pixels = pattern()
    result = load_image(pixels)
    assert np.array_equal(result.pixels, pixels)
    assert (result.source_height, result.source_width, result.format) == (48, 64, None)
    assert result.applied == () and result.pixels.flags.c_contiguous
    pixels[...] = 0
    assert result.pixels.any()


def test_strided_and_read_only_arrays_serve_too():
    pixels = pattern(96, 128)
    view = pixels[::2, ::-2]
    view.flags.writeable = False
    assert np.array_equal(load_image(view).pixels, pixels[::2, ::-2])


def test_grey_with_and_without_a_channel_axis_becomes_rgb():
    grey = pattern()[..., 0]
    for value in (grey, grey[..., None], torch.from_numpy(grey)):
        result = load_image(value)
        assert np.array_equal(result.pixels, np.stack([grey] * 3, -1))
        assert result.applied == ("grey to RGB",)


def test_every_pair_of_colour_and_alpha_is_composited_on_white_exactly():
    colour, alpha = np.meshgrid(np.arange(256), np.arange(256))
    rgba = np.stack([colour, colour, 255 - colour, alpha], -1).astype(np.uint8)
    exact = (colour * alpha + 255 * (255 - alpha)) / 255
    result = load_image(rgba)
    assert np.array_equal(result.pixels[..., 0], np.floor(exact + 0.5).astype(np.uint8))
    assert result.applied == ("alpha over white",)
    opaque, changed = over_white(np.full((2, 2, 4), 255, np.uint8))
    assert not changed and (opaque == 255).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_of_every_code_round_trip(dtype):
    codes = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    result = load_image((codes / 255).astype(dtype))
    assert np.array_equal(result.pixels, codes)
    assert result.applied == ("float 0..1 to 8 bits",)


def test_tensors_of_every_float_type_round_trip():
    pixels = torch.from_numpy(pattern())
    assert np.array_equal(load_image(pixels).pixels, pixels.numpy())
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert np.array_equal(load_image((pixels.double() / 255).to(dtype)).pixels, pixels.numpy())
    halves = torch.full((16, 16, 3), 0.5, dtype=torch.bfloat16, requires_grad=True)
    assert (load_image(halves).pixels == 128).all()  # 127.5 to even


@pytest.mark.parametrize("value", [-0.001, 1.001, np.inf, np.nan])
def test_one_float_outside_its_range_is_refused(value):
    pixels = np.zeros((16, 16, 3), np.float32)
    pixels[3, 4, 1] = value
    with pytest.raises(MediaError, match="outside their range.*0 to 1"):
        load_image(pixels)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, np.bool_, np.complex64])
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(MediaError, match=f"uint8 or floating point, found {np.dtype(dtype)}"):
        load_image(np.zeros((16, 16, 3), dtype))


def test_a_remedy_is_named_where_the_channels_come_first():
    with pytest.raises(MediaError, match="permute"):
        load_image(torch.zeros(3, 16, 20))
    with pytest.raises(MediaError, match="permute"):
        load_video(torch.zeros(5, 3, 16, 20), num_frames=5)
    with pytest.raises(MediaError) as caught:
        load_image(np.zeros((16, 20, 2), np.uint8))
    assert "permute" not in str(caught.value)


@pytest.mark.parametrize("keep", ["first", "last"])
@pytest.mark.parametrize(
    "wrap", [np.asarray, torch.from_numpy, list], ids=["array", "tensor", "list"]
)
def test_the_frames_of_one_end_are_taken_in_order(keep, wrap):
    clip = moving(9)
    for count in (1, 5, 9, 20):
        expected = clip[:count] if keep == "first" else clip[-count:]
        result = load_video(wrap(clip), num_frames=count, keep=keep)
        assert np.array_equal(result.frames, expected)
        assert result.source_frames == 9
        assert result.applied == (f"{keep} {min(count, 9)} frames",)
        assert result.frame_rate is result.timestamps is result.duration is None


def test_a_clip_of_another_kind_is_converted_like_a_picture():
    clip = moving(3)
    grey = load_video(clip[..., :1], num_frames=3).frames
    assert np.array_equal(grey, clip[..., :1].repeat(3, -1))
    rgba = np.concatenate([clip, np.full((3, 48, 64, 1), 0, np.uint8)], -1)
    assert (load_video(rgba, num_frames=3).frames == 255).all()
    assert np.array_equal(load_video(clip / 255, num_frames=3).frames, clip)


def test_only_the_frames_that_are_used_are_looked_at():
    clip = np.full((6, 16, 16, 3), np.nan, np.float32)
    clip[-2:] = 1
    assert (load_video(clip, num_frames=2, keep="last").frames == 255).all()
    assert (load_video(list(clip), num_frames=2, keep="last").frames == 255).all()
    with pytest.raises(MediaError):
        load_video(clip, num_frames=2, keep="first")


def test_a_bad_item_of_a_list_is_named_by_its_place():
    with pytest.raises(MediaError, match="video_reference, list, item 3"):
        load_video([*moving(3), "a.png"], num_frames=2, keep="last")


def test_a_policy_that_allows_single_frames_accepts_them():
    policy = MediaPolicy(min_video_frames=1)
    assert load_video(moving(1), num_frames=5, policy=policy).frames.shape == (1, 48, 64, 3)
