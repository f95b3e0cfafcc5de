# SPDX-License-Identifier: Apache-2.0
"""The job database."""

import sqlite3
from dataclasses import replace

import pytest

from tensorrt_llm.serve.records import JobRecord, StoredFile, new_id
from tensorrt_llm.serve.store import JobStore

RESOLVED = {"height": 64, "width": 96, "num_frames": 5, "frame_rate": 24.0, "seed": 2**63 - 1}


def record(kind: str = "video", **values) -> JobRecord:
    return JobRecord(kind, new_id(kind), "model", "prompt \u2764 \x00 'x'", RESOLVED, **values)


@pytest.fixture
def store(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite3")
    yield store
    store.close()


def test_a_job_comes_back_as_it_was_stored_after_a_restart_too(store, tmp_path):
    files = [StoredFile("a.mp4", 123, "video/mp4"), StoredFile("b.mp4", 4, "video/mp4")]
    job = record(error={"code": "c", "message": "m"}, files=files, metrics={"denoise": 1.5})
    store.insert(job)
    assert store.get(job.id) == job and store.get("video_0") is None
    store.close()
    again = JobStore(tmp_path / "jobs.sqlite3")
    assert again.get(job.id) == job
    again.close()


def test_what_is_stored_is_on_disk_at_once(store, tmp_path):
    job = record()
    store.insert(job)
    with sqlite3.connect(tmp_path / "jobs.sqlite3") as other:
        assert other.execute("SELECT id FROM jobs").fetchall() == [(job.id,)]
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    # FULL: a commit waits for the disk.
    assert store._writer.execute("PRAGMA synchronous").fetchone() == (2,)


def test_a_deleted_job_can_not_be_updated(store):
    job = record()
    store.insert(job)
    assert store.update(replace(job, status="in_progress"))
    assert store.get(job.id).status == "in_progress"
    assert store.delete(job.id) == replace(job, status="in_progress")
    assert store.delete(job.id) is None
    assert not store.update(replace(job, status="completed"))
    assert store.get(job.id) is None


def test_pages_follow_the_order_of_creation_even_within_one_moment(store):
    jobs = [record(created_at=1.0) for _ in range(5)]
    for job in jobs:
        store.insert(record("image"))
        store.insert(job)
    ids = [job.id for job in jobs]

    def page(**options):
        found = store.page("video", **{"after": None, "limit": 10, "ascending": True} | options)
        return None if found is None else [job.id for job in found]

    assert page() == ids and page(ascending=False) == ids[::-1]
    assert page(limit=2) == ids[:2] and page(after=ids[1], limit=2) == ids[2:4]
    assert page(after=ids[1], ascending=False) == [ids[0]]
    assert page(after=ids[4]) == [] and page(after="video_0") is None
    # A deleted job's place isn't given to another.
    newest = record()
    (before,) = store._reader.execute("SELECT max(seq) FROM jobs").fetchone()
    store.delete(ids[4])
    store.insert(newest)
    (after,) = store._reader.execute("SELECT max(seq) FROM jobs").fetchone()
    assert after == before + 1 and page(after=ids[3]) == [newest.id]


def test_jobs_are_found_by_what_has_to_be_done_about_them(store):
    queued, running = record(), record(status="in_progress")
    completed = record(status="completed", expires_at=50.0)
    failed = record(status="failed", expires_at=10.0)
    for job in (queued, running, completed, failed):
        store.insert(job)
    assert store.unfinished() == [queued, running] and store.completed() == [completed]
    assert store.expired(9.9) == [] and store.expired(10.0) == [failed.id]
    assert store.expired(60.0) == [failed.id, completed.id]


def test_another_file_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "jobs.sqlite3"
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(ValueError, match="job database can't be used.*jobs.sqlite3"):
        JobStore(path)
    assert path.read_bytes().startswith(b"something else")
    newer = tmp_path / "newer.sqlite3"
    with sqlite3.connect(newer) as database:
        database.execute("PRAGMA user_version = 7")
    with pytest.raises(ValueError, match="version 7 instead of 1"):
        JobStore(newer)
