# SPDX-License-Identifier: Apache-2.0
"""A disk that fails while a job ends: the job ends all the same, and nobody waits for ever."""

import base64
import errno
import sqlite3
import threading

import httpx2 as httpx
import pytest

from tensorrt_llm.serve import manager as manager_module
from tests.support.hostile_media import png
from tests.support.serving import LONG, SMALL, serving, until

VIDEO = {"prompt": "a", **SMALL}
PICTURE = {"prompt": "a", "size": "64x64", "num_inference_steps": 1, "response_format": "b64_json"}
IO_ERROR = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def server(tmp_path):
    """One for each test: the others must not wait for what a failing one leaves."""
    with serving(tmp_path) as server:
        yield server


def fail(argument):
    if argument == []:
        return  # no files: nothing that could fail
    raise IO_ERROR


def forgotten(server) -> bool:
    """Whether no job is held any more: a shutdown has nothing to wait for."""
    return server.manager._idle.is_set() and not server.manager._live


def test_a_result_is_delivered_although_what_is_left_of_it_can_not_be_removed(server, monkeypatch):
    monkeypatch.setattr(server.manager.folder, "remove_partial", fail)
    answer = server.http.post("/v1/videos/sync", json=VIDEO)
    assert answer.status_code == 200 and answer.content[4:8] == b"ftyp"
    id = server.http.get("/v1/videos?limit=1").json()["first_id"]
    assert server.job(id)["status"] == "completed"
    assert server.http.delete(f"/v1/videos/{id}").status_code == 200
    answer = server.http.post("/v1/images/generations", json=PICTURE)
    assert answer.status_code == 200 and answer.json()["data"][0]["b64_json"]
    until(lambda: forgotten(server))


def test_a_job_is_deleted_although_what_its_encoder_left_can_not_be_removed(server, monkeypatch):
    monkeypatch.setattr(server.manager.folder, "remove_partial", fail)
    id = server.create({"encode": 40.0})
    server.wait(id, stage="postprocessing")
    assert server.http.delete(f"/v1/videos/{id}").status_code == 200
    assert server.http.get(f"/v1/videos/{id}").status_code == 404
    until(lambda: forgotten(server) and not server.manager.running)


class Publishing:
    """A synchronous request whose files are just being published, for as long as is wanted."""

    def __init__(self, server, monkeypatch) -> None:
        folder = server.manager.folder
        self._server, self._publish, self._files = server, folder.publish, folder.media
        self._begun, self._go_on = threading.Event(), threading.Event()
        self._answers: list[httpx.Response] = []
        monkeypatch.setattr(folder, "publish", self._hold)
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()
        assert self._begun.wait(LONG)
        (self.job,) = server.manager._live.values()

    def _ask(self) -> None:
        url = f"{self._server.url}/v1/videos/sync"
        self._answers.append(httpx.post(url, json=VIDEO, timeout=LONG))

    def _hold(self, names):
        self._begun.set()
        assert self._go_on.wait(LONG)
        return self._publish(names)

    def delete(self) -> httpx.Response:
        """Delete the job; its files appear when its row is gone."""
        answers = []

        def ask() -> None:
            url = f"{self._server.url}/v1/videos/{self.job.record.id}"
            answers.append(httpx.delete(url, timeout=LONG))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        until(lambda: self.job.deleted)
        self.go_on()
        thread.join(LONG)
        assert answers, "the deletion isn't answered"
        return answers[0]

    def go_on(self) -> None:
        self._go_on.set()

    def answer(self) -> httpx.Response:
        """What the waiting client got."""
        self._thread.join(LONG)
        assert self._answers, "the client isn't answered"
        return self._answers[0]


def test_a_deletion_at_the_last_moment_is_answered_although_nothing_can_be_removed(
    server, monkeypatch
):
    publishing = Publishing(server, monkeypatch)
    for name in ("remove", "remove_partial"):
        monkeypatch.setattr(server.manager.folder, name, fail)
    assert publishing.delete().status_code == 200
    answer = publishing.answer()
    assert answer.status_code == 404 and "deleted" in answer.json()["message"]
    until(lambda: forgotten(server))


def test_a_job_whose_publishing_breaks_off_fails_and_says_that_there_is_no_result(
    server, monkeypatch
):
    async def break_off(*arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr(manager_module, "publish", break_off)
    answer = server.http.post("/v1/videos/sync", json=VIDEO)
    assert answer.status_code == 500 and "result was lost" in answer.json()["message"]
    id = server.http.get("/v1/videos?limit=1").json()["first_id"]
    job = server.job(id)
    assert job["status"] == "failed" and job["error"]["code"] == "generation_failed"
    assert server.http.delete(f"/v1/videos/{id}").status_code == 200
    until(lambda: forgotten(server))


def test_a_job_ends_although_its_files_can_neither_be_stored_nor_removed(server, monkeypatch):
    def fail_to_store(record):
        raise sqlite3.OperationalError("database or disk is full")

    publishing = Publishing(server, monkeypatch)
    monkeypatch.setattr(server.manager.ledger._store, "update", fail_to_store)
    for name in ("remove", "remove_partial"):
        monkeypatch.setattr(server.manager.folder, name, fail)
    publishing.go_on()
    answer = publishing.answer()
    # The first error, not that of what was tried after it.
    assert answer.status_code == 503 and "OperationalError" in answer.json()["message"]
    until(lambda: forgotten(server))


@pytest.mark.parametrize("error", [IO_ERROR, RuntimeError("a bug")])
def test_a_job_whose_reference_can_not_be_removed_is_let_go_of(server, monkeypatch, error):
    def fail_to_remove(path):
        raise error

    monkeypatch.setattr(server.manager.folder, "remove_upload", fail_to_remove)
    uri = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    id = server.create(image_reference=uri)
    server.wait(id, status="completed")
    until(lambda: forgotten(server))


def test_a_refusal_is_told_although_the_refused_reference_can_not_be_removed(server, monkeypatch):
    monkeypatch.setattr(server.manager.folder, "remove_upload", fail)
    uri = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    refused = server.http.post(
        "/v1/videos", json={**VIDEO, "size": "100x128", "image_reference": uri}
    )
    assert refused.status_code == 400, refused.text
