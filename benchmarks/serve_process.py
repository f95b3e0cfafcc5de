# SPDX-License-Identifier: Apache-2.0
"""A server in a process of its own, on loopback, with the stub generator."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

_START_SECONDS = 60.0
_STOP_SECONDS = 60.0
_STUB = Path(__file__).resolve().with_name("serve_stub.py")


class ServerProcess:
    """Starts on ``with`` and is ready then; ends by SIGTERM, or SIGKILL where that has no effect.

    Args:
        media_path: The media folder.
        settings: Further fields of ``ServeSettings``.
        stub: Arguments of the generator.
        factory: The generator, as ``module:function``; by default ``StubGenerator``.
        log: File for what the server says; its level is INFO.
    """

    def __init__(
        self,
        media_path: Path,
        settings: dict[str, Any] | None = None,
        stub: dict[str, Any] | None = None,
        factory: str = "serve_stub:StubGenerator",
        log: Path | None = None,
    ) -> None:
        options = {
            "settings": {"media_path": str(media_path), **(settings or {})},
            "stub": stub or {},
            "factory": factory,
        }
        self._command = [sys.executable, str(_STUB), json.dumps(options)]
        self._log = log
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> "ServerProcess":
        self.start()
        deadline = time.monotonic() + _START_SECONDS
        while self.health() != "ready":
            if time.monotonic() > deadline or self.process.poll() is not None:
                self.kill()
                raise RuntimeError(f"The server wasn't ready in {_START_SECONDS} seconds.")
            time.sleep(0.05)
        return self

    def start(self) -> None:
        """Start it, and wait until it listens."""
        path = os.pathsep.join(sys.path)
        environment = {**os.environ, "TLLM_LOG_LEVEL": "INFO", "PYTHONPATH": path}
        errors = subprocess.DEVNULL if self._log is None else self._log.open("ab")
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
        )
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise RuntimeError(f"The server ended with {self.process.wait()} before it listened.")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.stop()

    def health(self) -> str:
        """What GET /health says; "unreachable" when nothing does."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as response:
                return json.load(response)["status"]
        except urllib.error.HTTPError as error:
            return json.load(error)["status"]
        except OSError:
            return "unreachable"

    def stop(self) -> int:
        """Ask for a shutdown; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def worker_pids(self) -> list[int]:
        """Process ids of the server's children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def resident_mib(self) -> dict[str, float]:
        """Resident memory of the server and of its worker."""
        workers = sum(_resident_mib(pid) for pid in self.worker_pids())
        return {"server": _resident_mib(self.process.pid), "worker": workers}


def _resident_mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0.0
    line = next((line for line in status.splitlines() if line.startswith("VmRSS:")), "VmRSS: 0")
    return int(line.split()[1]) / 1024
