# SPDX-License-Identifier: Apache-2.0
"""Encoded images to pixels: every expectation is exact unless the format itself is lossy."""

import io
import itertools
import struct
import time
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from tensorrt_llm.visual_gen.media_policy import MediaError, MediaPolicy
from tensorrt_llm.visual_gen.media_refs import load_image
from tests.support.hostile_media import (
    broken_png,
    jpeg,
    jpeg_of_scans,
    picture,
    png,
    png_chunk,
    png_of_size,
)
from tests.support.media_files import image_bytes, pattern, u32

# EXIF 2.32, tag 274: where the stored row 0 and column 0 are in the upright picture.
UPRIGHT = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored[::-1, ::-1].swapaxes(0, 1),
    8: lambda stored: np.rot90(stored),
}
LOSSLESS = {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True}}


def oriented(format: str, orientation: int, image: Image.Image | None = None, **options) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return image_bytes(image or picture(), format, exif=exif, **options)


@pytest.mark.parametrize("format", LOSSLESS)
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_every_exif_orientation_makes_the_picture_upright(format, orientation):
    result = load_image(oriented(format, orientation, **LOSSLESS[format]))
    assert np.array_equal(result.pixels, UPRIGHT[orientation](pattern()))
    assert (result.source_height, result.source_width) == (48, 64)
    assert result.pixels.flags.c_contiguous and result.pixels.dtype == np.uint8
    expected = () if orientation == 1 else (f"EXIF orientation {orientation}",)
    assert result.applied == expected and result.format == format.lower()


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_jpeg_is_turned_exactly(orientation):
    stored = load_image(jpeg()).pixels
    turned = load_image(oriented("JPEG", orientation)).pixels
    assert np.array_equal(turned, UPRIGHT[orientation](stored))


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_none(orientation):
    assert np.array_equal(load_image(oriented("PNG", orientation)).pixels, pattern())


def test_broken_metadata_does_not_hide_a_good_picture():
    data = image_bytes(picture(), "JPEG", exif=b"Exif\x00\x00" + b"not a TIFF header")
    assert np.array_equal(load_image(data).pixels, load_image(jpeg()).pixels)


def test_lossless_formats_give_exact_pixels_in_odd_sizes():
    for height, width in ((17, 33), (48, 64), (31, 16)):
        pixels = pattern(height, width)
        image = Image.fromarray(pixels)
        for format, options in {**LOSSLESS, "BMP": {}, "TIFF": {"compression": "tiff_lzw"}}.items():
            result = load_image(image_bytes(image, format, **options))
            assert np.array_equal(result.pixels, pixels), format
            assert result.applied == ()


def test_lossy_formats_come_close():
    smooth = np.linspace(0, 255, 64).astype(np.uint8)[None, :, None].repeat(48, 0).repeat(3, 2)
    for format in ("JPEG", "WEBP", "AVIF"):
        result = load_image(image_bytes(Image.fromarray(smooth), format, quality=90))
        assert np.abs(result.pixels.astype(int) - smooth).max() <= 6, format


def over(colour: np.ndarray, alpha: np.ndarray, back: int = 255) -> np.ndarray:
    exact = (colour.astype(float) * alpha + back * (255.0 - alpha)) / 255
    return np.floor(exact + 0.5).astype(np.uint8)


def test_alpha_is_composited_on_white_in_every_form_that_has_it():
    alpha = np.arange(48 * 64, dtype=np.uint8).reshape(48, 64)
    rgba = Image.fromarray(np.dstack([pattern(), alpha]))
    grey = Image.fromarray(pattern()[..., 0])
    grey.putalpha(Image.fromarray(alpha))
    expected = over(pattern(), alpha[..., None])
    for format, options in (("PNG", {}), ("TIFF", {}), ("WEBP", {"lossless": True, "exact": True})):
        result = load_image(image_bytes(rgba, format, **options))
        assert np.array_equal(result.pixels, expected), format
        assert result.applied == ("alpha over white",)
    result = load_image(image_bytes(grey, "PNG"))
    assert np.array_equal(result.pixels, over(pattern()[..., :1], alpha[..., None]).repeat(3, -1))
    assert result.applied == ("LA to RGB", "alpha over white")


def test_opaque_alpha_changes_nothing_and_is_not_reported():
    result = load_image(image_bytes(picture().convert("RGBA"), "PNG"))
    assert np.array_equal(result.pixels, pattern()) and result.applied == ()


def test_transparent_colours_and_palette_entries_become_white():
    stored = np.zeros((16, 16), np.uint8)
    stored[:, 8:] = 1
    palette = Image.fromarray(stored).convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    for format in ("PNG", "GIF"):
        plain = load_image(image_bytes(palette, format))
        assert (plain.pixels[0, 0].tolist(), plain.pixels[0, 8].tolist()) == (
            [10, 20, 30],
            [40, 50, 60],
        )
        assert plain.applied == ("P to RGB",)
        result = load_image(image_bytes(palette, format, transparency=1))
        assert (result.pixels[0, 0].tolist(), result.pixels[0, 8].tolist()) == (
            [10, 20, 30],
            [255, 255, 255],
        )
        assert result.applied == ("P to RGB", "alpha over white")
    faint = load_image(image_bytes(palette, "PNG", transparency=b"\xff\x80"))
    assert faint.pixels[0, 8].tolist() == over(np.array([40, 50, 60]), 128).tolist()
    colour = Image.fromarray(np.dstack([stored * 9] * 3))
    result = load_image(image_bytes(colour, "PNG", transparency=(9, 9, 9)))
    assert (result.pixels[:, :8] == 0).all() and (result.pixels[:, 8:] == 255).all()


def test_cmyk_is_ink_on_white():
    cmyk = np.random.default_rng(0).integers(0, 256, (16, 64, 4), np.uint8)
    ink = cmyk.astype(float) / 255
    exact = 255 * (1 - ink[..., :3]) * (1 - ink[..., 3:])
    image = Image.frombytes("CMYK", (64, 16), cmyk.tobytes())
    result = load_image(image_bytes(image, "TIFF"))
    assert np.abs(result.pixels - exact).max() < 1
    assert result.applied == ("CMYK to RGB",)
    # A JPEG of Adobe's kind stores it inverted.
    flat = Image.new("CMYK", (64, 64), (0, 128, 255, 40))
    result = load_image(image_bytes(flat, "JPEG", quality=100))
    assert np.abs(result.pixels.astype(int) - [215, 107, 0]).max() <= 2


def png_of_depth_16(samples: np.ndarray, *chunks: bytes) -> bytes:
    height, width = samples.shape[:2]
    kind = 0 if samples.ndim == 2 else 2
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", u32(width, height) + bytes([16, kind, 0, 0, 0]))
        + b"".join(chunks)
        + png_chunk(b"IDAT", zlib.compress(rows, 1))
        + png_chunk(b"IEND", b"")
    )


def test_every_16_bit_grey_is_rounded_to_the_nearest_8_bit_one():
    samples = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = np.floor(samples / 257 + 0.5).astype(np.uint8)[..., None].repeat(3, -1)
    big_endian = Image.frombytes("I;16B", (256, 256), samples.astype(">u2").tobytes())
    for data in (png_of_depth_16(samples), image_bytes(big_endian, "TIFF")):
        result = load_image(data)
        assert np.array_equal(result.pixels, expected)
        assert result.applied == ("16-bit grey to 8 bits",)


def test_a_transparent_16_bit_grey_becomes_white():
    samples = np.full((16, 16), 1000, np.uint16)
    samples[4] = 40000
    data = png_of_depth_16(samples, png_chunk(b"tRNS", struct.pack(">H", 1000)))
    result = load_image(data)
    assert (result.pixels[4] == 156).all() and (np.delete(result.pixels, 4, 0) == 255).all()
    assert result.applied == ("16-bit grey to 8 bits", "alpha over white")


def test_16_bit_colour_keeps_the_high_byte():
    samples = np.random.default_rng(0).integers(0, 65536, (16, 16, 3), np.uint16)
    assert np.array_equal(load_image(png_of_depth_16(samples)).pixels, samples >> 8)


def test_bilevel_and_grey_become_rgb():
    bits = np.random.default_rng(0).integers(0, 2, (16, 24), np.uint8) * 255
    for mode in ("1", "L"):
        result = load_image(image_bytes(Image.fromarray(bits).convert(mode), "PNG"))
        assert np.array_equal(result.pixels, bits[..., None].repeat(3, -1))
        assert result.applied == (f"{mode} to RGB",)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF", "MPO"])
def test_of_several_frames_the_first_is_taken(format):
    frames = [Image.new("RGB", (32, 24), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = image_bytes(frames[0], format, save_all=True, append_images=frames[1:], **options)
    result = load_image(data)
    assert np.abs(result.pixels.astype(int) - [255, 0, 0]).max() <= (2 if format == "MPO" else 0)
    assert result.applied[0] == "first frame"


def test_a_pil_image_is_taken_as_it_stands_and_left_alone():
    with Image.open(io.BytesIO(oriented("PNG", 6))) as lazy:
        result = load_image(lazy)
        assert np.array_equal(result.pixels, np.rot90(pattern(), -1))
        assert lazy.size == (64, 48) and lazy.getexif()[0x0112] == 6
    frames = [Image.new("RGB", (32, 24), colour) for colour in ("red", "lime")]
    data = image_bytes(frames[0], "PNG", save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(data)) as animation:
        animation.seek(1)
        assert (load_image(animation).pixels == [0, 255, 0]).all()


def test_a_lazy_pil_image_that_turns_out_broken_or_large_is_refused():
    with pytest.raises(MediaError, match="can't be decoded.*image_reference, PngImageFile"):
        load_image(Image.open(io.BytesIO(broken_png())))
    with pytest.raises(MediaError, match="too large"):
        load_image(Image.open(io.BytesIO(png_of_size(8200, 8200))))


def test_an_unusual_mode_is_refused_by_name():
    with pytest.raises(MediaError, match="Pillow mode LAB"):
        load_image(Image.new("LAB", (32, 32)))


def test_the_size_is_checked_before_anything_is_decoded(monkeypatch):
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    with pytest.raises(MediaError, match="found 64x48"):
        load_image(png(), policy=MediaPolicy(max_image_pixels=64 * 48 - 1))


def test_pillows_own_warning_made_an_error_is_a_refusal_too():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MediaError, match="too large.*found 96000000 pixels"):
            load_image(png_of_size(12000, 8000))


def test_scans_of_a_jpeg_are_counted_and_bytes_that_look_like_one_are_not():
    own = image_bytes(picture(), "JPEG", progressive=True).count(b"\xff\xda")
    assert load_image(jpeg_of_scans(101 - own)).pixels.shape == (48, 64, 3)
    with pytest.raises(MediaError, match="too many scans"):
        load_image(jpeg_of_scans(102 - own))
    comment = image_bytes(picture(), "JPEG", comment=b"\xff\xda" * 1000)
    assert np.array_equal(
        load_image(comment + b"\xff\xda" * 1000).pixels, load_image(jpeg()).pixels
    )


def test_decoding_ends_in_time():
    with pytest.raises(MediaError, match="takes too long.*decode_timeout"):
        load_image(png(), policy=MediaPolicy(decode_timeout=1e-6))


def test_the_clock_is_looked_at_while_pillow_reads(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks) / 10)
    with pytest.raises(MediaError, match="takes too long"):
        load_image(png(), policy=MediaPolicy(decode_timeout=0.5))
