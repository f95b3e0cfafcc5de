# SPDX-License-Identifier: Apache-2.0
"""Counters of a server, in Prometheus' text format."""

from collections import Counter
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("loading", "ready", "draining", "failed")
_METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH")

# (labels, value) pairs of one metric.
Samples = Iterable[tuple[Mapping[str, str], float]]


class Metrics:
    """What has been counted since the start. Only the event loop touches it."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.created: Counter[str] = Counter()
        self.ended: Counter[tuple[str, str]] = Counter()
        self.rejected = 0
        self.seconds: Counter[str] = Counter()
        self.observed = 0

    def count_request(self, method: str, route: str, status: int) -> None:
        """Count an answer; ``route`` is the route's pattern, which clients can't choose."""
        self.requests[method if method in _METHODS else "other", route, status] += 1

    def observe(self, phases: Mapping[str, float]) -> None:
        """Add the seconds of a completed job by phase."""
        self.observed += 1
        self.seconds.update(phases)

    def text(
        self, *, state: str, queued: int, running: int, media_bytes: int, restarts: int
    ) -> str:
        """All metrics.

        Args:
            state: Of the server.
            queued: Requests that wait.
            running: Jobs that the worker has in hand.
            media_bytes: Bytes of the media folder in use.
            restarts: Workers that died and were replaced.
        """
        requests = (
            ({"method": method, "route": route, "status": str(status)}, count)
            for (method, route, status), count in sorted(self.requests.items())
        )
        ended = (
            ({"kind": kind, "outcome": outcome}, count)
            for (kind, outcome), count in sorted(self.ended.items())
        )
        created = (({"kind": kind}, count) for kind, count in sorted(self.created.items()))
        seconds = (({"phase": name}, value) for name, value in sorted(self.seconds.items()))
        states = (({"state": name}, float(name == state)) for name in _STATES)
        return "".join(
            [
                _metric("state", "gauge", "1 for the state the server is in.", states),
                _metric("queued_requests", "gauge", "Requests that wait.", [({}, queued)]),
                _metric("running_jobs", "gauge", "Jobs in the worker.", [({}, running)]),
                _metric("media_bytes", "gauge", "Bytes of stored media.", [({}, media_bytes)]),
                _metric("worker_restarts_total", "counter", "Workers replaced.", [({}, restarts)]),
                _metric("jobs_created_total", "counter", "Jobs queued.", created),
                _metric("jobs_ended_total", "counter", "Jobs by their end.", ended),
                _metric("queue_full_total", "counter", "429 answers.", [({}, self.rejected)]),
                _metric("phase_seconds_total", "counter", "Seconds by phase.", seconds),
                _metric("timed_jobs_total", "counter", "Jobs in them.", [({}, self.observed)]),
                _metric("http_requests_total", "counter", "HTTP answers.", requests),
            ]
        )


def _metric(name: str, kind: str, help: str, samples: Samples) -> str:
    full = f"trtllm_serve_{name}"
    lines = [f"# HELP {full} {help}", f"# TYPE {full} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
        lines.append(f"{full}{{{inside}}} {value:.15g}" if inside else f"{full} {value:.15g}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
