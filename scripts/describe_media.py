# SPDX-License-Identifier: Apache-2.0
"""Print what media files really hold, read back from the files: codec, frames, size, rate."""

import sys

import av


def describe_media(path: str) -> str:
    """Return one line about the first video stream of a picture or clip; every frame is decoded.

    Raises:
        ValueError: the file has no picture in it.
    """
    with av.open(path) as container:
        if not container.streams.video:
            raise ValueError(f"{path} holds no picture")
        stream = container.streams.video[0]
        frames = [(frame.width, frame.height) for frame in container.decode(stream)]
        sizes = sorted(set(frames))
        text = f"{path}: {stream.codec_context.name}, {len(frames)} frame(s), " + ", ".join(
            f"{width}x{height}" for width, height in sizes
        )
        # A still picture has no rate; FFmpeg would report its own default of 25.
        if len(frames) > 1:
            text += f", {stream.codec_context.pix_fmt}, {float(stream.average_rate):g} fps"
    return text


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(describe_media(argument))
