# SPDX-License-Identifier: Apache-2.0
"""What one call of the transformer must look like."""

from collections.abc import Iterator

import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._utils import describe_error

_Rule = tuple[str, bool, object, object, str]


def check_call(
    arch: Cosmos3Architecture,
    hidden_states: torch.Tensor,
    timestep: torch.Tensor | None,
    text_ids: torch.Tensor,
    video_shape: tuple[int, int, int],
    raw_timestep: torch.Tensor | None,
    noisy_frame_mask: torch.Tensor | None,
    audio_latents: torch.Tensor | None,
) -> None:
    """Require the arguments of ``Cosmos3VFMTransformer.forward``, by their shapes alone.

    Raises:
        ValueError: a missing timestep, shapes that contradict each other or the model, audio
            latents for a checkpoint without sound.
    """

    def rules() -> Iterator[_Rule]:
        # One after the other: a rule may rely on those before it.
        yield (
            "timestep and raw_timestep are required",
            isinstance(timestep, torch.Tensor) and isinstance(raw_timestep, torch.Tensor),
            "two tensors [batch]",
            f"{type(timestep).__name__} and {type(raw_timestep).__name__}",
            "pass raw_timestep from the scheduler, and timestep = raw_timestep / "
            "num_train_timesteps",
        )
        shape = tuple(hidden_states.shape)
        channels = arch.latent_channel
        yield (
            "Latents don't fit the model",
            len(shape) == 5 and shape[1] == channels and 0 not in shape,
            f"hidden_states [B, {channels}, T, H, W], none of them zero",
            shape,
            "pass one row of latents for each guidance branch",
        )
        yield (
            "Latents and video_shape disagree",
            shape[2:] == tuple(video_shape),
            tuple(video_shape),
            shape,
            "pass video_shape=tuple(hidden_states.shape[2:])",
        )
        batch, frames = shape[0], shape[2]
        yield (
            "Latents and text_ids disagree about the batch",
            text_ids.dim() == 2 and text_ids.shape[0] == batch,
            f"text_ids [{batch}, L]",
            tuple(text_ids.shape),
            "expand the latents to one row for each guidance branch",
        )
        for name, steps in (("timestep", timestep), ("raw_timestep", raw_timestep)):
            yield (
                f"Latents and {name} disagree about the batch",
                tuple(steps.shape) == (batch,),
                f"{name} [{batch}]",
                tuple(steps.shape),
                "pass one timestep for each row of the latents",
            )
        if noisy_frame_mask is not None:
            yield (
                "Latents and noisy_frame_mask disagree",
                tuple(noisy_frame_mask.shape) == (batch, frames),
                f"noisy_frame_mask [{batch}, {frames}]",
                tuple(noisy_frame_mask.shape),
                "pass one flag for each row and latent frame",
            )
        if audio_latents is not None:
            yield (
                "audio_latents given to a checkpoint without sound",
                arch.sound_gen,
                "None",
                "a tensor",
                "leave audio_latents out, or load a checkpoint with sound_gen true",
            )
            sound = tuple(audio_latents.shape)
            yield (
                "Latents and audio_latents disagree",
                len(sound) == 3 and sound[:2] == (batch, arch.sound_dim) and sound[2] > 0,
                f"audio_latents [{batch}, {arch.sound_dim}, T_sound]",
                sound,
                "pass one row of sound latents for each row of latents",
            )

    for what, holds, expected, found, remedy in rules():
        if not holds:
            raise ValueError(
                describe_error(
                    what,
                    where="Cosmos3VFMTransformer.forward",
                    expected=expected,
                    found=found,
                    remedy=remedy,
                )
            )
