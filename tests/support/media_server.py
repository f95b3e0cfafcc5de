# SPDX-License-Identifier: Apache-2.0
"""An HTTP server on the loopback interface that answers well, badly, slowly or without end."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.hostile_media import mp4, png


class Handler(BaseHTTPRequestHandler):
    """The path names the method: /slow-body?x is answered by give_slow_body."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))
        name = self.path.partition("?")[0].strip("/").replace("-", "_").partition(".")[0]
        getattr(self, f"give_{name}")()

    def log_message(self, *arguments: object) -> None:
        pass

    def send(self, data: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content_Length": str(len(data)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def drip(self, data: bytes) -> None:
        """One byte at a time, each well inside any time limit on a single read."""
        try:
            for byte in data:
                self.wfile.write(bytes([byte]))
                time.sleep(0.02)
        except OSError:
            self.close_connection = True

    def give_picture(self) -> None:
        self.send(png())

    def give_clip(self) -> None:
        self.send(mp4())

    def give_chunked(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(png()), 100):
            part = png()[start : start + 100]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def give_chunked_without_end(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
        except OSError:
            self.close_connection = True

    def give_until_closed(self) -> None:
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + png())
        self.close_connection = True

    def give_slow_body(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        self.drip(bytes(1000))

    def give_slow_headers(self) -> None:
        self.drip(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000)

    def give_slow_chunks(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.drip(b"1\r\nx\r\n" * 200)

    def give_silence(self) -> None:
        time.sleep(1)

    def give_declared_length(self) -> None:
        self.send(b"", Content_Length=str(10**12))
        self.close_connection = True

    def give_half(self) -> None:
        self.send(png()[:50], Content_Length=str(len(png())))
        self.close_connection = True

    def give_negative_length(self) -> None:
        self.send(png(), Content_Length="-5")
        self.close_connection = True

    def give_compressed(self) -> None:
        self.send(png(), Content_Encoding="gzip")

    def give_page(self) -> None:
        self.send(b"<html>sign in first</html>", Content_Type="image/png")

    def give_missing(self) -> None:
        self.send(b"no", 404)

    def give_broken(self) -> None:
        self.send(b"no", 599)

    def give_nothing(self) -> None:
        self.send(b"", 204)

    def give_noise(self) -> None:
        self.wfile.write(bytes(range(256)))
        self.close_connection = True

    def give_many_headers(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000 + b"\r\n")
        self.close_connection = True

    def give_to(self) -> None:
        status = int(self.path.partition("status=")[2][:3] or 302)
        self.send(b"", status, Location=self.path.partition("url=")[2])

    def give_loop(self) -> None:
        self.send(b"", 302, Location="/loop")

    def give_redirect_to_nowhere(self) -> None:
        self.send(b"", 302)


class MediaServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, dict]] = []

    def handle_error(self, request, client_address) -> None:
        pass  # clients that give up are what is tested


@contextmanager
def serving(wrap: Callable[[socket.socket], socket.socket] | None = None) -> Iterator[MediaServer]:
    """Serve inside the block; ``wrap`` puts TLS around the listening socket."""
    server = MediaServer()
    if wrap is not None:
        server.socket = wrap(server.socket)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
