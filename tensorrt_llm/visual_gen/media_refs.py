# SPDX-License-Identifier: Apache-2.0
"""Reference media of a request: whatever stands for a picture or a clip, to uint8 RGB pixels.

A reference is a path, a ``file:`` or ``data:`` URI, an http(s) URL, the bytes of a file, a PIL
image, an array or a tensor; for a clip also a list of PIL images or arrays. It may come from
anyone, so work and memory are bounded by a ``MediaPolicy``, and whatever is wrong with it is one
``MediaError``, a ValueError that names the reference without its data or secrets. Nothing is
written. Importing this costs neither torch nor NumPy, Pillow or PyAV.
"""

from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen.media_arrays import is_array, is_pil_image, rgb_of_array, rgb_of_pil
from tensorrt_llm.visual_gen.media_image import DecodedImage, decode_image, pillow_errors
from tensorrt_llm.visual_gen.media_policy import MediaError, MediaPolicy, bad_media
from tensorrt_llm.visual_gen.media_source import is_encoded, open_source
from tensorrt_llm.visual_gen.media_video import DecodedVideo, decode_video

_KEEP = ("first", "last")


def load_image(reference: object, *, policy: MediaPolicy | None = None) -> DecodedImage:
    """Load the picture that an ``image_reference`` stands for.

    Args:
        reference: A path (str or PathLike), a ``file:`` or ``data:`` URI, an http(s) URL, the bytes
            of a file, a PIL image, or a NumPy array or torch tensor [H, W] or [H, W, C], C = 1, 3
            or 4, uint8 or floating point 0..1.
        policy: The limits; those of ``MediaPolicy()`` by default.

    Returns:
        Pixels uint8 RGB [H, W, 3], upright, of an animation the first frame.

    Raises:
        MediaError: (a ValueError) forbidden, not to be had, broken, or outside a limit.
    """
    policy = policy or MediaPolicy()
    if is_encoded(reference):
        with open_source(reference, "image", policy) as source:
            return decode_image(source, policy)
    label = f"image_reference, {type(reference).__name__}"
    pixels, applied, stored = _decoded_picture(reference, policy, label)
    return DecodedImage(pixels, *stored, applied=applied)


def load_video(
    reference: object, *, num_frames: int, keep: str = "first", policy: MediaPolicy | None = None
) -> DecodedVideo:
    """Load the frames of a ``video_reference`` that a request uses.

    Args:
        reference: A path (str or PathLike), a ``file:`` or ``data:`` URI, an http(s) URL, the bytes
            of a file, a list of PIL images or of arrays of pictures, or a NumPy array or torch
            tensor [T, H, W, C], C = 1, 3 or 4, uint8 or floating point 0..1.
        num_frames: Frames wanted; a shorter clip gives all that it has.
        keep: Which end of the clip they come from, "first" or "last".
        policy: The limits; those of ``MediaPolicy()`` by default.

    Returns:
        At most ``num_frames`` frames, uint8 RGB [T, H, W, 3], upright, in order.

    Raises:
        MediaError: (a ValueError) forbidden, not to be had, broken, or outside a limit.
        ValueError: ``num_frames`` below 1 or another ``keep``.
    """
    if isinstance(num_frames, bool) or not isinstance(num_frames, int) or num_frames < 1:
        raise ValueError(
            describe_error(
                "Bad num_frames",
                where="load_video",
                expected=">= 1",
                found=num_frames,
                remedy="pass how many frames of the clip are wanted, at least 1",
            )
        )
    if keep not in _KEEP:
        raise ValueError(
            describe_error(
                "Bad keep",
                where="load_video",
                expected=" or ".join(_KEEP),
                found=keep,
                remedy='pass keep="first" or keep="last"',
            )
        )
    policy = policy or MediaPolicy()
    if is_encoded(reference):
        with open_source(reference, "video", policy) as source:
            return decode_video(source, num_frames, keep, policy)
    label = f"video_reference, {type(reference).__name__}"
    if is_array(reference):
        return _video_of_array(reference, num_frames, keep, policy, label)
    if isinstance(reference, (list, tuple)):
        return _video_of_list(reference, num_frames, keep, policy, label)
    raise _no_reference(reference, label, "list of pictures")


def _video_of_array(
    value, num_frames: int, keep: str, policy: MediaPolicy, label: str
) -> DecodedVideo:
    if len(value.shape) == 4:
        _check_count(value.shape[0], num_frames, policy, label)
    part = value[_selection(keep, num_frames)] if len(value.shape) == 4 else value
    frames, applied = rgb_of_array(part, 4, policy, label, policy.max_video_pixels)
    return DecodedVideo(
        frames,
        *frames.shape[1:3],
        source_frames=value.shape[0],
        applied=(f"{keep} {len(frames)} frames", *applied),
    )


def _video_of_list(
    pictures: list | tuple, num_frames: int, keep: str, policy: MediaPolicy, label: str
) -> DecodedVideo:
    import numpy as np

    _check_count(len(pictures), num_frames, policy, label)
    frames, notes = [], {}
    first = len(pictures) - num_frames if keep == "last" else 0
    for number, picture in enumerate(pictures[_selection(keep, num_frames)], max(0, first)):
        pixels, applied, _ = _decoded_picture(picture, policy, f"{label}, item {number}")
        if frames and pixels.shape != frames[0].shape:
            raise bad_media(
                "The frames differ in size",
                f"{label}, item {number}",
                expected="{1}x{0}".format(*frames[0].shape),
                found="{1}x{0}".format(*pixels.shape),
                remedy="scale or crop all frames to one size",
            )
        frames.append(pixels)
        notes.update(dict.fromkeys(applied))
    height, width = frames[0].shape[:2]
    return DecodedVideo(
        np.stack(frames),
        height,
        width,
        source_frames=len(pictures),
        applied=(f"{keep} {len(frames)} frames", *notes),
    )


def _selection(keep: str, num_frames: int) -> slice:
    return slice(num_frames) if keep == "first" else slice(-num_frames, None)


def _check_count(count: int, num_frames: int, policy: MediaPolicy, label: str) -> None:
    if not min(num_frames, policy.min_video_frames) <= count <= policy.max_video_frames:
        raise bad_media(
            "The clip has too few or too many frames",
            label,
            expected=f"{policy.min_video_frames} to {policy.max_video_frames} frames",
            found=count,
            remedy="pass a single picture as image_reference" if count < 2 else "cut the clip",
        )


def _decoded_picture(picture: object, policy: MediaPolicy, label: str):
    """Pixels uint8 RGB [H, W, 3], what was applied, and the stored size of a decoded picture."""
    if is_pil_image(picture):
        with pillow_errors(label, picture.format or "image", policy):
            return rgb_of_pil(picture, policy, label)
    if is_array(picture):
        pixels, applied = rgb_of_array(picture, 3, policy, label, policy.max_image_pixels)
        return pixels, applied, pixels.shape[:2]
    raise _no_reference(picture, label, "PIL image")


def _no_reference(reference: object, label: str, picture: str) -> MediaError:
    remedy = "convert it to one of these, a NumPy array for instance"
    if hasattr(reference, "read"):
        remedy = "read a file object first and pass its bytes"
    return bad_media(
        "Not a kind of reference",
        label,
        expected=f"a path, URI, URL, bytes, {picture}, array or tensor",
        found=type(reference).__name__,
        remedy=remedy,
    )
