# SPDX-License-Identifier: Apache-2.0
"""Binding, settings, and the life of the worker process."""

import os
import socket

import pytest
from serve_process import ServerProcess

from tensorrt_llm.serve import server as server_module
from tensorrt_llm.serve import worker_client
from tensorrt_llm.serve.settings import ServeSettings, default_media_path
from tests.support.serving import LONG, serving, until


def test_answers_are_not_held_back_for_a_delayed_ack(server):
    """asyncio turns Nagle's algorithm off only for sockets that name their protocol."""
    with server_module.bind(ServeSettings(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP
        assert server_module.url_of(listener).startswith("http://127.0.0.1:")
    times = sorted(server.http.get("/version").elapsed.total_seconds() for _ in range(20))
    assert times[2] < 0.035


def test_an_address_in_use_is_told():
    with (
        server_module.bind(ServeSettings(port=0)) as listener,
        pytest.raises(ValueError, match="The address can't be used.*--port"),
    ):
        server_module.bind(ServeSettings(port=listener.getsockname()[1]))


def test_the_media_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TRTLLM_MEDIA_STORAGE_PATH", str(tmp_path / "given"))
    assert ServeSettings().media_path == tmp_path / "given"
    monkeypatch.delenv("TRTLLM_MEDIA_STORAGE_PATH")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_media_path() == tmp_path / "tensorrt-llm-cosmos3" / "media"
    monkeypatch.chdir(tmp_path)
    assert ServeSettings(media_path="relative").media_path == tmp_path / "relative"


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70_000},
        {"max_queue_size": 0},
        {"job_timeout": 0},
        {"expire_after": float("inf")},
        {"media_limit_bytes": 1},
        {"api_key": ""},
        {"no_such_option": 1},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ServeSettings(**wrong)


def test_a_message_that_can_not_be_handled_does_not_stop_the_others(server, monkeypatch):
    handle = server.manager.worker._on_event

    def fail_at_progress(message):
        if message["event"] == "progress":
            raise KeyError("something unforeseen")
        handle(message)

    monkeypatch.setattr(server.manager.worker, "_on_event", fail_at_progress)
    server.wait(server.create({"generate": 0.2}), status="completed")


def test_an_examination_that_takes_too_long_ends_in_an_error(server, monkeypatch):
    monkeypatch.setattr(worker_client, "_CHECK_SECONDS", 0.1)
    answer = server.post({"resolve_seconds": 1.0})
    assert answer.status_code == 503 and "took too long" in answer.json()["message"]
    monkeypatch.undo()
    server.wait(server.create(), status="completed")


def test_a_worker_that_can_not_be_started_is_given_up(tmp_path, monkeypatch):
    async def fail(*arguments, **options):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(worker_client, "_SPAWN_RETRY_SECONDS", 0.0)
    monkeypatch.setattr("asyncio.create_subprocess_exec", fail)
    with serving(tmp_path, state="failed") as server:
        assert server.post().status_code == 503


def test_a_server_that_is_killed_while_it_loads_leaves_no_worker(tmp_path):
    server = ServerProcess(tmp_path, stub={"load_seconds": LONG})
    server.start()
    (worker,) = until(server.worker_pids)
    until(lambda: server.health() == "loading")
    server.kill()
    until(lambda: not os.path.exists(f"/proc/{worker}"))
