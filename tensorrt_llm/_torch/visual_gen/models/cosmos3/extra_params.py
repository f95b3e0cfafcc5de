# SPDX-License-Identifier: Apache-2.0
"""The options that only this family of models has: ``VisualGenParams.extra_params``."""

from collections.abc import Mapping
from typing import Any

from tensorrt_llm._torch.visual_gen.models.cosmos3.resolved_request import latent_frames
from tensorrt_llm._torch.visual_gen.models.cosmos3.violations import MAX_TIMESTEP, Violations
from tensorrt_llm.visual_gen.params import ExtraParamSchema

MIN_FLOW_SHIFT, MAX_FLOW_SHIFT = 0.01, 100.0
_NO_CLIP_REMEDY = "give a video_reference, or leave the options for one out"

EXTRA_PARAMS: Mapping[str, ExtraParamSchema] = {
    "output_type": ExtraParamSchema(
        type="str",
        description="What to generate. Default: image for num_frames 1, else video.",
        choices=("video", "image"),
    ),
    "use_duration_template": ExtraParamSchema(
        type="bool",
        default=True,
        description="Tell the model the clip's length and frame rate: a sentence, or fields of a "
        "JSON caption. For an image, a JSON caption loses those fields.",
    ),
    "use_resolution_template": ExtraParamSchema(
        type="bool",
        default=True,
        description="Tell the model the size: a sentence, or fields of a JSON caption.",
    ),
    "use_system_prompt": ExtraParamSchema(
        type="bool",
        description="Put the system prompt before the prompt. Default: true for video to video, "
        "else what the checkpoint's model_index.json says (false where it says nothing).",
    ),
    "use_guardrails": ExtraParamSchema(
        type="bool",
        description="Check the prompt, the caller's negative prompt and the frames, and refuse "
        "what is unsafe. Default: true for a checkpoint that asks for it (model_index.json, "
        "enable_safety_checker), unless TRTLLM_DISABLE_COSMOS3_GUARDRAILS=1.",
    ),
    "enable_audio": ExtraParamSchema(
        type="bool",
        default=False,
        description="Generate sound with the video. Refused for an image, by 4-step builds and by "
        "checkpoints without sound.",
    ),
    "condition_video_latent_indexes": ExtraParamSchema(
        type="list[int]",
        description="Latent frames of the result that video_reference fixes; latent frame 0 is "
        "the first frame, each further one is four frames. The highest says how much of the "
        "reference is used: 4 * index + 1 frames. Default: [0, 1]. Video to video only.",
    ),
    "condition_video_keep": ExtraParamSchema(
        type="str",
        description="The end of video_reference that is used. Default: first. Video to video only.",
        choices=("first", "last"),
    ),
    "flow_shift": ExtraParamSchema(
        type="float",
        description="Use the uniform flow schedule with this shift instead of the checkpoint's "
        "own schedule. Default: 10 for video to video, else the checkpoint's schedule.",
        range=(MIN_FLOW_SHIFT, MAX_FLOW_SHIFT),
    ),
    "guidance_interval": ExtraParamSchema(
        type="list[float]",
        description="[low, high] raw timesteps, both included; guidance rests outside. "
        "Default: [400, 1000] for an image, everywhere for a video.",
        range=(0.0, MAX_TIMESTEP),
    ),
}


def given_extra_params(extra: Any, check: Violations) -> dict[str, Any]:
    """The entries that say something: None is the default. Unknown names are violations."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        remedy = 'give options by name, {"flow_shift": 5} for instance'
        check.add("extra_params", "a dictionary", extra, remedy)
        return {}
    for name in extra:
        if name not in EXTRA_PARAMS:
            expected = f"one of {', '.join(EXTRA_PARAMS)}"
            check.add("extra_params", expected, name, "correct the option's name, or leave it out")
    return {name: value for name, value in extra.items() if value is not None}


def flag(extra: dict[str, Any], name: str, default: bool, check: Violations) -> bool:
    """An option that is on or off."""
    return check.flag(f"extra_params.{name}", extra.get(name, default))


def condition_indexes(
    extra: dict[str, Any],
    task: str,
    num_frames: int,
    default: tuple[int, ...],
    check: Violations,
) -> tuple[int, ...]:
    """``condition_video_latent_indexes``: as asked, ascending, else the task's ``default``."""
    given = extra.get("condition_video_latent_indexes")
    if given is None:
        return default
    name = "extra_params.condition_video_latent_indexes"
    if task != "video_to_video":
        check.add(name, "none without a video_reference", given, _NO_CLIP_REMEDY)
        return ()
    return check.indexes(name, given, latent_frames(num_frames))


def condition_keep(extra: dict[str, Any], task: str, check: Violations) -> str:
    """``condition_video_keep``: as asked, else "first"."""
    name, given = "extra_params.condition_video_keep", extra.get("condition_video_keep")
    if given is None:
        return "first"
    if task != "video_to_video":
        check.add(name, "none without a video_reference", given, _NO_CLIP_REMEDY)
    return check.choice(name, given, ("first", "last")) or "first"
