# SPDX-License-Identifier: Apache-2.0
"""The Hub for tests: its cache layout on disk, and its few endpoints on the loopback interface.

Nothing of ``huggingface_hub`` is replaced: the library's own client talks to ``HubServer`` over
HTTP, and reads and writes the cache that ``fill_cache`` prepares.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """What one repository holds: commits by branch or tag name, and a folder for each commit.

    ``error`` answers every request for it, ``file_error`` every request for one of its files: (HTTP
    status, the Hub's X-Error-Code or None). ``cut`` leaves the second half of the named file out.
    """

    revisions: dict[str, str] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    error: tuple[int, str | None] | None = None
    file_error: tuple[int, str | None] | None = None
    cut: str | None = None

    def files(self, commit: str) -> dict[str, Path]:
        root = self.folders[commit]
        return {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*")) if p.is_file()}

    def commit(self, revision: str) -> str | None:
        return self.revisions.get(revision) or (revision if revision in self.folders else None)


@dataclass
class HubServer:
    """The served repositories, the endpoint's URL and every (method, path) that was asked for."""

    repositories: dict[str, Repository]
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)

    @property
    def fetched(self) -> set[str]:
        """Paths of the files that were downloaded."""
        parts = [p.split("/resolve/") for method, p in self.requests if method == "GET"]
        return {part[1].partition("/")[2] for part in parts if len(part) == 2}


def etag(path: Path) -> str:
    """Name of a file's blob in the cache."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fill_cache(
    cache: Path, name: str, revisions: dict[str, str], commit: str, folder: Path
) -> Path:
    """Put a folder into a Hub cache as one snapshot, in the library's layout; return the snapshot.

    ``models--owner--name/{blobs,refs,snapshots}``: a blob for each content, a ref file for each
    branch or tag, and a snapshot of relative links.
    """
    storage = cache / f"models--{name.replace('/', '--')}"
    snapshot = storage / "snapshots" / commit
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        blob = storage / "blobs" / etag(path)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(path.read_bytes())
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        depth = len(link.relative_to(storage).parts) - 1
        link.symlink_to(Path(*[".."] * depth) / "blobs" / blob.name)
    for revision, target in revisions.items():
        ref = storage / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(target)
    return snapshot


@contextmanager
def serve_hub(repositories: dict[str, Repository]) -> Iterator[HubServer]:
    """Serve the repositories on a free port of 127.0.0.1."""
    hub = HubServer(repositories)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        repository = self.hub.repositories.get("/".join(parts[:2]))
        if repository is None:
            return self._fail(401 if api else 404, "RepoNotFound")
        if repository.error is not None:
            return self._fail(*repository.error)
        verb, revision = parts[2:4] or ("revision", "main")
        inside = "/".join(parts[4:])
        commit = repository.commit(revision)
        if commit is None:
            return self._fail(404, "RevisionNotFound")
        if verb == "revision":
            return self._send(json.dumps({"id": "/".join(parts[:2]), "sha": commit}).encode())
        files = repository.files(commit)
        if verb == "tree":
            entries = [
                {"type": "file", "path": n, "size": p.stat().st_size, "oid": etag(p)[:40]}
                for n, p in files.items()
            ]
            return self._send(json.dumps(entries).encode())
        if repository.file_error is not None:
            return self._fail(*repository.file_error)
        if inside not in files:
            return self._fail(404, "EntryNotFound")
        content = files[inside].read_bytes()
        headers = {"ETag": f'"{etag(files[inside])}"', "X-Repo-Commit": commit}
        if with_body and repository.cut == inside:
            content = content[: len(content) // 2]
        return self._send(content, headers, with_body)

    def _fail(self, status: int, code: str | None) -> None:
        self._send(b"", {} if code is None else {"X-Error-Code": code}, status=status)

    def _send(
        self,
        content: bytes,
        headers: dict[str, str] | None = None,
        with_body: bool = True,
        status: int = 200,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)
