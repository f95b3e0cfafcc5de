# SPDX-License-Identifier: Apache-2.0
"""Encoded images to pixels through Pillow, with the limits checked on the header first."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm.visual_gen.media_arrays import rgb_of_pil
from tensorrt_llm.visual_gen.media_formats import IMAGE_FORMATS
from tensorrt_llm.visual_gen.media_policy import (
    Deadline,
    MediaError,
    MediaPolicy,
    bad_media,
    shorten,
)
from tensorrt_llm.visual_gen.media_source import MediaSource

# Each scan of a progressive JPEG costs a pass over all of its pixels and may be a few bytes long.
# Encoders write about 10; libjpeg-turbo's own tools warn from 500.
_MAX_JPEG_SCANS = 100
# A marker inside entropy-coded data: neither a stuffed 0xff, nor a restart, nor a fill byte.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_JPEG_SCAN, _JPEG_END = 0xDA, 0xD9


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """A picture of a reference.

    Attributes:
        pixels: uint8 RGB array [H, W, 3], upright, contiguous.
        source_height: Rows as stored, before the orientation was applied.
        source_width: Columns as stored.
        format: "jpeg", "png", ...; None for pixels that came decoded.
        applied: What was done to the stored pixels, in order, in words.
    """

    pixels: Any = field(repr=False)
    source_height: int
    source_width: int
    format: str | None = None
    applied: tuple[str, ...] = ()


def decode_image(source: MediaSource, policy: MediaPolicy) -> DecodedImage:
    """Decode the first frame of an image.

    Raises:
        MediaError: broken or cut data, a size or a time outside the limits, an unusual mode.
    """
    from PIL import Image

    deadline = Deadline(policy.decode_timeout, source.label, "decoding", "decode_timeout")
    data = source.file.read(source.size)
    if source.format == "jpeg":
        _check_jpeg_scans(data, source.label)
    with pillow_errors(source.label, source.format, policy):
        file = _TimedFile(data, deadline)
        with Image.open(file, formats=(IMAGE_FORMATS[source.format],)) as image:
            pixels, applied, stored = rgb_of_pil(image, policy, source.label)
            if getattr(image, "n_frames", 1) > 1:
                applied = ("first frame", *applied)
    deadline.check()
    return DecodedImage(pixels, *stored, source.format, applied)


@contextmanager
def pillow_errors(label: str, format: str, policy: MediaPolicy) -> Iterator[None]:
    """Turn whatever Pillow raises on broken data into a MediaError."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except (MediaError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise bad_media(
            "The picture is too large",
            label,
            expected=f"at most {policy.max_image_pixels} pixels",
            found=f"{int(re.search(r'[0-9]+', str(error))[0])} pixels",
            remedy="scale it down",
        ) from None
    except Exception as error:  # Pillow has no one type for them: struct.error, KeyError, ...
        header = isinstance(error, UnidentifiedImageError)
        raise bad_media(
            "The image can't be decoded",
            label,
            expected=f"a whole {format} file",
            found="a broken header" if header else shorten(f"{type(error).__name__}: {error}"),
            remedy="open it in an image editor and save it again",
        ) from error


class _TimedFile(io.BytesIO):
    """Bytes that stop coming when the time is over: Pillow decodes as it reads."""

    def __init__(self, data: bytes, deadline: Deadline) -> None:
        super().__init__(data)
        self._deadline = deadline

    def read(self, size: int | None = -1) -> bytes:
        self._deadline.check()
        return super().read(size)


def _check_jpeg_scans(data: bytes, label: str) -> None:
    """Refuse a JPEG whose first picture has more scans than encoders write.

    Raises:
        MediaError: too many scans.
    """
    position, scans = 2, 0
    while match := _JPEG_MARKER.search(data, position):
        marker, position = match.group()[1], match.end()
        if marker == _JPEG_END:
            return
        if marker == _JPEG_SCAN:
            scans += 1
            if scans > _MAX_JPEG_SCANS:
                raise bad_media(
                    "The JPEG has too many scans",
                    label,
                    expected=f"at most {_MAX_JPEG_SCANS}",
                    found="more",
                    remedy="save it again as a baseline JPEG or as PNG",
                )
        position += int.from_bytes(data[position : position + 2], "big")
