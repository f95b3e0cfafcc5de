# SPDX-License-Identifier: Apache-2.0
"""Fuzz a server with the stub generator: schemathesis on its OpenAPI document, and a table.

``python benchmarks/serve_fuzz.py --out FILE.json`` sends 10,000 requests: those of
serve_malformed.py first, then generated ones, right and wrong in turns, to every operation. No
answer may be a 5xx but the documented 503, none may hang, each must be documented and in its
schema, wrong data must be refused, and the server must be ready afterwards. The exit code is 1 when
one of these doesn't hold.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from serve_malformed import CASES
from serve_process import ServerProcess

_TIMEOUT = 60.0
_CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
# Requests to an operation before the next one has its turn: with a body, and without.
_BODY_TURN, _TURN = 60, 8


class Fuzz:
    """One run.

    Args:
        url: Of the server.
        limit: Requests in all, at least those of the table.
    """

    def __init__(self, url: str, limit: int) -> None:
        self._url, self._limit = url, limit
        self._session = requests.Session()
        self.answers: Counter[str] = Counter()
        self.problems: list[str] = []
        self.count = 0
        self.slowest = 0.0

    def run(self) -> None:
        """Send all requests."""
        for case in CASES:
            self._note(case.problem(self._url))
            self.answers["table"] += 1
            self.count += 1
        schema = schemathesis.openapi.from_url(f"{self._url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        turn = 0
        while self.count < self._limit:
            turn += 1
            for operation in operations:
                modes = [GenerationMode.POSITIVE]
                # An id may be any text: only queries and bodies can be wrong.
                if operation.body or operation.query:
                    modes.append(GenerationMode.NEGATIVE)
                for mode in modes:
                    self._turn(operation, mode, turn)

    def _turn(self, operation: Any, mode: GenerationMode, seed: int) -> None:
        """Requests to one operation; a small space of inputs may hold fewer."""

        # Shrinking would send requests that nobody counts.
        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=_BODY_TURN if operation.body else _TURN,
            deadline=None,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            if self.count < self._limit:
                self._send(case)

        send()

    def _send(self, case: Any) -> None:
        self.count += 1
        started = time.perf_counter()
        name = f"{case.method} {case.operation.path}"
        try:
            response = case.call(session=self._session, timeout=_TIMEOUT)
        except requests.RequestException as error:
            self._note(f"{name}: {type(error).__name__} {error}")
            return
        self.slowest = max(self.slowest, time.perf_counter() - started)
        self.answers[f"{name} {response.status_code}"] += 1
        if response.status_code >= 500 and response.status_code != 503:
            self._note(f"{name}: {response.status_code} {response.content[:300]!r}")
        try:
            case.validate_response(response, checks=_CHECKS)
        except AssertionError as error:
            self._note(f"{name}: {error}")
        except BaseExceptionGroup as group:
            self._note(f"{name}: {[str(error) for error in group.exceptions]}")

    def _note(self, problem: str | None) -> None:
        if problem is not None:
            self.problems.append(problem[:1500])


def run(limit: int, media_path: Path) -> dict[str, Any]:
    """One run on a fresh server."""
    started = time.perf_counter()
    with ServerProcess(media_path, {"max_queue_size": 1000}, {"generate_seconds": 0.0}) as server:
        fuzz = Fuzz(server.url, limit)
        fuzz.run()
        health = server.health()
        code = server.stop()
    statuses = Counter(name.rpartition(" ")[2] for name in fuzz.answers.elements())
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "schemathesis": schemathesis.SCHEMATHESIS_VERSION,
        "requests": fuzz.count,
        "of_the_table": len(CASES),
        "seconds": round(time.perf_counter() - started, 1),
        "slowest_answer_s": round(fuzz.slowest, 2),
        "statuses": {name: count for name, count in sorted(statuses.items()) if name.isdigit()},
        "answers": dict(sorted(fuzz.answers.items())),
        "problems": fuzz.problems[:20],
        "health_afterwards": health,
        "exit_code": code,
        "holds": {
            "no undocumented answer, no hang": not fuzz.problems,
            "ready afterwards": health == "ready",
            "exit code 0": code == 0,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = run(arguments.requests, Path(folder))
    text = json.dumps(record, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return 0 if all(record["holds"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
