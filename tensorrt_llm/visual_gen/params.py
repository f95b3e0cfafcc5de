# SPDX-License-Identifier: Apache-2.0
"""What a caller may ask of one generation. Importing this costs no torch."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

# Values are judged in one place, when a request is resolved against the pipeline's defaults, so
# that one error lists every violation, wrong types included. Construction refuses unknown names.
Unchecked = SkipValidation


class VisualGenParams(BaseModel):
    """The options of one request; None means the pipeline's default for the task.

    The task follows from the request: ``num_frames`` 1 or ``extra_params["output_type"]`` "image"
    asks for an image, anything else for a video. The values that were used are reported back in
    ``VisualGenOutput.metadata["request"]``.

    Raises:
        pydantic.ValidationError: (a ValueError) an unknown field. Values are checked by
            ``VisualGen.generate`` before any work, all of them at once.
    """

    model_config = ConfigDict(extra="forbid")

    height: Annotated[int | None, Unchecked] = Field(
        None, description="Pixels, a multiple of 16. Default: 720 for video, 1024 for an image."
    )
    width: Annotated[int | None, Unchecked] = Field(
        None, description="Pixels, a multiple of 16. Default: 1280 for video, 1024 for an image."
    )
    num_inference_steps: Annotated[int | None, Unchecked] = Field(
        None, description="Denoising steps, 1 to 1000. Default: 35 for video, 50 for an image."
    )
    guidance_scale: Annotated[float | None, Unchecked] = Field(
        None,
        description="Classifier-free guidance; off at 1 and below. "
        "Default: 6.0 for video, 7.0 for an image.",
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
        description="Frames, rounded up to 4k + 1; 1 is an image. Default: 189 for video.",
    )
    frame_rate: Annotated[float | None, Unchecked] = Field(
        None, description="Frames a second, of a video. Default: 24.0."
    )
    negative_prompt: Annotated[str | None, Unchecked] = Field(
        None,
        description="What guidance leads away from; '' is an empty one. Default: for video the "
        "checkpoint's own text, or this package's; for an image ''.",
    )
    image_reference: Annotated[Any, Unchecked] = Field(
        None, description="Not built yet: refused by name."
    )
    video_reference: Annotated[Any, Unchecked] = Field(
        None, description="Not built yet: refused by name."
    )
    num_images_per_prompt: Annotated[int | None, Unchecked] = Field(
        None,
        description="Images of one request, 1 to 10, their noise drawn one after another from one "
        "generator, so that the first equals that of a request for one. Images only. Default: 1.",
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
