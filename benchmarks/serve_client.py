# SPDX-License-Identifier: Apache-2.0
"""A lean HTTP/1.1 client for load: one kept connection, little work for a request."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    """An HTTP answer.

    Attributes:
        status: Its status.
        headers: By lower-case name.
        body: Its bytes.
        seconds: From the first byte sent to the last one received.
    """

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    def json(self) -> Any:
        """The body's value."""
        return json.loads(self.body)


class Connection:
    """One connection to a server; opened again when it was closed.

    Args:
        url: Of the server.
        timeout: Seconds after which a request counts as hanging (TimeoutError).
    """

    def __init__(self, url: str, timeout: float = 30.0) -> None:
        parts = urlsplit(url)
        self._address, self._timeout = (parts.hostname, parts.port), timeout
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, method: str, path: str, body: Any = None) -> Answer:
        """Send a request, with a JSON body where there is one, and read the answer."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._address[0]}\r\n"
        if body is not None:
            head += "Content-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        started = time.perf_counter()
        async with asyncio.timeout(self._timeout):
            try:
                status, headers, content = await self._exchange(head.encode() + data)
            except (ConnectionError, asyncio.IncompleteReadError):
                # An idle connection may be closed by the server at any time.
                self.close()
                status, headers, content = await self._exchange(head.encode() + data)
        return Answer(status, headers, content, time.perf_counter() - started)

    async def _exchange(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address)
        reader, writer = self._streams
        writer.write(data)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        content = await reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("connection", "").lower() == "close":
            self.close()
        return int(first.split()[1]), headers, content

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
