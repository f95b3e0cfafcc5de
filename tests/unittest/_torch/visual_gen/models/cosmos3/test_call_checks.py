# SPDX-License-Identifier: Apache-2.0
"""A call whose shapes contradict each other is refused by name, before anything is computed."""

import dataclasses

import pytest
import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.call_checks import check_call

SILENT = Cosmos3Architecture()
SOUND = dataclasses.replace(SILENT, sound_gen=True, sound_dim=64)


def arguments(**changes) -> dict:
    given = {
        "arch": SOUND,
        "hidden_states": torch.empty(2, 48, 3, 4, 6),
        "timestep": torch.empty(2),
        "text_ids": torch.empty(2, 7, dtype=torch.int64),
        "video_shape": (3, 4, 6),
        "raw_timestep": torch.empty(2),
        "noisy_frame_mask": torch.empty(2, 3, dtype=torch.bool),
        "audio_latents": torch.empty(2, 64, 5),
    }
    return given | changes


@pytest.mark.parametrize("changes", [{}, {"noisy_frame_mask": None}, {"audio_latents": None}])
def test_a_call_whose_shapes_belong_together_passes(changes):
    check_call(**arguments(**changes))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"timestep": None}, "timestep and raw_timestep are required"),
        ({"raw_timestep": None}, "timestep and raw_timestep are required"),
        ({"hidden_states": torch.empty(48, 3, 4, 6)}, r"hidden_states \[B, 48, T, H, W\]"),
        ({"hidden_states": torch.empty(())}, r"hidden_states \[B, 48, T, H, W\]"),
        ({"hidden_states": torch.empty(2, 16, 3, 4, 6)}, r"hidden_states \[B, 48, T, H, W\]"),
        ({"hidden_states": torch.empty(0, 48, 3, 4, 6)}, "none of them zero"),
        ({"video_shape": (3, 4, 7)}, "video_shape"),
        ({"text_ids": torch.empty(3, 7)}, r"text_ids \[2, L\]"),
        ({"text_ids": torch.empty(2)}, r"text_ids \[2, L\]"),
        ({"timestep": torch.empty(3)}, r" timestep \[2\]"),
        ({"raw_timestep": torch.empty(3)}, r"raw_timestep \[2\]"),
        ({"raw_timestep": torch.empty(())}, r"raw_timestep \[2\]"),
        ({"noisy_frame_mask": torch.empty(1, 3)}, r"noisy_frame_mask \[2, 3\]"),
        ({"noisy_frame_mask": torch.empty(2, 4)}, r"noisy_frame_mask \[2, 3\]"),
        ({"arch": SILENT}, "without sound"),
        ({"audio_latents": torch.empty(1, 64, 5)}, r"audio_latents \[2, 64, T_sound\]"),
        ({"audio_latents": torch.empty(2, 32, 5)}, r"audio_latents \[2, 64, T_sound\]"),
        ({"audio_latents": torch.empty(2, 64, 0)}, r"audio_latents \[2, 64, T_sound\]"),
    ],
)
def test_each_contradiction_is_named(changes, named):
    with pytest.raises(ValueError, match=named):
        check_call(**arguments(**changes))
