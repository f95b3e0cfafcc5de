# SPDX-License-Identifier: Apache-2.0
"""From a validated request to a queued job: references, resolved values, room for the result."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorrt_llm.serve.errors import ApiError
from tensorrt_llm.serve.jobs import LiveJob, failure_of
from tensorrt_llm.serve.manager import JobManager
from tensorrt_llm.serve.media_folder import StorageFullError
from tensorrt_llm.serve.records import JobRecord, new_id
from tensorrt_llm.serve.references import Reference, keep_reference, media_policy
from tensorrt_llm.serve.worker_client import WorkerError

# Encoded bytes for a byte of raw RGB, at most: PNG of noise, and H.264 at the quality that is used.
_ENCODED = {"png": 1.01, "webp": 1.0, "jpeg": 1.0, "mp4": 0.5}
# Bytes of a second of stereo sound at 48 kHz: AAC holds at most 6144 bits for 1024 samples of a
# channel.
_SOUND_BYTES = 2 * 6144 // 8 * 48_000 // 1024
_FULL_RETRY = 60.0


@dataclass(frozen=True)
class Submission:
    """What a route wants of the queue.

    Attributes:
        kind: "video" or "image".
        prompt: Text.
        params: Fields of ``VisualGenParams``.
        format: Of the files.
        origins: The request's field that each of the params was given by.
        seconds: Length in place of ``num_frames``.
        references: Media to start from.
        kept: Whether the files go to the media folder.
    """

    kind: str
    prompt: str
    params: dict[str, Any]
    format: str
    origins: Mapping[str, str]
    seconds: float | None = None
    references: list[Reference] = field(default_factory=list)
    kept: bool = True


async def submit(manager: JobManager, submission: Submission) -> LiveJob:
    """Examine a submission and queue it, within a ``manager.slot()``.

    Raises:
        ApiError: 400 values out of range or media that can't be used, 503 too large for the memory
            or for the media folder.
    """
    job_id = new_id(submission.kind)
    request: dict[str, Any] = {
        "prompt": submission.prompt,
        "params": submission.params,
        "seconds": submission.seconds,
        "references": {},
    }
    uploads: list[Path] = []
    try:
        for reference in submission.references:
            name, path = await _keep(manager, reference, job_id)
            uploads.append(path)
            request["references"][name] = str(path)
        resolved = await _resolve(manager, submission, request)
        await _check_room(manager, submission, resolved)
        # What the answer says is what is used: the seed that was drawn, the frames of a length.
        params = {**submission.params, "seed": resolved["seed"]}
        if submission.seconds is not None:
            params |= {name: resolved[name] for name in ("num_frames", "frame_rate")}
        request |= {"params": params, "seconds": None}
        job = LiveJob(
            record=JobRecord(
                kind=submission.kind,
                id=job_id,
                model=manager.worker.spec.model,
                prompt=submission.prompt,
                resolved=resolved,
            ),
            request=request,
            format=submission.format,
            kept=submission.kept,
            stored=submission.kind == "video",
            uploads=uploads,
        )
        await manager.add(job)
    except BaseException:
        for path in uploads:
            await manager.ledger.discard(manager.folder.remove_upload, path)
        raise
    return job


async def _keep(manager: JobManager, reference: Reference, job_id: str) -> tuple[str, Path]:
    policy = media_policy(manager.settings)
    try:
        return await manager.ledger.in_files(
            keep_reference, reference, job_id, manager.folder, policy
        )
    except StorageFullError as error:
        raise ApiError(503, str(error), retry_after=_FULL_RETRY) from None
    except ValueError as error:
        raise ApiError(400, str(error), param=reference.field) from None
    except OSError as error:
        raise ApiError(503, f"{type(error).__name__} in the media folder.") from error


async def _resolve(
    manager: JobManager, submission: Submission, request: dict[str, Any]
) -> dict[str, Any]:
    try:
        resolved = await manager.worker.check(request)
    except WorkerError as error:
        if error.kind == "died":
            raise ApiError(503, error.message, retry_after=_FULL_RETRY) from None
        refusal = failure_of(error).error()
        refusal.param = _field_of(error.names, submission.origins)
        raise refusal from None
    if submission.kind == "video" and resolved["num_frames"] == 1:
        raise ApiError(
            400,
            "num_frames is 1 here, an image: a video has 2 frames or more. "
            "POST /v1/images/generations makes images.",
            # No other field of a video's request can ask for it.
            param="extra_params.output_type",
        )
    return resolved


def _field_of(names: Iterable[str], origins: Mapping[str, str]) -> str | None:
    """The first field that the client gave among the params that ``ParameterError.names`` tells."""
    for name in re.findall(r"[\w.]+", " ".join(names)):
        param, dot, key = name.partition(".")
        if param in origins:
            return f"{origins[param]}{dot}{key}"
    return None


def encoded_bytes(submission: Submission, resolved: Mapping[str, Any]) -> int:
    """Bytes of the files of a job, at most: its pixels, and the sound that it asks for."""
    frames = resolved["num_frames"] * submission.params.get("num_images_per_prompt", 1)
    size = int(3 * resolved["width"] * resolved["height"] * frames * _ENCODED[submission.format])
    if (submission.params.get("extra_params") or {}).get("enable_audio"):
        size += int(resolved["num_frames"] / resolved["frame_rate"] * _SOUND_BYTES)
    return size


async def _check_room(
    manager: JobManager, submission: Submission, resolved: dict[str, Any]
) -> None:
    if not submission.kept:
        return
    size = encoded_bytes(submission, resolved)
    try:
        await manager.ledger.in_files(manager.folder.check_room, size)
    except StorageFullError as error:
        raise ApiError(503, str(error), retry_after=_FULL_RETRY) from None
