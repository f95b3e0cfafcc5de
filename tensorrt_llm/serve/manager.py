# SPDX-License-Identifier: Apache-2.0
"""The job queue in front of the one generation worker.

Every change of a job happens on the event loop, in one of these ways and in no other::

    queued -> generating -> postprocessing -> publishing -> completed
       any phase but publishing -> failed;    any phase -> deleted

First come, first served; one job generates while the one before it is encoded. The database's row
decides who wins when a job completes and is deleted at one moment.
"""

import asyncio
import contextlib
import sqlite3
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from typing import Any

from tensorrt_llm.logger import logger
from tensorrt_llm.serve.errors import ApiError
from tensorrt_llm.serve.expiry import expire_forever
from tensorrt_llm.serve.jobs import DEADLINE, DELETED, SHUTDOWN, Failure, LiveJob, failure_of
from tensorrt_llm.serve.ledger import Ledger
from tensorrt_llm.serve.media_folder import MediaFolder
from tensorrt_llm.serve.metrics import Metrics
from tensorrt_llm.serve.publishing import UNPUBLISHED, publish
from tensorrt_llm.serve.records import JobRecord
from tensorrt_llm.serve.settings import ServeSettings
from tensorrt_llm.serve.worker_client import WorkerClient, WorkerError, WorkerSpec, worker_died

# Jobs whose pixels the worker may hold: one that is encoded, and one that just generated.
_MAX_IN_WORKER = 2
# How long DELETE waits for an encoder to let go of its file, and a shutdown for the last rows.
_RELEASE_SECONDS = 5.0
# Weight of the newest job in the estimate of how long one takes.
_PACE_WEIGHT = 0.3
_LOADING_SECONDS = 5.0

Snapshot = tuple[JobRecord, str | None, int]


class JobManager:
    """All jobs of a server.

    Args:
        settings: The server's.
        spec: What the worker loads.
        metrics: Counted here.
    """

    def __init__(self, settings: ServeSettings, spec: WorkerSpec, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self._ledger: Ledger | None = None
        self.worker = WorkerClient(spec, self._on_event, self._on_worker_state)
        self.draining = False
        self._stopped = False
        self._live: dict[str, LiveJob] = {}
        self._queue: deque[LiveJob] = deque()
        self._intake = 0
        self._in_worker: dict[str, LiveJob] = {}
        self._generating: LiveJob | None = None
        self._generation_started = 0.0
        self._pace = 5.0  # seconds a job, until one has been seen
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Take the media folder; ``start`` does so where it hasn't been done.

        Raises:
            ValueError: it can't be used.
        """
        if self._ledger is None:
            self._ledger = Ledger(self.settings)

    @property
    def ledger(self) -> Ledger:
        """What survives the server; there once it is open."""
        return self._ledger

    @property
    def folder(self) -> MediaFolder:
        """The media folder; there once it is open."""
        return self._ledger.folder

    async def start(self) -> None:
        """Take over what a former server left, and start the worker.

        Raises:
            ValueError: the media folder can't be used.
        """
        self.open()
        await self.ledger.recover()
        self.worker.start()
        pause = min(30.0, self.settings.expire_after / 4)
        expiry = expire_forever(self.ledger, self.delete, pause)
        self._expiry = asyncio.get_running_loop().create_task(expiry)

    async def close(self) -> None:
        """End at once: fail what is left and stop the worker."""
        self.fail_all(SHUTDOWN)
        await self.worker.stop()
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._ledger is not None:
            self._ledger.close()

    @property
    def state(self) -> str:
        """ "loading", "ready", "draining" or "failed"."""
        return "draining" if self.draining else self.worker.state

    @property
    def queued(self) -> int:
        """Requests that wait, those under examination included."""
        return len(self._queue) + self._intake

    @property
    def running(self) -> int:
        """Jobs that the worker has in hand."""
        return len(self._in_worker)

    def check_accepting(self) -> None:
        """Raises ApiError (503) unless requests are taken."""
        if self.state == "ready":
            return
        wait = _LOADING_SECONDS if self.state == "loading" else None
        reason = f" ({self.worker.reason})" if self.state == "failed" else ""
        message = f"The server is {self.state}{reason}, not ready."
        raise ApiError(503, message, retry_after=wait)

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a place in the queue while a request is read and examined.

        Raises:
            ApiError: 503 when no requests are taken, 429 when the queue is full.
        """
        self.check_accepting()
        if self.queued >= self.settings.max_queue_size:
            self.metrics.rejected += 1
            raise ApiError(
                429,
                f"The queue is full: {self.queued} requests wait, at most "
                f"{self.settings.max_queue_size} may.",
                retry_after=min(self._pace, 600.0),
            )
        self._intake += 1
        try:
            yield
        finally:
            self._intake -= 1

    async def add(self, job: LiveJob) -> None:
        """Queue a job; once this returns, a stored one survives the server.

        Raises:
            ApiError: 503, there is no room for its row.
        """
        if job.stored:
            try:
                await self.ledger.insert(job.record)
            except sqlite3.OperationalError as error:
                raise ApiError(503, f"The job can't be stored: {error}.") from error
        self._live[job.record.id] = job
        self._idle.clear()
        self.metrics.created[job.record.kind] += 1
        job.deadline = asyncio.get_running_loop().call_later(
            self.settings.job_timeout, self.fail, job, DEADLINE
        )
        self._queue.append(job)
        logger.info("%s is queued: %s.", job.record.id, job.record.numbers)
        if self._stopped:
            self.fail(job, SHUTDOWN)
        self._dispatch()

    async def get(self, id: str) -> Snapshot | None:
        """(record, stage, steps done) of a job; None when there is no such job."""
        job = self._live.get(id)
        if job is not None:
            return None if job.deleted else (job.record, job.stage, job.step)
        record = await self.ledger.get(id)
        # The steps of a job that failed aren't kept.
        return record and (record, None, 0)

    async def page(
        self, kind: str, *, after: str | None, limit: int, ascending: bool
    ) -> list[Snapshot] | None:
        """Jobs by creation, as ``JobStore.page`` with ``get``'s values."""
        records = await self.ledger.page(kind, after, limit, ascending)
        if records is None:
            return None
        live = ((record, self._live.get(record.id)) for record in records)
        return [
            (job.record, job.stage, job.step) if job else (record, None, 0) for record, job in live
        ]

    async def delete(self, id: str) -> bool:
        """Remove a job: cancel it if it is live, and remove its files.

        Returns:
            False when there is no such job.
        """
        record = await self.ledger.delete(id)
        if record is None:
            return False
        job = self._live.get(id)
        if job is not None:
            job.deleted = True
            await self.cancel(job)
        await self.ledger.in_files(self.folder.remove, record.files)
        return True

    async def cancel(self, job: LiveJob) -> None:
        """End a job that nobody wants any more; its row, if there was one, is gone."""
        phase = job.phase
        if phase == "publishing":
            # It finds its row missing and removes its files.
            await job.ended.wait()
        elif phase != "ended":
            self._end(job, DELETED)
        if phase == "postprocessing":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(job.released.wait(), _RELEASE_SECONDS)
            # What the worker left may still be in the queue to be removed.
            await self._clean(job)

    def fail(self, job: LiveJob, failure: Failure) -> None:
        """Let a job fail, unless it has ended or its files are finished."""
        if job.phase not in ("publishing", "ended"):
            self._end(job, failure)

    def fail_all(self, failure: Failure) -> None:
        """Let every job fail, and each that still arrives."""
        self._stopped = True
        for job in list(self._live.values()):
            self.fail(job, failure)

    async def drain(self, timeout: float) -> None:
        """Take no more requests, let jobs end for ``timeout`` seconds, fail the rest."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        self.fail_all(SHUTDOWN)
        # Rows and files of the last ones.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _RELEASE_SECONDS)

    def _dispatch(self) -> None:
        if self._generating is not None or len(self._in_worker) >= _MAX_IN_WORKER:
            return
        if not self._queue or self.worker.state != "ready":
            return
        job = self._queue.popleft()
        job.phase, job.record.status = "generating", "in_progress"
        job.released.clear()
        self._generating = self._in_worker[job.record.id] = job
        self._generation_started = time.monotonic()
        self.worker.send(
            {
                "op": "run",
                "job": job.record.id,
                "request": job.request,
                "folder": str(self.folder.partial),
                "format": job.format,
            }
        )
        if job.stored:
            self._spawn(self.ledger.update(job.record))

    def _on_event(self, message: dict[str, Any]) -> None:
        job = self._in_worker.get(message["job"])
        if job is None:
            return
        match message["event"]:
            case "progress":
                job.step = message["step"]
            case "generated":
                self._stop_generating(job)
                if job.phase == "generating":
                    job.phase = "postprocessing"
                self._dispatch()
            case "finished":
                self._release(job)
                if job.phase == "postprocessing":
                    job.phase = "publishing"
                    job.deadline.cancel()
                    self._spawn(self._publish(job, message["files"], message["metrics"]))
                else:
                    self._spawn(self._clean(job))
            case "failed":
                self._release(job)
                self.fail(job, failure_of(WorkerError(**message["error"])))
                self._spawn(self._clean(job))

    def _stop_generating(self, job: LiveJob) -> None:
        if self._generating is job:
            self._generating = None
            taken = time.monotonic() - self._generation_started
            self._pace += _PACE_WEIGHT * (taken - self._pace)

    def _release(self, job: LiveJob) -> None:
        """The worker is done with a job."""
        self._stop_generating(job)
        del self._in_worker[job.record.id]
        job.released.set()
        self._dispatch()

    def _on_worker_state(self) -> None:
        for job in list(self._in_worker.values()):
            del self._in_worker[job.record.id]
            job.released.set()
            self.fail(job, failure_of(worker_died()))
            self._spawn(self._clean(job))
        self._generating = None
        if self.worker.state == "failed":
            logger.error("The generator can't be loaded: %s", self.worker.reason)
            message = f"The generator can't be loaded: {self.worker.reason}"
            for job in list(self._queue):
                self.fail(job, Failure("generator_failed", message, 503))
        self._dispatch()

    async def _publish(self, job: LiveJob, names: list[str], metrics: dict[str, float]) -> None:
        failure = UNPUBLISHED
        try:
            failure = await publish(self.ledger, job, names, metrics)
            await self._clean(job)
        finally:
            # Whatever went wrong: clients, deletions and shutdowns wait for this.
            self._end(job, failure)

    def _end(self, job: LiveJob, failure: Failure | None) -> None:
        """The one place where a job ends."""
        in_worker = job.phase in ("generating", "postprocessing")
        if job.phase == "queued":
            self._queue.remove(job)
        job.phase, job.failure = "ended", failure
        job.deadline.cancel()
        if failure is None:
            outcome = "completed"
            self.metrics.observe(job.record.metrics)
        elif failure is DELETED:
            outcome = "cancelled"
        else:
            outcome = f"failed, {failure.code}"
            self.ledger.mark_failed(job.record, failure)
        self.metrics.ended[job.record.kind, outcome.partition(",")[0]] += 1
        logger.info("%s is %s.", job.record.id, outcome)
        if in_worker and job.record.id in self._in_worker:
            self.worker.send({"op": "cancel", "job": job.record.id})
            loop = asyncio.get_running_loop()
            loop.call_later(self.settings.cancel_grace, self._kill_if_stuck, job)
        job.ended.set()
        self._spawn(self._forget(job))

    def _kill_if_stuck(self, job: LiveJob) -> None:
        if not job.released.is_set():
            logger.error("%s doesn't stop; the worker is killed.", job.record.id)
            self.worker.kill()

    async def _forget(self, job: LiveJob) -> None:
        """Put the end of a job on disk, then let go of it."""
        try:
            if job.stored and job.record.status == "failed":
                await self.ledger.update(job.record)
            for path in job.uploads:
                await self.ledger.discard(self.folder.remove_upload, path)
        finally:
            self._live.pop(job.record.id, None)
            if not self._live:
                self._idle.set()

    async def _clean(self, job: LiveJob) -> None:
        await self.ledger.discard(self.folder.remove_partial, job.record.id)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that nobody waits for; ``close`` does."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("Bookkeeping of a job failed.", exc_info=task.exception())
