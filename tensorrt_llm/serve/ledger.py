# SPDX-License-Identifier: Apache-2.0
"""Database and media folder of a server, for the event loop: nothing here blocks it."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from tensorrt_llm.logger import logger
from tensorrt_llm.serve.jobs import FILE_LOST, INTERRUPTED, Failure
from tensorrt_llm.serve.media_folder import MediaFolder
from tensorrt_llm.serve.records import JobRecord, StoredFile
from tensorrt_llm.serve.settings import ServeSettings
from tensorrt_llm.serve.store import JobStore

T = TypeVar("T")

_FILE_THREADS = 8


class Ledger:
    """What survives the server.

    Args:
        settings: The folder, its limit, and how long ended jobs are kept.

    Raises:
        ValueError: the folder or its database can't be used.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self.folder = MediaFolder(settings.media_path, settings.media_limit_bytes)
        try:
            self._store = JobStore(self.folder.database)
        except ValueError:
            self.folder.close()
            raise
        self._expire_after = settings.expire_after
        # One thread each: writes keep their order, and a read never waits for a write's disk.
        self._writes = ThreadPoolExecutor(1, "store-write")
        self._reads = ThreadPoolExecutor(1, "store-read")
        self._files = ThreadPoolExecutor(_FILE_THREADS, "files")

    async def recover(self) -> None:
        """Make database and folder agree about what a former server left."""
        for record in await self._read(self._store.unfinished):
            self.mark_failed(record, INTERRUPTED)
            await self.update(record)
        completed = await self._read(self._store.completed)
        for record in await self.in_files(self.folder.recover, completed):
            logger.error("The file of %s is missing or cut short.", record.id)
            self.mark_failed(record, FILE_LOST)
            await self.update(record)

    def close(self) -> None:
        """Finish what was begun and let another server use the folder."""
        for executor in (self._files, self._reads, self._writes):
            executor.shutdown()
        self._store.close()
        self.folder.close()

    def mark_failed(self, record: JobRecord, failure: Failure) -> None:
        """Let a record say that its job failed, now."""
        now = time.time()
        record.status, record.error, record.files = "failed", failure.report(), []
        record.completed_at, record.expires_at = now, now + self._expire_after

    def completed(
        self, record: JobRecord, files: list[StoredFile], metrics: dict[str, float]
    ) -> JobRecord:
        """The record of a job that is complete, now."""
        now = time.time()
        return replace(
            record,
            status="completed",
            completed_at=now,
            expires_at=now + self._expire_after,
            files=files,
            metrics=metrics,
        )

    async def insert(self, record: JobRecord) -> None:
        """Add a job; it is on disk when this returns.

        Raises:
            sqlite3.Error: the disk fails.
        """
        await self._write(self._store.insert, replace(record))

    async def complete(self, record: JobRecord) -> bool:
        """Store a completed job. False when it was deleted meanwhile.

        Raises:
            sqlite3.Error: the disk fails.
        """
        return await self._write(self._store.update, replace(record))

    async def update(self, record: JobRecord) -> None:
        """Store how a job stands.

        Where the disk fails, the row goes on saying that the job is under way, and the next start
        makes a failed one of it.
        """
        try:
            await self._write(self._store.update, replace(record))
        except sqlite3.Error:
            logger.exception("The state of %s can't be stored.", record.id)

    async def delete(self, id: str) -> JobRecord | None:
        """Remove a job's row; what it was, None when it isn't there."""
        return await self._write(self._store.delete, id)

    async def get(self, id: str) -> JobRecord | None:
        """A job; None when it isn't there."""
        return await self._read(self._store.get, id)

    async def page(
        self, kind: str, after: str | None, limit: int, ascending: bool
    ) -> list[JobRecord] | None:
        """See ``JobStore.page``."""

        def read() -> list[JobRecord] | None:
            return self._store.page(kind, after=after, limit=limit, ascending=ascending)

        return await self._read(read)

    async def expired(self) -> list[str]:
        """Ids of jobs whose time is over."""
        return await self._read(self._store.expired, time.time())

    async def in_files(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run blocking work on files."""
        return await asyncio.get_running_loop().run_in_executor(self._files, function, *arguments)

    async def discard(self, function: Callable[..., None], *arguments: Any) -> None:
        """Remove files that belong to no job any more, with a function of ``folder``.

        Where the disk fails they stay, and the next start removes them.
        """
        try:
            await self.in_files(function, *arguments)
        except OSError:
            logger.exception("Files that nobody needs can't be removed.")

    async def _write(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writes, function, *arguments)

    async def _read(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._reads, function, *arguments)
