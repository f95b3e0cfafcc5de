# SPDX-License-Identifier: Apache-2.0
"""What a client may send: the two request models.

Types are strict and unknown fields are refused, so that nothing a client asks for is dropped in
silence. Ranges that belong to the checkpoint (sizes, steps, frames) are judged by the pipeline.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

# Of these a video's request gives one at most, and a multipart body may hold it as a file.
REFERENCE_FIELDS = ("image_reference", "video_reference", "input_reference")

_SIZE = re.compile(r"([0-9]{1,9})x([0-9]{1,9})", re.ASCII)
_SIZE_SCHEMA = {"type": "string", "pattern": r"^(auto|[0-9]{1,9}x[0-9]{1,9})$"}
_MAX_SEED = 2**63 - 1
# Fields of a request that have other names in ``VisualGenParams``.
_BECOMES = {
    "size": ("width", "height"),
    "n": ("num_images_per_prompt",),
    "seconds": ("num_frames",),
    "fps": ("frame_rate",),
    "input_reference": ("image_reference", "video_reference"),
}


def _check_size(size: str) -> str:
    if size != "auto" and not _SIZE.fullmatch(size):
        raise ValueError("expected 'WIDTHxHEIGHT' in pixels, such as 1280x720, or 'auto'")
    return size


def _check_unicode(text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("expected valid Unicode, found a lone surrogate")
    return text


def _no_flag(value: Any) -> Any:
    # A bool is an int to Python, and a string of digits a number to pydantic.
    if isinstance(value, (bool, str)):
        raise ValueError("Input should be a valid number")
    return value


def _seconds_from_text(value: Any) -> Any:
    # OpenAI's clients send seconds as text.
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", value, re.ASCII):
        return float(value)
    return _no_flag(value)


Text = Annotated[StrictStr, AfterValidator(_check_unicode)]
Number = Annotated[float, BeforeValidator(_no_flag), Field(allow_inf_nan=False)]
Size = Annotated[StrictStr, AfterValidator(_check_size), WithJsonSchema(_SIZE_SCHEMA)]
Pixels = Annotated[StrictInt, Field(ge=1)]
PositiveInt = Annotated[StrictInt, Field(gt=0)]
Seed = Annotated[StrictInt, Field(ge=0, le=_MAX_SEED)]
Seconds = Annotated[
    float,
    BeforeValidator(_seconds_from_text),
    Field(gt=0, le=3600, allow_inf_nan=False),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": 3600},
                {"type": "string", "pattern": r"^[1-9][0-9]{0,2}$"},
            ]
        }
    ),
]


class _GenerationRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: Text | None = Field(None, description="The served model; needn't be given.")
    prompt: Text = Field(description="What to generate.")
    seed: Seed | None = Field(None, description="Drawn at random and reported when absent.")
    size: Size | None = Field(
        None, description="`WIDTHxHEIGHT` in pixels, multiples of 16; `auto` is the default size."
    )
    width: Pixels | None = Field(None, description="Pixels; with `height`, in place of `size`.")
    height: Pixels | None = Field(None, description="Pixels; with `width`, in place of `size`.")
    num_inference_steps: PositiveInt | None = Field(None, description="Denoising steps.")
    guidance_scale: Annotated[Number, Field(gt=0, le=100)] | None = Field(
        None, description="Classifier-free guidance; off at 1 and below."
    )
    negative_prompt: Text | None = Field(
        None, description="What guidance leads away from; '' is an empty one, not the default."
    )
    extra_params: dict[Text, Any] | None = Field(
        None, description="Options of the model family, as in `VisualGenParams.extra_params`."
    )

    @model_validator(mode="after")
    def _check_one_size(self) -> "_GenerationRequest":
        sides = [side for side in (self.width, self.height) if side is not None]
        if self.size is not None and sides:
            raise ValueError("give size, or width and height, not both")
        if len(sides) == 1:
            raise ValueError("give width and height together")
        return self

    def sides(self) -> tuple[int | None, int | None]:
        """(width, height) in pixels; None where the default is wanted."""
        match = _SIZE.fullmatch(self.size or "")
        return (int(match[1]), int(match[2])) if match else (self.width, self.height)

    def common_params(self) -> dict[str, Any]:
        """The fields of ``VisualGenParams`` that both kinds share, where given."""
        width, height = self.sides()
        values = {"width": width, "height": height}
        for name in (
            "seed",
            "num_inference_steps",
            "guidance_scale",
            "negative_prompt",
            "extra_params",
        ):
            values[name] = getattr(self, name)
        return {name: value for name, value in values.items() if value is not None}

    def origins(self) -> dict[str, str]:
        """Field of ``VisualGenParams``, or "prompt" -> the field that it was given by."""
        given = {name for name, value in self if value is not None} & self.model_fields_set
        if self.size == "auto":
            given.discard("size")
        return {param: name for name in given for param in _BECOMES.get(name, (name,))}


class ImageGenerationRequest(_GenerationRequest):
    """Body of ``POST /v1/images/generations``."""

    def origins(self) -> dict[str, str]:
        """As of any request; the frames are one by the route, which only output_type denies."""
        told = {"num_frames": "extra_params.output_type"}
        return super().origins() | (told if "output_type" in (self.extra_params or {}) else {})

    response_format: Literal["url", "b64_json"] = Field(
        "url", description="A URL to download from, or the picture itself in base64."
    )
    format: Literal["png", "webp", "jpeg"] | None = Field(
        None, description="Format of the picture. Default: png."
    )
    output_format: Literal["png", "webp", "jpeg"] | None = Field(
        None, description="OpenAI's name for `format`; give one of them."
    )
    max_sequence_length: PositiveInt | None = Field(
        None, description="Most tokens of the prompt; a longer one is refused, never cut."
    )
    n: Annotated[StrictInt, Field(ge=1, le=10)] = Field(1, description="Number of pictures.")

    @model_validator(mode="after")
    def _check_one_format(self) -> "ImageGenerationRequest":
        if self.format is not None and self.output_format is not None:
            raise ValueError("give format or output_format, not both")
        return self

    @property
    def file_format(self) -> str:
        """Format of the files."""
        return self.format or self.output_format or "png"

    def params(self) -> dict[str, Any]:
        """The fields of ``VisualGenParams``, where given."""
        values = self.common_params() | {"num_frames": 1, "num_images_per_prompt": self.n}
        if self.max_sequence_length is not None:
            values["max_sequence_length"] = self.max_sequence_length
        return values


class ReferenceObject(BaseModel):
    """OpenAI's form of a reference."""

    model_config = ConfigDict(extra="forbid")

    image_url: Text = Field(description="An http(s) URL or a `data:` URI of a picture.")


def _check_reference(value: Any, either: ValidatorFunctionWrapHandler) -> str | ReferenceObject:
    # Not ``either``, which gives the schema alone: its errors name the classes and validators of
    # both alternatives, and the field that is wrong after them.
    if isinstance(value, str):
        return _check_unicode(value)
    if isinstance(value, (dict, ReferenceObject)):
        return ReferenceObject.model_validate(value)
    raise ValueError("expected text or an object with image_url")


TextOrObject = Annotated[Text | ReferenceObject, WrapValidator(_check_reference)]


class VideoGenerationRequest(_GenerationRequest):
    """Body of ``POST /v1/videos`` and ``POST /v1/videos/sync``.

    In a multipart body each of the references may be an uploaded file.
    """

    format: Literal["mp4", "auto"] = Field("auto", description="`auto` is mp4.")
    image_reference: Text | None = Field(
        None, description="A picture to start from: an http(s) URL or a `data:` URI."
    )
    video_reference: Text | None = Field(
        None, description="A clip to continue: an http(s) URL or a `data:` URI."
    )
    input_reference: TextOrObject | None = Field(
        None,
        description="OpenAI's name: a picture or a clip, told by the bytes of an uploaded file, "
        "the type of a `data:` URI, the name of a URL.",
    )
    num_frames: Annotated[StrictInt, Field(ge=2)] | None = Field(
        None, description="Frames, rounded up to 4k + 1."
    )
    seconds: Seconds | None = Field(
        None, description="Length in place of `num_frames`: `seconds * fps` frames."
    )
    frame_rate: Annotated[Number, Field(gt=0, le=120)] | None = Field(
        None, description="Frames a second."
    )
    fps: Annotated[Number, Field(gt=0, le=120)] | None = Field(
        None, description="Another name for `frame_rate`; give one of them."
    )

    @model_validator(mode="after")
    def _check_alternatives(self) -> "VideoGenerationRequest":
        for names in (("num_frames", "seconds"), ("frame_rate", "fps"), REFERENCE_FIELDS):
            if sum(getattr(self, name) is not None for name in names) > 1:
                raise ValueError(f"give one of {', '.join(names)}")
        return self

    def params(self) -> dict[str, Any]:
        """The fields of ``VisualGenParams``, where given; references and seconds apart."""
        values = self.common_params()
        rate = self.fps if self.frame_rate is None else self.frame_rate
        if rate is not None:
            values["frame_rate"] = rate
        if self.num_frames is not None:
            values["num_frames"] = self.num_frames
        return values
