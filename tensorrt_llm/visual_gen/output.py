# SPDX-License-Identifier: Apache-2.0
"""What a generation gives back. Importing this costs no torch."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen import media_writer


class RequestCancelledError(RuntimeError):
    """The request was cancelled before it finished."""


class RequestBlockedError(ValueError):
    """The guardrails refused the request's text or what came of it; nothing was given out."""


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
        generation: Everything from the start of the work to the finished pixels, with the
            guardrails' reading of the texts, which no other field has.
        pre_denoise: Schedule, noise, VAE encode of references, and the understanding tower's pass
            over the texts.
        denoise: The denoising loop.
        post_denoise: VAE decode, guardrails of the frames, conversion to uint8, sound decode.
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
        audio: float CPU tensor [channels, samples] in [-1, 1], as long as ``video``; None without
            sound.
        frame_rate: Frames a second of ``video``.
        audio_sample_rate: Samples a second of ``audio``.
        error: Why there is no result, for an item of a list.
        metrics: Seconds by phase.
        metadata: ``request`` (every resolved value), ``model``, ``revision``, ``commit``,
            ``fp8_linears`` per tower, ``precision_trace`` per step (timestep, precision of each
            tower and of attention, guidance branches), ``sigmas``, ``image_seeds`` (the seed of
            each image), ``decoding_tile`` (size and stride where the VAE had to decode in tiles),
            ``reference`` (size, rate and frames of a reference, and what was done to its pixels).
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
        should_stop: Callable[[], bool] | None = None,
    ) -> Path:
        """Write the image, the video with its sound, or the sound alone to a file.

        The file is written under a temporary name beside the target and renamed when complete, so
        it is there whole or not at all.

        Args:
            path: The target; its folder must exist. An existing file is replaced, where
                a symbolic link points if it is one; what is no regular file is refused.
            format: "png", "jpg", "webp" for an image, "mp4" (H.264, yuv420p, BT.709; sound as AAC)
                for a video, "wav" (PCM, 16 bit) for its sound alone. Default: the path's suffix,
                which must agree where both are given.
            frame_rate: Frames a second of the file instead of the output's own; mp4 only.
            audio_sample_rate: Samples a second of the file instead of the output's own, without
                resampling; for sound only. In an mp4 the two tracks must stay equally long.
            quality: 1 (small) to 100 (best), for jpg, webp and the picture of mp4; png and wav are
                lossless.
            should_stop: Asked before each frame of an mp4; True ends the writing.

        Returns:
            The path written.

        Raises:
            RequestCancelledError: ``should_stop`` said so; nothing is left.
            ValueError: an unknown format, one that doesn't fit the content, a missing folder, a
                size or rate that the format can't hold, several images, nothing to save, tracks
                that differ in length by more than a frame.
            RuntimeError: this PyAV has no H.264 encoder.
        """
        target = Path(path)
        kind = media_writer.resolve_format(target, format)
        content = self._content(kind, target)
        if frame_rate is not None and kind != "mp4":
            remedy = "leave frame_rate out, or save the video as mp4"
            raise _meaningless("frame_rate", f"in a {kind} file", frame_rate, remedy)
        if audio_sample_rate is not None and (self.audio is None or kind not in ("mp4", "wav")):
            remedy = "leave audio_sample_rate out, or save sound as mp4 or wav"
            raise _meaningless("audio_sample_rate", "without sound", audio_sample_rate, remedy)
        rate = self.frame_rate if frame_rate is None else frame_rate
        sample_rate = self.audio_sample_rate if audio_sample_rate is None else audio_sample_rate
        if kind == "mp4":
            return media_writer.write_video(
                target,
                content,
                rate,
                quality,
                self.audio,
                sample_rate,
                functools.partial(_stop_if, should_stop),
            )
        if kind == "wav":
            return media_writer.write_sound(target, content, sample_rate)
        return media_writer.write_image(target, content, kind, quality)

    def _content(self, kind: str, target: Path) -> Any:
        """What a file of this kind holds.

        Raises:
            ValueError: the output lacks it.
        """
        name = {"mp4": "video", "wav": "audio"}.get(kind, "image")
        content = getattr(self, name)
        if content is not None:
            return content
        has = [n for n in ("image", "video", "audio") if getattr(self, n) is not None]
        remedy = "use mp4 for a video, wav for its sound, png, jpg or webp for an image"
        if not has:
            remedy = "look at error for why there is no result, and generate again"
        raise ValueError(
            describe_error(
                f"No {name} to save as {kind}",
                where=target,
                expected=f"an output with {name}",
                found=" and ".join(has) if has else f"nothing (error: {self.error})",
                remedy=remedy,
            )
        )


def _stop_if(should_stop: Callable[[], bool] | None) -> None:
    if should_stop is not None and should_stop():
        raise RequestCancelledError("The request was cancelled while it was encoded.")


def _meaningless(name: str, why: str, found: object, remedy: str) -> ValueError:
    return ValueError(
        describe_error(
            f"{name} has no meaning {why}",
            where="VisualGenOutput.save",
            expected="None",
            found=found,
            remedy=remedy,
        )
    )
