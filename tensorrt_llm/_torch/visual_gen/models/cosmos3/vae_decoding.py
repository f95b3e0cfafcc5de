# SPDX-License-Identifier: Apache-2.0
"""Decoding latents in the memory that is there: at once where it fits, in tiles where it does not.

The Wan decoder holds some 42 bytes a pixel and channel of its last stage while it decodes a clip,
whatever its length: 10 GiB at 1280x720. Tiles bound that by their own size. Neighbours overlap and
are blended, and the decoder's attention sees one tile instead of the picture, so a tiled result is
not the one decoded at once; which it was is in the output's metadata.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

from tensorrt_llm.logger import logger

# Bytes that diffusers' Wan decoder holds for each pixel of a frame and each channel of its last
# stage, in BF16, counted over its tensors on the meta device at full size (base 256): 2,888 bytes a
# pixel for one frame, 10,760 for nine frames and more, because it decodes four frames at a time
# and keeps two of each convolution for the next four.
_DECODER_BYTES = {"image": 11.3, "video": 42.1}
# Bytes a pixel and frame: the finished part in BF16 beside the decoder's tensors; and the BF16
# video, its FP32 copy and the uint8 result afterwards.
_FINISHED_BYTES = 3 * 2
_CONVERSION_BYTES = 3 * (2 + 4 + 1)
# The joined rows, the joined picture and its depatchified copy beside the tiles.
_TILED_COPIES = 3
# What must stay free: cached blocks that don't fit together.
_MARGIN = 0.9


@dataclass(frozen=True)
class Tile:
    """Square tiles in pixels: their side, and the distance from one to the next."""

    size: int
    stride: int


TILES = (Tile(512, 384), Tile(256, 192))
"""Tiles by preference: larger ones have fewer seams."""


def decode_bytes(height: int, width: int, num_frames: int, channels: int) -> int:
    """The VAE's peak, in BF16, for pixels of the output and ``channels`` of its last stage."""
    per_channel = _DECODER_BYTES["image" if num_frames == 1 else "video"]
    pixels = height * width
    decoding = pixels * (per_channel * channels + num_frames * _FINISHED_BYTES)
    return int(max(decoding, pixels * num_frames * _CONVERSION_BYTES))


def tiled_decode_bytes(height: int, width: int, num_frames: int, channels: int, tile: Tile) -> int:
    """``decode_bytes`` in tiles: one of them being decoded, beside all that are finished."""
    tall, wide = min(height, tile.size), min(width, tile.size)
    decoding = decode_bytes(tall, wide, num_frames, channels)
    tiles = ceil(height / tile.stride) * ceil(width / tile.stride)
    pixels = tiles * tall * wide + _TILED_COPIES * height * width
    conversion = height * width * num_frames * _CONVERSION_BYTES
    return max(decoding + pixels * num_frames * _FINISHED_BYTES, conversion)


def choose_tile(vae: Any, height: int, width: int, num_frames: int, capacity: float) -> Tile | None:
    """Decide how a picture or clip is decoded.

    Args:
        vae: diffusers AutoencoderKLWan.
        height: Of the pixels, like width.
        width: Of the pixels.
        num_frames: 1 for a picture.
        capacity: Bytes that the decoding may take.

    Returns:
        None to decode at once; else the first of ``TILES`` that fits, or the last one that is
        smaller than the picture.
    """
    channels = decoder_channels(vae.config)
    # The counts are of BF16.
    widen = vae.dtype.itemsize / 2
    room = _MARGIN * capacity / widen
    size = (height, width, num_frames, channels)
    need = decode_bytes(*size)
    smaller = [tile for tile in TILES if tile.size < max(height, width)]
    if need <= room or not smaller:
        return None
    fitting = [tile for tile in smaller if tiled_decode_bytes(*size, tile) <= room]
    tile = fitting[0] if fitting else smaller[-1]
    logger.warning(
        "Decoding %dx%d, %d frames in tiles of %d pixels: at once it takes %.1f GiB, and %.1f are "
        "free. Tiles change the pixels.",
        *(width, height, num_frames, tile.size, need * widen / 2**30, capacity / 2**30),
    )
    return tile


def decoder_channels(config: Any) -> int:
    """Channels of the decoder's last stage."""
    return (config.decoder_base_dim or config.base_dim) * config.dim_mult[0]


@contextmanager
def tiled(vae: Any, tile: Tile | None) -> Iterator[None]:
    """Let ``vae.decode`` work in tiles within the block; nothing for None."""
    if tile is None:
        yield
        return
    vae.enable_tiling(tile.size, tile.size, tile.stride, tile.stride)
    try:
        yield
    finally:
        vae.disable_tiling()
