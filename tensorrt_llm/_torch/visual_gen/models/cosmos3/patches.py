# SPDX-License-Identifier: Apache-2.0
"""Latents to vision tokens and back. A token is one patch x patch square of one latent frame."""

from math import ceil

import torch
from torch.nn import functional as F


def patchify(latents: torch.Tensor, patch: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Cut latents [B, C, T, H, W] into tokens [B, T * rows * columns, patch * patch * C].

    Bottom and right edges are padded with zeros to whole patches. Tokens run frame by frame, row by
    row; inside a token the order is (row in patch, column in patch, channel).

    Returns:
        The tokens and their grid (T, rows, columns).
    """
    batch, channels, frames, height, width = latents.shape
    latents = F.pad(latents, (0, -width % patch, 0, -height % patch))
    rows, columns = latents.shape[3] // patch, latents.shape[4] // patch
    squares = latents.reshape(batch, channels, frames, rows, patch, columns, patch)
    tokens = squares.permute(0, 2, 3, 5, 4, 6, 1).reshape(batch, frames * rows * columns, -1)
    return tokens, (frames, rows, columns)


def token_count(latent_shape: tuple[int, int, int], patch: int) -> int:
    """Tokens that ``patchify`` makes of a branch's latents (T, H, W)."""
    frames, height, width = latent_shape
    return frames * ceil(height / patch) * ceil(width / patch)


def unpatchify(
    tokens: torch.Tensor, grid: tuple[int, int, int], patch: int, size: tuple[int, int]
) -> torch.Tensor:
    """The inverse of ``patchify``, cropped to ``size`` = (H, W) of the latents: [B, C, T, H, W]."""
    batch = tokens.shape[0]
    frames, rows, columns = grid
    squares = tokens.reshape(batch, frames, rows, columns, patch, patch, -1)
    latents = squares.permute(0, 6, 1, 2, 4, 3, 5)
    latents = latents.reshape(batch, -1, frames, rows * patch, columns * patch)
    return latents[..., : size[0], : size[1]]
