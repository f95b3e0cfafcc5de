# SPDX-License-Identifier: Apache-2.0
"""What a client gets back: the response models of the OpenAPI document."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Response(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorResponse(_Response):
    """The one error envelope."""

    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: int


class JobError(_Response):
    """Why a job failed."""

    code: str
    message: str


class VideoJob(_Response):
    """A video job. Sizes, rate and seed are those that the generation uses."""

    id: str
    object: Literal["video"] = "video"
    model: str
    prompt: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    stage: Literal["generating", "postprocessing"] | None = Field(
        description="What a job in progress is doing."
    )
    progress: Annotated[int, Field(ge=0, le=100)] = Field(description="Per cent.")
    step: int = Field(description="Denoising steps done.")
    num_steps: int = Field(description="Denoising steps of the job.")
    created_at: int
    completed_at: int | None = Field(description="When it ended, completed or failed.")
    expires_at: int | None = Field(description="When the job and its file are removed.")
    error: JobError | None
    size: str
    num_frames: int
    fps: float
    duration: float = Field(description="Seconds.")
    seconds: str = Field(description="`duration` as OpenAI's clients expect it.")
    seed: int


class VideoList(_Response):
    """A page of video jobs."""

    object: Literal["list"] = "list"
    data: list[VideoJob]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(_Response):
    """Answer to DELETE."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class ImageData(_Response):
    """One picture: ``url`` or ``b64_json``."""

    url: str | None = None
    b64_json: str | None = None
    revised_prompt: str


class ImagesResponse(_Response):
    """Answer to an image generation."""

    created: int
    data: list[ImageData]
    output_format: Literal["png", "webp", "jpeg"]
    size: str


class Model(_Response):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(_Response):
    """The served models: one."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(_Response):
    """State of the server; 200 when ready, else 503."""

    status: Literal["loading", "ready", "draining", "failed"]
    model: str
    reason: str | None = Field(description="Why it failed.")


class Version(_Response):
    """Version of the package."""

    version: str


class ListQuery(BaseModel):
    """Query of ``GET /v1/videos``."""

    model_config = ConfigDict(extra="forbid")

    after: str | None = Field(None, description="Id of the last job of the page before.")
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = Field("desc", description="By time of creation.")


class ContentQuery(BaseModel):
    """Query of ``GET /v1/videos/{id}/content``."""

    model_config = ConfigDict(extra="forbid")

    variant: Literal["video"] = "video"
