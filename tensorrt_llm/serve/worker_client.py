# SPDX-License-Identifier: Apache-2.0
"""The server's end of the worker process: start it, talk to it, start it again when it dies."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm.logger import logger
from tensorrt_llm.serve import channel

# Longer than a reference may take to be decoded, twice.
_CHECK_SECONDS = 180.0
_SPAWN_RETRY_SECONDS = 1.0
# Deaths while loading, one after another, after which loading is given up.
_MAX_LOAD_DEATHS = 3
_STOP_SECONDS = 3.0


class WorkerError(Exception):
    """What the worker reported, or that it died.

    Args:
        kind: "client", "memory", "cancelled", "storage", "internal", "died" or "busy".
        type: Name of the exception's class.
        message: Its text.
        names: Those of a ``ParameterError``.
    """

    def __init__(self, kind: str, type: str, message: str, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.kind, self.type, self.message, self.names = kind, type, message, tuple(names)


def worker_died() -> WorkerError:
    """The error of everything that a dead worker had in hand."""
    return WorkerError("died", "WorkerDied", "The generation process died; it is started again.")


@dataclass(frozen=True)
class WorkerSpec:
    """What the worker process is to load.

    Attributes:
        factory: ``module:function`` that returns a generator.
        options: Its keyword arguments, as JSON can carry them.
        model: The name under which the model is served.
        aliases: Other names that a request may use for it.
    """

    factory: str
    options: dict[str, Any] = field(default_factory=dict)
    model: str = "model"
    aliases: tuple[str, ...] = ()


class WorkerClient:
    """One worker process after another.

    All methods belong to the event loop.

    Args:
        spec: What it loads.
        on_event: Called with each message about a job.
        on_state: Called after ``state`` has changed. On a change from "ready" whatever the worker
            had in hand is lost.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        on_event: Callable[[dict[str, Any]], None],
        on_state: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.state = "loading"
        self.reason: str | None = None
        self.restarts = 0
        self._on_event, self._on_state = on_event, on_state
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the first worker; ``state`` tells when it is ready."""
        self._task = asyncio.get_running_loop().create_task(self._supervise())

    async def stop(self) -> None:
        """End the worker, whatever it does."""
        self._stopping = True
        if self.state == "ready":
            self.send({"op": "stop"})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        self.kill()
        if self._task is not None:
            await self._task

    def kill(self) -> None:
        """Kill the worker; unless the server stops, another one is started."""
        if self._process is not None and self._process.returncode is None:
            # Not Process.kill: before it kills it polls, and so reaps a worker that is dead, whose
            # exit code asyncio's child watcher then looks for in vain: it warns and reports 255.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; to a dead worker it is lost, and ``on_state`` tells."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(channel.encode(message))

    async def check(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have a request resolved.

        Returns:
            The values that its generation would use.

        Raises:
            WorkerError: it can't be served, or the worker is not there.
        """
        if self.state != "ready":
            raise worker_died()
        call = next(self._numbers)
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self.send({"op": "check", "call": call, "request": request})
            return await asyncio.wait_for(future, _CHECK_SECONDS)
        except TimeoutError:
            raise WorkerError(
                "busy", "Timeout", "The request's examination took too long."
            ) from None
        finally:
            del self._calls[call]

    async def _supervise(self) -> None:
        deaths = 0
        while not self._stopping:
            try:
                outcome = await self._run_once()
            except OSError:
                logger.exception("The worker can't be started.")
                outcome = "died_loading"
                await asyncio.sleep(_SPAWN_RETRY_SECONDS)
            if self._stopping:
                return
            deaths = 0 if outcome == "died" else deaths + 1
            if outcome == "load_failed" or deaths == _MAX_LOAD_DEATHS:
                self.reason = self.reason or "The generation process dies while it loads."
                self._change("failed")
                return
            self.restarts += 1
            logger.error("The worker died (exit code %s); starting another.", self._exit_code())
            self._change("loading")

    def _exit_code(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def _run_once(self) -> str:
        """One worker from start to end: "load_failed", "died_loading" or "died"."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "tensorrt_llm.serve.worker",
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            if self._stopping:
                # stop() came while it was being spawned, and had nothing to kill.
                self.kill()
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=channel.MAX_LINE)
        except BaseException:
            ours.close()
            raise
        self.send(
            {
                "server": os.getpid(),
                "factory": self.spec.factory,
                "options": self.spec.options,
                "sys_path": sys.path,
            }
        )
        outcome = "died_loading"
        # Ends with the stream: the worker is gone, or as good as that.
        with contextlib.suppress(ConnectionError, ValueError):
            while line := await reader.readline():
                message = channel.decode(line)
                if message["event"] == "ready":
                    outcome = "died"
                    self._change("ready")
                elif message["event"] == "load_failed":
                    outcome = "load_failed"
                    self.reason = message["error"]["message"]
                else:
                    self._deliver(message)
        self._writer.close()
        self.kill()
        await self._process.wait()
        self._lose_calls()
        return outcome

    def _deliver(self, message: dict[str, Any]) -> None:
        if "call" not in message:
            try:
                self._on_event(message)
            except Exception:
                # One job's trouble must not end the reading of all others' news.
                logger.exception("A message of the worker can't be handled.")
            return
        future = self._calls.get(message["call"])
        if future is None or future.done():
            return
        if message["event"] == "checked":
            future.set_result(message["report"])
        else:
            future.set_exception(WorkerError(**message["error"]))

    def _lose_calls(self) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(worker_died())

    def _change(self, state: str) -> None:
        self.state = state
        self._on_state()
