# SPDX-License-Identifier: Apache-2.0
"""Formats told by content, name and MIME type."""

import pytest

from tensorrt_llm.visual_gen.media_formats import (
    IMAGE_FORMATS,
    VIDEO_FORMATS,
    format_of_mime,
    format_of_suffix,
    kind_of,
    sniff,
)
from tests.support.hostile_media import jpeg, mp4, other_clip, picture, png
from tests.support.media_files import box, image_bytes


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("jpeg", jpeg),
        ("png", png),
        *[
            (name, lambda name=name: image_bytes(picture(), IMAGE_FORMATS[name]))
            for name in ("webp", "gif", "bmp", "tiff", "avif")
        ],
        ("mp4", mp4),
        ("matroska", lambda: other_clip("matroska")),
        ("avi", lambda: other_clip("avi")),
        ("mp4", lambda: other_clip("mov")),
    ],
)
def test_what_libraries_write_is_recognised(name, make):
    assert sniff(make()[:512]) == name
    assert kind_of(name) == ("video" if name in VIDEO_FORMATS else "image")


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"MM\x00*", "tiff"),
        (box(b"ftyp", b"mif1", bytes(4), b"mif1avif"), "avif"),
        (box(b"ftyp", b"heic", bytes(4), b"mif1heic"), "a HEIF picture"),
        (box(b"ftyp", b"qt  ", bytes(4), b"qt  "), "mp4"),
        (box(b"wide") + box(b"mdat"), "mp4"),
        (b"RIFF\x00\x00\x00\x00WAVE", "a WAV file"),
        (b"RIFF\x00\x00\x00\x00ABCD", "an unknown RIFF file"),
        (b"G" + bytes(187) + b"G", "an MPEG transport stream"),
        (b"hello", "text"),
        (b"\x80", "unknown binary data"),
    ],
)
def test_other_starts_have_their_names(head, name):
    assert sniff(head) == name


def test_suffixes_and_mime_types_lead_to_the_format_whatever_their_case():
    assert format_of_suffix(".JPG") == format_of_mime("image/JPEG") == "jpeg"
    assert format_of_suffix(".mov") == format_of_mime("video/quicktime") == "mp4"
    assert format_of_suffix(".webm") == format_of_mime("video/webm") == "matroska"
    assert format_of_suffix("") is format_of_suffix(".txt") is format_of_mime("") is None
