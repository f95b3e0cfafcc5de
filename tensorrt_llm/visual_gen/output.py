# SPDX-License-Identifier: Apache-2.0
"""What a generation gives back. Importing this costs no torch."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen import media_writer


class RequestCancelledError(RuntimeError):
    """The request was cancelled before it finished."""


class VisualGenProgress(NamedTuple):
    """Where a request stands.

    Attributes:
        stage: "queued", "generating", "postprocessing" or "done" (whatever the end was).
        step: Denoising steps submitted so far, over all images of the request.
        num_steps: Denoising steps of the whole request.
    """

    stage: str
    step: int
    num_steps: int


class VisualGenMetrics(BaseModel):
    """Wall-clock seconds of one request, the queue not counted.

    Attributes:
        generation: Everything from the start of the work to the finished pixels.
        pre_denoise: Noise, token tensors and schedule.
        denoise: The denoising loop, with the text pass that its first step makes.
        post_denoise: Checks, VAE decode, conversion to uint8.
    """

    model_config = ConfigDict(extra="forbid")

    generation: float
    pre_denoise: float
    denoise: float
    post_denoise: float


class VisualGenOutput(BaseModel):
    """One finished (or, from a list, failed) request.

    Attributes:
        request_id: Number of the request within its ``VisualGen``.
        image: uint8 RGB CPU tensor [H, W, C], or [B, H, W, C] for several images.
        video: uint8 RGB CPU tensor [T, H, W, C].
        audio: float [channels, samples]; nothing makes it yet.
        frame_rate: Frames a second of ``video``.
        audio_sample_rate: Samples a second of ``audio``.
        error: Why there is no result, for an item of a list.
        metrics: Seconds by phase.
        metadata: ``request`` (every resolved value), ``model``, ``revision``, ``commit``,
            ``fp8_linears`` per tower, ``precision_trace`` per step, ``timesteps``, ``sigmas``.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    request_id: int | None = None
    image: Any = Field(None, repr=False)
    video: Any = Field(None, repr=False)
    audio: Any = Field(None, repr=False)
    frame_rate: float | None = None
    audio_sample_rate: int | None = None
    error: str | None = None
    metrics: VisualGenMetrics | None = None
    metadata: dict[str, Any] = Field(default_factory=dict, repr=False)

    def save(
        self,
        path: str | os.PathLike[str],
        format: str | None = None,
        frame_rate: float | None = None,
        audio_sample_rate: int | None = None,
        quality: int = 95,
    ) -> Path:
        """Write the image or the video to a file, whole or not at all.

        The file is written under a temporary name beside the target and renamed when complete.

        Args:
            path: The target; its folder must exist. An existing file is replaced.
            format: "png", "jpg", "webp" for an image, "mp4" (H.264, yuv420p, BT.709) for a video.
                Default: the path's suffix, which must agree where both are given.
            frame_rate: Frames a second of the file instead of the output's own; video only.
            audio_sample_rate: For outputs with sound; refused without.
            quality: 1 (small) to 100 (best), for jpg, webp and mp4; png is lossless.

        Returns:
            The path written.

        Raises:
            ValueError: an unknown format, one that doesn't fit the content, a missing folder, a
                size that the format can't hold, several images, or nothing to save.
            NotImplementedError: an output with sound.
            RuntimeError: this PyAV has no H.264 encoder.
        """
        target = Path(path)
        kind = media_writer.resolve_format(target, format)
        wanted = "video" if kind == "mp4" else "image"
        pixels = self.video if kind == "mp4" else self.image
        if pixels is None:
            has = "video" if self.video is not None else "image" if self.image is not None else None
            raise ValueError(
                describe_error(
                    f"No {wanted} to save as {kind}",
                    where=target,
                    expected=f"an output with a {wanted}",
                    found=f"a {has}" if has else f"nothing (error: {self.error})",
                    remedy="use mp4 for a video, png, jpg or webp for an image" if has else None,
                )
            )
        if self.audio is not None:
            raise NotImplementedError(
                describe_error("Saving sound is not supported yet", where="VisualGenOutput.audio")
            )
        if audio_sample_rate is not None:
            raise ValueError(
                describe_error(
                    "audio_sample_rate without sound",
                    where="VisualGenOutput.save",
                    expected="None for an output without audio",
                    found=audio_sample_rate,
                )
            )
        if kind == "mp4":
            rate = self.frame_rate if frame_rate is None else frame_rate
            return media_writer.write_video(target, pixels, rate, quality)
        if frame_rate is not None:
            raise ValueError(
                describe_error(
                    "frame_rate for an image",
                    where="VisualGenOutput.save",
                    expected="None for an image",
                    found=frame_rate,
                )
            )
        return media_writer.write_image(target, pixels, kind, quality)
