# SPDX-License-Identifier: Apache-2.0
"""Run the application: bind, serve, and shut down so that no job is lost without a word."""

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from tensorrt_llm._utils import describe_error
from tensorrt_llm.logger import logger
from tensorrt_llm.serve.app import create_app
from tensorrt_llm.serve.jobs import SHUTDOWN
from tensorrt_llm.serve.settings import ServeSettings
from tensorrt_llm.serve.worker_client import WorkerSpec

_BACKLOG = 2048
_CLOSE_SECONDS = 5
_KEEP_ALIVE_SECONDS = 30


class DrainingServer(uvicorn.Server):
    """Goes on answering while jobs drain; uvicorn's own would stop listening at once.

    The first signal drains, a second one ends the drain. Either way the process ends with exit
    code 0: a shutdown that was asked for is no failure.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        drain_timeout: float,
        on_started: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(config)
        self._app, self._drain_timeout = app, drain_timeout
        self._on_started = on_started
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, tell so, and remember the loop for signals."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        if self._on_started is not None and not self.should_exit:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM and SIGINT, in the main thread, between any two instructions."""
        if self._loop is None or not self.started:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_drain, signal.Signals(sig).name)

    def _begin_drain(self, name: str) -> None:
        if self._drain is not None:
            self._drain.cancel()
            # Now, so that the requests which wait for a job still get their answer.
            self._app.state.manager.fail_all(SHUTDOWN)
            self.should_exit = True
            return
        logger.info("%s: draining for at most %g seconds.", name, self._drain_timeout)
        self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        await self._app.state.manager.drain(self._drain_timeout)
        self.should_exit = True


def bind(settings: ServeSettings) -> socket.socket:
    """Bind the settings' address.

    Raises:
        ValueError: it can't be bound.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM
        )[0]
        # With its protocol named: only for such sockets asyncio turns Nagle's algorithm off, which
        # holds the body of an answer back for the 40 ms of the client's delayed ACK.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ValueError(
            describe_error(
                "The address can't be used",
                where=f"{settings.host}:{settings.port}",
                expected="an address of this machine and a free port",
                found=error.strerror or error,
                remedy="choose another with --host and --port; port 0 takes a free one",
            )
        ) from error


def url_of(listener: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    settings: ServeSettings,
    spec: WorkerSpec,
    listener: socket.socket,
    on_started: Callable[[], None] | None = None,
) -> int:
    """Serve until a signal; then drain and return.

    Args:
        settings: How it is run.
        spec: What generates.
        listener: From ``bind``.
        on_started: Called once requests are answered; never where the start fails.

    Returns:
        The exit code: 0 after a shutdown that was asked for, 1 when the start failed.

    Raises:
        ValueError: the media folder can't be used.
    """
    app = create_app(settings, spec)
    app.state.manager.open()
    server = make_server(settings, app, on_started)
    server.run(sockets=[listener])
    return 0 if server.started else 1


def make_server(
    settings: ServeSettings, app: FastAPI, on_started: Callable[[], None] | None = None
) -> DrainingServer:
    """The server of an application from ``create_app``; ``run(sockets=[bind(settings)])`` it."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        loop="asyncio",
        http="h11",
        ws="none",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    return DrainingServer(config, app, settings.drain_timeout, on_started)
