# SPDX-License-Identifier: Apache-2.0
"""From encoded files to a completed job: moved to their place, then stored; all or nothing."""

import sqlite3

from tensorrt_llm.logger import logger
from tensorrt_llm.serve.jobs import DELETED, Failure, LiveJob
from tensorrt_llm.serve.ledger import Ledger
from tensorrt_llm.serve.media_folder import StorageFullError
from tensorrt_llm.serve.records import StoredFile

# Of a job whose publishing broke off, where not even ``publish`` could say why.
UNPUBLISHED = Failure("generation_failed", "The result was lost while it was being stored.", 500)


async def publish(
    ledger: Ledger, job: LiveJob, names: list[str], metrics: dict[str, float]
) -> Failure | None:
    """Complete a job whose files lie in the ``partial`` folder.

    Args:
        ledger: Database and folder.
        job: Its record is replaced by the completed one.
        names: The files.
        metrics: Seconds by phase.

    Returns:
        None; or why the job isn't complete, and then its files are discarded.
    """
    try:
        if not job.kept:
            job.contents = await ledger.in_files(ledger.folder.read_partial, names)
            job.record.metrics = metrics
            return None
        files = await ledger.in_files(ledger.folder.publish, names)
        try:
            complete = await _store(ledger, job, files, metrics)
        except sqlite3.Error:
            await ledger.discard(ledger.folder.remove, files)
            raise
        if not complete:
            await ledger.discard(ledger.folder.remove, files)
            return DELETED
    except StorageFullError as error:
        return Failure("storage_failed", str(error), 503)
    except (OSError, sqlite3.Error) as error:
        logger.exception("The files of %s can't be stored.", job.record.id)
        return Failure("storage_failed", f"{type(error).__name__} in the media folder.", 503)
    except Exception as error:
        logger.exception("The files of %s can't be used.", job.record.id)
        return Failure("generation_failed", f"{type(error).__name__} in the files.", 500)
    return None


async def _store(
    ledger: Ledger, job: LiveJob, files: list[StoredFile], metrics: dict[str, float]
) -> bool:
    """Store that a job is complete. False when it was deleted meanwhile."""
    record = ledger.completed(job.record, files, metrics)
    if not job.stored:
        await ledger.insert(record)
    elif not await ledger.complete(record):
        return False
    job.record = record
    return True
