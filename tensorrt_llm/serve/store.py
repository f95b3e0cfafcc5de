# SPDX-License-Identifier: Apache-2.0
"""The job database: SQLite in WAL mode, so that jobs survive the process, however it ends.

Every method blocks and may be called from any thread. A change is on disk when its method returns.
"""

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tensorrt_llm._utils import describe_error
from tensorrt_llm.serve.records import FINAL, JobRecord, StoredFile

_VERSION = 1
_COLUMNS = (
    "id",
    "kind",
    "status",
    "model",
    "prompt",
    "resolved",
    "created_at",
    "completed_at",
    "expires_at",
    "error",
    "files",
    "metrics",
)
_JSON_COLUMNS = ("resolved", "error", "files", "metrics")
# seq orders jobs of one moment, and is never used twice.
_SCHEMA = f"""
CREATE TABLE jobs (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  {", ".join(_COLUMNS[1:])}
);
CREATE INDEX jobs_by_expiry ON jobs (expires_at);
CREATE INDEX jobs_by_kind ON jobs (kind, seq);
PRAGMA user_version = {_VERSION};
"""


class JobStore:
    """The jobs of one media folder.

    Args:
        path: The database file, made if it isn't there.

    Raises:
        ValueError: the file is no such database, or one of another version.
    """

    def __init__(self, path: Path) -> None:
        self._write_lock, self._read_lock = threading.Lock(), threading.Lock()
        try:
            self._writer = _connect(path)
            self._prepare()
            self._reader = _connect(path)
        except sqlite3.DatabaseError as error:
            raise ValueError(
                describe_error(
                    "The job database can't be used",
                    where=path,
                    expected="an SQLite database of this server",
                    found=error,
                    remedy="move jobs.sqlite3 away, or give another --media_path",
                )
            ) from error

    def _prepare(self) -> None:
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._writer.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"version {version} instead of {_VERSION}")

    def close(self) -> None:
        """Close the database; what was written stays."""
        with self._read_lock, self._write_lock:
            self._reader.close()
            self._writer.close()

    def insert(self, record: JobRecord) -> None:
        """Add a job."""
        marks = ", ".join("?" * len(_COLUMNS))
        with self._transaction() as connection:
            connection.execute(
                f"INSERT INTO jobs ({', '.join(_COLUMNS)}) VALUES ({marks})", _row(record)
            )

    def update(self, record: JobRecord) -> bool:
        """Write a job's current values. False when it is no longer there."""
        assignments = ", ".join(f"{name} = ?" for name in _COLUMNS)
        with self._transaction() as connection:
            done = connection.execute(
                f"UPDATE jobs SET {assignments} WHERE id = ?", (*_row(record), record.id)
            )
        return done.rowcount == 1

    def delete(self, id: str) -> JobRecord | None:
        """Remove a job and return what it was; None when it isn't there."""
        with self._transaction() as connection:
            row = connection.execute(
                f"DELETE FROM jobs WHERE id = ? RETURNING {', '.join(_COLUMNS)}", (id,)
            ).fetchone()
        return row and _record(row)

    def get(self, id: str) -> JobRecord | None:
        """A job; None when it isn't there."""
        rows = self._select("WHERE id = ?", (id,))
        return rows[0] if rows else None

    def page(
        self, kind: str, *, after: str | None, limit: int, ascending: bool
    ) -> list[JobRecord] | None:
        """Jobs in the order of their creation.

        Args:
            kind: "video" or "image".
            after: Id of the job before the first one; None starts at the beginning.
            limit: Most jobs.
            ascending: Oldest first.

        Returns:
            The jobs; None when there is no job ``after``.
        """
        sign, order = (">", "ASC") if ascending else ("<", "DESC")
        condition, values = "", ()
        if after is not None:
            with self._read_lock:
                found = self._reader.execute(
                    "SELECT seq FROM jobs WHERE id = ? AND kind = ?", (after, kind)
                ).fetchone()
            if found is None:
                return None
            condition, values = f"AND seq {sign} ?", found
        return self._select(
            f"WHERE kind = ? {condition} ORDER BY seq {order} LIMIT ?", (kind, *values, limit)
        )

    def unfinished(self) -> list[JobRecord]:
        """Jobs that were neither completed nor failed."""
        return self._select(f"WHERE status NOT IN {FINAL}")

    def completed(self) -> list[JobRecord]:
        """Jobs that have files."""
        return self._select("WHERE status = 'completed'")

    def expired(self, now: float) -> list[str]:
        """Ids of jobs whose time is over at ``now``."""
        with self._read_lock:
            rows = self._reader.execute("SELECT id FROM jobs WHERE expires_at <= ?", (now,))
            return [id for (id,) in rows]

    def _select(self, tail: str, values: tuple = ()) -> list[JobRecord]:
        with self._read_lock:
            rows = self._reader.execute(f"SELECT {', '.join(_COLUMNS)} FROM jobs {tail}", values)
            return [_record(row) for row in rows]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._write_lock, self._writer:
            yield self._writer


def _connect(path: Path) -> sqlite3.Connection:
    # Prompts stand in it: for its owner alone, also in a folder that others may read. SQLite gives
    # its log the same rights.
    path.touch(mode=0o600)
    with suppress(PermissionError):  # somebody else's, who may have shared it on purpose
        path.chmod(0o600)
    connection = sqlite3.connect(path, check_same_thread=False, timeout=10)
    connection.execute("PRAGMA journal_mode = WAL")
    # An answer that tells of a job is sent after this much: it survives a loss of power too.
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _row(record: JobRecord) -> tuple:
    values = asdict(record)
    for name in _JSON_COLUMNS:
        values[name] = json.dumps(values[name])
    return tuple(values[name] for name in _COLUMNS)


def _record(row: tuple) -> JobRecord:
    values: dict[str, Any] = dict(zip(_COLUMNS, row, strict=True))
    for name in _JSON_COLUMNS:
        values[name] = json.loads(values[name])
    values["files"] = [StoredFile(**file) for file in values["files"]]
    return JobRecord(**values)
