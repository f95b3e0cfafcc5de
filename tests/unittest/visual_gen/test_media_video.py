# SPDX-License-Identifier: Apache-2.0
"""Which frames are decoded, what is said about the clip, and that work and memory are bounded."""

import io
import itertools
import time
from fractions import Fraction
from functools import cache

import av
import numpy as np
import pytest

from tensorrt_llm.visual_gen import media_video
from tensorrt_llm.visual_gen.media_policy import MediaError, MediaPolicy
from tensorrt_llm.visual_gen.media_refs import load_video
from tests.support.hostile_media import motion_jpeg, mp4
from tests.support.media_files import clip_bytes, image_bytes, moving, pattern

GOP = {"g": "10", "preset": "ultrafast", "bf": "3", "b-adapt": "0"}
OPEN_GOP = {**GOP, "x264-params": "open-gop=1:scenecut=0:bframes=3:b-adapt=0"}
KINDS = {
    "mp4": {"options": GOP},
    "mp4, open groups": {"options": OPEN_GOP},
    "mp4 with sound": {"options": GOP, "audio": True},
    "fragments": {"options": GOP, "container_options": {"movflags": "frag_keyframe+empty_moov"}},
    "mov": {"options": GOP, "container": "mov"},
    "matroska": {"options": GOP, "container": "matroska", "audio": True},
    "webm": {
        **{"container": "webm", "codec": "libvpx-vp9"},
        "options": {"g": "10", "deadline": "realtime", "cpu-used": "8"},
    },
    "av1": {"codec": "libsvtav1", "options": {"g": "10", "preset": "13"}},
    "hevc": {"codec": "libx265", "options": {"preset": "ultrafast", "x265-params": "keyint=10"}},
    "avi": {"container": "avi", "codec": "mpeg4", "options": {"g": "10"}, "audio": True},
    "matroska, open groups": {"options": OPEN_GOP, "container": "matroska"},
    "one group": {"options": {"g": "1000", "preset": "ultrafast"}},
    "keyframes alone": {"codec": "mjpeg", "pixel_format": "yuvj444p", "options": {}},
}


@cache
def clip_of(kind: str) -> bytes:
    options = {"pixel_format": "yuv420p", **KINDS[kind]}
    if f"lib{options.get('codec', 'libx264').removeprefix('lib')}" not in av.codecs_available and (
        options.get("codec", "libx264") not in av.codecs_available
    ):
        pytest.skip(f"this PyAV has no encoder {options['codec']}")
    return clip_bytes(moving(45, 64, 96), **options)


@cache
def plain_decode(kind: str) -> np.ndarray:
    """Every frame, decoded in one go without anything of ours."""
    with av.open(io.BytesIO(clip_of(kind))) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])


def places(frames: np.ndarray, whole: np.ndarray) -> list[int]:
    """Which frame of ``whole`` each of ``frames`` is; the two ways to RGB differ a little."""
    return [int(np.abs(whole.astype(int) - f).mean((1, 2, 3)).argmin()) for f in frames]


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """Collects the number of each frame that is decoded, per opening of the file."""
    numbers: list[int] = []
    check = media_video._Reader._check_count

    def count(self, number: int) -> None:
        numbers.append(number)
        check(self, number)

    monkeypatch.setattr(media_video._Reader, "_check_count", count)
    return numbers


@pytest.mark.parametrize("kind", KINDS)
def test_the_frames_of_either_end_are_those_of_a_whole_decode(kind):
    plain = plain_decode(kind)
    whole = load_video(clip_of(kind), num_frames=60).frames
    assert len(plain) == 45 and places(whole, plain) == list(range(45))
    for count in (1, 5, 6, 7, 12, 44, 45, 60):
        first = load_video(clip_of(kind), num_frames=count)
        last = load_video(clip_of(kind), num_frames=count, keep="last")
        assert np.array_equal(first.frames, whole[:count]), count
        assert np.array_equal(last.frames, whole[-count:]), count
        assert last.applied[0] == f"last {min(count, 45)} frames"


def test_the_first_frames_cost_no_more_than_themselves(decoded):
    load_video(clip_of("mp4"), num_frames=5)
    declared, *numbers = decoded
    assert declared == 45 and numbers == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["mp4", "mov", "avi", "matroska", "webm", "fragments"])
def test_the_last_frames_are_decoded_from_a_keyframe_near_them(kind, decoded):
    # The last of the groups of 10 frames begins at frame 40.
    load_video(clip_of(kind), num_frames=4, keep="last")
    assert len([number for number in decoded if number != 45]) <= 5
    decoded.clear()
    load_video(clip_of(kind), num_frames=7, keep="last")
    indexed = kind in ("mp4", "mov", "avi")
    assert len([number for number in decoded if number != 45]) <= (15 if indexed else 30)


def test_no_more_frames_are_held_than_are_wanted(monkeypatch):
    held: list[int] = []
    check = media_video._Reader._check_held

    def record(self, count: int, height: int, width: int) -> None:
        held.append(count)
        check(self, count, height, width)

    monkeypatch.setattr(media_video._Reader, "_check_held", record)
    for keep in ("first", "last"):
        load_video(clip_of("one group"), num_frames=4, keep=keep)
        assert max(held) == 4


def test_what_the_clip_says_about_itself_is_reported():
    result = load_video(clip_of("mp4 with sound"), num_frames=3)
    assert (result.frame_rate, result.duration) == (10, Fraction(9, 2))
    assert (result.source_frames, result.codec, result.format) == (45, "h264", "mp4")
    assert (result.source_height, result.source_width) == (64, 96)
    assert result.timestamps == (0, Fraction(1, 10), Fraction(1, 5))
    last = load_video(clip_of("mp4 with sound"), num_frames=2, keep="last")
    assert last.timestamps == (Fraction(43, 10), Fraction(44, 10))
    assert load_video(clip_of("webm"), num_frames=2).source_frames is None


def test_an_exact_rate_stays_exact():
    rate = Fraction(30000, 1001)
    data = clip_bytes(moving(12), rate=rate)
    result = load_video(data, num_frames=12)
    assert result.frame_rate == rate
    assert result.timestamps == tuple(n / rate for n in range(12))


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_variable_rate_keeps_its_timestamps_and_gives_their_average(container):
    times = [0, 10, 30, 40, 80, 100, 110, 200, 210, 230]  # hundredths of a second
    options = {"bf": "0", **{k: v for k, v in GOP.items() if k == "preset"}}
    data = clip_bytes(
        moving(10),
        container=container,
        pts=times,
        time_base=Fraction(1, 100),
        options=options,
        rate=25,
    )
    for keep, expected in (("first", times[:4]), ("last", times[-4:])):
        result = load_video(data, num_frames=4, keep=keep)
        assert result.timestamps == tuple(Fraction(t, 100) for t in expected)
    if container == "mp4":  # Matroska declares no average, but a nominal rate
        assert 4 <= result.frame_rate <= 4.5  # ten frames in 2.3 to 2.5 seconds


def test_a_clip_of_one_frame_is_a_matter_of_policy_and_of_what_is_asked():
    data = clip_bytes(moving(1))
    policy = MediaPolicy(min_video_frames=1)
    for keep in ("first", "last"):
        assert load_video(data, num_frames=5, keep=keep, policy=policy).frames.shape[0] == 1
        assert load_video(data, num_frames=1, keep=keep).frames.shape[0] == 1
        with pytest.raises(MediaError, match="too few frames.*at least 2.*found 1"):
            load_video(data, num_frames=5, keep=keep)


def test_declared_and_real_limits_of_frames_and_duration():
    exact = MediaPolicy(max_video_frames=45, max_duration=4.5)
    assert len(load_video(clip_of("mp4"), num_frames=2, policy=exact).frames) == 2
    # Matroska declares no count, so the frames themselves are counted.
    for kind, keep in (("mp4", "first"), ("matroska", "last"), ("avi", "first")):
        with pytest.raises(MediaError, match="too many frames.*at most 44"):
            policy = MediaPolicy(max_video_frames=44)
            load_video(clip_of(kind), num_frames=45, keep=keep, policy=policy)
    for kind in ("mp4", "matroska", "avi"):
        with pytest.raises(MediaError, match="too long.*at most 4.4 seconds"):
            load_video(clip_of(kind), num_frames=2, policy=MediaPolicy(max_duration=4.4))


def test_a_duration_that_lies_low_is_noticed_while_decoding(monkeypatch):
    monkeypatch.setattr(media_video, "_duration", lambda container, stream: None)
    with pytest.raises(MediaError, match="too long.*at most 2 seconds.*found 2.1"):
        load_video(clip_of("mp4"), num_frames=45, policy=MediaPolicy(max_duration=2.0))


def test_frames_that_take_too_much_memory_are_refused_before_and_while_decoding(decoded):
    policy = MediaPolicy(max_decoded_bytes=10 * 64 * 96 * 3)
    for kind in ("mp4", "webm"):  # the second declares no count
        assert len(load_video(clip_of(kind), num_frames=10, policy=policy).frames) == 10
        with pytest.raises(MediaError, match="too much memory.*11 frames of 96x64"):
            load_video(clip_of(kind), num_frames=11, policy=policy)
    assert decoded.count(11) == 1


def test_frames_larger_than_their_header_are_refused():
    large = image_bytes(av.VideoFrame.from_ndarray(pattern(96, 128)).to_image(), "JPEG")
    data = motion_jpeg(64, 48, [large] * 3)
    with pytest.raises(MediaError, match="too large.*found 128x96"):
        load_video(data, num_frames=3, policy=MediaPolicy(max_video_pixels=64 * 48))


def test_decoding_ends_in_time():
    with pytest.raises(MediaError, match="takes too long.*decode_timeout"):
        load_video(mp4(), num_frames=5, policy=MediaPolicy(decode_timeout=1e-6))


def test_the_clock_is_looked_at_for_every_frame(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks) / 10)
    # 45 frames are decoded, one is converted; reading and opening take about 60 looks at the clock.
    policy = MediaPolicy(decode_timeout=8.0)
    with pytest.raises(MediaError, match="takes too long"):
        load_video(clip_of("one group"), num_frames=1, keep="last", policy=policy)
    load_video(clip_of("one group"), num_frames=1, policy=policy)


def test_damage_that_the_decoder_notices_is_not_patched_over():
    noise = np.random.default_rng(0).integers(0, 256, (6, 48, 64, 3), np.uint8)
    data = clip_bytes(noise, pixel_format="yuv420p", options={"crf": "20"})
    with av.open(io.BytesIO(data)) as container:
        packets = [(p.pos, p.size) for p in container.demux(video=0) if p.size]
    messages = []
    for position, size in packets:
        for offset in range(100, size - 100, 150):
            start = position + offset
            try:
                load_video(data[:start] + bytes(60) + data[start + 60 :], num_frames=6)
            except MediaError as error:
                messages.append(str(error))
    assert any("The video is damaged" in message for message in messages)


def test_a_cover_picture_is_not_the_video():
    cover = image_bytes(av.VideoFrame.from_ndarray(pattern(), format="rgb24").to_image(), "PNG")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        output.add_attachment("cover.png", "image/png", cover)
        sound = output.add_stream("aac", rate=48000)
        samples = np.zeros((2, 4800), np.float32)
        silence = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        silence.sample_rate = 48000
        output.mux(sound.encode(silence))
        output.mux(sound.encode())
    with pytest.raises(MediaError, match="No video stream.*found audio, video"):
        load_video(buffer.getvalue(), num_frames=2)


def test_arguments_without_sense_are_refused():
    for count in (0, -1, True, 2.0, None):
        with pytest.raises(ValueError, match="Bad num_frames"):
            load_video(mp4(), num_frames=count)
    with pytest.raises(ValueError, match="Bad keep.*first or last"):
        load_video(mp4(), num_frames=1, keep="middle")


def test_of_several_files_of_one_clip_nothing_is_opened_but_the_one():
    reader = media_video._Reader.__new__(media_video._Reader)
    reader._label = "video_reference, bytes"
    with pytest.raises(MediaError, match="refers to another file"):
        reader._refuse_to_open("file:///etc/passwd", 0, {})
