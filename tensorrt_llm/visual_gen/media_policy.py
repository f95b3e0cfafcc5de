# SPDX-License-Identifier: Apache-2.0
"""What reference media may cost: the limits, the clock, and the one way to refuse them."""

import os
import time

from pydantic import BaseModel, ConfigDict, Field

from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen.params import ParameterError

LOCAL_PATHS_OFF = "TRTLLM_DISALLOW_LOCAL_MEDIA_PATH"
# Pillow's own guard (PIL.Image.MAX_IMAGE_PIXELS): 256 MiB of 24-bit pixels. A higher limit of ours
# would do nothing.
_PILLOW_MAX_PIXELS = 1024 * 1024 * 1024 // 4 // 3
_SIZE_REMEDIES = {
    "thin": "crop the longer side",
    "small": "give a larger picture",
    "large": "scale the picture down",
}


class MediaPolicy(BaseModel):
    """Limits on reference media; whatever exceeds one is refused before the work is done.

    The defaults fit a program that reads its user's own files. A server narrows them with
    ``MediaPolicy(allow_local_paths=False, ...)``. The environment variable
    ``TRTLLM_DISALLOW_LOCAL_MEDIA_PATH=1`` forbids local paths under every policy.

    Raises:
        pydantic.ValidationError: (a ValueError) an unknown field or a value outside its range.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    allow_local_paths: bool = Field(True, description="Paths and `file://` URIs may be read.")
    allow_private_addresses: bool = Field(
        False,
        description="URLs may lead to private, loopback, link-local, multicast and other "
        "addresses that aren't public.",
    )
    max_image_bytes: int = Field(
        64 * 2**20, ge=1, description="Encoded bytes of an image, wherever it comes from."
    )
    max_video_bytes: int = Field(
        2**30, ge=1, description="Encoded bytes of a video, wherever it comes from."
    )
    max_download_bytes: int = Field(
        256 * 2**20,
        ge=1,
        description="Encoded bytes from a URL, which are held in memory; beside the two above.",
    )
    # A side below 16 is less than one latent cell (the VAE's spatial factor).
    min_side: int = Field(16, ge=1, description="Pixels of the shorter side.")
    max_side: int = Field(16384, ge=1, description="Pixels of the longer side.")
    # Filling a target with a thin strip scales it up by this factor before the crop.
    max_aspect_ratio: float = Field(16.0, ge=1, description="Longer side over shorter side.")
    max_image_pixels: int = Field(2**26, ge=1, le=_PILLOW_MAX_PIXELS, description="Of an image.")
    # A decoder may hold 16 reference pictures: 16 * 2**24 pixels in 4:2:0 are 384 MiB.
    max_video_pixels: int = Field(2**24, ge=1, le=2**26, description="Of one video frame.")
    min_video_frames: int = Field(
        2, ge=1, description="A clip of a single frame is a picture and belongs in an image."
    )
    max_video_frames: int = Field(
        216_000, ge=1, le=2_000_000, description="Frames of the whole clip, used or not."
    )
    max_duration: float = Field(
        3600.0, gt=0, allow_inf_nan=False, description="Seconds of the whole clip, used or not."
    )
    max_decoded_bytes: int = Field(
        2 * 2**30, ge=1, description="RGB bytes of the frames that a request uses."
    )
    fetch_timeout: float = Field(
        30.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds for a URL in all: names, connections, redirects and body.",
    )
    max_redirects: int = Field(3, ge=0, le=20, description="Redirects followed for one URL.")
    decode_timeout: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="Seconds for decoding one reference."
    )

    def local_paths_allowed(self) -> bool:
        """Whether this policy and the environment both let a path be read."""
        return self.allow_local_paths and os.environ.get(LOCAL_PATHS_OFF, "") in ("", "0")


class MediaError(ParameterError):
    """A reference that is refused or can't be decoded. A ValueError: the request is at fault."""

    def __init__(self, message: str) -> None:
        # Of the two fields a request has one at most.
        super().__init__(message, ("image_reference", "video_reference"))


def bad_media(
    what: str,
    label: str,
    *,
    expected: object,
    found: object,
    remedy: str,
) -> MediaError:
    """The error that refuses a reference; the caller raises it.

    Args:
        what: The problem in one clause.
        label: The request field and the kind of reference, without data or secrets.
        expected: What would have been right.
        found: What was there instead.
        remedy: What the caller can do about it.
    """
    return MediaError(
        describe_error(what, where=label, expected=expected, found=found, remedy=remedy)
    )


def shorten(text: str, limit: int = 120) -> str:
    """``text`` for an error message: printable characters only, the middle of a long one cut."""
    if len(text) > limit:
        text = f"{text[: limit - 43]}...{text[-40:]}"
    return "".join(c if c.isprintable() else "?" for c in text)


class Deadline:
    """The moment by which work on one reference has to be done.

    Args:
        seconds: From now.
        label: As for ``bad_media``.
        work: What takes the time, "decoding" say.
        field: The field of ``MediaPolicy`` that set the time.
    """

    def __init__(self, seconds: float, label: str, work: str, field: str) -> None:
        self._end = time.monotonic() + seconds
        self._seconds, self._label, self._work, self._field = seconds, label, work, field

    def left(self) -> float:
        """Seconds left; 0 or less when the time is over."""
        return self._end - time.monotonic()

    def check(self) -> None:
        """Raises MediaError when the time is over."""
        if self.left() <= 0:
            raise self.error()

    def error(self) -> MediaError:
        """The error that says the time is over."""
        return bad_media(
            f"{self._work.capitalize()} takes too long",
            self._label,
            expected=f"at most {self._seconds:g} seconds (MediaPolicy.{self._field})",
            found="more",
            remedy="give a smaller or simpler file",
        )


def check_size(
    height: int, width: int, policy: MediaPolicy, label: str, *, max_pixels: int
) -> None:
    """Check the size of a picture, as its header or its shape gives it.

    Raises:
        MediaError: too small, too large, or too thin.
    """
    short, long = min(height, width), max(height, width)
    if short < policy.min_side:
        problem, limit = "small", f"at least {policy.min_side} pixels a side"
    elif long > policy.max_side:
        problem, limit = "large", f"at most {policy.max_side} pixels a side"
    elif height * width > max_pixels:
        problem, limit = "large", f"at most {max_pixels} pixels"
    elif long > short * policy.max_aspect_ratio:
        problem, limit = "thin", f"a longer side of at most {policy.max_aspect_ratio:g} times"
        limit += " the shorter one"
    else:
        return
    raise bad_media(
        f"The picture is too {problem}",
        label,
        expected=limit,
        found=f"{width}x{height}",
        remedy=_SIZE_REMEDIES[problem],
    )
