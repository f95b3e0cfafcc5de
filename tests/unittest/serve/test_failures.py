# SPDX-License-Identifier: Apache-2.0
"""Failing generations, dying workers, full disks: the right answer, and life goes on."""

import json
import threading

import httpx2 as httpx
import pytest

from tensorrt_llm.serve.worker_client import WorkerSpec
from tests.support.serving import LONG, SMALL, serving, until

FAIL_TO_LOAD = "tests.support.scripted_generator:fail_to_load"


@pytest.fixture(autouse=True)
def wait_for_the_worker(server):
    """A test may leave a worker that is just starting."""
    until(lambda: server.http.get("/health").status_code == 200)


@pytest.mark.parametrize(
    ("script", "status", "code", "type"),
    [
        ({"raise": "ValueError"}, 400, "invalid_request", "BadRequestError"),
        ({"raise": "RequestBlockedError"}, 400, "invalid_request", "RequestBlockedError"),
        ({"raise": "NotImplementedError"}, 400, "invalid_request", "BadRequestError"),
        ({"raise": "MemoryError"}, 503, "out_of_memory", "ServiceUnavailableError"),
        ({"raise": "RuntimeError"}, 500, "generation_failed", "InternalServerError"),
        ({"raise": "KeyError"}, 500, "generation_failed", "InternalServerError"),
        ({"garbage": True}, 500, "generation_failed", "InternalServerError"),
        ({"full": True}, 503, "storage_failed", "ServiceUnavailableError"),
        ({"die": 0}, 500, "worker_died", "InternalServerError"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_failed_generation_has_its_status_and_the_next_one_works(
    server, script, status, code, type
):
    job = server.wait(server.create(script), status="failed")
    assert job["error"]["code"] == code and job["error"]["message"]
    assert job["completed_at"] and job["expires_at"] and job["stage"] is None
    until(lambda: server.http.get("/health").status_code == 200)
    answer = server.http.post("/v1/videos/sync", json={"prompt": json.dumps(script), **SMALL})
    assert (answer.status_code, answer.json()["type"]) == (status, type)
    assert answer.json()["code"] == status
    until(lambda: server.http.get("/health").status_code == 200)
    server.wait(server.create(), status="completed")
    until(lambda: not list((server.media_path / "partial").iterdir()))


def test_a_dead_worker_takes_only_what_it_had_in_hand(server):
    before = server.manager.worker.restarts
    encoding = server.create({"encode": 8.0})
    server.wait(encoding, stage="postprocessing")
    dying, queued = server.create({"die": 0.5}), server.create()
    for id in (encoding, dying):
        assert server.wait(id, status="failed")["error"]["code"] == "worker_died"
    server.wait(queued, status="completed")
    assert server.manager.worker.restarts == before + 1
    assert f"trtllm_serve_worker_restarts_total {before + 1}" in server.http.get("/metrics").text
    until(lambda: not list((server.media_path / "partial").iterdir()))


@pytest.mark.parametrize(
    ("error", "status"), [("MemoryError", 503), ("ValueError", 400), ("RuntimeError", 500)]
)
def test_what_the_check_finds_is_told_before_anything_is_queued(server, error, status):
    newest = server.http.get("/v1/videos?limit=1").json()["first_id"]
    answer = server.post({"resolve": error})
    assert answer.status_code == status and f"a scripted {error}" in answer.json()["message"]
    assert server.http.get("/v1/videos?limit=1").json()["first_id"] == newest


def test_a_request_that_can_not_fit_the_memory_is_refused_before_it_is_queued(server):
    answer = server.http.post(
        "/v1/videos", json={"prompt": "a", "size": "4096x4096", "num_frames": 21}
    )
    assert answer.status_code == 503 and "memory" in answer.json()["message"]


def test_a_generation_that_does_not_stop_is_killed(tmp_path):
    with serving(tmp_path, cancel_grace=0.2) as server:
        worker = server.manager.worker.pid
        id = server.create({"hang": 30.0})
        server.wait(id, stage="generating")
        queued = server.create()
        server.http.delete(f"/v1/videos/{id}")
        server.wait(queued, status="completed")
        assert server.manager.worker.pid != worker


def test_a_folder_that_is_full_takes_no_more_until_something_is_deleted(tmp_path):
    with serving(tmp_path, media_limit_bytes=2**20) as server:
        large = server.post(size="512x512", num_frames=5)
        assert large.status_code == 503 and "No room" in large.json()["message"]
        assert int(large.headers["retry-after"]) > 0
        ids = []
        while (answer := server.post(size="224x224")).status_code == 202:
            ids.append(answer.json()["id"])
            server.wait(ids[-1], status="completed")
        assert answer.status_code == 503 and ids
        assert server.manager.folder.used <= 2**20
        for id in ids:
            server.http.delete(f"/v1/videos/{id}")
        server.wait(server.create(size="224x224"), status="completed")


def test_files_that_turn_out_too_large_for_the_folder_fail_their_job(server, monkeypatch):
    monkeypatch.setattr(server.manager.folder, "limit", server.manager.folder.used + 20_000)
    # H.264 of noise takes more than what was reckoned with.
    monkeypatch.setattr("tensorrt_llm.serve.intake._ENCODED", {"mp4": 0.0})
    before = server.files()
    job = server.wait(server.create(size="224x224"), status="failed")
    assert job["error"]["code"] == "storage_failed"
    assert server.files() == before


def test_a_checkpoint_that_can_not_be_loaded_is_told_by_health_and_by_requests(tmp_path):
    spec = WorkerSpec(FAIL_TO_LOAD, {"how": "raise"}, "stub")
    with serving(tmp_path, spec, state="failed") as server:
        health = server.http.get("/health")
        assert health.status_code == 503 and health.json()["reason"] == "a scripted bad checkpoint"
        answer = server.post()
        assert answer.status_code == 503 and "failed" in answer.json()["message"]
        assert server.http.get("/v1/videos").status_code == 200


def test_a_worker_that_always_dies_while_it_loads_is_given_up(tmp_path):
    spec = WorkerSpec(FAIL_TO_LOAD, {"how": "die"}, "stub")
    with serving(tmp_path, spec, state="failed") as server:
        assert "dies while it loads" in server.http.get("/health").json()["reason"]
        assert server.manager.worker.restarts == 2


def test_while_it_loads_requests_are_told_to_come_again(tmp_path):
    spec = WorkerSpec(
        "tests.support.scripted_generator:ScriptedGenerator", {"load_seconds": 1.0}, "stub"
    )
    with serving(tmp_path, spec, state="loading") as server:
        answer = server.post()
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert "loading" in answer.json()["message"]
        assert server.http.get("/v1/models").json()["data"][0]["id"] == "stub"
        until(lambda: server.http.get("/health").json()["status"] == "ready")
        server.wait(server.create(), status="completed")


def test_requests_under_examination_when_the_worker_dies_are_told_to_come_again(server):
    answers = []

    def ask():
        body = {"prompt": "a", **SMALL}
        for _ in range(15):
            answers.append(httpx.post(f"{server.url}/v1/videos", json=body, timeout=LONG))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    server.manager.worker.kill()
    for thread in threads:
        thread.join(LONG)
    assert {answer.status_code for answer in answers} <= {202, 429, 503}
    assert all("retry-after" in a.headers for a in answers if a.status_code != 202)
    until(lambda: server.http.get("/health").status_code == 200)
    for answer in answers:
        if answer.status_code == 202:
            server.wait(answer.json()["id"])
