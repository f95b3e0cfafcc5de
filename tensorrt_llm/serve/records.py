# SPDX-License-Identifier: Apache-2.0
"""What is kept of a job: the record that the database stores and the resource that it shows."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

FINAL = ("completed", "failed")


@dataclass
class StoredFile:
    """A finished file of a job.

    Attributes:
        name: Name in the media folder.
        size: Bytes.
        content_type: MIME type, told by its bytes.
    """

    name: str
    size: int
    content_type: str


@dataclass
class JobRecord:
    """One job, live or ended.

    Attributes:
        kind: "video" or "image".
        id: ``video_<hex>`` or ``image_<hex>``; also the stem of its files' names.
        model: The served model.
        prompt: As sent.
        resolved: What the generation uses: height, width, num_frames, frame_rate,
            num_inference_steps, seed.
        status: "queued", "in_progress", "completed" or "failed".
        created_at: Unix time, like the next two.
        completed_at: When it ended, either way.
        expires_at: When it is removed.
        error: ``code`` and ``message`` of a failed one.
        files: Of a completed one.
        metrics: Seconds by phase, of a completed one.
    """

    kind: str
    id: str
    model: str
    prompt: str
    resolved: dict[str, Any]
    status: str = "queued"
    created_at: float = field(default_factory=time.time)
    completed_at: float | None = None
    expires_at: float | None = None
    error: dict[str, str] | None = None
    files: list[StoredFile] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def size(self) -> str:
        """``WIDTHxHEIGHT`` in pixels."""
        return f"{self.resolved['width']}x{self.resolved['height']}"

    @property
    def numbers(self) -> str:
        """What a log may say of a request."""
        names = ("num_frames", "num_inference_steps", "seed")
        return ", ".join([self.size, *(f"{name} {self.resolved[name]}" for name in names)])


def new_id(kind: str) -> str:
    """A fresh job id that nobody can guess."""
    return f"{kind}_{secrets.token_hex(16)}"


def video_resource(record: JobRecord, stage: str | None, step: int) -> dict[str, Any]:
    """The ``VideoJob`` of a record.

    Args:
        record: Of a video.
        stage: "generating" or "postprocessing" of a job in progress.
        step: Denoising steps done so far.
    """
    resolved = record.resolved
    num_steps = resolved["num_inference_steps"]
    if record.status == "completed":
        step = num_steps
    # 100 means completed: the last step is followed by decoding and encoding.
    progress = 100 if record.status == "completed" else min(99, 100 * step // num_steps)
    duration = resolved["num_frames"] / resolved["frame_rate"]
    return {
        "id": record.id,
        "object": "video",
        "model": record.model,
        "prompt": record.prompt,
        "status": record.status,
        "stage": stage if record.status == "in_progress" else None,
        "progress": progress,
        "step": step,
        "num_steps": num_steps,
        "created_at": int(record.created_at),
        "completed_at": _seconds(record.completed_at),
        "expires_at": _seconds(record.expires_at),
        "error": record.error,
        "size": record.size,
        "num_frames": resolved["num_frames"],
        "fps": resolved["frame_rate"],
        "duration": round(duration, 6),
        "seconds": f"{duration:.10g}",
        "seed": resolved["seed"],
    }


def server_timing(record: JobRecord) -> dict[str, str]:
    """The ``Server-Timing`` header of a completed job, in milliseconds."""
    phases = [
        f"{name};dur={1000 * record.metrics[name]:.1f}"
        for name in ("generation", "denoise")
        if name in record.metrics
    ]
    return {"Server-Timing": ", ".join(phases)} if phases else {}


def _seconds(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
