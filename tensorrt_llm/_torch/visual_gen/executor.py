# SPDX-License-Identifier: Apache-2.0
"""One worker thread that owns the pipeline, and the queue before it.

A request is resolved before it is queued, so that a mistake is reported at once. Whatever the
worker raises arrives as one of three kinds: ValueError (the caller's), MemoryError (capacity),
RuntimeError (the rest).
"""

import os
import threading
import traceback
import weakref
from collections import Counter, deque
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from tensorrt_llm._utils import REMEDY_MARK, describe_error
from tensorrt_llm.logger import logger
from tensorrt_llm.visual_gen.output import (
    RequestCancelledError,
    VisualGenOutput,
    VisualGenProgress,
)

# torch reports an exhausted host as a plain RuntimeError whose text names its CPU allocator.
_HOST_MEMORY_MARKER = "DefaultCPUAllocator"


class Pipeline(Protocol):
    """What the worker needs of a pipeline."""

    def generate(self, request: Any, *, on_step: Any, should_cancel: Any) -> VisualGenOutput:
        """Run one request, see ``Cosmos3OmniMoTPipeline.generate``."""


class VisualGenExecutor:
    """Runs requests one after another.

    Args:
        pipeline: Used by the worker alone from now on.
        device: Where it generates; None is the CPU. The worker makes a CUDA device its current one.
    """

    def __init__(self, pipeline: Pipeline, device: torch.device | None = None) -> None:
        self._queue = _JobQueue()
        # The thread must not hold this object, or a forgotten executor would never be collected.
        self._thread = threading.Thread(
            target=_work, args=(pipeline, self._queue, device), name="visual-gen", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._queue, self._thread, True)

    def submit(self, request: Any) -> "Job":
        """Queue a resolved request.

        Raises:
            RuntimeError: after ``shutdown``.
        """
        return self._queue.put(request)

    def stats(self) -> dict[str, int]:
        """Requests ``queued`` and ``running`` now, and ``completed``, ``failed``, ``cancelled``."""
        return self._queue.stats()

    def shutdown(self, *, cancel_running: bool = False) -> None:
        """Fail what is queued, let the running request end (or cancel it), and end the worker."""
        self._finalizer.detach()
        _stop(self._queue, self._thread, cancel_running)


class Job:
    """A queued or running request.

    Attributes:
        request_id: Number within the executor.
        future: Holds the output or the mapped error.
        progress: Where it stands; replaced as a whole, so readable from any thread.
    """

    def __init__(self, request_id: int, request: Any, owner: "_JobQueue") -> None:
        self.request_id = request_id
        self.progress = VisualGenProgress("queued", 0, 0)
        self.future: Future[VisualGenOutput] = Future()
        # From here on the future itself can't be cancelled: ``cancel`` below is the one way.
        self.future.set_running_or_notify_cancel()
        self.cancel_wanted = threading.Event()
        self._request = request
        self._owner = owner

    def cancel(self) -> bool:
        """Ask for an end: at once if queued, before the next step if running.

        Returns:
            False when the request had already finished.
        """
        return self._owner.cancel(self)

    def run(self, pipeline: Pipeline) -> None:
        """Run in the worker's thread and settle the future."""
        self.progress = VisualGenProgress("generating", 0, 0)
        try:
            output = pipeline.generate(
                self._request, on_step=self._note_step, should_cancel=self.cancel_wanted.is_set
            )
            output = output.model_copy(update={"request_id": self.request_id})
        except BaseException as error:
            self.fail(error)
            return
        self._end("completed")
        self.future.set_result(output)

    def fail(self, error: BaseException) -> None:
        """Settle the future with the mapped error."""
        mapped = map_error(error)
        cancelled = isinstance(mapped, RequestCancelledError)
        if not cancelled:
            logger.error("Request %d failed: %s", self.request_id, mapped, exc_info=error)
        _release_frames(mapped)
        self._end("cancelled" if cancelled else "failed")
        self.future.set_exception(mapped)

    def _end(self, how: str) -> None:
        """Counted before the future is settled, so that who waits for it sees it counted."""
        self._request = None
        self.progress = self.progress._replace(stage="done")
        self._owner.end(self, how)

    def _note_step(self, done: int, total: int) -> None:
        stage = "postprocessing" if done == total else "generating"
        self.progress = VisualGenProgress(stage, done, total)


class _JobQueue:
    """Waiting jobs, the running one, and counts: what executor, thread and jobs share."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._ended: Counter[str] = Counter()
        self._submitted = 0
        self._closed = False
        self._process = os.getpid()

    def put(self, request: Any) -> Job:
        if os.getpid() != self._process:
            # A fork copies the queue and not the worker: the request would wait forever.
            raise RuntimeError(
                describe_error(
                    "VisualGen can't be used in a forked process",
                    where=f"process {os.getpid()}",
                    expected=f"process {self._process}, which made it",
                    found="a copy of it made by fork",
                    remedy="make a VisualGen in the new process, or start that one with spawn",
                )
            )
        with self._changed:
            if self._closed:
                raise RuntimeError(
                    describe_error(
                        "VisualGen is shut down",
                        where="VisualGen.generate_async",
                        expected="a VisualGen before shutdown()",
                        found="one after it",
                        remedy="make a new VisualGen",
                    )
                )
            job = Job(self._submitted, request, self)
            self._submitted += 1
            self._waiting.append(job)
            self._changed.notify()
        return job

    def take(self) -> Job | None:
        """The next job, now the running one; None once the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._running = self._waiting.popleft() if self._waiting else None
            return self._running

    def end(self, job: Job, how: str) -> None:
        with self._changed:
            if self._running is job:
                self._running = None
            self._ended[how] += 1

    def cancel(self, job: Job) -> bool:
        with self._changed:
            if job is self._running:
                job.cancel_wanted.set()
                return True
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
        job.fail(RequestCancelledError("The request was cancelled while it was queued."))
        return True

    def close(self, cancel_running: bool) -> list[Job]:
        """Take no more jobs; return those that never ran."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            if cancel_running and self._running is not None:
                self._running.cancel_wanted.set()
            self._changed.notify_all()
        return left

    def stats(self) -> dict[str, int]:
        with self._changed:
            now = {"queued": len(self._waiting), "running": int(self._running is not None)}
            return now | {name: self._ended[name] for name in ("completed", "failed", "cancelled")}


def map_error(error: BaseException) -> Exception:
    """The error as a caller sees it: ValueError, MemoryError or RuntimeError, with its cause."""
    if isinstance(error, torch.OutOfMemoryError) or _HOST_MEMORY_MARKER in str(error):
        mapped: Exception = MemoryError(
            describe_error(
                "Not enough memory for this request",
                where="the device or the host",
                expected="memory for the sizes that were asked for",
                found=str(error).partition("\n")[0],
                remedy=(
                    "ask for a smaller height and width, fewer frames or fewer images, or free "
                    "memory"
                ),
            )
        )
    elif isinstance(error, (ValueError, MemoryError, RuntimeError)):
        return error
    elif REMEDY_MARK in str(error):  # one of ours, of another type: it says all that is needed
        mapped = RuntimeError(f"{type(error).__name__}: {error}")
    else:
        mapped = RuntimeError(
            describe_error(
                "The work failed for another reason than the request or the memory",
                where="the traceback of this error's cause",
                expected="no error",
                found=f"{type(error).__name__}: {error}",
                remedy="report it with the request and the log",
            )
        )
    mapped.__cause__ = error
    return mapped


def _work(pipeline: Pipeline, jobs: _JobQueue, device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        # The current device is each thread's own, and this one would begin with the first.
        torch.cuda.set_device(device)
    while (job := jobs.take()) is not None:
        job.run(pipeline)
        # While the next take() waits, this frame must not keep the finished output alive.
        del job


def _stop(jobs: _JobQueue, thread: threading.Thread, cancel_running: bool) -> None:
    for job in jobs.close(cancel_running):
        job.fail(
            RuntimeError(
                describe_error(
                    "VisualGen was shut down before this request ran",
                    where=f"request {job.request_id}",
                    expected="a VisualGen that is kept until its requests are done",
                    found="shutdown() or the end of its with block",
                    remedy="wait for result() before shutting down, or send it to a new VisualGen",
                )
            )
        )
    # A finalizer may run in any thread, the worker's included.
    if thread is not threading.current_thread():
        thread.join()


def _release_frames(error: BaseException) -> None:
    """Let go of what a kept traceback would hold: a request's latents, and the model itself.

    The traceback stays readable, as a note.
    """
    error.add_note("In the worker:\n" + "".join(traceback.format_exception(error)))
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
