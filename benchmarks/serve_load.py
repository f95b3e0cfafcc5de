# SPDX-License-Identifier: Apache-2.0
"""Load on a server with the stub generator: clients that create, poll, cancel, download, delete.

``python benchmarks/serve_load.py --out FILE.json``: 200 clients, two minutes.

Checks that every job goes forward to exactly one final state, that no file is without its job and
no job without its file, that status answers within 100 ms at the 99th percentile while generation
and encoding run, and that memory stays flat. The exit code is 1 when one of them doesn't hold.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sqlite3
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serve_client import Connection
from serve_process import ServerProcess

P99_LIMIT_MS = 100.0
# Growth of the resident memory over the second half of a run.
MEMORY_LIMIT_MIB = 16.0
_POLL_SECONDS = 0.5
_FINAL = ("completed", "failed")
# How far a job has come: it goes forward only, and ends once.
_ORDER = {"queued": 0, "in_progress": 1, "completed": 2, "failed": 2, "deleted": 3}
_IDLE_SECONDS = 60.0


@dataclass
class Tally:
    """What the clients saw.

    Attributes:
        status_seconds: Time of each GET of a job.
        answers: By "METHOD status".
        seen: Job id to its states in the order seen, without repetition; "deleted" at the end.
        problems: What should never happen.
        memory: Resident MiB of server and worker, once a second.
    """

    status_seconds: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    seen: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)

    def see(self, job: str, state: str) -> None:
        """Note a state, and what is wrong about it."""
        states = self.seen.setdefault(job, [])
        if states and states[-1] == state:
            return
        if states and _ORDER[state] <= _ORDER[states[-1]]:
            self.problems.append(f"{job} went from {states[-1]} to {state}")
        states.append(state)


class Client:
    """One client: a job after another until the time is over."""

    def __init__(self, url: str, tally: Tally, seed: int) -> None:
        self._connection, self._second = Connection(url), Connection(url)
        self._tally, self._random = tally, random.Random(seed)

    async def run(self, until: float) -> None:
        """Work until the loop's time is ``until``."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._random.uniform(0, 1))
        while loop.time() < until:
            job = await self._create()
            if job is None:
                continue
            if self._random.random() < 0.3:
                await asyncio.sleep(self._random.uniform(0, 2))
                await self._delete(job)
                continue
            if await self._poll(job) != "completed":
                continue
            await self._download(job)
            if self._random.random() < 0.7:
                await self._delete(job)
        self._connection.close()
        self._second.close()

    async def _request(self, method: str, path: str, body: Any = None):
        answer = await self._connection.request(method, path, body)
        self._tally.answers[f"{method} {answer.status}"] += 1
        return answer

    async def _create(self) -> str | None:
        width = self._random.choice((64, 96, 128))
        body = {
            "prompt": "A robot arm folds a towel.",
            "size": f"{width}x64",
            "num_frames": 5,
            "num_inference_steps": 8,
        }
        answer = await self._request("POST", "/v1/videos", body)
        if answer.status == 202:
            job = answer.json()["id"]
            self._tally.see(job, answer.json()["status"])
            return job
        if answer.status == 429:
            await asyncio.sleep(int(answer.headers["retry-after"]) * self._random.uniform(0.5, 1.5))
        else:
            self._tally.problems.append(f"POST: {answer.status} {answer.body[:200]!r}")
            await asyncio.sleep(1)
        return None

    async def _poll(self, job: str) -> str:
        while True:
            answer = await self._request("GET", f"/v1/videos/{job}")
            self._tally.status_seconds.append(answer.seconds)
            if answer.status != 200:
                self._tally.problems.append(f"{job}: {answer.status} while it is polled")
                return "lost"
            state = answer.json()["status"]
            self._tally.see(job, state)
            if state in _FINAL:
                return state
            await asyncio.sleep(_POLL_SECONDS * self._random.uniform(0.5, 1.5))

    async def _download(self, job: str) -> None:
        answer = await self._request("GET", f"/v1/videos/{job}/content")
        if answer.status != 200 or answer.body[4:8] != b"ftyp":
            self._tally.problems.append(f"{job}: content {answer.status}")

    async def _delete(self, job: str) -> None:
        """Twice at one moment: one of the two succeeds."""
        answers = await asyncio.gather(
            *(c.request("DELETE", f"/v1/videos/{job}") for c in (self._connection, self._second))
        )
        statuses = sorted(answer.status for answer in answers)
        for status in statuses:
            self._tally.answers[f"DELETE {status}"] += 1
        if statuses != [200, 404]:
            self._tally.problems.append(f"{job}: two deletions gave {statuses}")
        self._tally.see(job, "deleted")
        gone = await self._request("GET", f"/v1/videos/{job}")
        if gone.status != 404:
            self._tally.problems.append(f"{job}: {gone.status} after its deletion")


async def _watch_memory(server: ServerProcess, tally: Tally) -> None:
    while True:
        tally.memory.append(server.resident_mib())
        await asyncio.sleep(1)


async def load(server: ServerProcess, clients: int, seconds: float) -> Tally:
    """Run the clients, and wait until the server has nothing more to do."""
    tally = Tally()
    loop = asyncio.get_running_loop()
    watch = loop.create_task(_watch_memory(server, tally))
    until = loop.time() + seconds
    await asyncio.gather(*(Client(server.url, tally, seed).run(until) for seed in range(clients)))
    watch.cancel()
    await _wait_until_idle(server.url)
    return tally


async def _wait_until_idle(url: str) -> None:
    connection = Connection(url)
    async with asyncio.timeout(_IDLE_SECONDS):
        while True:
            counts = read_metrics((await connection.request("GET", "/metrics")).body)
            if counts["queued_requests"] == counts["running_jobs"] == 0:
                connection.close()
                return
            await asyncio.sleep(0.2)


def read_metrics(body: bytes) -> Counter[str]:
    """Prometheus' text as numbers; labelled metrics by name and labels."""
    counts: Counter[str] = Counter()
    for line in body.decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            counts[name.removeprefix("trtllm_serve_")] = float(value)
    return counts


async def check_end(server: ServerProcess, media_path: Path, tally: Tally) -> dict[str, int]:
    """Compare what the clients saw with the server, the database and the folder."""
    connection = Connection(server.url)
    ends: Counter[str] = Counter()
    kept = set()
    for job, states in tally.seen.items():
        answer = await connection.request("GET", f"/v1/videos/{job}")
        deleted = states[-1] == "deleted"
        if (answer.status == 404) != deleted:
            tally.problems.append(f"{job}: {answer.status}, seen {states}")
            continue
        end = "deleted" if deleted else answer.json()["status"]
        tally.see(job, end)
        ends[end] += 1
        if end == "completed":
            kept.add(job)
        elif end not in ("deleted", "failed"):
            tally.problems.append(f"{job} has no final state: {end}")
    counts = read_metrics((await connection.request("GET", "/metrics")).body)
    connection.close()
    ended = sum(value for name, value in counts.items() if name.startswith("jobs_ended_total"))
    created = counts['jobs_created_total{kind="video"}']
    if not len(tally.seen) == created == ended:
        tally.problems.append(f"seen {len(tally.seen)}, created {created}, ended {ended}")
    with sqlite3.connect(f"file:{media_path}/jobs.sqlite3?mode=ro", uri=True) as store:
        rows = {id for (id,) in store.execute("SELECT id FROM jobs WHERE status = 'completed'")}
    files = {path.stem for path in (media_path / "media").iterdir()}
    if not kept == rows == files:
        tally.problems.append(
            f"completed for clients {len(kept)}, in the database {len(rows)}, files {len(files)}"
        )
    left = [p.name for name in ("partial", "uploads") for p in (media_path / name).iterdir()]
    if left:
        tally.problems.append(f"left over: {left[:5]}")
    return dict(ends)


def growth(memory: list[dict[str, float]], name: str) -> float:
    """MiB by which the last quarter's median lies above that of the second quarter."""
    values = [sample[name] for sample in memory]
    quarter = max(1, len(values) // 4)
    return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])


def quantile(values: list[float], share: float) -> float:
    """The smallest value that ``share`` of all don't exceed."""
    return sorted(values)[max(0, -(-int(len(values) * share * 1000) // 1000) - 1)]


def report(tally: Tally, ends: dict[str, int], clients: int, seconds: float) -> dict[str, Any]:
    """All results, with a verdict of each claim."""
    p99 = 1000 * quantile(tally.status_seconds, 0.99)
    grown = {name: round(growth(tally.memory, name), 1) for name in ("server", "worker")}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, Python "
        f"{platform.python_version()}; server, worker and clients share them",
        "clients": clients,
        "seconds": seconds,
        "jobs": len(tally.seen),
        "ends": ends,
        "answers": dict(sorted(tally.answers.items())),
        "status_requests": len(tally.status_seconds),
        "status_ms": {
            "median": round(1000 * statistics.median(tally.status_seconds), 2),
            "p99": round(p99, 2),
            "max": round(1000 * max(tally.status_seconds), 2),
        },
        "memory_mib_first_and_last": [tally.memory[0], tally.memory[-1]],
        "memory_growth_mib": grown,
        "problems": tally.problems[:20],
        "holds": {
            "one final state, files and jobs agree": not tally.problems,
            f"status p99 <= {P99_LIMIT_MS:g} ms": p99 <= P99_LIMIT_MS,
            f"memory growth <= {MEMORY_LIMIT_MIB:g} MiB": max(grown.values()) <= MEMORY_LIMIT_MIB,
        },
    }


def run(clients: int, seconds: float, media_path: Path) -> dict[str, Any]:
    """One run on a fresh server."""

    async def both(server: ServerProcess) -> tuple[Tally, dict[str, int]]:
        tally = await load(server, clients, seconds)
        return tally, await check_end(server, media_path, tally)

    settings = {"max_queue_size": 100}
    with ServerProcess(media_path, settings, {"generate_seconds": 0.05}) as server:
        tally, ends = asyncio.run(both(server))
    return report(tally, ends, clients, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = run(arguments.clients, arguments.seconds, Path(folder))
    text = json.dumps(record, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return 0 if all(record["holds"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
