# SPDX-License-Identifier: Apache-2.0
"""A server in a thread of the test's process, on loopback, with its worker process."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2 as httpx

from tensorrt_llm.serve.app import create_app
from tensorrt_llm.serve.manager import JobManager
from tensorrt_llm.serve.server import bind, make_server, url_of
from tensorrt_llm.serve.settings import ServeSettings
from tensorrt_llm.serve.worker_client import WorkerSpec

T = TypeVar("T")

LONG = 60.0  # seconds; waiting this long means that something hangs
SCRIPTED = "tests.support.scripted_generator:ScriptedGenerator"
SMALL = {"size": "64x64", "num_frames": 5, "num_inference_steps": 4}
FINAL = ("completed", "failed")


class Server:
    """A running server and a client of it."""

    def __init__(self, url: str, manager: JobManager, headers: dict[str, str]) -> None:
        self.url, self.manager = url, manager
        self.http = httpx.Client(base_url=url, timeout=LONG, headers=headers, trust_env=False)

    @property
    def media_path(self) -> Path:
        return self.manager.settings.media_path

    def files(self) -> list[str]:
        """Every file of the media folder but the database and the lock."""
        folders = ("media", "partial", "uploads")
        return sorted(p.name for name in folders for p in (self.media_path / name).iterdir())

    def post(self, script: dict[str, Any] | str = "a prompt", **fields: Any) -> httpx.Response:
        """Ask for a small video; a dictionary is a script for the generator."""
        prompt = script if isinstance(script, str) else json.dumps(script)
        return self.http.post("/v1/videos", json={"prompt": prompt, **SMALL, **fields})

    def create(self, script: dict[str, Any] | str = "a prompt", **fields: Any) -> str:
        """Queue a small video; its id."""
        response = self.post(script, **fields)
        assert response.status_code == 202, response.text
        return response.json()["id"]

    def job(self, id: str) -> dict[str, Any]:
        response = self.http.get(f"/v1/videos/{id}")
        assert response.status_code == 200, response.text
        return response.json()

    def wait(self, id: str, **wanted: Any) -> dict[str, Any]:
        """Wait until a job has ended, or has the wanted values."""

        def look() -> dict[str, Any] | None:
            job = self.job(id)
            if wanted and all(job[name] == value for name, value in wanted.items()):
                return job
            return job if job["status"] in FINAL else None

        job = until(look)
        assert all(job[name] == value for name, value in wanted.items()), job
        return job


def until(look: Callable[[], T]) -> T:
    """Look again and again until there is something to see."""
    deadline = time.monotonic() + LONG
    while not (seen := look()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)
    return seen


def _is_in(server: Server, state: str) -> bool:
    health = server.http.get("/health").json()
    assert health["status"] in (state, "loading"), health
    return health["status"] == state


@contextmanager
def serving(
    media_path: Path,
    spec: WorkerSpec | None = None,
    *,
    state: str = "ready",
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """Serve the scripted generator, or what ``spec`` says, once it is in the state wanted."""
    options = ServeSettings(port=0, media_path=media_path, **settings)
    spec = spec or WorkerSpec(SCRIPTED, {"generate_seconds": 0.0}, "stub")
    app = create_app(options, spec)
    listener = bind(options)
    running = make_server(options, app)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    server = Server(url_of(listener), app.state.manager, headers or {})
    try:
        until(lambda: _is_in(server, state))
        yield server
    finally:
        server.http.close()
        running.should_exit = True
        thread.join(LONG)
        assert not thread.is_alive(), "the server doesn't end"
