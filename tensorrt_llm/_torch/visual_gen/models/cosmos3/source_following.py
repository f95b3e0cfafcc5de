# SPDX-License-Identifier: Apache-2.0
"""Sizes and rates: the trained sizes, and what a request takes from its reference."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorrt_llm._torch.visual_gen.models.cosmos3.violations import (
    MAX_SIDE,
    SPATIAL_FACTOR,
    Violations,
)
from tensorrt_llm.visual_gen.media_writer import MAX_FRAME_RATE, MIN_FRAME_RATE

# The sizes (width, height) that the models were trained on, by tier and aspect ratio (cosmos3.md
# E.1). A tier is a name, no number of pixels: its sizes are these and no others.
RESOLUTIONS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "256": {
        "16:9": (320, 192),
        "4:3": (320, 256),
        "1:1": (256, 256),
        "3:4": (256, 320),
        "9:16": (192, 320),
    },
    "480": {
        "16:9": (832, 480),
        "4:3": (736, 544),
        "1:1": (640, 640),
        "3:4": (544, 736),
        "9:16": (480, 832),
    },
    "704": {
        "16:9": (1280, 704),
        "4:3": (1088, 832),
        "1:1": (960, 960),
        "3:4": (832, 1088),
        "9:16": (704, 1280),
    },
    "720": {
        "16:9": (1280, 720),
        "4:3": (1104, 832),
        "1:1": (960, 960),
        "3:4": (832, 1104),
        "9:16": (720, 1280),
    },
}


@dataclass(frozen=True)
class SourceInfo:
    """What a decoded reference says about itself.

    Attributes:
        width, height: Pixels, as displayed (orientation applied).
        frame_rate: Frames a second; None for an image or where the file doesn't say.
        num_frames: Frames of a video; None for an image or where the file doesn't say.
    """

    width: int
    height: int
    frame_rate: float | None
    num_frames: int | None


def resolve_size(
    height: Any,
    width: Any,
    default: tuple[int, int],
    tier: str | None,
    source: SourceInfo | None,
    check: Violations,
) -> tuple[int, int]:
    """The size of a request.

    Args:
        height, width: As asked for; None follows the source, else the default.
        default: (height, width) of the task.
        tier: Tier of ``RESOLUTIONS`` from which a source chooses; None where none is followed.
        source: The reference.
        check: Collects what is wrong.

    Returns:
        (height, width): without both, the tier's size that is nearest to the source in aspect;
        without one, the side that keeps the source's aspect, to the nearest multiple of 16.
    """
    height = None if height is None else check.side("height", height)
    width = None if width is None else check.side("width", width)
    if source is None or tier is None:
        return default[0] if height is None else height, default[1] if width is None else width
    if height is None and width is None:
        width, height = nearest_resolution(source.width / source.height, tier)
    elif width is None:
        width = _snap_side(height * source.width / source.height)
    elif height is None:
        height = _snap_side(width * source.height / source.width)
    return height, width


def smallest_size(height: int | None, width: int | None, tier: str) -> tuple[int, int]:
    """The (height, width) of fewest pixels that a source not read yet can lead ``resolve_size`` to.

    Args:
        height, width: As asked for; None where the source will say it.
        tier: Tier of ``RESOLUTIONS`` from which the source chooses.
    """
    if height is None and width is None:
        width, height = min(RESOLUTIONS[tier].values(), key=math.prod)
    return height or SPATIAL_FACTOR, width or SPATIAL_FACTOR


def nearest_resolution(aspect: float, tier: str) -> tuple[int, int]:
    """(width, height) of the tier whose width / height is nearest to ``aspect`` in logarithm."""
    return min(
        RESOLUTIONS[tier].values(), key=lambda size: abs(math.log(aspect * size[1] / size[0]))
    )


def resolve_frame_rate(
    given: Any, num_frames: Any, default: float, source: SourceInfo | None, check: Violations
) -> float:
    """Frames a second of a video.

    Args:
        given: As asked for.
        num_frames: As asked for: a caller who says the length means it at the default rate.
        default: Of the task.
        source: The reference. A request that says neither follows its rate, if it has one.
        check: Collects what is wrong, a source's rate that can't be had included.
    """
    follows = given is None and num_frames is None and source is not None
    if follows and source.frame_rate is not None:
        name = "frame_rate, which follows video_reference,"
        # Left out it already is, so that is no advice.
        remedy = f"give frame_rate, from {MIN_FRAME_RATE:g} to {MAX_FRAME_RATE:g}"
        return check.number(name, source.frame_rate, MIN_FRAME_RATE, MAX_FRAME_RATE, remedy)
    given = default if given is None else given
    return check.number("frame_rate", given, MIN_FRAME_RATE, MAX_FRAME_RATE)


def _snap_side(side: float) -> int:
    """The nearest side that the VAE can make."""
    return min(max(round(side / SPATIAL_FACTOR) * SPATIAL_FACTOR, SPATIAL_FACTOR), MAX_SIDE)
