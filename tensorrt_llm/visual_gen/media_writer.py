# SPDX-License-Identifier: Apache-2.0
"""Pixels and sound to files, whole or not at all.

png, jpg and webp go through Pillow, mp4 (H.264, AAC) through PyAV, wav through Python's own module.
"""

import math
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen.audio_writer import AacTrack, as_sound, check_track, write_wav

_FORMATS = {
    **{"png": "png", "jpg": "jpg", "jpeg": "jpg", "webp": "webp"},
    **{"mp4": "mp4", "wav": "wav"},
}
_PILLOW_NAMES = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}
_NAMES = "png, jpg, webp, mp4 or wav"
# The widest picture of each coder: JPEG stores 16-bit sizes, WebP 14-bit ones.
_MAX_SIDE = {"jpg": 65535, "webp": 16383}
# Frames a second; the lower bound keeps the fraction below within its denominator.
MIN_FRAME_RATE, MAX_FRAME_RATE = 0.01, 120.0
# A rate this close to n * 1000/1001 means that fraction: 23.976, 29.97, 59.94 are roundings.
_NTSC_TOLERANCE = 5e-4
# Keeps numerator and denominator of any rate well inside the 32 bits of an MP4 time base.
_MAX_DENOMINATOR = 100_000
# What a path may be beside a regular file.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def resolve_format(path: Path, format: str | None) -> str:
    """The canonical format name of a target, from ``format`` or the path's suffix.

    Raises:
        ValueError: unknown, absent, or format and suffix contradict each other.
    """
    suffix = path.suffix.lower().lstrip(".")
    name = suffix if format is None else str(format).lower().lstrip(".")
    if name not in _FORMATS:
        raise ValueError(
            describe_error(
                "Unknown media format",
                where=path,
                expected=_NAMES,
                found=repr(name) if name else "a path without suffix and no format",
                remedy="end the path with one of these suffixes",
            )
        )
    if suffix in _FORMATS and _FORMATS[suffix] != _FORMATS[name]:
        raise ValueError(
            describe_error(
                "The format contradicts the file name",
                where=path,
                expected=f"{_FORMATS[suffix]}, or another suffix",
                found=f"format {name}",
                remedy="leave format out, or rename the file",
            )
        )
    return _FORMATS[name]


def exact_frame_rate(rate: float) -> Fraction:
    """The exact fraction that a decimal frame rate means: 23.976 is 24000/1001, 24 is 24.

    Raises:
        ValueError: not a number from 0.01 to 120.
    """
    number = isinstance(rate, (int, float, Fraction)) and not isinstance(rate, bool)
    if not number or not math.isfinite(rate) or not MIN_FRAME_RATE <= rate <= MAX_FRAME_RATE:
        raise ValueError(
            describe_error(
                "Bad frame rate",
                where="frame_rate",
                expected=f"{MIN_FRAME_RATE:g} to {MAX_FRAME_RATE:g} frames a second",
                found=repr(rate),
                remedy="pass frame_rate in frames a second, 24 for instance",
            )
        )
    if rate == int(rate):
        return Fraction(int(rate))
    ntsc = Fraction(math.ceil(rate) * 1000, 1001)
    if not isinstance(rate, Fraction) and abs(ntsc - Fraction(rate)) < _NTSC_TOLERANCE:
        return ntsc
    exact = rate if isinstance(rate, Fraction) else Fraction(repr(rate))
    return exact.limit_denominator(_MAX_DENOMINATOR)


def write_image(path: Path, pixels: object, format: str, quality: int) -> Path:
    """Write uint8 RGB [H, W, 3] (or [1, H, W, 3]) as png, jpg or webp.

    Raises:
        ValueError: pixels of another kind, several images, a side too long for the format, a
            quality outside 1..100, a missing folder.
    """
    array = _as_array(pixels, path)
    if array.ndim == 4:
        if array.shape[0] != 1:
            raise ValueError(
                describe_error(
                    "Several images for one file",
                    where=path,
                    expected="one image [H, W, 3]",
                    found=f"{array.shape[0]} images",
                    remedy="save each: VisualGenOutput(image=output.image[i]).save(path)",
                )
            )
        array = array[0]
    _check_pixels(array, 3, path)
    _check_quality(quality)
    limit = _MAX_SIDE.get(format, max(array.shape))
    if max(array.shape[:2]) > limit:
        raise ValueError(
            describe_error(
                f"The picture is too large for {format}",
                where=path,
                expected=f"sides of at most {limit} pixels",
                found=f"{array.shape[0]}x{array.shape[1]}",
                remedy="save it as png",
            )
        )
    from PIL import Image

    options = {} if format == "png" else {"quality": quality}
    if format == "jpg":
        # Full chroma resolution: halved chroma smears the saturated edges of generated pictures.
        options["subsampling"] = "4:4:4"
    with _written_aside(path) as partial:
        Image.fromarray(array).save(partial, format=_PILLOW_NAMES[format], **options)
    return path


def write_sound(path: Path, audio: object, sample_rate: int | None) -> Path:
    """Write sound [channels, samples] as WAV: PCM, 16 bit.

    Raises:
        ValueError: no sound of one or two channels, a bad or missing sample rate, a missing folder.
    """
    sound = as_sound(audio, sample_rate, path)
    with _written_aside(path) as partial:
        write_wav(partial, sound, sample_rate)
    return path


def write_video(
    path: Path,
    pixels: object,
    frame_rate: float | None,
    quality: int,
    audio: object = None,
    sample_rate: int | None = None,
    before_frame: Callable[[], None] | None = None,
) -> Path:
    """Write uint8 RGB [T, H, W, 3] as MP4: H.264, yuv420p, BT.709 limited range, index in front.

    Sound becomes an AAC track. ``before_frame`` is called before each frame; what it raises ends
    the writing and leaves nothing.

    Raises:
        ValueError: pixels of another kind, an odd height or width (yuv420p halves both), a bad or
            missing frame rate, a quality outside 1..100, a missing folder; sound that ``as_sound``
            or ``check_track`` refuses.
        RuntimeError: this PyAV has no H.264 encoder.
    """
    array = _as_array(pixels, path)
    _check_pixels(array, 4, path)
    _check_quality(quality)
    frames, height, width, _ = array.shape
    if frames == 0 or height % 2 or width % 2:
        raise ValueError(
            describe_error(
                "H.264 in yuv420p can't hold this video",
                where=path,
                expected="at least one frame, an even height and an even width",
                found=f"{frames} frames of {height}x{width}",
                remedy="pass at least one frame, and crop or pad an odd side by one pixel",
            )
        )
    rate = exact_frame_rate(frame_rate)
    sound = None
    if audio is not None:
        sound = as_sound(audio, sample_rate, path)
        check_track(sound, sample_rate, frames / rate, rate)
    with _written_aside(path) as partial:
        _encode_mp4(partial, array, rate, quality, sound, sample_rate, before_frame)
    return path


def _encode_mp4(
    path: Path,
    array,
    rate: Fraction,
    quality: int,
    sound,
    sample_rate: int | None,
    before_frame: Callable[[], None] | None,
) -> None:
    import av
    from av.video.reformatter import (
        ColorPrimaries,
        ColorRange,
        Colorspace,
        ColorTrc,
        Interpolation,
        VideoReformatter,
    )

    try:
        av.Codec("libx264", "w")
    except av.codec.codec.UnknownCodecError as error:
        raise RuntimeError(
            describe_error(
                "No H.264 encoder",
                where="PyAV",
                expected="a build with libx264",
                found=f"av {av.__version__} without it",
                remedy="pip install --force-reinstall --only-binary av av",
            )
        ) from error

    reformatter = VideoReformatter()
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.height, stream.width = array.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": str(_crf(quality)), "preset": "medium"}
        # The tags say what the conversion below does; an untagged file is guessed at by its size.
        context = stream.codec_context
        context.colorspace = Colorspace.ITU709
        context.color_range = ColorRange.MPEG
        context.color_primaries = ColorPrimaries.BT709
        context.color_trc = ColorTrc.BT709
        track = None if sound is None else AacTrack(container, sound, sample_rate)
        for index, pixels in enumerate(array):
            if before_frame is not None:
                before_frame()
            frame = reformatter.reformat(
                av.VideoFrame.from_ndarray(pixels, format="rgb24"),
                format="yuv420p",
                src_color_range=ColorRange.JPEG,
                dst_colorspace=Colorspace.ITU709,
                dst_color_range=ColorRange.MPEG,
                dst_color_primaries=ColorPrimaries.BT709,
                dst_color_trc=ColorTrc.BT709,
                interpolation=Interpolation.BICUBIC
                | Interpolation.ACCURATE_RND
                | Interpolation.FULL_CHR_H_INP,
            )
            frame.pts = index
            frame.time_base = 1 / rate
            container.mux(stream.encode(frame))
            if track is not None:
                track.mux_until((index + 1) / rate)
        container.mux(stream.encode())
        if track is not None:
            track.mux_until(None)


def _crf(quality: int) -> int:
    """Quality 95 is x264's visually lossless 18, every two points below cost one step of CRF."""
    return min(51, round(18 + (95 - quality) / 2))


def resolve_target(path: Path) -> Path:
    """Where a file of this name is written: the path itself, or where a symbolic link points.

    Raises:
        ValueError: a folder, or something else that is no regular file (renaming a file onto a
            device or a FIFO would replace it for everybody); no folder to write to.
    """
    kind = None
    try:
        mode = path.stat().st_mode
        kind = None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")
    except FileNotFoundError:
        pass  # a new file, or what a link points to is new
    except OSError as error:
        kind = error.strerror  # a ring of links, no access
    # Renaming onto a link would replace the link, and leave the file that it stands for as it was.
    target = Path(os.path.realpath(path))
    if kind is not None or not target.parent.is_dir():
        raise ValueError(
            describe_error(
                "No place to write to",
                where=path,
                expected="a new file or a regular one, in an existing folder",
                found=kind or f"no folder {target.parent}",
                remedy="make the folder first" if kind is None else "give another file name",
            )
        )
    return target


@contextmanager
def _written_aside(path: Path) -> Iterator[Path]:
    """Give a name beside the target; rename it to the target at the end, or leave nothing."""
    target = resolve_target(path)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        yield partial
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _as_array(pixels, path: Path):
    """A NumPy array of a CPU tensor or array, without a copy."""
    array = pixels.numpy() if hasattr(pixels, "numpy") else pixels
    if str(getattr(array, "dtype", "")) != "uint8":
        raise ValueError(
            describe_error(
                "Not pixels",
                where=path,
                expected="a uint8 tensor or array",
                found=getattr(array, "dtype", type(array).__name__),
                remedy="scale to 0..255 and convert with .to(torch.uint8).cpu()",
            )
        )
    return array


def _check_pixels(array, rank: int, path: Path) -> None:
    if array.ndim != rank or array.shape[-1] != 3 or 0 in array.shape[-3:]:
        expected = "[T, H, W, 3]" if rank == 4 else "[H, W, 3]"
        remedy = "put the three colours last, and for a video the frames first"
        raise ValueError(
            describe_error(
                "Pixels of another shape",
                where=path,
                expected=expected,
                found=array.shape,
                remedy=remedy,
            )
        )


def _check_quality(quality: int) -> None:
    if isinstance(quality, bool) or not isinstance(quality, int) or not 1 <= quality <= 100:
        raise ValueError(
            describe_error(
                "Bad quality",
                where="quality",
                expected="an integer, 1 to 100",
                found=quality,
                remedy="pass quality=95, or another whole number up to 100",
            )
        )
