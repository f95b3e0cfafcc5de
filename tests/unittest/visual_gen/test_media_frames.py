# SPDX-License-Identifier: Apache-2.0
"""Colours, depth, aspect and rotation of video, against formulas and NumPy's own rotations."""

from fractions import Fraction

import av
import numpy as np
import pytest

from tensorrt_llm.visual_gen.media_policy import MediaError, MediaPolicy
from tensorrt_llm.visual_gen.media_refs import load_video
from tests.support.hostile_media import clip_of_two_sizes
from tests.support.media_files import clip_bytes, moving, planes_frame

# Kr and Kb of ITU-T H.273, table 4, by matrix code.
WEIGHTS = {
    1: (0.2126, 0.0722),
    4: (0.30, 0.11),
    5: (0.299, 0.114),
    6: (0.299, 0.114),
    7: (0.212, 0.087),
    9: (0.2627, 0.0593),
}
ONE_FRAME = MediaPolicy(min_video_frames=1)


def rgb_of(planes: np.ndarray, matrix: int, full: bool, bits: int = 8) -> np.ndarray:
    """H.273, 8.3: codes [3, H, W] to RGB 0..255 [H, W, 3], unrounded."""
    y, cb, cr = planes.astype(float)
    scale = 2 ** (bits - 8)
    if full:
        top = 2**bits - 1
        y, cb, cr = y / top, (cb - 128 * scale) / top, (cr - 128 * scale) / top
    else:
        y = (y / scale - 16) / 219
        cb, cr = (cb / scale - 128) / 224, (cr / scale - 128) / 224
    kr, kb = WEIGHTS[matrix]
    red, blue = y + 2 * (1 - kr) * cr, y + 2 * (1 - kb) * cb
    green = (y - kr * red - kb * blue) / (1 - kr - kb)
    return np.stack([red, green, blue], -1).clip(0, 1) * 255


def codes(full: bool, bits: int = 8, height: int = 48, width: int = 64) -> np.ndarray:
    low, high = (0, 255) if full else (16, 235)
    scale = 2 ** (bits - 8)
    generator = np.random.default_rng(3)
    dtype = np.uint8 if bits == 8 else np.uint16
    return generator.integers(low * scale, high * scale + 1, (3, height, width), dtype)


def tagged(matrix: int, colour_range: int, transfer: int = 2):
    def prepare(stream) -> None:
        context = stream.codec_context
        context.colorspace, context.color_range = matrix, colour_range
        context.color_trc = transfer

    return prepare


def decoded(planes: np.ndarray, pixel_format: str, prepare, codec="ffv1", container="matroska"):
    frame = planes_frame(list(planes), pixel_format)
    # The encoder converts where the frame's own tags and the stream's differ.
    stream = type("Tags", (), {"codec_context": frame})()
    prepare(stream)
    data = clip_bytes(
        [frame],
        codec=codec,
        container=container,
        pixel_format=pixel_format,
        prepare=prepare,
        options={} if codec == "ffv1" else None,
    )
    return load_video(data, num_frames=1, policy=ONE_FRAME)


@pytest.mark.parametrize("full", [False, True], ids=["limited", "full"])
@pytest.mark.parametrize("matrix", WEIGHTS)
def test_the_matrix_and_range_of_the_stream_are_honoured(matrix, full):
    planes = codes(full)
    result = decoded(planes, "yuv444p", tagged(matrix, 2 if full else 1))
    assert np.abs(result.frames[0] - rgb_of(planes, matrix, full)).max() < 1
    others = {code for code in WEIGHTS if WEIGHTS[code] != WEIGHTS[matrix]}
    for other in others:
        assert np.abs(result.frames[0] - rgb_of(planes, other, full)).max() > 2
    words = result.applied[-1]
    assert ("full range" if full else "limited range") in words
    assert {1: "BT.709", 5: "BT.601", 6: "BT.601", 9: "BT.2020"}.get(matrix, "") in words


@pytest.mark.parametrize("full", [False, True], ids=["limited", "full"])
def test_h264_in_mp4_carries_its_tags_too(full):
    planes = codes(full)
    tags = tagged(1, 2 if full else 1)
    result = decoded(planes, "yuv444p", tags, codec="libx264", container="mp4")
    assert np.abs(result.frames[0] - rgb_of(planes, 1, full)).max() < 1
    assert (result.codec, result.format) == ("h264", "mp4")


@pytest.mark.parametrize(
    ("height", "width", "matrix"), [(48, 64, 5), (720, 960, 1), (480, 1280, 1), (704, 1264, 5)]
)
def test_an_untagged_stream_is_bt709_from_hd_sizes_on(height, width, matrix):
    planes = codes(False, height=height, width=width)
    result = decoded(planes, "yuv444p", tagged(2, 0))
    assert np.abs(result.frames[0] - rgb_of(planes, matrix, False)).max() < 1
    assert "untagged, by size" in result.applied[-1]


@pytest.mark.parametrize("bits", [10, 12])
@pytest.mark.parametrize("full", [False, True], ids=["limited", "full"])
def test_more_bits_are_brought_to_eight(bits, full):
    planes = codes(full, bits)
    result = decoded(planes, f"yuv444p{bits}le", tagged(9, 2 if full else 1, transfer=16))
    # swscale takes the full range of n bits for 255 * 2**(n - 8), up to 1 code more.
    assert np.abs(result.frames[0] - rgb_of(planes, 9, full, bits)).max() < (2 if full else 1)
    assert f"{bits} bits to 8" in result.applied
    assert "PQ values kept, without tone mapping" in result.applied


def test_a_matrix_that_cannot_be_converted_is_refused_by_name():
    with pytest.raises(MediaError, match="matrix 8 of ITU-T H.273"):
        decoded(codes(True), "yuv444p", tagged(8, 2))


def test_grey_and_rgb_streams_have_no_matrix():
    grey = codes(True)[:1]
    result = decoded(grey, "gray", tagged(2, 2))
    assert np.array_equal(result.frames[0], grey[0][..., None].repeat(3, -1))
    assert result.applied == ("first 1 frames",)
    clip = moving(3)
    data = clip_bytes(clip, codec="ffv1", container="matroska", pixel_format="bgr0", options={})
    assert np.array_equal(load_video(data, num_frames=3).frames, clip)


def test_alpha_of_a_video_is_composited_on_white():
    clip = moving(2)
    alpha = np.zeros((48, 64), np.uint8)
    alpha[:, 32:] = 255
    frames = [
        av.VideoFrame.from_ndarray(np.dstack([frame, alpha]), format="rgba").reformat(format="bgra")
        for frame in clip
    ]
    data = clip_bytes(frames, codec="ffv1", container="matroska", pixel_format="bgra", options={})
    result = load_video(data, num_frames=2)
    assert np.array_equal(result.frames[:, :, 32:], clip[:, :, 32:])
    assert (result.frames[:, :, :32] == 255).all()
    assert result.applied[-1] == "alpha over white"


@pytest.mark.parametrize("container", ["mp4", "matroska", "mov"])
@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_a_rotation_is_applied_as_the_file_says(container, degrees):
    clip = moving(3)
    plain = load_video(clip_bytes(clip), num_frames=3).frames
    # PyAV counts counterclockwise, as np.rot90 does.
    turned = clip_bytes(
        clip, container=container, prepare=lambda stream: stream.set_display_rotation(degrees)
    )
    result = load_video(turned, num_frames=3)
    assert np.array_equal(result.frames, np.rot90(plain, degrees // 90, (1, 2)))
    assert result.frames.flags.c_contiguous
    assert (result.source_height, result.source_width) == (48, 64)
    words = {
        90: "rotated counterclockwise by 90 degrees",
        180: "rotated by 180 degrees",
        270: "rotated clockwise by 90 degrees",
    }
    assert degrees == 0 or result.applied[-1] == words[degrees]


def test_a_phone_s_portrait_matrix_turns_clockwise():
    # What phones write: (p, q) -> (height - q, p), so the stored left edge becomes the top.
    matrix = [0, 65536, 0, -65536, 0, 0, 48 << 16, 0, 1 << 30]
    clip = np.zeros((2, 48, 64, 3), np.uint8)
    clip[:, :, :16] = 255
    data = clip_bytes(clip, prepare=lambda stream: stream.set_display_matrix(matrix))
    frames = load_video(data, num_frames=2).frames
    assert frames.shape == (2, 64, 48, 3)
    assert (frames[:, :16] > 250).all() and (frames[:, 16:] < 5).all()


@pytest.mark.parametrize(
    ("matrix", "turn"),
    [
        ((-1, 0, 0, 1), lambda f: f[:, :, ::-1]),
        ((1, 0, 0, -1), lambda f: f[:, ::-1]),
        ((0, 1, 1, 0), lambda f: f.swapaxes(1, 2)),
        ((0, -1, -1, 0), lambda f: f.swapaxes(1, 2)[:, ::-1, ::-1]),
    ],
)
def test_mirrored_matrices_are_applied(matrix, turn):
    a, b, c, d = (65536 * number for number in matrix)
    clip = moving(2)
    plain = load_video(clip_bytes(clip), num_frames=2).frames
    data = clip_bytes(
        clip, prepare=lambda stream: stream.set_display_matrix([a, b, 0, c, d, 0, 0, 0, 1 << 30])
    )
    assert np.array_equal(load_video(data, num_frames=2).frames, turn(plain))


def test_pixels_that_are_not_square_are_made_square():
    def prepare(stream) -> None:
        stream.codec_context.sample_aspect_ratio = Fraction(3, 2)

    clip = np.zeros((2, 48, 64, 3), np.uint8)
    clip[:, :, 32:] = 255
    result = load_video(clip_bytes(clip, prepare=prepare), num_frames=2)
    assert result.frames.shape == (2, 48, 96, 3)
    assert (result.frames[:, :, :46] < 5).all() and (result.frames[:, :, 50:] > 250).all()
    assert (result.source_height, result.source_width) == (48, 64)
    assert "pixels of 3/2 made square" in result.applied
    with pytest.raises(MediaError, match="too large.*96x48"):
        policy = MediaPolicy(max_video_pixels=64 * 48)
        load_video(clip_bytes(clip, prepare=prepare), num_frames=2, policy=policy)


def test_subsampled_video_of_an_odd_size_is_decoded_whole():
    flat = np.zeros((2, 33, 47, 3), np.uint8)
    flat[:] = (200, 100, 50)
    data = clip_bytes(flat, pixel_format="yuv420p", codec="ffv1", container="matroska", options={})
    result = load_video(data, num_frames=2)
    assert result.frames.shape == (2, 33, 47, 3)
    assert np.abs(result.frames.astype(int) - flat).max() <= 3


def test_subsampled_chroma_is_interpolated_without_bias():
    ramp = np.linspace(0, 255, 128)
    clip = np.zeros((2, 96, 128, 3), np.uint8)
    clip[..., 0], clip[..., 1], clip[..., 2] = ramp, 128, 255 - ramp
    data = clip_bytes(clip, pixel_format="yuv420p", codec="ffv1", container="matroska", options={})
    error = load_video(data, num_frames=2).frames.astype(int) - clip
    assert np.abs(error).max() <= 2 and abs(error.mean()) < 0.5


def test_frames_of_several_sizes_are_refused_as_such():
    with pytest.raises(MediaError, match="changes its size.*64x48 throughout"):
        load_video(clip_of_two_sizes(), num_frames=6)
