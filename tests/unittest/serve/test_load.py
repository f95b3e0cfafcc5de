# SPDX-License-Identifier: Apache-2.0
"""The short form of benchmarks/serve_load.py: everything but the times."""

import pytest
import serve_load


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return serve_load.run(20, 3.0, tmp_path_factory.mktemp("media"))


def test_every_job_ends_once_and_files_and_jobs_agree(record):
    assert record["holds"]["one final state, files and jobs agree"], record["problems"]
    assert record["ends"]["deleted"] > 0 and record["ends"]["completed"] > 0
    assert sum(record["ends"].values()) == record["jobs"] > 20


def test_memory_stays_flat(record):
    assert record["holds"]["memory growth <= 16 MiB"], record["memory_growth_mib"]


def problems(*states: str) -> list[str]:
    tally = serve_load.Tally()
    for state in states:
        tally.see("video_0", state)
    return tally.problems


@pytest.mark.parametrize(
    "states",
    [
        ("queued", "completed", "failed"),
        ("queued", "failed", "completed"),
        ("queued", "in_progress", "queued"),
        ("queued", "completed", "in_progress"),
        ("queued", "deleted", "completed"),
    ],
    ids=" ".join,
)
def test_a_job_that_went_back_or_had_a_second_end_would_be_noticed(states):
    assert problems(*states) == [f"video_0 went from {states[1]} to {states[2]}"]


def test_a_job_may_skip_states_that_nobody_saw_and_be_seen_twice_in_one():
    for end in ("completed", "failed"):
        assert not problems("queued", "queued", "in_progress", end, end, "deleted", "deleted")
    assert not problems("queued", "completed") and not problems("queued", "deleted")


def test_quantiles_and_growth():
    assert serve_load.quantile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert serve_load.quantile([3.0], 0.99) == 3.0
    memory = [{"server": float(n)} for n in (9, 9, 10, 10, 11, 11, 30, 30)]
    assert serve_load.growth(memory, "server") == 20.0
