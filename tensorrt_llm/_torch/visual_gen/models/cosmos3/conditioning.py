# SPDX-License-Identifier: Apache-2.0
"""Given frames of image to video and video to video: from decoded pixels to clean latent frames.

The frames are scaled to fill the target and cropped around the centre, in FP32 with an antialiased
bilinear filter: diffusers' rule for its conditioning image (cosmos3.md E.6), here for clips as
well, so that nothing is ever stretched. Only as many frames are encoded as the clean latent frames
span: the VAE is causal in time, so the rest of the clip can't change them.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tensorrt_llm._torch.visual_gen.models.cosmos3.denoising import normalize_latents
from tensorrt_llm._torch.visual_gen.models.cosmos3.resolved_request import (
    TEMPORAL_FACTOR,
    ResolvedRequest,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.source_following import SourceInfo
from tensorrt_llm.visual_gen.media_refs import MediaPolicy, load_image, load_video
from tensorrt_llm.visual_gen.params import VisualGenParams


@dataclass(frozen=True)
class Reference:
    """A decoded reference.

    Attributes:
        frames: uint8 RGB [N, h, w, 3], the frames that the request uses or all of a shorter clip.
        source: What the whole reference says about itself.
        applied: What was done to the stored pixels, in words.
    """

    frames: torch.Tensor
    source: SourceInfo
    applied: tuple[str, ...]

    def fitted(self, values: ResolvedRequest) -> torch.Tensor:
        """The given frames in the request's size, uint8 RGB [4k + 1, height, width, 3]."""
        count = frames_spanned(values.condition_video_latent_indexes)
        return pad_frames(fit_frames(self.frames, values.height, values.width), count)

    def report(self) -> dict[str, Any]:
        """Facts for the output's metadata."""
        return asdict(self.source) | {"frames_used": len(self.frames), "applied": [*self.applied]}


@dataclass(frozen=True)
class Condition:
    """Latent frames that are given, and which frames those are.

    Attributes:
        latents: FP32 [1, C, T, H, W]; the encoded frames where they are given, zero elsewhere.
        noisy: Bool [1, T]; False = given, the transformer's ``noisy_frame_mask`` of one branch.
    """

    latents: torch.Tensor
    noisy: torch.Tensor

    def impose(self, latents: torch.Tensor) -> torch.Tensor:
        """``latents`` [1, C, T, H, W] with the given frames written into them, bit for bit."""
        return torch.where(self.noisy[:, None, :, None, None], latents, self.latents)


def frames_spanned(indexes: Sequence[int]) -> int:
    """How many leading frames of a clip the latent frames ``indexes`` are made of."""
    return max(indexes) * TEMPORAL_FACTOR + 1


def read_reference(
    params: VisualGenParams, values: ResolvedRequest, policy: MediaPolicy
) -> Reference | None:
    """Decode as much of the request's reference as it uses, on the host.

    Args:
        params: Holds the reference.
        values: The task, and which latent frames are given.
        policy: Limits on size, time and origin.

    Returns:
        None for the tasks from text alone.

    Raises:
        ValueError: a reference that is broken, forbidden or outside a limit.
    """
    if values.task == "image_to_video":
        image = load_image(params.image_reference, policy=policy)
        pixels, rate, count = image.pixels[None], None, None
        applied = image.applied
    elif values.task == "video_to_video":
        video = load_video(
            params.video_reference,
            num_frames=frames_spanned(values.condition_video_latent_indexes),
            keep=values.condition_video_keep,
            policy=policy,
        )
        pixels, rate, count = video.frames, video.frame_rate, video.source_frames
        applied = video.applied
    else:
        return None
    source = SourceInfo(
        width=pixels.shape[2],
        height=pixels.shape[1],
        frame_rate=None if rate is None else float(rate),
        num_frames=count,
    )
    # torch would warn about the pixels of a read-only array, of a caller's say.
    return Reference(torch.from_numpy(np.require(pixels, requirements="W")), source, applied)


def fit_frames(frames: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Scale to fill the target and crop around the centre, keeping the aspect.

    Args:
        frames: uint8 RGB [N, h, w, 3] on the CPU.
        height: Of the target, in pixels.
        width: Of the target, in pixels.

    Returns:
        uint8 RGB [N, height, width, 3].
    """
    source_height, source_width = frames.shape[1:3]
    scale = max(width / source_width, height / source_height)
    size = (math.ceil(scale * source_height), math.ceil(scale * source_width))
    top, left = round((size[0] - height) / 2), round((size[1] - width) / 2)
    fitted = torch.empty((len(frames), height, width, 3), dtype=torch.uint8)
    # One frame at a time: in FP32, all frames of a large source would take gigabytes.
    for source, target in zip(frames, fitted, strict=True):
        planes = source.permute(2, 0, 1)[None].to(torch.float32)
        planes = F.interpolate(
            planes, size=size, mode="bilinear", align_corners=False, antialias=True
        )
        planes = planes[0, :, top : top + height, left : left + width]
        target.copy_(planes.round().clamp(0, 255).permute(1, 2, 0))
    return fitted


def pad_frames(frames: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` of frames [N, ...]; a shorter clip goes on with its last frame."""
    missing = max(0, count - len(frames))
    return torch.cat((frames[:count], frames[-1:].expand(missing, *frames.shape[1:])))


def encode_frames(vae: Any, frames: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Encode and normalise, without sampling: the mode of the VAE's distribution.

    Args:
        vae: diffusers AutoencoderKLWan; its dtype is that of the arithmetic.
        frames: uint8 RGB [4k + 1, H, W, 3].
        device: Where the VAE is.

    Returns:
        FP32 [1, C, k + 1, H / 16, W / 16], bit-equal to diffusers' in the VAE's dtype.
    """
    video = frames.to(device).permute(3, 0, 1, 2)[None].to(torch.float32) / 127.5 - 1.0
    mode = vae.encode(video.to(vae.dtype)).latent_dist.mode()
    return normalize_latents(mode, vae.config.latents_mean, vae.config.latents_std).float()


def make_condition(encoded: torch.Tensor, indexes: Sequence[int], num_frames: int) -> Condition:
    """Lay the given latent frames out on the request's own timeline.

    Args:
        encoded: [1, C, T', H, W], T' > max(indexes).
        indexes: Latent frames to keep.
        num_frames: Latent frames T of the request.
    """
    kept = list(indexes)
    shape = (*encoded.shape[:2], num_frames, *encoded.shape[3:])
    latents = torch.zeros(shape, dtype=torch.float32, device=encoded.device)
    latents[:, :, kept] = encoded[:, :, kept]
    noisy = torch.ones((1, num_frames), dtype=torch.bool, device=encoded.device)
    noisy[:, kept] = False
    return Condition(latents, noisy)
