# SPDX-License-Identifier: Apache-2.0
"""The goals of performance on one H200, and whether committed results meet them.

``GOALS`` has every number in one place. A line is a group of goals; ``evaluate`` judges all of them
and calls a goal without a result missing, which is not met. Results of another device don't count.

*Not slower* is decided on the samples of one run: A is not slower than B when A's median is not
above B's, or when it is at most 2 % above and the ranges of their samples overlap: that is noise.
The range is from the smallest to the largest sample; with ten samples or more, from the 10th to the
90th percentile, so that a single outlier does not widen it.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report_tables import RESULTS, Record, read_result, section

DEVICE = "H200"
# A ratio of medians up to here may be noise; in benchmarks/results a run differs from the next by
# 0.1 to 1 %.
NOISE = 1.02
FULL_SIZE = [720, 1280, 189]
MANY_SAMPLES = 10


@dataclass(frozen=True)
class Goal:
    """One number to reach.

    Attributes:
        line: The group it belongs to.
        what: What is measured.
        relation: How a value has to stand to the limit.
        limit: The limit.
    """

    line: int
    what: str
    relation: str
    limit: float

    def meets(self, value: float) -> bool:
        """Whether a finite value meets the goal."""
        compare = {
            "at least": value >= self.limit,
            "at most": value <= self.limit,
            "below": value < self.limit,
        }
        return math.isfinite(value) and compare[self.relation]


GOALS = {
    "swiglu": Goal(1, "two-input SwiGLU to FP8, of the copy bandwidth", "at least", 0.98),
    "swiglu_fused": Goal(1, "two-input SwiGLU, of the fused form's time", "at most", 1.0),
    "topology": Goal(2, "a step split, of the time fused", "at most", 1.0),
    "sharing": Goal(2, "a step with shared quantisation, of the time unshared", "at most", 1.0),
    "step_720p": Goal(3, "a step, of its sustained ceilings", "at most", 1.05),
    "peer_bf16": Goal(4, "speed with BF16 attention, of the peer's", "at least", 1.3),
    "peer_fp8": Goal(4, "speed with FP8 attention, of the peer's", "at least", 1.6),
    "peer_memory": Goal(4, "peak memory, of the peer's", "below", 1.0),
    # No more than a sign that both compute the same: with random weights, the roundings of 36
    # layers of FP8 add up. docs/source/measurements.md explains the difference.
    "peer_velocity": Goal(4, "velocities, relative L2 from the peer's", "below", 0.1),
    "step": Goal(5, "a step, of its sustained ceilings", "at most", 1.05),
    "breakdown": Goal(5, "kernel families in the table of where the time goes", "at least", 3),
    "phases": Goal(6, "phases of a whole request with their seconds", "at least", 4),
    "steps": Goal(6, "settled step of the first request, of its median", "at most", 1.02),
    "lifecycle": Goal(
        7, "latents after a cancelled and a failed request that differ", "at most", 0
    ),
}
# (kernel sizes of line 1), (linears, attention) of a step, (family, case) of lines 3 and 5.
SWIGLU_SHAPES = ([88320, 12288], [88320, 25600])
STEPS = (("w8a8", "bf16"), ("w8a8", "fp8"), ("w8a16", "bf16"))
FULL_CASE = ("nano", "720p")
OTHER_CASES = (("nano", "480p"), ("nano", "image"), ("super", "480p"))
REPEATS = 5
PHASES = ("text", "denoise", "decode", "mp4")
REQUEST_STEPS = 35


@dataclass(frozen=True)
class Finding:
    """One goal and what the results say about it; ``value`` None is missing."""

    goal: Goal
    subject: str
    value: float | None
    met: bool
    note: str = ""

    @property
    def line(self) -> int:
        return self.goal.line

    def __str__(self) -> str:
        verdict = "met    " if self.met else "MISSING" if self.value is None else "NOT MET"
        value = "no result" if self.value is None else f"{self.value:.4g}"
        text = f"line {self.line}  {verdict}  {self.subject}: {self.goal.what} {value}, "
        text += f"{self.goal.relation} {self.goal.limit:g}"
        return f"{text} ({self.note})" if self.note else text


def judge(name: str, subject: str, value: float | None, note: str = "") -> Finding:
    """Judge a value by the goal's number."""
    goal = GOALS[name]
    return Finding(goal, subject, value, value is not None and goal.meets(value), note)


def sample_range(samples: Sequence[float]) -> tuple[float, float]:
    """The range of samples that counts as their noise; see the module's docstring."""
    if len(samples) < MANY_SAMPLES:
        return min(samples), max(samples)
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def judge_not_slower(
    name: str, subject: str, ours: Sequence[float], other: Sequence[float], least: int = REPEATS
) -> Finding:
    """Judge the ratio of medians, with the tolerance of overlapping ranges."""
    goal = GOALS[name]
    if min(len(ours), len(other)) < least:
        return Finding(goal, subject, None, False, f"fewer than {least} samples of each")
    value = statistics.median(ours) / statistics.median(other)
    low, high = sample_range(ours)
    other_low, other_high = sample_range(other)
    overlap = low <= other_high and other_low <= high and value <= NOISE
    ranges = f"ranges {low:.5g} to {high:.5g} and {other_low:.5g} to {other_high:.5g}"
    note = f"{ranges}{', which overlap: noise' if overlap else ''}"
    return Finding(goal, subject, value, goal.meets(value) or overlap, note)


class Results:
    """The committed results of one folder, those of the right device alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, Record | None] = {}

    def rows(self, stem: str, name: str) -> list[dict[str, Any]]:
        """Rows of a section; none where the file is missing or of another device."""
        record = self.record(stem)
        return [] if record is None else section(record, name)

    def record(self, stem: str) -> Record | None:
        if stem not in self._read:
            record = read_result(stem, self._folder)
            right = record is not None and DEVICE in record["device"]
            self._read[stem] = record if right else None
        return self._read[stem]


def find(rows: list[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    """The rows that have all of these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in values.items())]


def line_1(results: Results) -> Iterator[Finding]:
    """SwiGLU as it ships, against the copy and against the fused form."""
    record = results.record("ops_h200")
    for shape in SWIGLU_SHAPES:
        subject = " x ".join(map(str, shape))
        rows = results.rows("ops_h200", "swiglu")
        two, fused = (
            find(rows, name=f"swiglu {form} -> float8_e4m3fn", shape=shape)
            for form in ("two inputs", "fused input")
        )
        table = {} if record is None else record.get("launch_table", {})
        shipped = [row for row in two if _launch(row) == table.get("torch.float8_e4m3fn")]
        # Op against op. Without rows of the ops, the launch that ships has to beat every launch
        # of the fused form that was tried.
        two = find(two, block=None) or shipped
        fused = find(fused, block=None) or fused
        ours = max(two, key=lambda row: row["median_ms"], default=None)
        best = min(fused, key=lambda row: row["median_ms"], default=None)
        yield judge("swiglu", subject, None if ours is None else ours["of_copy"])
        samples = [[] if row is None else row["samples_ms"] for row in (ours, best)]
        yield judge_not_slower("swiglu_fused", subject, *samples)


def _launch(row: dict[str, Any]) -> list[int] | None:
    """The launch parameters that a row tries; None for the op, which has its own."""
    return None if row.get("block") is None else [row["block"], row["num_warps"]]


def line_2(results: Results) -> Iterator[Finding]:
    """Split against fused, shared against unshared, wherever both were measured."""
    for name in ("topology", "sharing"):
        pairs = 0
        for family in ("nano", "super"):
            rows = results.rows(f"step_{family}_h200", "step")
            for other in find(rows, variant=name):
                same = {key: other[key] for key in ("case", "mode", "attention")}
                for base in find(rows, variant="base", **same):
                    pairs += 1
                    subject = f"{family} {other['case']} {other['mode']}"
                    yield judge_not_slower(name, subject, base["samples_s"], other["samples_s"])
        if not pairs:
            yield judge(name, "any case", None)


def step_findings(results: Results, name: str, family: str, case: str) -> Iterator[Finding]:
    """The fastest split, shared variant of each precision against its ceiling."""
    rows = results.rows(f"step_{family}_h200", "step")
    for mode, attention in STEPS:
        subject = f"{family} {case} {mode}, {attention} attention"
        found = find(
            rows, case=case, mode=mode, attention=attention, topology="split", sharing=True
        )
        best = min(found, key=lambda row: row["of_ceiling"], default=None)
        if best is None:
            yield judge(name, subject, None)
        else:
            yield judge(name, subject, best["of_ceiling"], f"variant {best['variant']}")


def line_3(results: Results) -> Iterator[Finding]:
    """The large video of Nano."""
    yield from step_findings(results, "step_720p", *FULL_CASE)


def line_4(results: Results) -> Iterator[Finding]:
    """Ours beside the peer."""
    rows = results.rows("peer_nano_h200", "peer")
    peer = next((row for row in rows if not row["name"].startswith("ours")), None)
    timed = [row for row in rows if row["name"].startswith("ours") and "speedup" in row]
    for attention in ("bf16", "fp8"):
        ours = max(find(timed, attention=attention), key=lambda r: r["speedup"], default=None)
        subject = f"{attention} attention"
        if ours is None or peer is None or ours["size"] != FULL_SIZE:
            for name in (f"peer_{attention}", "peer_memory", "peer_velocity"):
                yield judge(name, subject, None)
            continue
        yield judge(f"peer_{attention}", subject, ours["speedup"], ours["name"])
        yield judge("peer_memory", subject, ours["peak_gib"] / peer["peak_gib"])
        yield judge("peer_velocity", subject, ours["velocity_error"])


def line_5(results: Results) -> Iterator[Finding]:
    """The other sizes, and for every size where the time goes."""
    for family, case in OTHER_CASES:
        yield from step_findings(results, "step", family, case)
    for family, case in (FULL_CASE, *OTHER_CASES):
        rows = results.rows(f"step_{family}_h200", "breakdown")
        for mode, attention in STEPS:
            found = find(rows, case=case, mode=mode, attention=attention)
            judged = sum("of_ceiling" in row for row in found)
            subject = f"{family} {case} {mode}, {attention} attention"
            yield judge("breakdown", subject, judged if found else None)


def line_6(results: Results) -> Iterator[Finding]:
    """A whole default request of Nano."""
    found = find(results.rows("request_nano_h200", "request"), size=FULL_SIZE, steps=REQUEST_STEPS)
    row = next((row for row in found if row["first_after_warm_up"]), None)
    subject = f"nano 720p, {REQUEST_STEPS} steps"
    if row is None:
        yield judge("phases", subject, None)
        yield judge("steps", subject, None)
        return
    known = [name for name in PHASES if name in row["phases_s"]]
    missing = [name for name in PHASES if name not in known]
    yield judge("phases", subject, len(known), f"without {', '.join(missing)}" if missing else "")
    yield judge("steps", subject, row["slowest_of_median"])


def line_7(results: Results) -> Iterator[Finding]:
    """A cancelled and a failed request leave no trace."""
    found = find(results.rows("request_nano_h200", "lifecycle"), size=FULL_SIZE)
    row = next((row for row in found if {"cancelled", "failed"} <= row["after"].keys()), None)
    if row is None:
        yield judge("lifecycle", "nano 720p", None)
        return
    before = row["before"]["precision"]
    changed = [end for end, state in row["after"].items() if state["precision"] != before]
    differ = int(not row["bit_identical"]) + len(changed)
    note = f"precision changed after {', '.join(changed)}" if changed else ""
    yield judge("lifecycle", "nano 720p", differ, note)


LINES: tuple[Callable[[Results], Iterator[Finding]], ...] = (
    *(line_1, line_2, line_3, line_4, line_5, line_6, line_7),
)


def evaluate(folder: Path = RESULTS) -> list[Finding]:
    """Judge every goal by the results of a folder, in the order of the lines."""
    results = Results(folder)
    return [finding for line in LINES for finding in line(results)]
