# SPDX-License-Identifier: Apache-2.0
"""References that must be refused: each a name, a field and a way to make it in a folder.

``python -m tests.support.hostile_media FOLDER`` tries them all in a process whose memory is
limited to a little more than it starts with, and which may not open a file for writing.
"""

import base64
import io
import os
import resource
import struct
import sys
import zlib
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import numpy as np
from PIL import Image

from tests.support.media_files import (
    FILE_TYPE,
    box,
    clip_bytes,
    declared_mp4,
    full_box,
    image_bytes,
    index_first,
    moving,
    pattern,
    sound_bytes,
    u32,
)

# What the process may take beyond its imports. The largest picture that is let through to a
# decoder here is far smaller; a bomb would take gigabytes.
MEMORY_HEADROOM = 256 * 2**20


def picture() -> Image.Image:
    return Image.fromarray(pattern())


@cache
def png() -> bytes:
    return image_bytes(picture(), "PNG")


@cache
def jpeg() -> bytes:
    return image_bytes(picture(), "JPEG")


@cache
def mp4() -> bytes:
    return clip_bytes(moving(12))


@cache
def other_clip(container: str) -> bytes:
    codec = "mpeg4" if container == "avi" else "libx264"
    pixel_format = "yuv420p" if container == "avi" else "yuv444p"
    return clip_bytes(moving(12), container=container, codec=codec, pixel_format=pixel_format)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + u32(zlib.crc32(kind + data))


def png_of_size(width: int, height: int, *chunks: bytes) -> bytes:
    header = png_chunk(b"IHDR", u32(width, height) + b"\x08\x02\x00\x00\x00")
    data = png_chunk(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + data + png_chunk(b"IEND", b"")


def jpeg_of_size(width: int, height: int) -> bytes:
    data = bytearray(jpeg())
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def jpeg_of_scans(count: int) -> bytes:
    data = image_bytes(picture(), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    return data[:start] + data[start:-2] * count + data[-2:]


def webp_of_size(width: int, height: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunk = b"VP8X" + struct.pack("<I", 10) + bytes(4) + sides
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def bmp_of_size(width: int, height: int) -> bytes:
    data = bytearray(image_bytes(picture(), "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def damaged(data: bytes, position: int, content: bytes) -> bytes:
    return data[:position] + content + data[position + len(content) :]


def broken_png() -> bytes:
    return damaged(png(), png().index(b"IDAT") + 30, b"\x00\x00\x00\x00")


def png_with_text_bomb() -> bytes:
    bomb = zlib.compress(bytes(200 * 2**20), 9)
    return png_of_size(64, 64, png_chunk(b"zTXt", b"a\x00\x00" + bomb))


def damaged_clip() -> bytes:
    data = bytearray(mp4())
    start = data.index(b"mdat") + 60
    data[start : start + 600] = bytes(range(256)) * 2 + bytes(88)
    return bytes(data)


def motion_jpeg(width: int, height: int, pictures: list[bytes]) -> bytes:
    """A Matroska file of these JPEGs, whatever they are, under a header of this size."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        stream = output.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 320, 272, "yuvj444p"
        for index, data in enumerate(pictures):
            packet = av.Packet(data)
            packet.stream, packet.pts, packet.dts = stream, index * 100, index * 100
            packet.time_base, packet.is_keyframe = Fraction(1, 1000), True
            output.mux(packet)
    data = buffer.getvalue()
    for element, side in ((b"\xb0\x82\x01\x40", width), (b"\xba\x82\x01\x10", height)):
        data = data.replace(element, element[:2] + struct.pack(">H", side), 1)
    return data


def clip_of_two_sizes() -> bytes:
    pictures = [image_bytes(Image.fromarray(pattern(48 * n, 64 * n)), "JPEG") for n in (1, 2)]
    return motion_jpeg(64, 48, [pictures[0]] * 3 + [pictures[1]] * 3)


def fragments(samples: int) -> bytes:
    """A fragmented MP4 with one fragment that declares ``samples`` without their sizes."""
    extends = box(b"mvex", full_box(b"trex", u32(1, 1, 1, 1, 0)))
    head = declared_mp4(samples=0, chunks=0, extra=extends)
    track = box(b"traf", full_box(b"tfhd", u32(1)), full_box(b"trun", u32(samples)))
    return head + box(b"moof", full_box(b"mfhd", u32(1)), track) + box(b"mdat", bytes(64))


def data_uri(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def stored(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(data)
        return path

    return make


def fifo(folder: Path) -> Path:
    path = folder / "pipe.png"
    os.mkfifo(path)
    return path


def images() -> dict[str, object]:
    """Hostile image references; a callable is called with a folder first."""
    grey = Image.fromarray(np.zeros((48, 64), np.float32))
    whole = Image.fromarray(np.zeros((48, 64), np.int32))
    tiny = Image.new("RGB", (1, 1))
    pictures = [picture().convert("P")] * 3
    gif = image_bytes(pictures[0], "GIF", save_all=True, append_images=pictures[1:])
    tiff = image_bytes(picture(), "TIFF", compression="tiff_lzw")
    webp = image_bytes(picture(), "WEBP", lossless=True)
    return {
        "no bytes": b"",
        "an empty file": stored("empty.png", b""),
        "one byte": b"\xff",
        "random bytes": np.random.default_rng(0).bytes(1000),
        "text with the name of an image": stored("text.png", b"not a picture"),
        "half a JPEG": jpeg()[: len(jpeg()) // 2],
        "a JPEG's first bytes": jpeg()[:20],
        "half a PNG": png()[: len(png()) // 2],
        "half a WebP": webp[: len(webp) // 2],
        "half a GIF": gif[: len(gif) // 6],
        "half a TIFF": tiff[: len(tiff) // 2],
        "half an AVIF": image_bytes(picture(), "AVIF")[:-200],
        "half a BMP": image_bytes(picture(), "BMP")[:3000],
        "a damaged PNG": broken_png(),
        "a PNG header of 20000x20000": png_of_size(20000, 20000),
        "a PNG header of 12000x8000": png_of_size(12000, 8000),
        "a PNG header of 2**31 - 1 a side": png_of_size(2**31 - 1, 2**31 - 1),
        "a PNG header of 0x0": png_of_size(0, 0),
        "a JPEG header of 65500x65500": jpeg_of_size(65500, 65500),
        "a JPEG header of 20000x20000": jpeg_of_size(20000, 20000),
        "a GIF header of 65535x65535": damaged(gif, 6, b"\xff\xff\xff\xff"),
        "a BMP header of 20000x20000": bmp_of_size(20000, 20000),
        "a BMP header of a negative width": bmp_of_size(-64, 48),
        "a WebP header of 2**24 a side": webp_of_size(2**24, 2**24),
        "a PNG with a text of 200 MiB": png_with_text_bomb(),
        "a JPEG of 2000 scans": jpeg_of_scans(2000),
        "a picture of 1x1": image_bytes(tiny, "PNG"),
        "a GIF of 1x1": image_bytes(tiny, "GIF"),
        "a strip of 4000x16": image_bytes(Image.new("RGB", (4000, 16)), "PNG"),
        "a picture of floats": image_bytes(grey, "TIFF"),
        "a picture of 32-bit integers": image_bytes(whole, "TIFF"),
        "a page": b"<!DOCTYPE html><html><img src='x.png'></html>",
        "a drawing": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "a document": b"%PDF-1.7\n",
        "a PostScript file": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n",
        "an archive": b"PK\x03\x04" + bytes(100),
        "a JPEG with the name of a PNG": stored("photo.png", jpeg()),
        "a video with the name of an image": stored("clip.jpg", mp4()),
        "a video": mp4(),
        "a data URI of another MIME type": data_uri("image/jpeg", png()),
        "a data URI of a page": data_uri("text/html", png()),
        "a data URI without MIME type": data_uri("", png()),
        "a data URI of broken base64": data_uri("image/png", png())[:-7] + "*",
        "a data URI without base64": "data:image/png,%89PNG",
        "a data URI without comma": "data:image/png;base64",
        "an empty data URI": "data:image/png;base64,",
        "no file": stored_nowhere,
        "a folder": lambda folder: folder,
        "a pipe": fifo,
        "a device": "/dev/zero",
        "a path with a null": "a\0.png",
        "an empty path": "",
        "a path that is too long": "x" * 5000,
        "a file URI of another host": "file://host/etc/passwd",
        "a relative file URI": "file:picture.png",
        "another scheme": "ftp://example.com/a.png",
        "a URL of this machine": "http://127.0.0.1:9/a.png",
        "a URL of this machine as a number": "http://2130706433/a.png",
        "a URL of this machine in IPv6": "http://[::1]/a.png",
        "a URL of a cloud's metadata": "http://169.254.169.254/latest/meta-data/",
        "a URL of a private network": "https://10.0.0.1/a.png",
        "a URL without host": "http:///a.png",
        "a URL with a broken address": "http://[::1/a.png",
        "a URL with a password": "http://user:secret@127.0.0.1/a.png",
        "nothing": None,
        "a number": 3,
        "a mapping": {"path": "a.png"},
        "an open file": io.BytesIO(png()),
        "an array of 20000x20000": np.broadcast_to(np.uint8(0), (20000, 20000, 3)),
        "an array of 1x1": np.zeros((1, 1, 3), np.uint8),
        "an array with channels first": np.zeros((3, 64, 64), np.uint8),
        "an array of integers": np.zeros((64, 64, 3), np.int64),
        "an array with a NaN": np.full((64, 64, 3), np.nan, np.float32),
        "an array of floats up to 255": np.full((64, 64, 3), 255.0),
        "an array of a clip": np.zeros((2, 64, 64, 3), np.uint8),
        "an empty array": np.zeros((0, 64, 3), np.uint8),
    }


def stored_nowhere(folder: Path) -> Path:
    return folder / "missing.png"


def videos() -> dict[str, object]:
    """Hostile video references; a callable is called with a folder first."""
    matroska, avi = other_clip("matroska"), other_clip("avi")
    rotated = clip_bytes(moving(3), prepare=lambda stream: stream.set_display_rotation(45))
    flash = {"container": "avi", "codec": "flv", "pixel_format": "yuv420p", "options": {}}
    stream = {"container": "mpegts", "pixel_format": "yuv420p"}
    table = full_box(b"stsz", u32(1, 40_000_000))
    frames = [Image.new("RGB", (64, 48)), Image.new("RGB", (48, 64))]
    return {
        "no bytes": b"",
        "an empty file": stored("empty.mp4", b""),
        "random bytes": np.random.default_rng(1).bytes(1000),
        "a clip without its end": mp4()[:-200],
        "a clip of which half is there": index_first(mp4())[: len(mp4()) // 2],
        "a clip's first bytes": mp4()[:24],
        "an index without data": index_first(mp4())[: index_first(mp4()).index(b"mdat") - 4],
        "half a Matroska file": matroska[: len(matroska) // 2],
        "half an AVI file": avi[: len(avi) // 2],
        "a damaged clip": damaged_clip(),
        "sound alone": sound_bytes(),
        "a clip of one frame": clip_bytes(moving(1)),
        "a clip of no frames": declared_mp4(samples=0, chunks=0),
        "40 million declared frames": declared_mp4(samples=40_000_000),
        "4 billion declared frames": declared_mp4(samples=2**32 - 1),
        "20 million declared chunks of sound": declared_mp4(
            samples_per_chunk=2 * 10**9, chunks=10, handler=b"soun"
        ),
        "a fragment of 40 million frames": fragments(40_000_000),
        "a table of frames inside a description": declared_mp4(sample_entry_extra=table),
        "a list of 5000 edits": declared_mp4(edits=5000),
        "a header of 20000x20000": motion_jpeg(20000, 20000, [jpeg_of_size(20000, 20000)] * 3),
        "a header of 65535x65535": motion_jpeg(65535, 65535, [jpeg_of_size(65500, 65500)] * 3),
        "frames larger than their header": motion_jpeg(64, 48, [jpeg_of_size(16000, 16000)] * 3),
        "a header of 8x8": motion_jpeg(8, 8, [jpeg_of_size(8, 8)] * 3),
        "a header of 4000x20": motion_jpeg(4000, 20, [jpeg_of_size(4000, 20)] * 3),
        "a clip of more than an hour": clip_bytes(moving(3), pts=[0, 1, 50_000]),
        "frames of 4608x4096": clip_bytes(np.zeros((2, 4096, 4608, 3), np.uint8)),
        "a box of size 4": FILE_TYPE + u32(4) + b"moov",
        "a box larger than its parent": FILE_TYPE + box(b"moov", u32(4000) + b"trak"),
        "a compressed header": FILE_TYPE + box(b"moov", box(b"cmov", box(b"cmvd", u32(2**32 - 1)))),
        "a million boxes": FILE_TYPE + box(b"free") * 1_000_000,
        "a size that changes": clip_of_two_sizes(),
        "a rotation of 45 degrees": rotated,
        "a codec that isn't accepted": clip_bytes(moving(3), **flash),
        "a transport stream": clip_bytes(moving(3), **stream),
        "a playlist": b"#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1:9/a.ts\n",
        "a playlist with the name of a clip": stored(
            "clip.mp4", b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n"
        ),
        "an EBML header alone": b"\x1aE\xdf\xa3\x80",
        "a Matroska size beyond the file": damaged(
            matroska, matroska.index(b"\x18\x53\x80\x67") + 4, b"\x01\x00\xff\xff\xff\xff\xff\xff"
        ),
        "a picture": png(),
        "an animation": image_bytes(picture(), "GIF", save_all=True, append_images=[picture()]),
        "a picture with the name of a clip": stored("photo.mp4", jpeg()),
        "a Matroska file with the name of an MP4": stored("clip.mp4", matroska),
        "a data URI of another MIME type": data_uri("video/webm", mp4()),
        "a data URI of an image type": data_uri("image/png", mp4()),
        "no file": stored_nowhere,
        "a folder": lambda folder: folder,
        "a URL of this machine": "http://localhost:9/clip.mp4",
        "a URL of a private network": "http://192.168.1.1/clip.mp4",
        "nothing": None,
        "an empty list": [],
        "a list of numbers": [1, 2, 3],
        "a list of one picture": frames[:1],
        "a list of two sizes": frames,
        "a list of paths": ["a.png", "b.png"],
        "an array of one frame": np.zeros((1, 64, 64, 3), np.uint8),
        "an array of a picture": np.zeros((64, 64, 3), np.uint8),
        "an array with channels first": np.zeros((5, 3, 64, 64), np.uint8),
        "an array of 20000x20000": np.broadcast_to(np.uint8(0), (5, 20000, 20000, 3)),
        "an array of a million frames": np.broadcast_to(np.uint8(0), (10**6, 64, 64, 3)),
    }


def load(kind: str, reference: object) -> object:
    from tensorrt_llm.visual_gen.media_refs import load_image, load_video

    return load_image(reference) if kind == "image" else load_video(reference, num_frames=5)


def _try_all(folder: Path) -> None:
    """Try every reference under the limits; prints the number that were refused."""
    from tensorrt_llm.visual_gen.media_refs import MediaError

    load("image", png())  # imports, thread pools and code are not what is limited
    load("video", mp4())
    cases = []
    for kind, catalogue in (("image", images()), ("video", videos())):
        (folder / kind).mkdir()
        for name, reference in catalogue.items():
            made = reference(folder / kind) if callable(reference) else reference
            cases.append((kind, name, made))

    def forbid_writing(event: str, arguments: tuple) -> None:
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise SystemExit(f"opened for writing: {arguments[0]}")

    sys.addaudithook(forbid_writing)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_HEADROOM,) * 2)
    refused = 0
    for kind, name, reference in cases:
        try:
            load(kind, reference)
        except MediaError:
            refused += 1
        except Exception as error:
            print(f"{kind}, {name}: {error!r}", file=sys.stderr)
        else:
            print(f"{kind}, {name}: accepted", file=sys.stderr)
    print(refused, len(cases))


if __name__ == "__main__":
    _try_all(Path(sys.argv[1]))
