# SPDX-License-Identifier: Apache-2.0
"""Default values by task, and the one place that turns a request into full, checked values.

``resolve_request`` is pure but for the seed that it draws when none is given. It collects every
violation before it raises, so that a caller mends a request in one go.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorrt_llm._torch.visual_gen.models.cosmos3.violations import (
    MAX_TIMESTEP,
    SPATIAL_FACTOR,
    Violations,
)
from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen.media_refs import refuse_media_references
from tensorrt_llm.visual_gen.media_writer import MAX_FRAME_RATE, MIN_FRAME_RATE
from tensorrt_llm.visual_gen.params import ExtraParamSchema, VisualGenParams

# The VAE makes a latent frame of every four frames after the first (cosmos3.md B.2).
TEMPORAL_FACTOR = 4
MAX_FRAMES = 1001
# Twice the largest published setting, 1280x720 with 300 frames: beyond it a request is a mistake.
MAX_PIXELS = 2**29
MAX_STEPS = 1000
MAX_SEQUENCE_LENGTH = 32768
MAX_IMAGES = 10
MAX_FLOW_SHIFT = 100.0


@dataclass(frozen=True)
class TaskDefaults:
    """What a request gets where it says nothing.

    Attributes:
        height, width: Pixels.
        num_frames: Frames; 1 is an image.
        frame_rate: Frames a second, None for an image.
        num_inference_steps: Denoising steps.
        guidance_scale: Classifier-free guidance.
        guidance_interval: Raw timesteps, both ends included, outside which guidance rests.
        max_sequence_length: Tokens of a prompt.
    """

    height: int
    width: int
    num_frames: int
    frame_rate: float | None
    num_inference_steps: int
    guidance_scale: float
    guidance_interval: tuple[float, float] | None
    max_sequence_length: int = 4096


# Sources: cosmos3.md E.1 (TensorRT-LLM's column) for video, I.11 for images. The schedule is the
# checkpoint's own for both, so no row names a shift.
NANO_AND_SUPER: Mapping[str, TaskDefaults] = {
    "text_to_image": TaskDefaults(
        height=1024,
        width=1024,
        num_frames=1,
        frame_rate=None,
        num_inference_steps=50,
        guidance_scale=7.0,
        guidance_interval=(400.0, 1000.0),
    ),
    "text_to_video": TaskDefaults(
        height=720,
        width=1280,
        num_frames=189,
        frame_rate=24.0,
        num_inference_steps=35,
        guidance_scale=6.0,
        guidance_interval=None,
    ),
}

EXTRA_PARAMS: Mapping[str, ExtraParamSchema] = {
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
        description="Put the system prompt before the prompt. Default: what the checkpoint's "
        "model_index.json says.",
    ),
    "output_type": ExtraParamSchema(
        type="str",
        description="What to generate. Default: image for num_frames 1, else video.",
        choices=("video", "image"),
    ),
    "flow_shift": ExtraParamSchema(
        type="float",
        description="Use the uniform flow schedule with this shift instead of the checkpoint's "
        "own schedule. Default: the checkpoint's.",
        range=(0.01, MAX_FLOW_SHIFT),
    ),
    "guidance_interval": ExtraParamSchema(
        type="list[float]",
        description="[low, high] raw timesteps, both included; guidance rests outside. "
        "Default: [400, 1000] for an image, everywhere for a video.",
        range=(0.0, MAX_TIMESTEP),
    ),
}

# Named by the interface, built by later work: refused rather than ignored.
_LATER_EXTRA_PARAMS = (
    "use_guardrails",
    "enable_audio",
    "condition_video_latent_indexes",
    "condition_video_keep",
)


@dataclass(frozen=True)
class ResolvedRequest:
    """Every value of one request, as it will run. Fields as in ``VisualGenParams``.

    ``guidance_scale`` of 1 and below means one branch; then ``negative_prompt`` is '' and
    ``guidance_interval`` None. ``flow_shift`` None is the checkpoint's own schedule.
    """

    task: str
    prompt: str
    negative_prompt: str
    height: int
    width: int
    num_frames: int
    frame_rate: float | None
    num_inference_steps: int
    guidance_scale: float
    max_sequence_length: int
    seed: int
    num_images_per_prompt: int
    use_duration_template: bool
    use_resolution_template: bool
    use_system_prompt: bool
    flow_shift: float | None
    guidance_interval: tuple[float, float] | None

    @property
    def is_image(self) -> bool:
        """Whether one frame is generated, as an image."""
        return self.num_frames == 1

    @property
    def is_guided(self) -> bool:
        """Whether any step may run both branches."""
        return self.guidance_scale > 1.0

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(T, H, W) of the latents."""
        frames = (self.num_frames - 1) // TEMPORAL_FACTOR + 1
        return frames, self.height // SPATIAL_FACTOR, self.width // SPATIAL_FACTOR

    def report(self) -> dict[str, Any]:
        """The values under the names of ``VisualGenParams``, to be read or asked for again."""
        extra = {
            "output_type": "image" if self.is_image else "video",
            "use_duration_template": self.use_duration_template,
            "use_resolution_template": self.use_resolution_template,
            "use_system_prompt": self.use_system_prompt,
            "flow_shift": self.flow_shift,
            "guidance_interval": self.guidance_interval and list(self.guidance_interval),
        }
        names = ("prompt", *VisualGenParams.model_fields)
        values = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return {"task": self.task, **values, "extra_params": extra}


def resolve_request(
    prompt: str,
    params: VisualGenParams,
    *,
    default_use_system_prompt: bool,
    video_negative_prompt: str,
    defaults: Mapping[str, TaskDefaults] = NANO_AND_SUPER,
) -> ResolvedRequest:
    """Fill in and check every value of a request.

    Args:
        prompt: Text, or a JSON object as text.
        params: What the caller asked for; None means the default.
        default_use_system_prompt: The checkpoint's own default.
        video_negative_prompt: What an absent negative prompt means for a video.
        defaults: Rows by task.

    Raises:
        ValueError: starts with "Parameter validation failed:" and lists every violation.
        NotImplementedError: an option that a later version builds, by name.
    """
    refuse_media_references(params.image_reference, params.video_reference)
    check = Violations()
    extra = _check_extra_params(params.extra_params, check)
    task = _choose_task(params.num_frames, extra.get("output_type"), check)
    row = defaults[task]

    def value(name: str) -> Any:
        given = getattr(params, name)
        return getattr(row, name) if given is None else given

    prompt = check.text("prompt", prompt, allow_blank=False)
    height, width = check.side("height", value("height")), check.side("width", value("width"))
    num_frames = check.integer("num_frames", value("num_frames"), 1, MAX_FRAMES)
    num_frames = math.ceil((num_frames - 1) / TEMPORAL_FACTOR) * TEMPORAL_FACTOR + 1
    if height * width * num_frames > MAX_PIXELS:
        found = f"{height} * {width} * {num_frames} = {height * width * num_frames}"
        check.add("height * width * num_frames", f"at most {MAX_PIXELS}", found)
    frame_rate = row.frame_rate
    if params.frame_rate is not None:
        frame_rate = check.number("frame_rate", params.frame_rate, MIN_FRAME_RATE, MAX_FRAME_RATE)
        if task == "text_to_image":
            check.add("frame_rate", "none for an image, which has no rate", params.frame_rate)
    images = _or_default(params.num_images_per_prompt, 1)
    images = check.integer("num_images_per_prompt", images, 1, MAX_IMAGES)
    if images > 1 and task != "text_to_image":
        check.add("num_images_per_prompt", "1 for a video", images)
    guidance_scale = check.number("guidance_scale", value("guidance_scale"), 0.0)
    negative_prompt, interval = _resolve_guidance(
        params.negative_prompt,
        extra.get("guidance_interval"),
        guidance_scale > 1.0,
        default_negative="" if task == "text_to_image" else video_negative_prompt,
        default_interval=row.guidance_interval,
        check=check,
    )
    flow_shift = extra.get("flow_shift")
    if flow_shift is not None:
        flow_shift = check.number("extra_params.flow_shift", flow_shift, 0.01, MAX_FLOW_SHIFT)
    resolved = ResolvedRequest(
        task=task,
        prompt=prompt,
        negative_prompt=negative_prompt,
        height=height,
        width=width,
        num_frames=num_frames,
        frame_rate=frame_rate,
        num_inference_steps=check.integer(
            "num_inference_steps", value("num_inference_steps"), 1, MAX_STEPS
        ),
        guidance_scale=guidance_scale,
        max_sequence_length=check.integer(
            "max_sequence_length", value("max_sequence_length"), 1, MAX_SEQUENCE_LENGTH
        ),
        seed=secrets.randbits(63)
        if params.seed is None
        else check.integer("seed", params.seed, 0, 2**63 - 1),
        num_images_per_prompt=images,
        use_duration_template=_flag(extra, "use_duration_template", True, check),
        use_resolution_template=_flag(extra, "use_resolution_template", True, check),
        use_system_prompt=_flag(extra, "use_system_prompt", default_use_system_prompt, check),
        flow_shift=flow_shift,
        guidance_interval=interval,
    )
    check.raise_if_any()
    return resolved


def _or_default(value: Any, default: Any) -> Any:
    """``default`` where ``value`` is None (and only there: 0 and '' are values)."""
    return default if value is None else value


def _flag(extra: dict[str, Any], name: str, default: bool, check: Violations) -> bool:
    return check.flag(f"extra_params.{name}", _or_default(extra.get(name), default))


def _check_extra_params(extra: Any, check: Violations) -> dict[str, Any]:
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        check.add("extra_params", "a dictionary", extra)
        return {}
    for name in extra:
        if name in _LATER_EXTRA_PARAMS:
            raise NotImplementedError(
                describe_error(
                    f"{name} is not supported yet",
                    where=f"VisualGenParams.extra_params[{name!r}]",
                    expected=f"one of {', '.join(EXTRA_PARAMS)}",
                    found=name,
                    remedy="leave it out",
                )
            )
        if name not in EXTRA_PARAMS:
            check.add("extra_params", f"one of {', '.join(EXTRA_PARAMS)}", name)
    return dict(extra)


def _choose_task(num_frames: Any, output_type: Any, check: Violations) -> str:
    one_frame = num_frames == 1 and not isinstance(num_frames, bool)
    if output_type is None:
        return "text_to_image" if one_frame else "text_to_video"
    if output_type not in ("image", "video"):
        check.add("extra_params.output_type", "'image' or 'video'", output_type)
    elif output_type == "image" and num_frames is not None and not one_frame:
        check.add("num_frames", "1 or nothing with output_type 'image'", num_frames)
    elif output_type == "video" and one_frame:
        check.add("num_frames", "2 or more with output_type 'video'", num_frames)
    return "text_to_image" if output_type == "image" else "text_to_video"


def _resolve_guidance(
    negative_prompt: Any,
    interval: Any,
    guided: bool,
    *,
    default_negative: str,
    default_interval: tuple[float, float] | None,
    check: Violations,
) -> tuple[str, tuple[float, float] | None]:
    """Both belong to guidance: without it a given one would do nothing, so it is refused."""
    if negative_prompt is not None:
        negative_prompt = check.text("negative_prompt", negative_prompt)
    if interval is not None:
        interval = check.interval("extra_params.guidance_interval", interval)
    if guided:
        return _or_default(negative_prompt, default_negative), _or_default(
            interval, default_interval
        )
    if negative_prompt:
        check.add(
            "negative_prompt", "none with guidance_scale <= 1, where it has no effect", "text"
        )
    if interval is not None:
        remark = "none with guidance_scale <= 1, where it has no effect"
        check.add("extra_params.guidance_interval", remark, interval)
    return "", None
