# SPDX-License-Identifier: Apache-2.0
"""Messages between the server and its worker process: one JSON object a line over a socket."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

# A message holds at most a prompt, whose characters JSON may spell with six bytes each.
MAX_LINE = 64 * 2**20


def encode(message: dict[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps(message).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The message of a line."""
    return json.loads(line)


class WorkerChannel:
    """The worker's end.

    Args:
        descriptor: Of a connected stream socket.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send from any thread. A server that is gone is noticed by ``__iter__`` alone."""
        with self._lock:
            try:
                self._socket.sendall(encode(message))
            except OSError:
                return

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The server's messages, until it is gone."""
        with self._socket.makefile("rb") as lines:
            for line in lines:
                # A last line that was cut belongs to a server that died while it wrote.
                if line.endswith(b"\n"):
                    yield decode(line)
