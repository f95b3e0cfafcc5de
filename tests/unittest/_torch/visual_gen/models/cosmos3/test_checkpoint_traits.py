# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is, read from its parts and not from its name."""

from types import SimpleNamespace

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.checkpoint_traits import (
    CheckpointTraits,
    family_of,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.prompts import packaged_negative_prompt
from tests.support.cosmos3_requests import T_LIST

SUPER = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64}


def distilled_scheduler():
    fixed = {"t_list": T_LIST, "sample_type": "sde"}
    return FlowMatchEulerDiscreteScheduler.from_config(
        {"stochastic_sampling": True, "fixed_step_sampler_config": fixed}
    )


def traits(*, sound_gen=True, **changes) -> CheckpointTraits:
    components = {
        "transformer": SimpleNamespace(arch=Cosmos3Architecture(sound_gen=sound_gen)),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True
        ),
        "sound_tokenizer": object(),
        "default_use_system_prompt": False,
        "requires_guardrails": False,
        "negative_prompt": None,
        "model": "nvidia/Cosmos3-Super-Image2Video-4Step",
    }
    return CheckpointTraits.from_components(SimpleNamespace(**components | changes))


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "nano"),
        (SUPER, "super"),
        (SUPER | {"num_hidden_layers": 36}, "nano"),
        ({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, "nano"),
    ],
)
def test_the_family_follows_from_the_sizes(changes, family):
    assert family_of(Cosmos3Architecture(**changes)) == family


def test_the_build_follows_from_the_scheduler_and_not_from_the_name():
    base = traits()
    assert (base.family, base.build, base.fixed_sigmas) == ("nano", "base", None)
    distilled = traits(scheduler=distilled_scheduler())
    assert (distilled.build, distilled.fixed_sigmas) == ("distilled", T_LIST)


def test_sound_takes_a_transformer_and_a_tokenizer_for_it_and_a_base_build():
    assert traits().has_sound is True
    assert traits(sound_gen=False).has_sound is False
    assert traits(sound_tokenizer=None).has_sound is False
    assert traits(scheduler=distilled_scheduler()).has_sound is False


def test_the_checkpoints_own_negative_prompt_comes_before_the_packages():
    assert traits().video_negative_prompt == packaged_negative_prompt()
    assert traits(negative_prompt="its own").video_negative_prompt == "its own"
    assert traits(negative_prompt="").video_negative_prompt == ""


@pytest.mark.parametrize("name", ["default_use_system_prompt", "requires_guardrails"])
@pytest.mark.parametrize("value", [True, False])
def test_the_checkpoints_flags_are_taken_over(name, value):
    assert getattr(traits(**{name: value}), name) is value
