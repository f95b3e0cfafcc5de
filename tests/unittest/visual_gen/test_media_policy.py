# SPDX-License-Identifier: Apache-2.0
"""The limits, and how errors name a reference."""

import pytest

from tensorrt_llm.visual_gen.media_policy import (
    LOCAL_PATHS_OFF,
    Deadline,
    MediaError,
    MediaPolicy,
    bad_media,
    check_size,
    shorten,
)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_image_pixels": 2**27},  # above Pillow's own guard it would do nothing
        {"max_image_pixels": 0},
        {"decode_timeout": 0},
        {"decode_timeout": float("inf")},
        {"max_redirects": -1},
        {"min_side": 2.5},
        {"allow_local_paths": "yes"},
        {"max_frames": 5},
    ],
)
def test_a_value_without_effect_or_sense_is_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        MediaPolicy(**fields)


def test_a_policy_does_not_change():
    with pytest.raises(ValueError, match="frozen"):
        MediaPolicy().max_side = 1


@pytest.mark.parametrize(
    ("setting", "allowed"), [(None, True), ("", True), ("0", True), ("1", False), ("yes", False)]
)
def test_the_environment_forbids_local_paths_under_every_policy(monkeypatch, setting, allowed):
    monkeypatch.delenv(LOCAL_PATHS_OFF, raising=False)
    if setting is not None:
        monkeypatch.setenv(LOCAL_PATHS_OFF, setting)
    assert MediaPolicy().local_paths_allowed() is allowed
    assert not MediaPolicy(allow_local_paths=False).local_paths_allowed()


@pytest.mark.parametrize(
    ("height", "width", "problem"),
    [
        (16, 16, None),
        (15, 100, "small"),
        (100, 15, "small"),
        (0, 0, "small"),
        (1024, 16384, None),
        (1024, 16385, "large"),
        (1000, 1000, None),
        (4096, 4097, "large"),
        (64, 1024, None),
        (64, 1025, "thin"),
        (1025, 64, "thin"),
    ],
)
def test_sizes_are_checked_on_both_sides_of_each_limit(height, width, problem):
    if problem is None:
        check_size(height, width, MediaPolicy(), "there", max_pixels=2**24)
    else:
        with pytest.raises(MediaError, match=f"too {problem} .*found {width}x{height}"):
            check_size(height, width, MediaPolicy(), "there", max_pixels=2**24)


def test_a_deadline_passes_and_says_which_limit_it_was():
    Deadline(60, "there", "decoding", "decode_timeout").check()
    late = Deadline(1e-9, "there", "decoding", "decode_timeout")
    with pytest.raises(MediaError, match="Decoding takes too long.*MediaPolicy.decode_timeout"):
        late.check()
    assert late.left() < 0


def test_a_refusal_is_a_value_error_in_the_format_of_the_package():
    error = bad_media("Wrong", "image_reference, bytes", expected="a", found="b", remedy="c")
    assert isinstance(error, ValueError)
    assert str(error) == "Wrong (where: image_reference, bytes): expected a, found b. Remedy: c."


def test_long_and_unprintable_text_is_made_fit_for_a_message():
    assert shorten("short") == "short"
    assert shorten("a\x00\n\x1b[31mb") == "a???[31mb"
    long = shorten("x" * 1000 + "end")
    assert len(long) == 120 and long.endswith("xend") and "..." in long
