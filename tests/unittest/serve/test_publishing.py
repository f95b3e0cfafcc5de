# SPDX-License-Identifier: Apache-2.0
"""Completing a job: its files and its row, both or neither."""

import asyncio
import sqlite3

import pytest

from tensorrt_llm.serve.jobs import DELETED, LiveJob
from tensorrt_llm.serve.ledger import Ledger
from tensorrt_llm.serve.publishing import publish
from tensorrt_llm.serve.records import JobRecord
from tensorrt_llm.serve.settings import ServeSettings

PNG = b"\x89PNG\r\n\x1a\n" + bytes(92)
NAME = "image_0-0.png"
METRICS = {"generation": 1.0}


def complete(tmp_path, *, insert=True, stored=True, kept=True, content=PNG, spoil=None, **settings):
    """Publish one file; (failure, job, the row afterwards, files afterwards)."""
    ledger = Ledger(ServeSettings(media_path=tmp_path, **settings))
    (ledger.folder.partial / NAME).write_bytes(content)

    async def run():
        record = JobRecord("image", "image_0", "m", "p", {"width": 1})
        job = LiveJob(record, {}, "png", kept, stored)
        if insert:
            await ledger.insert(record)
        if spoil is not None:
            spoil(ledger)
        failure = await publish(ledger, job, [NAME], METRICS)
        return failure, job, await ledger.get("image_0")

    failure, job, row = asyncio.run(run())
    files = [path.name for path in ledger.folder.media.iterdir()]
    assert ledger.folder.used == sum(len(PNG) for _ in files)
    ledger.close()
    return failure, job, row, files


@pytest.mark.parametrize(("insert", "stored"), [(True, True), (False, False)])
def test_a_complete_job_has_its_files_and_its_row(tmp_path, insert, stored):
    failure, job, row, files = complete(tmp_path, insert=insert, stored=stored, expire_after=50)
    assert failure is None and files == [NAME]
    assert row == job.record and row.status == "completed" and row.metrics == METRICS
    assert row.expires_at == row.completed_at + 50
    assert [(file.name, file.size) for file in row.files] == [(NAME, len(PNG))]


def test_a_job_that_was_deleted_meanwhile_leaves_no_file(tmp_path):
    failure, _, row, files = complete(tmp_path, insert=False)
    assert failure is DELETED and row is None and files == []


def test_a_database_that_fails_leaves_no_file(tmp_path):
    def spoil(ledger):
        def fail(record):
            raise sqlite3.OperationalError("database or disk is full")

        ledger._store.update = fail

    failure, _, row, files = complete(tmp_path, spoil=spoil)
    assert failure.code == "storage_failed" and row.status == "queued" and files == []


def test_files_that_are_not_what_they_should_be_are_not_published(tmp_path):
    failure, _, _, files = complete(tmp_path, content=b"<html>")
    assert failure.code == "generation_failed" and failure.status == 500 and files == []


def test_what_is_not_kept_is_handed_over(tmp_path):
    failure, job, _, files = complete(tmp_path, kept=False, stored=False, insert=False)
    assert failure is None and job.contents == [PNG] and files == []
    assert job.record.metrics == METRICS
