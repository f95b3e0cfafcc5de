# SPDX-License-Identifier: Apache-2.0
"""The media folder: finished files, files under way, uploads, and what they take of the limit.

::

    jobs.sqlite3   the job database
    lock           held by the server that uses the folder
    media/         finished files: <job id>.mp4, <job id>-0.png
    partial/       files being written
    uploads/       references of jobs that aren't finished

Names are made from job ids alone. A finished file appears by a rename, whole and on disk. Every
method blocks.
"""

import fcntl
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from tensorrt_llm._utils import describe_error
from tensorrt_llm.serve.records import JobRecord, StoredFile
from tensorrt_llm.visual_gen.media_formats import HEAD_BYTES, sniff

CONTENT_TYPES = {
    "mp4": "video/mp4",
    "png": "image/png",
    "webp": "image/webp",
    "jpeg": "image/jpeg",
}
# What must stay free on the disk for the database and for files under way.
_SPARE_BYTES = 64 * 2**20


class StorageFullError(Exception):
    """There is no room for another file."""


class MediaFolder:
    """The files of one server.

    Args:
        root: The folder, made if it isn't there.
        limit: Most bytes of finished files and uploads.

    Raises:
        ValueError: the folder can't be made, or another server uses it.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self.root, self.limit = root, limit
        self.database = root / "jobs.sqlite3"
        self.media, self.partial = root / "media", root / "partial"
        self.uploads = root / "uploads"
        try:
            # One by one: what mkdir makes on its way (parents) has the umask's rights.
            root.parent.mkdir(parents=True, exist_ok=True)
            for folder in (root, self.media, self.partial, self.uploads):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._lock = open(root / "lock", "a+b")  # noqa: SIM115 - held until close()
        except OSError as error:
            raise ValueError(
                describe_error(
                    "The media folder can't be used",
                    where=root,
                    expected="a folder that this user can make and write to",
                    found=error.strerror,
                    remedy="give another --media_path, or the rights to this one",
                )
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ValueError(
                describe_error(
                    "The media folder is in use",
                    where=root,
                    expected="one server for a folder",
                    found="another server that runs",
                    remedy=(
                        "stop that server, or give this one another folder (--media_path, "
                        "TRTLLM_MEDIA_STORAGE_PATH)"
                    ),
                )
            ) from error
        self._used = 0
        self._used_lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes of finished files and uploads."""
        return self._used

    def close(self) -> None:
        """Let another server use the folder."""
        self._lock.close()

    def recover(self, completed: Iterable[JobRecord]) -> list[JobRecord]:
        """Make the folder agree with the database, at start.

        Args:
            completed: The jobs that have files.

        Returns:
            Those of them whose files are missing or cut short.
        """
        for folder in (self.partial, self.uploads):
            for path in folder.iterdir():
                path.unlink()
        known: dict[str, int] = {}
        broken = []
        for record in completed:
            if all(_size(self.media / file.name) == file.size for file in record.files):
                known |= {file.name: file.size for file in record.files}
            else:
                broken.append(record)
        for path in self.media.iterdir():
            if path.name not in known:
                path.unlink()
        self._used = sum(known.values())
        return broken

    def check_room(self, size: int) -> None:
        """Raises StorageFullError when ``size`` more bytes don't fit now."""
        self._take(size)
        self._give_back(size)

    def _take(self, size: int) -> None:
        """Count ``size`` bytes as used, if they fit."""
        free = shutil.disk_usage(self.root).free - _SPARE_BYTES
        with self._used_lock:
            room = min(self.limit - self._used, free)
            if size <= room:
                self._used += size
                return
        raise StorageFullError(
            describe_error(
                "No room for more media",
                where="the media folder",
                expected=f"{size} bytes",
                found=f"{max(0, room)} bytes",
                remedy="delete jobs, or wait until some expire",
            )
        )

    def _give_back(self, size: int) -> None:
        with self._used_lock:
            self._used -= size

    def publish(self, names: Iterable[str]) -> list[StoredFile]:
        """Move finished files from ``partial`` to ``media``; all of them or none.

        Raises:
            StorageFullError: they don't fit the limit.
            ValueError: a file has another format than its name says.
            OSError: the disk fails.
        """
        names = list(names)
        files = [self._describe(name) for name in names]
        self._take(sum(file.size for file in files))
        try:
            for file in files:
                os.replace(self.partial / file.name, self.media / file.name)
            _sync(self.media)
        except OSError:
            self.remove(files)
            raise
        return files

    def _describe(self, name: str) -> StoredFile:
        path = self.partial / name
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        found = sniff(head)
        wanted = path.suffix.lstrip(".").replace("jpg", "jpeg")
        if found != wanted:
            raise ValueError(
                describe_error(
                    "An encoder wrote another format",
                    where=name,
                    expected=wanted,
                    found=found,
                    remedy="report this with the version of Pillow or PyAV that is installed",
                )
            )
        return StoredFile(name, size, CONTENT_TYPES[found])

    def remove(self, files: Iterable[StoredFile]) -> None:
        """Remove published files; one that is gone already is no error."""
        for file in files:
            (self.media / file.name).unlink(missing_ok=True)
            self._give_back(file.size)

    def remove_partial(self, id: str) -> None:
        """Remove whatever was being written for a job."""
        for path in self.partial.iterdir():
            # An encoder's own name is ".<name>.<random>.part" before it is <name>.
            if path.name.lstrip(".").startswith(id):
                path.unlink(missing_ok=True)

    def read_partial(self, names: Iterable[str]) -> list[bytes]:
        """Contents of files in ``partial``."""
        return [(self.partial / name).read_bytes() for name in names]

    def save_upload(self, name: str, source: BinaryIO, size: int) -> Path:
        """Keep a reference until its job has ended.

        Raises:
            StorageFullError: it doesn't fit the limit.
        """
        self._take(size)
        path = self.uploads / name
        try:
            with path.open("xb") as file:
                shutil.copyfileobj(source, file, 2**20)
        except BaseException:
            path.unlink(missing_ok=True)
            self._give_back(size)
            raise
        return path

    def remove_upload(self, path: Path) -> None:
        """Remove a kept reference."""
        size = _size(path)
        if size is not None:
            path.unlink()
            self._give_back(size)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _sync(folder: Path) -> None:
    """Put the names of a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
