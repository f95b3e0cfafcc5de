# SPDX-License-Identifier: Apache-2.0
"""Synthetic media in memory: images through Pillow, clips through PyAV, MP4 boxes by hand."""

import io
import re
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction

import av
import numpy as np
from PIL import Image

# x264 with this is lossless; 4:4:4 keeps every chroma sample.
LOSSLESS = {"qp": "0", "preset": "ultrafast"}


def image_bytes(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def pattern(height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray:
    """Coloured 8x8 blocks, different in every corner: uint8 [H, W, 3]."""
    blocks = np.random.default_rng(seed).integers(
        0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8
    )
    return blocks.repeat(8, 0).repeat(8, 1)[:height, :width].copy()


def moving(frames: int, height: int = 48, width: int = 64) -> np.ndarray:
    """The pattern, shifted by one pixel and dimmed by one code a frame: [T, H, W, 3]."""
    still = pattern(height, width)
    return np.stack([np.roll(still, t, 1) - still // 128 * (t % 8) for t in range(frames)])


def clip_bytes(
    frames: Sequence,
    *,
    container: str = "mp4",
    codec: str = "libx264",
    pixel_format: str = "yuv444p",
    rate: int | Fraction = 10,
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    prepare: Callable | None = None,
    pts: Sequence[int] | None = None,
    time_base: Fraction | None = None,
    audio: bool = False,
) -> bytes:
    """Encode a clip.

    Args:
        frames: uint8 RGB arrays, or ``av.VideoFrame`` of ``pixel_format`` used as they are.
        container: FFmpeg's name of the muxer.
        codec: FFmpeg's name of the encoder.
        pixel_format: Of the stream.
        rate: Frames a second.
        options: Of the encoder; lossless for libx264 by default.
        container_options: Of the muxer.
        prepare: Called with the stream before it is opened.
        pts: Timestamps in ``time_base``; 0, 1, 2, ... by default.
        time_base: Seconds of one unit of ``pts``; 1 / rate by default.
        audio: Add a stream of silence as long as the clip.
    """
    buffer = io.BytesIO()
    frames = [f if isinstance(f, av.VideoFrame) else _frame(f, pixel_format) for f in frames]
    with av.open(buffer, "w", format=container, options=container_options or {}) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].height, frames[0].width
        stream.pix_fmt = pixel_format
        stream.options = dict(options if options is not None else LOSSLESS)
        if time_base is not None:
            stream.codec_context.time_base = time_base
        if prepare is not None:
            prepare(stream)
        if audio:
            sound = output.add_stream("mp2" if container == "avi" else "aac", rate=48000)
        for index, frame in enumerate(frames):
            frame.pts = index if pts is None else pts[index]
            frame.time_base = time_base or Fraction(1) / rate
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
        if audio:
            samples = np.zeros((2, int(48000 * len(frames) / rate)), np.float32)
            silence = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
            silence.sample_rate = 48000
            output.mux(sound.encode(silence))
            output.mux(sound.encode())
    return buffer.getvalue()


def _frame(pixels: np.ndarray, pixel_format: str) -> av.VideoFrame:
    return av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format=pixel_format)


def sound_bytes() -> bytes:
    """An MP4 with a second of silence and nothing else."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        sound = output.add_stream("aac", rate=48000)
        samples = np.zeros((2, 48000), np.float32)
        silence = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        silence.sample_rate = 48000
        output.mux(sound.encode(silence))
        output.mux(sound.encode())
    return buffer.getvalue()


def planes_frame(planes: Sequence[np.ndarray], pixel_format: str) -> av.VideoFrame:
    """A frame of exactly these samples (uint8, or uint16 for more bits), one array a plane."""
    frame = av.VideoFrame(planes[0].shape[1], planes[0].shape[0], pixel_format)
    for plane, samples in zip(frame.planes, planes, strict=True):
        stored = np.zeros((samples.shape[0], plane.line_size // samples.itemsize), samples.dtype)
        stored[:, : samples.shape[1]] = samples
        plane.update(stored.tobytes())
    return frame


def box(kind: bytes, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I", 8 + len(body)) + kind + body


def full_box(kind: bytes, *content: bytes) -> bytes:
    return box(kind, bytes(4), *content)


def u32(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}I", *numbers)


def index_first(data: bytes) -> bytes:
    """The MP4 with its moov, which PyAV writes last, in front of the data."""
    start = data.index(b"moov") - 4
    head_end = data.index(b"mdat") - 4
    index = bytearray(data[start:])
    for found in re.finditer(b"stco", index):
        entries = found.end() + 8
        count = int.from_bytes(index[found.end() + 4 : entries], "big")
        for at in range(entries, entries + 4 * count, 4):
            offset = int.from_bytes(index[at : at + 4], "big")
            index[at : at + 4] = u32(offset + len(index))
    return data[:head_end] + bytes(index) + data[head_end:start]


_MATRIX = u32(0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
FILE_TYPE = box(b"ftyp", b"isom" + bytes(4) + b"isom")


def declared_mp4(
    *,
    samples: int = 10,
    samples_per_chunk: int = 1,
    chunks: int = 1,
    handler: bytes = b"vide",
    width: int = 64,
    height: int = 64,
    milliseconds: int = 1000,
    edits: int = 0,
    sample_entry_extra: bytes = b"",
    extra: bytes = b"",
) -> bytes:
    """A few hundred bytes of MP4 that declare whatever they are told, with 64 bytes of data."""
    if handler == b"vide":
        entry = box(
            b"mp4v",
            bytes(6) + b"\x00\x01" + bytes(16),
            struct.pack(">HH", width, height),
            u32(0x480000, 0x480000, 0) + b"\x00\x01" + bytes(32) + b"\x00\x18\xff\xff",
            sample_entry_extra,
        )
        header = full_box(b"vmhd", bytes(8))
    else:
        numbers = struct.pack(">HHHHI", 2, 16, 0, 0, 48000 << 16)
        entry = box(b"sowt", bytes(6) + b"\x00\x01" + bytes(8), numbers)
        header = full_box(b"smhd", bytes(4))
    table = box(
        b"stbl",
        full_box(b"stsd", u32(1), entry),
        full_box(b"stts", u32(1, samples, 1)),
        full_box(b"stsc", u32(1, 1, samples_per_chunk, 1)),
        full_box(b"stsz", u32(1, samples)),
        full_box(b"stco", u32(chunks, *[40] * chunks)),
    )
    media = box(
        b"mdia",
        full_box(b"mdhd", u32(0, 0, 1000, milliseconds, 0)),
        full_box(b"hdlr", u32(0), handler, bytes(13)),
        box(b"minf", header, table),
    )
    track = [box(b"tkhd", u32(7, 0, 0, 1, 0, milliseconds), bytes(16), _MATRIX)]
    track[0] = box(b"tkhd", track[0][8:], u32(width << 16, height << 16))
    if edits:
        track.append(box(b"edts", full_box(b"elst", u32(edits, *[1000, 0, 0x10000] * edits))))
    movie = full_box(
        b"mvhd", u32(0, 0, 1000, milliseconds, 0x10000), b"\x01" + bytes(11), _MATRIX, bytes(28)
    )
    content = box(b"moov", movie, box(b"trak", *track, media), extra)
    return FILE_TYPE + content + box(b"mdat", bytes(64))
