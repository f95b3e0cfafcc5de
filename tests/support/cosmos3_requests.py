# SPDX-License-Identifier: Apache-2.0
"""Requests resolved against checkpoints that a test describes in a word."""

from dataclasses import replace

from tensorrt_llm import VisualGenParams
from tensorrt_llm._torch.visual_gen.models.cosmos3.checkpoint_traits import CheckpointTraits
from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import SourceInfo, resolve_request
from tensorrt_llm._torch.visual_gen.models.cosmos3.resolved_request import ResolvedRequest

NEGATIVE = "the checkpoint's negative prompt"
T_LIST = (1.0, 0.9375, 0.8333333333333334, 0.625)
"""The noise levels of the published 4-step builds (cosmos3.md E.3)."""

NANO = CheckpointTraits(
    family="nano",
    build="base",
    has_sound=True,
    default_use_system_prompt=False,
    requires_guardrails=False,
    video_negative_prompt=NEGATIVE,
    fixed_sigmas=None,
)
SUPER = replace(NANO, family="super")
FOUR_STEPS = replace(
    SUPER,
    build="distilled",
    has_sound=False,
    default_use_system_prompt=True,
    fixed_sigmas=T_LIST,
)


def resolve(
    prompt: str = "A robot.",
    *,
    traits: CheckpointTraits = NANO,
    source: SourceInfo | None = None,
    **params: object,
) -> ResolvedRequest:
    """``resolve_request`` with the fields of ``VisualGenParams`` as keywords."""
    return resolve_request(prompt, VisualGenParams(**params), traits, source)
