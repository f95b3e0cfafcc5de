# SPDX-License-Identifier: Apache-2.0
"""What the values of a request must agree on: the task, guidance, fixed schedules and sound.

Each rule notes its violations and gives the values that follow from it.
"""

from typing import TYPE_CHECKING, Any

from tensorrt_llm._torch.visual_gen.models.cosmos3.extra_params import flag
from tensorrt_llm._torch.visual_gen.models.cosmos3.violations import Violations
from tensorrt_llm.visual_gen.params import VisualGenParams

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.models.cosmos3.checkpoint_traits import CheckpointTraits

# Four times the longest published setting, 300 frames at 10 a second (cosmos3.md E.1): beyond it a
# request is a mistake.
MAX_SOUND_SECONDS = 120
_NO_GUIDANCE = "none with guidance_scale <= 1, where it has no effect"
_NEVER_GUIDANCE = "none with a 4-step build, which has no guidance"
_NO_SCHEDULE = "none with a 4-step build, whose schedule is fixed"
_GUIDANCE_REMEDY = "leave what guides out, or raise guidance_scale above 1"
_DISTILLED_REMEDY = "leave out what a 4-step build has fixed, or load a base build"
_ONE_OF_BOTH = "give output_type or num_frames, one of them says it"


def choose_task(params: VisualGenParams, output_type: Any, check: Violations) -> str:
    """The task that a request asks for; a contradiction is a violation."""
    num_frames = params.num_frames
    one_frame = num_frames == 1 and not isinstance(num_frames, bool)
    if output_type is not None:
        output_type = check.choice("extra_params.output_type", output_type, ("image", "video"))
    wants_image = output_type == "image" or (output_type is None and one_frame)
    if output_type == "image" and num_frames is not None and not one_frame:
        expected = "1 or nothing with output_type 'image'"
        check.add("num_frames", expected, num_frames, _ONE_OF_BOTH)
    elif output_type == "video" and one_frame:
        expected = "2 or more with output_type 'video'"
        check.add("num_frames", expected, num_frames, _ONE_OF_BOTH)
    references = [
        name for name in ("image_reference", "video_reference") if getattr(params, name) is not None
    ]
    if len(references) == 2:
        remedy = "choose the reference to start from, and leave the other out"
        check.add(" and ".join(references), "one of them", "both", remedy)
    if wants_image:
        for name in references:
            expected = "none for an image, which is made from text alone"
            check.add(name, expected, "a reference", "leave the reference out, or ask for a video")
        return "text_to_image"
    if not references:
        return "text_to_video"
    return "image_to_video" if references[0] == "image_reference" else "video_to_video"


def check_distilled(
    params: VisualGenParams,
    steps: int,
    guidance_scale: float,
    extra: dict[str, Any],
    traits: "CheckpointTraits",
    check: Violations,
) -> None:
    """A distilled build was trained for its own noise levels without guidance (cosmos3.md E.1).

    Only what the caller gave is judged: for a task that the build doesn't serve, the values are
    those of a base build. What is out of range altogether is a violation already.
    """

    def given(name: str) -> bool:
        return getattr(params, name) is not None and not check.refused(name)

    count = len(traits.fixed_sigmas)
    if given("num_inference_steps") and steps != count:
        expected = f"{count}, what this 4-step build was trained for"
        check.add("num_inference_steps", expected, steps, _DISTILLED_REMEDY)
    if given("guidance_scale") and guidance_scale != 1.0:
        expected = "1.0, since a 4-step build has no guidance"
        check.add("guidance_scale", expected, guidance_scale, _DISTILLED_REMEDY)
    if "flow_shift" in extra:
        shift = extra["flow_shift"]
        check.add("extra_params.flow_shift", _NO_SCHEDULE, shift, _DISTILLED_REMEDY)


def resolve_audio(
    extra: dict[str, Any],
    task: str,
    num_frames: int,
    frame_rate: float | None,
    traits: "CheckpointTraits",
    check: Violations,
) -> bool:
    """Whether sound is generated, which not every task, checkpoint and length can have.

    Silent, a clip costs what its frames cost, however slow they are shown. Sound has 25 tokens a
    second, whatever the frames: 1001 of them at 0.01 a second would have 2.5 million. So a clip
    with sound may last ``MAX_SOUND_SECONDS``.
    """
    wanted = flag(extra, "enable_audio", False, check)
    if wanted and task == "text_to_image":
        remedy = "leave enable_audio out, or ask for a video"
        check.add("extra_params.enable_audio", "False for an image", wanted, remedy)
    elif wanted and not traits.has_sound:
        expected = "False with this checkpoint, which makes no sound"
        remedy = "leave enable_audio out, or load a checkpoint with sound"
        check.add("extra_params.enable_audio", expected, wanted, remedy)
    elif wanted and not check.refused("frame_rate"):  # a refused rate says no length
        seconds = num_frames / frame_rate
        if seconds > MAX_SOUND_SECONDS:
            expected = f"at most {MAX_SOUND_SECONDS} seconds with enable_audio"
            remedy = "raise frame_rate, ask for fewer frames, or leave enable_audio out"
            check.add("num_frames / frame_rate", expected, f"{seconds:.10g} seconds", remedy)
    return wanted


def resolve_guidance(
    negative_prompt: Any,
    interval: Any,
    guidance_scale: float,
    *,
    distilled: bool,
    default_negative: str,
    default_interval: tuple[float, float] | None,
    check: Violations,
) -> tuple[str, tuple[float, float] | None]:
    """Both belong to guidance: without it a given one would do nothing, so it is refused.

    A distilled build has none whatever ``guidance_scale`` says, so that all that is wrong is told
    in one go, and nobody is sent to a scale that the build refuses. Any other build may have
    guidance once a ``guidance_scale`` that is refused has been mended.
    """
    if negative_prompt is not None:
        negative_prompt = check.text("negative_prompt", negative_prompt)
    if interval is not None:
        interval = check.interval("extra_params.guidance_interval", interval)
    if not distilled and (guidance_scale > 1.0 or check.refused("guidance_scale")):
        return (
            default_negative if negative_prompt is None else negative_prompt,
            default_interval if interval is None else interval,
        )
    expected, remedy = (
        (_NEVER_GUIDANCE, _DISTILLED_REMEDY) if distilled else (_NO_GUIDANCE, _GUIDANCE_REMEDY)
    )
    if negative_prompt:
        check.add("negative_prompt", expected, "text", remedy)
    if interval is not None:
        name = "extra_params.guidance_interval"
        check.add(name, expected, interval, remedy)
    return "", None
