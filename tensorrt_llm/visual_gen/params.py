# SPDX-License-Identifier: Apache-2.0
"""What a caller may ask of one generation. Importing this costs no torch."""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from tensorrt_llm.strict_model import StrictModel

# Values are judged in one place, when a request is resolved against the pipeline's defaults, so
# that one error lists every violation, wrong types included. Construction refuses unknown names.
Unchecked = SkipValidation


class ParameterError(ValueError):
    """Values of a request are refused.

    Args:
        message: What is wrong and what to do about it.
        names: What was refused: each a field of ``VisualGenParams``, ``extra_params.KEY``,
            "prompt", or several of them in one text.
    """

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class VisualGenParams(StrictModel):
    """The options of one request; None means the checkpoint's default for the task.

    The task follows from the request: ``num_frames`` 1 or ``extra_params["output_type"]`` "image"
    asks for an image, ``image_reference`` for image to video, ``video_reference`` for video to
    video, anything else for a video from text alone. ``VisualGen.task_defaults`` has the defaults
    of each task; the values that were used are reported back in
    ``VisualGenOutput.metadata["request"]``.

    Raises:
        pydantic.ValidationError: (a ValueError) an unknown field. Values are checked by
            ``VisualGen.generate`` before any work, all of them at once.
    """

    height: Annotated[int | None, Unchecked] = Field(
        None,
        description="Pixels, a multiple of 16. Default: of the task; with a reference, the trained "
        "size nearest to its aspect, or what keeps its aspect with the width given.",
    )
    width: Annotated[int | None, Unchecked] = Field(
        None, description="Pixels, a multiple of 16. Default: as for height."
    )
    num_inference_steps: Annotated[int | None, Unchecked] = Field(
        None,
        description="Denoising steps, 1 to 1000. Default: of the task. A 4-step build takes only "
        "its own number.",
    )
    guidance_scale: Annotated[float | None, Unchecked] = Field(
        None,
        description="Classifier-free guidance, 0 to 100; off at 1 and below. Default: of the task. "
        "A 4-step build takes only 1.0.",
    )
    max_sequence_length: Annotated[int | None, Unchecked] = Field(
        None,
        description="Most tokens of the prompt and of the negative prompt, each with its chat "
        "template and the two tokens that end it. A longer one is refused, never cut. "
        "Default: 4096.",
    )
    seed: Annotated[int | None, Unchecked] = Field(
        None, description="0 <= seed < 2**63. Default: drawn at random and reported."
    )
    num_frames: Annotated[int | None, Unchecked] = Field(
        None,
        description="Frames, rounded up to 4k + 1, at most 1001; 1 is an image. "
        "Default: of the task.",
    )
    frame_rate: Annotated[float | None, Unchecked] = Field(
        None,
        description="Frames a second, of a video. With enable_audio, num_frames / frame_rate is at "
        "most 120 seconds. Default: of the task; for video to video the reference's, unless "
        "num_frames is given.",
    )
    negative_prompt: Annotated[str | None, Unchecked] = Field(
        None,
        description="What guidance leads away from; '' is an empty one. Default: for a video the "
        "checkpoint's own text, or this package's; for an image and for 4-step builds ''.",
    )
    image_reference: Annotated[Any, Unchecked] = Field(
        None,
        description="The first frame of a video: a path, a file:, data: or http(s): URI, bytes, a "
        "PIL image or an array. Not together with video_reference, nor for an image.",
    )
    video_reference: Annotated[Any, Unchecked] = Field(
        None,
        description="A clip that the video continues or completes: a path, a URI, bytes, frames as "
        "PIL images or an array. Not for an image.",
    )
    num_images_per_prompt: Annotated[int | None, Unchecked] = Field(
        None,
        description="Images of one request, 1 to 10, with the seeds seed, seed + 1, ..., so that "
        "each can be made alone. Images only. Default: 1.",
    )
    extra_params: Annotated[dict[str, Any] | None, Unchecked] = Field(
        None, description="Options of the model family, see ``VisualGen.extra_param_specs``."
    )


class ExtraParamSchema(BaseModel):
    """Describes one entry of ``VisualGenParams.extra_params``.

    Attributes:
        type: Name of the Python type of a value.
        default: The value when absent; None where it depends on the task or the checkpoint, which
            ``description`` then says.
        description: Meaning, and what an absent value gives.
        choices: The only values accepted, if they are few.
        range: Bounds of a number, both included.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    default: Any = None
    description: str
    choices: tuple[Any, ...] | None = None
    range: tuple[float, float] | None = None
