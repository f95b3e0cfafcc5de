# SPDX-License-Identifier: Apache-2.0
"""A job that hasn't ended, and the ways in which one fails."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorrt_llm.serve.errors import ApiError
from tensorrt_llm.serve.records import JobRecord
from tensorrt_llm.serve.worker_client import WorkerError

# kind of a WorkerError -> (code in the job, status of a synchronous request)
_OF_WORKER = {
    "client": ("invalid_request", 400),
    "memory": ("out_of_memory", 503),
    "storage": ("storage_failed", 503),
    "internal": ("generation_failed", 500),
    "cancelled": ("cancelled", 503),
    "died": ("worker_died", 500),
    "busy": ("worker_busy", 503),
}
# Exceptions whose names say no more than the status does.
_PLAIN_TYPES = (
    "ValueError",
    "NotImplementedError",
    "MemoryError",
    "ValidationError",
    "ParameterError",
)


@dataclass(frozen=True)
class Failure:
    """Why a job failed.

    Attributes:
        code: For the job resource.
        message: For the job resource and the envelope.
        status: HTTP status of a request that waited for the job.
        type: Type in the envelope; that of the status by default.
    """

    code: str
    message: str
    status: int
    type: str | None = None

    def error(self) -> ApiError:
        """The answer to a request that waited for the job."""
        return ApiError(self.status, self.message, type=self.type)

    def report(self) -> dict[str, str]:
        """The ``error`` of the job resource."""
        return {"code": self.code, "message": self.message}


INTERRUPTED = Failure("interrupted", "The server ended before the job did.", 503)
SHUTDOWN = Failure("server_shutdown", "The server shut down before the job ended.", 503)
DEADLINE = Failure("deadline_exceeded", "The job took longer than the server allows.", 503)
FILE_LOST = Failure("file_lost", "The file was missing or incomplete after a restart.", 500)
DELETED = Failure("deleted", "The job was deleted.", 404)


def failure_of(error: WorkerError) -> Failure:
    """The failure that a worker's error means."""
    code, status = _OF_WORKER[error.kind]
    own_type = error.kind == "client" and error.type not in _PLAIN_TYPES
    message = error.message or error.type
    return Failure(code, message, status, error.type if own_type else None)


@dataclass(eq=False)
class LiveJob:
    """A live job. Only the event loop touches it.

    Attributes:
        record: What is stored; of a synchronous image only once it is complete.
        request: What the worker needs: prompt, params, references, seconds.
        format: Of its files: "mp4", "png", "webp" or "jpeg".
        kept: Whether its files go to the media folder; else ``contents`` holds them.
        stored: Whether the database has a row of it.
        uploads: Its references.
        phase: "queued", "generating", "postprocessing", "publishing" or "ended".
        step: Denoising steps done.
        failure: Why it failed or was cancelled; None for a completed one.
        deleted: Whether its row is gone: nobody may see it any more.
        contents: The files of a completed one that isn't kept.
        ended: Set when it is complete, failed or deleted.
        released: Set while the worker has nothing to do with it.
    """

    record: JobRecord
    request: dict[str, Any]
    format: str
    kept: bool
    stored: bool
    uploads: list[Path] = field(default_factory=list)
    phase: str = "queued"
    step: int = 0
    failure: Failure | None = None
    deleted: bool = False
    contents: list[bytes] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    deadline: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.released.set()

    @property
    def stage(self) -> str | None:
        """Stage of the job resource."""
        if self.phase in ("generating", "postprocessing"):
            return self.phase
        return "postprocessing" if self.phase == "publishing" else None
