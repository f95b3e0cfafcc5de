# SPDX-License-Identifier: Apache-2.0
"""Encoded video to the first or last frames through PyAV, within bounded work and memory."""

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tensorrt_llm.visual_gen.media_boxes import checked_container
from tensorrt_llm.visual_gen.media_formats import VIDEO_FORMATS
from tensorrt_llm.visual_gen.media_frames import rgb_of_frames
from tensorrt_llm.visual_gen.media_policy import (
    Deadline,
    MediaError,
    MediaPolicy,
    bad_media,
    check_size,
    shorten,
)
from tensorrt_llm.visual_gen.media_source import MediaSource

# FFmpeg's names of the decoders that may run, also while it probes a file.
_DECODERS = (
    *("h264", "hevc", "av1", "libdav1d", "vp8", "vp9", "libvpx", "libvpx-vp9"),
    *("mpeg4", "msmpeg4v3", "mpeg2video", "mpeg1video", "mjpeg", "h263"),
    *("prores", "dnxhd", "ffv1", "huffyuv", "ffvhuff", "utvideo", "rawvideo"),
)
_MAX_STREAMS = 32
_MAX_THREADS = 4
# Decoders round the sides of their pictures up, to multiples of at most this.
_CODED_ALIGNMENT = 64
# Seconds beyond the last frame of an index: later than any frame is shown.
_SEEK_MARGIN = 10


@dataclass(frozen=True, eq=False)
class DecodedVideo:
    """The frames of a reference that a request uses, in order.

    Attributes:
        frames: uint8 RGB array [T, H, W, 3], upright, square pixels, contiguous.
        source_height: Rows as stored, before any rotation.
        source_width: Columns as stored.
        frame_rate: Average frames a second of the whole clip; None where nothing tells it, as for
            arrays and lists.
        timestamps: Seconds from the start of the clip, one for each of ``frames``; None as above.
            Their distances differ where the frame rate varies.
        duration: Seconds of the whole clip, as it declares; None as above.
        source_frames: Frames of the whole clip, as it declares; None where it doesn't.
        format: "mp4", "matroska", "avi"; None for frames that came decoded.
        codec: FFmpeg's name of the decoder, or None as above.
        applied: What was done to the stored frames, in order, in words.
    """

    frames: Any = field(repr=False)
    source_height: int
    source_width: int
    frame_rate: Fraction | None = None
    timestamps: tuple[Fraction, ...] | None = None
    duration: Fraction | None = None
    source_frames: int | None = None
    format: str | None = None
    codec: str | None = None
    applied: tuple[str, ...] = ()


def decode_video(
    source: MediaSource, num_frames: int, keep: str, policy: MediaPolicy
) -> DecodedVideo:
    """Decode the first or last frames of a video.

    For the first ones, decoding stops after them. For the last ones it starts at a keyframe near
    the end that has enough frames behind it, found by the file's index or by time, and at the
    beginning where neither can be had; no more than ``num_frames`` frames are held.

    Args:
        source: Of one of ``VIDEO_FORMATS``.
        num_frames: Frames wanted; all of a shorter clip.
        keep: "first" or "last".
        policy: The limits.

    Raises:
        MediaError: broken or cut data, no video stream, no or too few frames, a codec that isn't
            accepted, sizes, counts or times outside the limits, a size that changes on the way.
    """
    import av

    deadline = Deadline(policy.decode_timeout, source.label, "decoding", "decode_timeout")
    try:
        return _Reader(source, policy, deadline).read(num_frames, keep)
    except MediaError:
        raise
    except (av.FFmpegError, OSError, ValueError, RuntimeError) as error:
        deadline.check()
        raise bad_media(
            "The video can't be decoded",
            source.label,
            # FFmpeg doesn't say so where it stops at frames that are too large.
            expected=f"a whole {source.format} file with frames of at most "
            f"{policy.max_video_pixels} pixels",
            found=shorten(f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"),
            remedy="play it, and write it again with a video tool",
        ) from error


class _Reader:
    """One video file; each ``_open`` gives it a fresh decoder."""

    def __init__(self, source: MediaSource, policy: MediaPolicy, deadline: Deadline) -> None:
        self._source, self._policy, self._deadline = source, policy, deadline
        self._label = source.label
        self._file = checked_container(source, policy, deadline)

    def read(self, num_frames: int, keep: str) -> DecodedVideo:
        """The frames, with what the container says about the whole clip."""
        with self._open() as container:
            stream = self._stream(container)
            origin, pixel_aspect = stream.start_time or 0, stream.sample_aspect_ratio
            codec = stream.codec_context.name
            rate = stream.average_rate or stream.guessed_rate
            duration, count = _duration(container, stream), max(0, stream.frames) or None
            self._check_declared(stream.codec_context, num_frames, duration, count)
            starts = _seek_points(stream, num_frames, duration) if keep == "last" else []
            if keep == "first":
                frames = list(self._first_frames(container, stream, num_frames))
        if keep == "last":
            frames = self._last_frames(num_frames, starts)
        self._check_frames(frames, num_frames)
        height, width, base = frames[0].height, frames[0].width, frames[0].time_base
        times = [frame.pts for frame in frames]
        applied = (f"{keep} {len(frames)} frames",)
        pixels, converted = rgb_of_frames(
            frames, pixel_aspect, self._policy, self._label, self._deadline
        )
        return DecodedVideo(
            frames=pixels,
            source_height=height,
            source_width=width,
            frame_rate=rate if rate and rate > 0 else None,
            timestamps=None if None in times else tuple((t - origin) * base for t in times),
            duration=duration,
            source_frames=count,
            format=self._source.format,
            codec=codec,
            applied=applied + converted,
        )

    def _open(self):
        import av

        policy = self._policy
        self._file.seek(0)
        return av.open(
            self._file,
            mode="r",
            format=VIDEO_FORMATS[self._source.format],
            options={
                # max_pixels reaches the decoders that FFmpeg runs to probe the streams.
                "max_pixels": str(policy.max_video_pixels + 2 * _CODED_ALIGNMENT * policy.max_side),
                "codec_whitelist": ",".join(_DECODERS),
                "max_streams": str(_MAX_STREAMS),
            },
            io_open=self._refuse_to_open,
            metadata_errors="replace",
        )

    def _refuse_to_open(self, url: str, flags: int, options: dict) -> None:
        raise bad_media(
            "The video refers to another file",
            self._label,
            expected="one whole file",
            found="a reference",
            remedy="write it as one self-contained MP4",
        )

    def _stream(self, container):
        """The first video stream that isn't a cover picture; its decoder limited, not open yet."""
        from av.stream import Discard, Disposition

        streams = [
            stream
            for stream in container.streams.video
            if not stream.disposition & Disposition.attached_pic
        ]
        if not streams:
            kinds = ", ".join(sorted({stream.type for stream in container.streams}))
            raise bad_media(
                "No video stream",
                self._label,
                expected="a file with moving pictures",
                found=kinds or "none",
                remedy="pass a file with a video stream; for a picture use image_reference",
            )
        stream = streams[0]
        context = stream.codec_context
        if context is None or context.name not in _DECODERS:
            raise bad_media(
                "A video codec that isn't accepted",
                self._label,
                expected="H.264, HEVC, AV1, VP8, VP9, MPEG-4, MPEG-2, MJPEG, ProRes, FFV1, ...",
                found="one without decoder" if context is None else context.name,
                remedy="encode it as H.264",
            )
        context.options = {"max_pixels": container.options["max_pixels"]}
        context.thread_type = "AUTO"
        context.thread_count = min(_MAX_THREADS, os.cpu_count() or 1)
        for other in container.streams:
            if other.index != stream.index:
                other.discard = Discard.all
        return stream

    def _check_declared(
        self, context, num_frames: int, duration: Fraction | None, count: int | None
    ) -> None:
        policy = self._policy
        limit = policy.max_video_pixels
        if context.height and context.width:  # some headers leave it to the frames
            check_size(context.height, context.width, policy, self._label, max_pixels=limit)
        if count is not None:
            self._check_count(count)
            self._check_held(min(count, num_frames), context.height, context.width)
        if duration is not None:
            self._check_duration(duration)

    def _check_count(self, count: int) -> None:
        if count > self._policy.max_video_frames:
            raise bad_media(
                "The video has too many frames",
                self._label,
                expected=f"at most {self._policy.max_video_frames} (MediaPolicy.max_video_frames)",
                found=count,
                remedy="cut the clip, or raise MediaPolicy.max_video_frames",
            )

    def _check_duration(self, seconds: Fraction) -> None:
        if seconds > self._policy.max_duration:
            raise bad_media(
                "The video is too long",
                self._label,
                expected=f"at most {self._policy.max_duration:g} seconds "
                "(MediaPolicy.max_duration)",
                found=f"{float(seconds):.6g} seconds",
                remedy="cut the clip, or raise MediaPolicy.max_duration",
            )

    def _check_held(self, count: int, height: int, width: int) -> None:
        size = count * height * width * 3
        if size > self._policy.max_decoded_bytes:
            raise bad_media(
                "The frames take too much memory",
                self._label,
                expected=f"at most {self._policy.max_decoded_bytes} bytes "
                "(MediaPolicy.max_decoded_bytes)",
                found=f"{count} frames of {width}x{height}, {size} bytes",
                remedy="scale the video down, or use fewer frames",
            )

    def _check_frames(self, frames: list, num_frames: int) -> None:
        """Check that what was decoded is enough and whole."""
        needed = min(num_frames, self._policy.min_video_frames)
        if len(frames) < needed:
            raise bad_media(
                "The video has too few frames" if frames else "The video has no frames",
                self._label,
                expected=f"at least {needed} (MediaPolicy.min_video_frames)",
                found=len(frames),
                remedy="pass a single picture as image_reference",
            )
        if any(frame.is_corrupt for frame in frames):
            raise bad_media(
                "The video is damaged",
                self._label,
                expected="frames that decode",
                found="a frame with missing parts",
                remedy="copy or download it again",
            )

    def _decoded(self, container, stream) -> Iterator:
        """Frames from where the container stands, with the limits enforced on each."""
        origin = stream.start_time or 0
        for number, frame in enumerate(container.decode(stream), 1):
            self._deadline.check()
            self._check_count(number)
            if frame.pts is not None:
                self._check_duration((frame.pts - origin) * frame.time_base)
            yield frame

    def _first_frames(self, container, stream, num_frames: int) -> Iterator:
        for number, frame in enumerate(self._decoded(container, stream), 1):
            self._check_held(number, frame.height, frame.width)
            yield frame
            if number == num_frames:
                return

    def _last_frames(self, num_frames: int, starts: list[int]) -> list:
        """The last frames, from the first of ``starts`` (late to early) that gives enough."""
        import av

        for start in starts:
            try:
                with self._open() as container:
                    stream = self._stream(container)
                    container.seek(start, stream=stream)
                    tail = self._tail(container, stream, num_frames)
            except MediaError:
                raise
            except av.FFmpegError:
                continue  # the file can't seek to there; an earlier point or the beginning may do
            if len(tail) == num_frames:
                return list(tail)
        with self._open() as container:
            return list(self._tail(container, self._stream(container), num_frames))

    def _tail(self, container, stream, num_frames: int) -> deque:
        """The last frames from here on.

        Pictures that a seek can't give, because they build on earlier ones, aren't given by the
        decoders either.
        """
        tail: deque = deque(maxlen=num_frames)
        for frame in self._decoded(container, stream):
            tail.append(frame)
            self._check_held(len(tail), frame.height, frame.width)
        return tail


def _duration(container, stream) -> Fraction | None:
    """Seconds that the stream, or else the container, declares."""
    import av

    if stream.duration is not None and stream.duration > 0:
        return stream.duration * stream.time_base
    if container.duration is not None and container.duration > 0:
        return Fraction(container.duration, av.time_base)
    return None


def _seek_points(stream, num_frames: int, duration: Fraction | None) -> list[int]:
    """Where to seek to for the last frames, late to early, in the stream's time base.

    An index of every frame tells which keyframes have enough frames behind them. Without one the
    points are the end of the clip and then earlier ones, each twice as far from it.
    """
    entries = list(stream.index_entries)
    if entries and len(entries) == stream.frames:
        # A seek goes to the last keyframe that is shown up to a time, and an index may list times
        # of decoding, which are earlier; so each point is just before the next keyframe.
        keys = [number for number, entry in enumerate(entries) if entry.is_keyframe]
        after_all = entries[-1].timestamp + int(_SEEK_MARGIN / stream.time_base)
        ends = [entries[number].timestamp - 1 for number in keys[1:]] + [after_all]
        points = [
            end
            for number, end in zip(keys, ends, strict=False)  # without keyframes, none
            if len(entries) - number >= num_frames
        ]
        return [points[-(2**n)] for n in range(len(points).bit_length())]
    if duration is None:
        return []
    start = stream.start_time or 0
    end, step = start + int(duration / stream.time_base), num_frames / (stream.average_rate or 1)
    points = [end]
    while (earlier := end - int(step / stream.time_base)) > start:
        points.append(earlier)
        step *= 2
    return points
