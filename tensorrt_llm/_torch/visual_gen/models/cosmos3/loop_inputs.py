# SPDX-License-Identifier: Apache-2.0
"""What the denoising loop reads, laid out on the device before its first step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.conditioning import (
    Condition,
    encode_frames,
    make_condition,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.resolved_request import ResolvedRequest

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.pipeline_loader import Cosmos3Components

# Seeds are 63 bits wide, and the images of a request count on from its seed.
_SEEDS = 2**63


@dataclass(frozen=True)
class Cosmos3Request:
    """A request that is ready to run.

    Attributes:
        values: Every resolved value.
        prompt_ids: Token ids of the conditional branch.
        negative_ids: Token ids of the unconditional branch; None without guidance.
        frames: Given frames in the request's size, uint8 RGB [4k + 1, H, W, 3]; None without a
            reference.
        reference: Facts about the reference for the output's metadata; None without one.
    """

    values: ResolvedRequest
    prompt_ids: tuple[int, ...]
    negative_ids: tuple[int, ...] | None
    frames: torch.Tensor | None = None
    reference: dict[str, Any] | None = None


@dataclass(frozen=True)
class TextBatch:
    """Token ids and mask [B, L] int64 (1 = token) of the branches that one call runs."""

    ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class LoopInputs:
    """What all steps of a request read.

    Attributes:
        values: The request.
        guided: Whether each step runs both branches.
        texts: The text of unguided (False) and of guided (True) steps.
        timesteps: FP32 [steps].
        condition: Given latent frames, if there are any.
    """

    values: ResolvedRequest
    guided: list[bool]
    texts: dict[bool, TextBatch]
    timesteps: torch.Tensor
    condition: Condition | None

    def text_of(self, step: int) -> TextBatch:
        """The text that step ``step`` runs."""
        return self.texts[self.guided[step]]


@dataclass(frozen=True)
class Start:
    """Where one image or clip starts.

    Attributes:
        latents: FP32 noise [1, C, T, H, W], given frames written into it.
        sound: FP32 noise [1, C, T], or None without sound.
        generator: What the noise came from, for a solver that draws more.
    """

    latents: torch.Tensor
    sound: torch.Tensor | None
    generator: torch.Generator


def lay_out(
    components: "Cosmos3Components",
    request: Cosmos3Request,
    timesteps: torch.Tensor,
    guided: list[bool],
) -> LoopInputs:
    """Encode the given frames and upload everything that the steps of a request read.

    Args:
        components: The checkpoint.
        request: A request that is ready to run.
        timesteps: Raw timesteps [steps].
        guided: Whether each step runs both branches.
    """
    values, device = request.values, components.device
    condition = None
    if request.frames is not None:
        encoded = encode_frames(components.vae, request.frames, device)
        indexes, frames = values.condition_video_latent_indexes, values.latent_shape[0]
        condition = make_condition(encoded, indexes, frames)
    # Each text is made once: the transformer knows it again by its identity.
    branches = {False: (request.prompt_ids,), True: (request.prompt_ids, request.negative_ids)}
    return LoopInputs(
        values=values,
        guided=guided,
        texts={flag: pad_branches(branches[flag], device) for flag in set(guided)},
        timesteps=timesteps.to(device, torch.float32),
        condition=condition,
    )


def image_seeds(seed: int, count: int) -> list[int]:
    """The seed of each image of a request: seed, seed + 1, ..., so that one can be made alone."""
    return [(seed + index) % _SEEDS for index in range(count)]


def draw_start(
    inputs: LoopInputs,
    seed: int,
    channels: int,
    sound_shape: tuple[int, ...] | None,
    device: torch.device,
) -> Start:
    """Draw the noise of one image or clip, the picture's and then the sound's.

    Args:
        inputs: Of the request.
        seed: Of this image or clip.
        channels: C of the latents.
        sound_shape: (1, C, T) of the sound latents; None without sound.
        device: Where the loop runs.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    latents = draw_noise((1, channels, *inputs.values.latent_shape), generator, device)
    sound = None if sound_shape is None else draw_noise(sound_shape, generator, device)
    if inputs.condition is not None:
        latents = inputs.condition.impose(latents)
    return Start(latents, sound, generator)


def draw_noise(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Standard normal FP32 noise, drawn on the CPU so that a seed means one picture everywhere."""
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)


def guided_steps(values: ResolvedRequest, timesteps: Sequence[float]) -> list[bool]:
    """Whether each step runs both branches: guidance above 1 and the timestep in the interval."""
    low, high = values.guidance_interval or (float("-inf"), float("inf"))
    return [values.is_guided and low <= timestep <= high for timestep in timesteps]


def pad_branches(branches: Sequence[tuple[int, ...]], device: torch.device) -> TextBatch:
    """Token ids of B branches as one batch, padded on the right, and the mask that says where."""
    length = max(len(ids) for ids in branches)
    ids = torch.tensor([(*ids, *[0] * (length - len(ids))) for ids in branches])
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in branches])
    return TextBatch(ids.to(device), mask.to(device))
