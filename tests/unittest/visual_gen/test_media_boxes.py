# SPDX-License-Identifier: Apache-2.0
"""What a container declares is checked before FFmpeg sees it, and what it needn't see is hidden."""

import io

import av
import numpy as np
import pytest

from tensorrt_llm.visual_gen.media_boxes import CheckedFile, checked_container
from tensorrt_llm.visual_gen.media_formats import sniff
from tensorrt_llm.visual_gen.media_policy import Deadline, MediaError, MediaPolicy
from tensorrt_llm.visual_gen.media_refs import load_video
from tensorrt_llm.visual_gen.media_source import MediaSource
from tests.support.hostile_media import damaged, fragments, mp4, other_clip
from tests.support.media_files import (
    box,
    clip_bytes,
    declared_mp4,
    full_box,
    index_first,
    moving,
    u32,
)


def deadline(seconds: float = 60) -> Deadline:
    return Deadline(seconds, "there", "decoding", "decode_timeout")


def checked(data: bytes, **limits) -> CheckedFile:
    source = MediaSource(io.BytesIO(data), len(data), sniff(data[:512]), "video_reference, bytes")
    return checked_container(source, MediaPolicy(**limits), deadline())


def loads(data: bytes, count: int = 12) -> bool:
    return len(load_video(data, num_frames=count).frames) == count


@pytest.mark.parametrize("container", ["mp4", "mov"])
def test_ffmpeg_sees_the_video_and_no_other_track(container):
    data = clip_bytes(moving(12), container=container, audio=True)
    with av.open(io.BytesIO(data)) as whole, av.open(checked(data)) as shown:
        assert [stream.type for stream in whole.streams] == ["video", "audio"]
        assert [stream.type for stream in shown.streams] == ["video"]
        frames = [f.to_ndarray(format="rgb24") for f in whole.decode(video=0)]
        assert np.array_equal(frames, [f.to_ndarray(format="rgb24") for f in shown.decode(video=0)])


def test_the_limit_of_declared_frames_is_exact():
    for data, count in ((declared_mp4(samples=1000), 1000), (fragments(1000), 1000), (mp4(), 12)):
        checked(data, max_video_frames=count)
        with pytest.raises(MediaError, match=f"at most {count - 1} .*found {count} declared"):
            checked(data, max_video_frames=count - 1)


def test_frames_of_all_fragments_are_counted_and_those_of_sound_are_not():
    options = {"g": "4", "preset": "ultrafast"}
    flags = {"movflags": "frag_keyframe+empty_moov"}
    data = clip_bytes(moving(12), audio=True, options=options, container_options=flags)
    assert data.count(b"moof") > 2 and data.count(b"traf") > data.count(b"moof")
    checked(data, max_video_frames=12)
    with pytest.raises(MediaError, match="too many frames"):
        checked(data, max_video_frames=11)
    assert loads(data)


@pytest.mark.parametrize("kind", [b"stsz", b"stz2", b"stsc", b"trun", b"elst", b"hdlr"])
def test_a_table_may_not_hide_in_a_box_that_ffmpeg_looks_into(kind):
    hidden = full_box(kind, u32(1, 1))
    with pytest.raises(MediaError, match="sample tables outside their usual place"):
        checked(declared_mp4(sample_entry_extra=hidden))
    # In a box that FFmpeg doesn't get to see, it does no harm.
    checked(declared_mp4(extra=box(b"udta", hidden)))


@pytest.mark.parametrize("kind", [b"udta", b"meta", b"iods", b"cmov", b"free", b"abcd"])
def test_boxes_that_are_not_needed_read_as_free_space(kind):
    data = declared_mp4(extra=box(kind, b"content!")) + box(kind, b"outside!")
    shown = checked(data).read()
    assert len(shown) == len(data)
    assert b"content!" in data and b"content!" not in shown
    assert shown.endswith(u32(16) + b"freeoutside!")
    assert shown.count(kind) == (2 if kind == b"free" else 0)


def test_edit_lists_of_a_few_entries_pass_and_long_ones_do_not():
    checked(declared_mp4(edits=16))
    with pytest.raises(MediaError, match="edit list of 17 entries"):
        checked(declared_mp4(edits=17))


def test_two_handlers_or_two_track_numbers_hide_a_track():
    media = full_box(b"hdlr", u32(0), b"soun", bytes(13))
    data = declared_mp4()
    start = data.index(b"mdia") - 4
    size = int.from_bytes(data[start : start + 4], "big")
    doubled = data[:start] + box(b"mdia", data[start + 8 : start + size], media)
    outer = {name: data.index(name) - 4 for name in (b"moov", b"trak")}
    result = bytearray(doubled + data[start + size :])
    for at in outer.values():
        grown = int.from_bytes(result[at : at + 4], "big") + len(media)
        result[at : at + 4] = u32(grown)
    assert b"stsz" in checked(data).read() and b"stsz" not in checked(bytes(result)).read()


def test_sizes_of_64_bits_and_up_to_the_end_are_understood():
    data = index_first(mp4())
    start = data.index(b"mdat") - 4
    assert loads(data[:start] + u32(0) + data[start + 4 :])
    plain = mp4()
    free, mdat = plain.index(b"free") - 4, plain.index(b"mdat") - 4
    assert mdat - free == 8  # the muxer leaves the space that a long size would take
    size = int.from_bytes(plain[mdat : mdat + 4], "big") + 8
    assert loads(plain[:free] + u32(1) + b"mdat" + u32(0, size) + plain[mdat + 8 :])


def test_padding_behind_the_last_box_is_no_box():
    for count in (1, 7, 8, 100):
        assert loads(mp4() + bytes(count))


def test_live_recordings_without_a_size_are_read_to_their_end():
    matroska, avi = other_clip("matroska"), other_clip("avi")
    at = matroska.index(b"\x18\x53\x80\x67") + 4
    assert loads(damaged(matroska, at, b"\x01" + b"\xff" * 7))
    assert loads(damaged(avi, 4, u32(0)))


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi"])
def test_a_missing_end_is_noticed_by_one_byte(container):
    data = mp4() if container == "mp4" else other_clip(container)
    checked(data)
    with pytest.raises(MediaError, match=f"cut short.*expected {len(data)} bytes.*{len(data) - 1}"):
        checked(data[:-1])


def test_a_header_is_not_read_into_memory_without_limit(monkeypatch):
    monkeypatch.setattr("tensorrt_llm.visual_gen.media_boxes._MAX_HEADER_BYTES", 1000)
    data = declared_mp4(samples=10)
    checked(data)
    with pytest.raises(MediaError, match="more than 1000 bytes of header"):
        checked(declared_mp4(extra=box(b"free", bytes(1000))))
    with pytest.raises(MediaError, match="more than 1000 bytes of header"):
        checked(data + box(b"moof", box(b"mfhd", bytes(8))) * 50)


@pytest.mark.parametrize("size", [1, 3, 7, 50, 1000])
def test_patches_show_whatever_the_size_and_place_of_a_read(size):
    stored = bytes(range(200))
    patches = [(0, b"AB"), (10, b"free"), (14, b"xyz"), (60, b"Q" * 100), (198, b"ZZ")]
    expected = bytearray(stored)
    for offset, patch in patches:
        expected[offset : offset + len(patch)] = patch
    for start in range(0, 200):
        file = CheckedFile(io.BytesIO(stored), patches, deadline())
        assert file.seek(start) == start == file.tell()
        assert file.read(size) == expected[start : start + size]
    file = CheckedFile(io.BytesIO(stored), patches, deadline())
    assert b"".join(iter(lambda: file.read(size), b"")) == expected


def test_reads_after_the_deadline_raise():
    file = CheckedFile(io.BytesIO(b"data"), [], deadline(1e-9))
    with pytest.raises(MediaError, match="takes too long"):
        file.read(1)
