# SPDX-License-Identifier: Apache-2.0
"""Samples are taken in turns, settled, and per pass."""

import itertools

import pytest
import torch

from benchmarks import common

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A host clock that stands still unless told to go on."""

    class Time:
        now = 0.0

        def spend(self, seconds):
            self.now += seconds

    time = Time()
    monkeypatch.setattr(common.time, "perf_counter", lambda: time.now)
    return time


def spending(clock, calls, name, seconds):
    def run(marks, count):
        calls.append((name, count))
        marks.mark(None)
        clock.spend(seconds * count)
        marks.mark("step")

    return run


def test_runs_take_turns_and_the_first_place_rotates(clock):
    calls = []
    runs = {name: spending(clock, calls, name, 1.0) for name in "abc"}
    samples, states = common.interleave(CPU, runs, 3, 0.0)
    assert "".join(name for name, _ in calls) == "abc" + "abc" + "bca" + "cab"
    assert samples == {name: [{"step": 1.0}] * 3 for name in "abc"}
    assert states == {name: {} for name in "abc"}


def test_untimed_rounds_fill_the_settling_time(clock):
    calls = []
    runs = {name: spending(clock, calls, name, 1.0) for name in "ab"}
    common.interleave(CPU, runs, 1, 10.0)
    # One round to see how long a pass is, and on to ten seconds; then the samples.
    assert len(calls) == 10 + 2


def test_a_short_pass_is_repeated_within_a_sample_and_divided(clock):
    calls = []
    runs = {"short": spending(clock, calls, "short", 0.05)}
    samples, _ = common.interleave(CPU, runs, 2, 0.0)
    # Each sample has as many passes before it that no clock counts.
    assert [count for _, count in calls] == [1, *[10] * 4]
    assert samples["short"] == [{"step": pytest.approx(0.05)}] * 2


def test_a_clock_adds_up_by_label_and_leaves_gaps_out(clock):
    marks = common.Clock(CPU)
    for label, seconds in itertools.product(("a", None, "b"), (1.0, 2.0)):
        clock.spend(seconds)
        marks.mark(label)
    assert marks.totals() == {"a": 3.0, "b": 3.0}
    assert [label for label, _ in marks.intervals()] == ["a", "a", "b", "b"]


def test_calls_are_timed_one_by_one_after_a_warm_up(clock):
    counts = dict.fromkeys("xy", 0)

    def call(name, seconds):
        def run():
            counts[name] += 1
            clock.spend(seconds)

        return run

    samples = common.time_calls(CPU, {"x": call("x", 1e-3), "y": call("y", 2e-3)}, rounds=3)
    assert samples == {"x": [pytest.approx(1.0)] * 3, "y": [pytest.approx(2.0)] * 3}
    assert counts == {"x": 5, "y": 5}
