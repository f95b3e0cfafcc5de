# SPDX-License-Identifier: Apache-2.0
"""Positions of the joint sequence and the interleaved three-axis rotary embedding.

Positions have three axes (time, height, width). Text token j sits at (j, j, j). Picture, video and
sound start behind the text, at ``L + margin`` on the time axis, side by side rather than one after
the other, so the table of a branch depends on its own text length L. All of it is FP32: 16 bits
can't tell neighbouring positions above 256 apart.
"""

import torch

from tensorrt_llm._torch.custom_ops.attention_ops import rotary_formula
from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture

# Pixel frames per latent frame of the Wan 2.2 VAE (vae/config.json, scale_factor_temporal).
VAE_TEMPORAL_FACTOR = 4


def text_positions(length: int, device: torch.device) -> torch.Tensor:
    """Positions of ``length`` text tokens: FP32 [3, length]."""
    return torch.arange(length, dtype=torch.float32, device=device).expand(3, length)


def media_offset(architecture: Cosmos3Architecture, text_length: int) -> int:
    """Time position at which every medium of a branch with ``text_length`` tokens starts."""
    return text_length + architecture.unified_3d_mrope_temporal_modality_margin


def vision_positions(
    architecture: Cosmos3Architecture,
    grid: tuple[int, int, int],
    fps: float | None,
    text_length: int,
    device: torch.device,
) -> torch.Tensor:
    """Positions of the vision tokens, FP32 [3, T * rows * columns], time-major, then row, column.

    Args:
        grid: Latent frames and patch rows and columns, (T, rows, columns).
        fps: Frame rate of the video; None turns the temporal modulation off.
        text_length: Text tokens of the branch, which shift the start.

    The time axis of latent frame i is ``i / (fps / 4) * (base_fps / 4) + offset``, in this order
    and in FP32; a single latent frame, or modulation off, counts whole frames.
    """
    frames, rows, columns = grid
    offset = media_offset(architecture, text_length)
    time = torch.arange(frames, dtype=torch.float32, device=device)
    if fps is not None and frames > 1 and architecture.enable_fps_modulation:
        latent_fps = fps / VAE_TEMPORAL_FACTOR
        time = time / latent_fps * (architecture.base_fps / VAE_TEMPORAL_FACTOR)
    spatial = 0 if architecture.unified_3d_mrope_reset_spatial_ids else offset
    axes = torch.meshgrid(
        time + offset,
        torch.arange(rows, dtype=torch.float32, device=device) + spatial,
        torch.arange(columns, dtype=torch.float32, device=device) + spatial,
        indexing="ij",
    )
    return torch.stack([axis.flatten() for axis in axes])


def sound_positions(
    architecture: Cosmos3Architecture, frames: int, text_length: int, device: torch.device
) -> torch.Tensor:
    """Positions of the sound tokens, FP32 [3, frames].

    One second is ``base_fps`` units here against ``base_fps / 4`` for video; that is how the model
    was trained (cosmos3.md C.2).
    """
    offset = media_offset(architecture, text_length)
    time = torch.arange(frames, dtype=torch.float32, device=device)
    if architecture.enable_fps_modulation and frames > 1:
        time = time / architecture.sound_latent_fps * architecture.base_fps
    spatial = 0 if architecture.unified_3d_mrope_reset_spatial_ids else offset
    still = torch.full_like(time, float(spatial))
    return torch.stack([time + offset, still, still])


def rotary_tables(
    architecture: Cosmos3Architecture, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine tables [N, head_dim] of ``positions`` (FP32 [3, N]), rounded once to dtype.

    Frequency j belongs to the height axis where j % 3 == 1 and to the width axis where j % 3 == 2,
    as far as three times that axis' section reaches, and to the time axis elsewhere.
    """
    head_dim = architecture.head_dim
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / (architecture.rope_theta ** (exponents / head_dim))
    per_axis = positions[:, :, None] * frequencies
    index = torch.arange(head_dim // 2, device=positions.device)
    angles = per_axis[0]
    for axis in (1, 2):
        reach = 3 * architecture.rope_axes_dim[axis]
        mine = (index % 3 == axis) & (index < reach)
        angles = torch.where(mine, per_axis[axis], angles)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., N, heads, D] by tables [..., N, D] in x's dtype, halves paired (NeoX)."""
    return rotary_formula(x, cos, sin)
