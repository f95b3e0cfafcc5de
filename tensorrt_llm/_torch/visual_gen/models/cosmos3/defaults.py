# SPDX-License-Identifier: Apache-2.0
"""Default values by task, and the one place that turns a request into full, checked values.

``resolve_request`` is pure but for the seed that it draws when none is given. It collects every
violation before it raises, so that a caller mends a request in one go.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tensorrt_llm._torch.visual_gen.models.cosmos3.extra_params import (
    EXTRA_PARAMS,
    MAX_FLOW_SHIFT,
    MIN_FLOW_SHIFT,
    condition_indexes,
    condition_keep,
    flag,
    given_extra_params,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.request_rules import (
    check_distilled,
    choose_task,
    resolve_audio,
    resolve_guidance,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.resolved_request import (
    TEMPORAL_FACTOR,
    ResolvedRequest,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.source_following import (
    SourceInfo,
    resolve_frame_rate,
    resolve_size,
    smallest_size,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.violations import (
    MAX_GUIDANCE_SCALE,
    Violations,
)
from tensorrt_llm.visual_gen.params import VisualGenParams

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.models.cosmos3.checkpoint_traits import CheckpointTraits

__all__ = [
    "DEFAULTS",
    "EXTRA_PARAMS",
    "ResolvedRequest",
    "SourceInfo",
    "TaskDefaults",
    "default_params",
    "resolve_request",
    "task_defaults",
]

MAX_FRAMES = 1001
# Twice the largest published setting, 1280x720 with 300 frames: beyond it a request is a mistake.
MAX_PIXELS = 2**29
MAX_STEPS = 1000
MAX_SEQUENCE_LENGTH = 32768
MAX_IMAGES = 10


@dataclass(frozen=True)
class TaskDefaults:
    """What a request gets where it says nothing.

    Attributes:
        height, width: Pixels.
        num_frames: Frames; 1 is an image.
        frame_rate: Frames a second, None for an image.
        num_inference_steps: Denoising steps; None is the number of the checkpoint's fixed sigmas.
        guidance_scale: Classifier-free guidance.
        guidance_interval: Raw timesteps, both ends included, outside which guidance rests; None is
            nowhere.
        negative_prompt: None is the checkpoint's text for videos.
        flow_shift: Shift of the uniform schedule; None is the checkpoint's own schedule.
        source_tier: Tier of ``RESOLUTIONS`` from which a reference chooses the size; None without
            a reference.
        use_system_prompt: None is the checkpoint's own default.
        condition_video_latent_indexes: Latent frames that the reference fixes.
        max_sequence_length: Tokens of a prompt.
    """

    height: int = 720
    width: int = 1280
    num_frames: int = 189
    frame_rate: float | None = 24.0
    num_inference_steps: int | None = 35
    guidance_scale: float = 6.0
    guidance_interval: tuple[float, float] | None = None
    negative_prompt: str | None = None
    flow_shift: float | None = None
    source_tier: str | None = None
    use_system_prompt: bool | None = None
    condition_video_latent_indexes: tuple[int, ...] = ()
    max_sequence_length: int = 4096


# Sources: cosmos3.md E.1 (TensorRT-LLM's column) for video, I.11 for images and video to video.
_BASE = {
    "text_to_image": TaskDefaults(
        height=1024,
        width=1024,
        num_frames=1,
        frame_rate=None,
        num_inference_steps=50,
        guidance_scale=7.0,
        guidance_interval=(400.0, 1000.0),
        negative_prompt="",
    ),
    "text_to_video": TaskDefaults(),
    "image_to_video": TaskDefaults(source_tier="720", condition_video_latent_indexes=(0,)),
    "video_to_video": TaskDefaults(
        source_tier="720",
        flow_shift=10.0,
        use_system_prompt=True,
        condition_video_latent_indexes=(0, 1),
    ),
}
# Distilled from the image build and from the image-to-video build: no other task was trained
# (cosmos3.md A.1, E.1).
_DISTILLED = {
    "text_to_image": TaskDefaults(
        height=1024,
        width=1024,
        num_frames=1,
        frame_rate=None,
        num_inference_steps=None,
        guidance_scale=1.0,
        negative_prompt="",
    ),
    "image_to_video": TaskDefaults(
        num_inference_steps=None,
        guidance_scale=1.0,
        negative_prompt="",
        source_tier="720",
        condition_video_latent_indexes=(0,),
    ),
}

# (family, build) -> task -> defaults. Nano and Super have the same.
DEFAULTS: Mapping[tuple[str, str], Mapping[str, TaskDefaults]] = {
    ("nano", "base"): _BASE,
    ("super", "base"): _BASE,
    ("nano", "distilled"): _DISTILLED,
    ("super", "distilled"): _DISTILLED,
}


def task_defaults(traits: "CheckpointTraits") -> dict[str, dict[str, Any]]:
    """The defaults of each task that the checkpoint serves, under the names of a request."""
    tasks = {}
    for task, row in DEFAULTS[traits.family, traits.build].items():
        values = asdict(row)
        del values["source_tier"]
        values["num_inference_steps"] = _steps(row, traits)
        values["use_system_prompt"] = _or_default(
            row.use_system_prompt, traits.default_use_system_prompt
        )
        values["negative_prompt"] = _default_negative(row, traits)
        tasks[task] = values
    return tasks


def default_params(traits: "CheckpointTraits") -> VisualGenParams:
    """Options with the defaults filled in that every task of the checkpoint shares.

    What depends on the task stays None, so that a caller who changes the task (``num_frames`` 1,
    a reference) gets that task's defaults and not another's.
    """
    rows = list(DEFAULTS[traits.family, traits.build].values())
    shared = {
        name: getattr(rows[0], name)
        for name in VisualGenParams.model_fields
        if hasattr(rows[0], name) and len({getattr(row, name) for row in rows}) == 1
    }
    if traits.fixed_sigmas is not None:
        shared["num_inference_steps"] = len(traits.fixed_sigmas)
    return VisualGenParams(**shared, num_images_per_prompt=1)


def resolve_request(
    prompt: str,
    params: VisualGenParams,
    traits: "CheckpointTraits",
    source: SourceInfo | None = None,
) -> ResolvedRequest:
    """Fill in and check every value of a request.

    Args:
        prompt: Text, or a JSON object as text.
        params: What the caller asked for; None means the default. References are only looked at
            for being there.
        traits: What the checkpoint is.
        source: What the decoded reference says; None where there is none, or to judge a request
            before its reference is read: the size and rate of the task's row stand in then.

    Raises:
        ValueError: starts with "Parameter validation failed:" and lists every violation.
    """
    check = Violations()
    extra = given_extra_params(params.extra_params, check)
    task = choose_task(params, extra.get("output_type"), check)
    rows = DEFAULTS[traits.family, traits.build]
    if task not in rows:
        expected = f"{' or '.join(rows)}, which this 4-step build serves"
        check.add("task", expected, task, "ask for one of these, or load a base build")
    row = rows.get(task) or _BASE[task]

    def value(name: str) -> Any:
        given = getattr(params, name)
        return getattr(row, name) if given is None else given

    prompt = check.text("prompt", prompt, allow_blank=False)
    height, width = resolve_size(
        params.height, params.width, (row.height, row.width), row.source_tier, source, check
    )
    num_frames = check.integer("num_frames", value("num_frames"), 1, MAX_FRAMES)
    num_frames = math.ceil((num_frames - 1) / TEMPORAL_FACTOR) * TEMPORAL_FACTOR + 1
    size = height, width
    if source is None and row.source_tier is not None:
        # A stand-in for a side that the reference will say must not refuse the request.
        given = (None if params.height is None else height, None if params.width is None else width)
        size = smallest_size(*given, row.source_tier)
    pixels = math.prod(size) * num_frames
    if pixels > MAX_PIXELS:
        found = f"{size[0]}*{size[1]}*{num_frames} = {pixels}"  # short enough to be shown in full
        remedy = "ask for a smaller size or fewer frames"
        check.add("height * width * num_frames", f"at most {MAX_PIXELS}", found, remedy)
    images = check.integer(
        "num_images_per_prompt", _or_default(params.num_images_per_prompt, 1), 1, MAX_IMAGES
    )
    if images > 1 and task != "text_to_image":
        remedy = "send a request for each video"
        check.add("num_images_per_prompt", "1 for a video", images, remedy)
    guidance_scale = value("guidance_scale")
    guidance_scale = check.number("guidance_scale", guidance_scale, 0.0, MAX_GUIDANCE_SCALE)
    steps = _or_default(params.num_inference_steps, _steps(row, traits))
    steps = check.integer("num_inference_steps", steps, 1, MAX_STEPS)
    if traits.fixed_sigmas is not None:
        check_distilled(params, steps, guidance_scale, extra, traits, check)
    negative_prompt, interval = resolve_guidance(
        params.negative_prompt,
        extra.get("guidance_interval"),
        guidance_scale,
        distilled=traits.fixed_sigmas is not None,
        default_negative=_default_negative(row, traits),
        default_interval=row.guidance_interval,
        check=check,
    )
    frame_rate = params.frame_rate
    if task == "text_to_image":
        if frame_rate is not None:
            expected, remedy = "none for an image, which has no rate", "leave frame_rate out"
            check.add("frame_rate", expected, frame_rate, remedy)
    else:
        frame_rate = resolve_frame_rate(
            frame_rate, params.num_frames, row.frame_rate, source, check
        )
    system_prompt = _or_default(row.use_system_prompt, traits.default_use_system_prompt)
    resolved = ResolvedRequest(
        task=task,
        prompt=prompt,
        negative_prompt=negative_prompt,
        height=height,
        width=width,
        num_frames=num_frames,
        frame_rate=frame_rate,
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
        max_sequence_length=check.integer(
            "max_sequence_length", value("max_sequence_length"), 1, MAX_SEQUENCE_LENGTH
        ),
        seed=secrets.randbits(63)
        if params.seed is None
        else check.integer("seed", params.seed, 0, 2**63 - 1),
        num_images_per_prompt=images,
        use_duration_template=flag(extra, "use_duration_template", True, check),
        use_resolution_template=flag(extra, "use_resolution_template", True, check),
        use_system_prompt=flag(extra, "use_system_prompt", system_prompt, check),
        flow_shift=_resolve_flow_shift(extra.get("flow_shift"), row, check),
        guidance_interval=interval,
        enable_audio=resolve_audio(extra, task, num_frames, frame_rate, traits, check),
        condition_video_latent_indexes=condition_indexes(
            extra, task, num_frames, row.condition_video_latent_indexes, check
        ),
        condition_video_keep=condition_keep(extra, task, check),
        use_guardrails=flag(extra, "use_guardrails", traits.requires_guardrails, check),
    )
    check.raise_if_any()
    return resolved


def _or_default(value: Any, default: Any) -> Any:
    """``default`` where ``value`` is None (and only there: 0 and '' are values)."""
    return default if value is None else value


def _steps(row: TaskDefaults, traits: "CheckpointTraits") -> int:
    """The default number of steps; a distilled build has one step per noise level."""
    return row.num_inference_steps or len(traits.fixed_sigmas)


def _default_negative(row: TaskDefaults, traits: "CheckpointTraits") -> str:
    return _or_default(row.negative_prompt, traits.video_negative_prompt)


def _resolve_flow_shift(given: Any, row: TaskDefaults, check: Violations) -> float | None:
    if given is None:
        return row.flow_shift
    return check.number("extra_params.flow_shift", given, MIN_FLOW_SHIFT, MAX_FLOW_SHIFT)
