# SPDX-License-Identifier: Apache-2.0
"""Paths, file: and data: URIs and bytes, to an open file of a known format."""

import base64
from pathlib import Path
from urllib.parse import quote

import pytest

from tensorrt_llm.visual_gen import media_source
from tensorrt_llm.visual_gen.media_policy import LOCAL_PATHS_OFF, MediaError, MediaPolicy
from tensorrt_llm.visual_gen.media_source import open_source
from tests.support.hostile_media import data_uri, jpeg, mp4, png


def content(reference, kind="image", policy=None) -> bytes:
    with open_source(reference, kind, policy or MediaPolicy()) as source:
        data = source.file.read()
        assert len(data) == source.size
    return data


@pytest.fixture
def photo(tmp_path) -> Path:
    path = tmp_path / "a photo, 100% ü.png"
    path.write_bytes(png())
    return path


def test_every_spelling_of_a_file_gives_its_bytes(photo, monkeypatch):
    monkeypatch.chdir(photo.parent)
    for reference in (
        photo,
        str(photo),
        photo.name,
        photo.as_uri(),
        "file://localhost" + quote(str(photo)),
        "FILE:" + quote(str(photo)),
        data_uri("image/png", png()),
        data_uri("IMAGE/PNG;charset=x", png()),
        "data:image/png;base64," + quote(base64.b64encode(png()).decode(), safe=""),
        png(),
        bytearray(png()),
        memoryview(png()),
    ):
        assert content(reference) == png(), reference


def test_a_path_may_hold_colons_and_look_like_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a:b.png", "concat:x.png", "s3:x.png"):
        (tmp_path / name).write_bytes(png())
        assert content(name) == png()


def test_a_name_without_a_known_suffix_promises_nothing(tmp_path):
    for name in ("upload", "upload.bin", "upload.tmp"):
        (tmp_path / name).write_bytes(jpeg())
        assert content(tmp_path / name) == jpeg()


def test_the_file_is_closed_at_the_end_also_after_an_error(photo):
    with open_source(photo, "image", MediaPolicy()) as source:
        assert not source.file.closed
    assert source.file.closed
    with pytest.raises(RuntimeError), open_source(photo, "image", MediaPolicy()) as source:
        raise RuntimeError
    assert source.file.closed


@pytest.mark.parametrize("kind", ["image", "video"])
def test_the_limit_of_bytes_is_exact_for_every_kind_of_reference(tmp_path, kind):
    data = png() if kind == "image" else mp4()
    mime = "image/png" if kind == "image" else "video/mp4"
    path = tmp_path / "file"
    path.write_bytes(data)
    field = f"max_{kind}_bytes"
    for reference in (path, data, data_uri(mime, data)):
        assert content(reference, kind, MediaPolicy(**{field: len(data)})) == data
        with pytest.raises(MediaError, match="too large.*at most|too large.*1 to"):
            content(reference, kind, MediaPolicy(**{field: len(data) - 1}))


def test_a_long_data_uri_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(media_source.base64, "b64decode", None)
    with pytest.raises(MediaError, match="too large"):
        content("data:image/png;base64," + "A" * 10_000, policy=MediaPolicy(max_image_bytes=1000))


def test_forbidden_paths_are_not_even_looked_at(photo, monkeypatch):
    monkeypatch.setattr(media_source.os, "open", None)
    for policy in (MediaPolicy(allow_local_paths=False), MediaPolicy()):
        for reference in (photo, str(photo), photo.as_uri(), "missing.png"):
            with pytest.raises(MediaError, match="Local files are forbidden"):
                content(reference, policy=policy)
        assert content(png(), policy=policy) == png()
        assert content(data_uri("image/png", png()), policy=policy) == png()
        monkeypatch.setenv(LOCAL_PATHS_OFF, "1")  # for the second policy, which allows them


def test_a_link_to_a_file_is_followed_and_one_to_a_device_refused(photo):
    good, bad = photo.with_name("good.png"), photo.with_name("bad.png")
    good.symlink_to(photo)
    bad.symlink_to("/dev/zero")
    assert content(good) == png()
    with pytest.raises(MediaError, match="Not a regular file"):
        content(bad)


def test_an_error_shows_no_data_of_a_data_uri():
    reference = data_uri("image/jpeg", png())
    with pytest.raises(MediaError) as caught:
        content(reference)
    assert reference[30:50] not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_field_in_the_error_is_the_request_s():
    with pytest.raises(MediaError, match=r"where: image_reference, bytes\)"):
        content(b"x", "image")
    with pytest.raises(MediaError, match=r"where: video_reference, bytes\)"):
        content(b"x", "video")
