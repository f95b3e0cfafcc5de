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


def test_a_second_final_state_would_be_noticed():
    tally = serve_load.Tally()
    for state in ("queued", "completed", "failed"):
        tally.see("video_0", state)
    assert tally.problems == ["video_0 went from completed to failed"]


def test_quantiles_and_growth():
    assert serve_load.quantile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert serve_load.quantile([3.0], 0.99) == 3.0
    memory = [{"server": float(n)} for n in (9, 9, 10, 10, 11, 11, 30, 30)]
    assert serve_load.growth(memory, "server") == 20.0
