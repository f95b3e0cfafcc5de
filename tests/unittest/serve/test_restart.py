# SPDX-License-Identifier: Apache-2.0
"""Ends of the server: kill -9 and a restart, and shutdowns that were asked for."""

import os
import signal
import sqlite3
import threading
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from serve_process import ServerProcess

from tests.support.serving import LONG, SCRIPTED, SMALL, until

QUICK = {"generate_seconds": 0.0}


def create(url: str, prompt: str = "a") -> str:
    answer = httpx.post(f"{url}/v1/videos", json={"prompt": prompt, **SMALL}, timeout=LONG)
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def job(url: str, id: str) -> dict:
    return httpx.get(f"{url}/v1/videos/{id}", timeout=LONG).json()


def wait(url: str, id: str, **wanted) -> dict:
    def look():
        found = job(url, id)
        return found if all(found[name] == value for name, value in wanted.items()) else None

    return until(look)


def files(media) -> list[str]:
    return sorted(p.name for f in ("media", "partial", "uploads") for p in (media / f).iterdir())


def test_kill_9_while_queued_generating_and_encoding(tmp_path):
    with ServerProcess(tmp_path, stub=QUICK, factory=SCRIPTED) as server:
        image = {"prompt": "a", "size": "64x64", "num_inference_steps": 1}
        picture = httpx.post(f"{server.url}/v1/images/generations", json=image, timeout=LONG)
        completed = create(server.url)
        wait(server.url, completed, status="completed")
        content = httpx.get(f"{server.url}/v1/videos/{completed}/content").content
        before = job(server.url, completed)
        encoding = create(server.url, '{"encode": 600}')
        generating = create(server.url, '{"generate": 600}')
        queued = create(server.url)
        wait(server.url, encoding, stage="postprocessing")
        wait(server.url, generating, stage="generating")
        until(lambda: [name for name in files(tmp_path) if encoding in name])
        assert job(server.url, queued)["status"] == "queued"
        (worker,) = server.worker_pids()
        server.kill()
    # The worker ends with its server.
    until(lambda: not os.path.exists(f"/proc/{worker}"))
    # One that had a half-written row's transaction open would have left it: SQLite undoes it.
    with sqlite3.connect(tmp_path / "jobs.sqlite3") as store:
        assert store.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with ServerProcess(tmp_path, stub=QUICK) as server:
        assert job(server.url, completed) == before
        assert httpx.get(f"{server.url}/v1/videos/{completed}/content").content == content
        path = httpx.URL(picture.json()["data"][0]["url"]).path
        assert httpx.get(server.url + path).status_code == 200
        for id in (encoding, generating, queued):
            found = job(server.url, id)
            assert found["status"] == "failed" and found["error"]["code"] == "interrupted"
            assert found["completed_at"] and found["expires_at"]
            assert httpx.get(f"{server.url}/v1/videos/{id}/content").status_code == 400
        pictures = [name for name in files(tmp_path) if name.startswith("image_")]
        assert files(tmp_path) == sorted([f"{completed}.mp4", *pictures]) and len(pictures) == 1
        later = create(server.url)
        wait(server.url, later, status="completed")
        listed = httpx.get(f"{server.url}/v1/videos").json()["data"]
        assert [found["id"] for found in listed] == [
            later,
            queued,
            generating,
            encoding,
            completed,
        ]
        # What the first server knew can be deleted like anything else.
        for id in (completed, encoding, later):
            assert httpx.delete(f"{server.url}/v1/videos/{id}").status_code == 200
        assert files(tmp_path) == pictures
        assert server.stop() == 0


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("whole_group", [False, True])
def test_a_shutdown_lets_jobs_finish_and_answers_meanwhile(tmp_path, whole_group):
    stub = {"generate_seconds": 0.6}
    with ServerProcess(tmp_path, {"drain_timeout": LONG}, stub) as server:
        ids = [create(server.url) for _ in range(2)]
        if whole_group:  # as systemd and timeout do
            workers = children(server.process.pid)
            assert workers
            for pid in workers:
                os.kill(pid, signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.health() == "draining")
        refused = httpx.post(f"{server.url}/v1/videos", json={"prompt": "a"})
        assert refused.status_code == 503 and "draining" in refused.json()["message"]
        assert job(server.url, ids[1])["status"] in ("queued", "in_progress")
        assert server.process.wait(LONG) == 0
    assert files(tmp_path) == sorted(f"{id}.mp4" for id in ids)
    assert rows(tmp_path) == {id: ("completed", "null") for id in ids}


def rows(media) -> dict[str, tuple[str, str]]:
    with sqlite3.connect(media / "jobs.sqlite3") as store:
        found = store.execute("SELECT id, status, error FROM jobs").fetchall()
    return {id: (status, error) for id, status, error in found}


@pytest.mark.parametrize("signals", [1, 2])
def test_a_shutdown_fails_what_does_not_finish_in_time(tmp_path, signals):
    drain = 0.5 if signals == 1 else LONG
    with ServerProcess(tmp_path, {"drain_timeout": drain}, {"generate_seconds": LONG}) as server:
        ids = [create(server.url) for _ in range(2)]
        answers = []
        body = {"prompt": "a", **SMALL}
        waiting = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{server.url}/v1/videos/sync", json=body, timeout=LONG)
            )
        )
        waiting.start()
        until(lambda: len(httpx.get(f"{server.url}/v1/videos").json()["data"]) == 3)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        if signals == 2:
            until(lambda: server.health() == "draining")
            server.process.send_signal(signal.SIGINT)
        assert server.process.wait(LONG) == 0
        assert time.monotonic() - started < 15
        waiting.join(LONG)
    found = rows(tmp_path)
    assert len(found) == 3 and set(ids) < set(found)
    assert all(s == "failed" and "server_shutdown" in e for s, e in found.values())
    assert files(tmp_path) == []
    assert answers[0].status_code == 503 and "shut down" in answers[0].json()["message"]


def test_a_shutdown_while_it_loads_ends_at_once_with_code_0(tmp_path):
    server = ServerProcess(tmp_path, stub={"load_seconds": LONG})
    server.start()
    until(lambda: server.health() == "loading")
    started = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - started < 20
