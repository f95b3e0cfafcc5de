# SPDX-License-Identifier: Apache-2.0
"""Decoded video frames to uint8 RGB: matrix, range, bit depth, alpha, pixel aspect, rotation."""

from fractions import Fraction

from tensorrt_llm.visual_gen.media_arrays import over_white
from tensorrt_llm.visual_gen.media_policy import Deadline, MediaPolicy, bad_media, check_size

# Matrix coefficients by their code in ITU-T H.273 -> (name, swscale's code for the same).
_MATRICES = {
    1: ("BT.709", 1),
    4: ("FCC", 4),
    5: ("BT.601", 5),
    6: ("BT.601", 5),
    7: ("SMPTE 240M", 7),
    9: ("BT.2020", 9),
}
_UNTAGGED = (2, 3)  # "unspecified" and "reserved"
# Untagged video from this size on is taken for HD, hence BT.709; smaller video for BT.601.
_HD_WIDTH, _HD_HEIGHT = 1280, 720
_FULL_RANGE = 2
_THREADS = 4  # by default swscale starts one for each core of the machine
# (swap the axes, then flip rows, then flip columns) in words.
_TURNS = {
    (False, False, False): [],
    (False, True, False): ["flipped vertically"],
    (False, False, True): ["flipped horizontally"],
    (False, True, True): ["rotated by 180 degrees"],
    (True, False, False): ["rotated clockwise by 90 degrees", "flipped horizontally"],
    (True, False, True): ["rotated clockwise by 90 degrees"],
    (True, True, False): ["rotated counterclockwise by 90 degrees"],
    (True, True, True): ["rotated clockwise by 90 degrees", "flipped vertically"],
}
# Transfer characteristics of HDR, by their code in H.273: PQ and HLG.
_HDR = {16: "PQ", 18: "HLG"}


def rgb_of_frames(
    frames: list, pixel_aspect: Fraction | None, policy: MediaPolicy, label: str, deadline: Deadline
):
    """Convert frames of one clip; each is dropped from the list as soon as it is converted.

    Args:
        frames: ``av.VideoFrame`` of one size, at least one. Emptied.
        pixel_aspect: Width of a stored pixel over its height.
        policy: Limits on the size with square pixels.
        label: For errors.
        deadline: Checked before each frame.

    Returns:
        (uint8 array [T, H, W, 3], what was applied).

    Raises:
        MediaError: a matrix that swscale doesn't have, a rotation that is no multiple of 90
            degrees, several sizes, a size or a time outside the limits.
    """
    import numpy as np
    from av.video.reformatter import ColorRange, Interpolation, VideoReformatter

    first = frames[0]
    height, width = first.height, first.width
    if any((frame.height, frame.width) != (height, width) for frame in frames):
        raise bad_media(
            "The video changes its size",
            label,
            expected=f"{width}x{height} throughout",
            found="frames of another size",
            remedy="encode the clip again at one size",
        )
    applied, matrix = _colours(first, label)
    if pixel_aspect and pixel_aspect > 0 and pixel_aspect != 1:
        width = round(width * pixel_aspect)
        applied.append(f"pixels of {pixel_aspect} made square")
    check_size(height, width, policy, label, max_pixels=policy.max_video_pixels)
    turn, words = _turn(first, label)
    applied += words
    alpha = any(component.is_alpha for component in first.format.components)
    shape = (width, height) if turn[0] else (height, width)
    pixels = np.empty((len(frames), *shape, 3), np.uint8)
    reformatter = VideoReformatter()
    transparent = False
    for index in range(len(frames)):
        deadline.check()
        frame, frames[index] = frames[index], None
        array = reformatter.reformat(
            frame,
            width=width,
            format="rgba" if alpha else "rgb24",
            src_colorspace=matrix,
            dst_color_range=ColorRange.JPEG,  # RGB is full range, whatever the source is
            interpolation=Interpolation.BICUBIC
            | Interpolation.ACCURATE_RND
            | Interpolation.FULL_CHR_H_INT,
            threads=_THREADS,
        ).to_ndarray()
        if alpha:
            array, changed = over_white(array)
            transparent |= changed
        pixels[index] = _turned(array, turn)
    frames.clear()
    if transparent:
        applied.append("alpha over white")
    return pixels, tuple(applied)


def _colours(frame, label: str) -> tuple[list[str], int | None]:
    """What is said about the colour conversion, and swscale's code of the matrix (None: RGB)."""
    depth = max(component.bits for component in frame.format.components)
    notes = [f"{depth} bits to 8"] if depth > 8 else []
    if frame.color_trc in _HDR:
        notes.append(f"{_HDR[frame.color_trc]} values kept, without tone mapping")
    if frame.format.is_rgb or len(frame.format.components) < 3:
        return notes, None
    code, guess = frame.colorspace, ""
    if code in _UNTAGGED:
        code = 1 if frame.width >= _HD_WIDTH or frame.height >= _HD_HEIGHT else 5
        guess = " (untagged, by size)"
    if code not in _MATRICES:
        raise bad_media(
            "A colour matrix that can't be converted",
            label,
            expected="BT.601, BT.709, SMPTE 240M, FCC or BT.2020 with constant luminance off",
            found=f"matrix {code} of ITU-T H.273",
            remedy="convert the video to BT.709",
        )
    name, matrix = _MATRICES[code]
    full = frame.color_range == _FULL_RANGE or frame.format.name.startswith("yuvj")
    return [*notes, f"{name}{guess} {'full' if full else 'limited'} range to RGB"], matrix


def _turn(frame, label: str) -> tuple[tuple[bool, bool, bool], list[str]]:
    """What the display matrix asks for: (swap the axes, then flip rows, then flip columns).

    The matrix (ISO/IEC 14496-12, 8.2.2) maps a stored point (p, q), q downwards, to
    (a p + c q + x, b p + d q + y); a, b, c, d are numbers 0, 1, 3 and 4 of its nine.
    """
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return (False, False, False), []
    import numpy as np

    numbers = np.frombuffer(bytes(data), "=i4").astype(float)
    a, b, c, d = numbers[[0, 1, 3, 4]] / (np.abs(numbers[[0, 1, 3, 4]]).max() or 1)
    if max(abs(b), abs(c)) < 0.01:
        turn = (False, d < 0, a < 0)
    elif max(abs(a), abs(d)) < 0.01:
        turn = (True, b < 0, c < 0)
    else:
        raise bad_media(
            "A rotation that isn't a multiple of 90 degrees",
            label,
            expected="0, 90, 180 or 270 degrees",
            found=f"{frame.rotation} degrees",
            remedy="rotate the video itself",
        )
    turn = tuple(bool(part) for part in turn)
    return turn, _TURNS[turn]


def _turned(array, turn: tuple[bool, bool, bool]):
    swap, rows, columns = turn
    if swap:
        array = array.swapaxes(0, 1)
    return array[:: -1 if rows else 1, :: -1 if columns else 1]
