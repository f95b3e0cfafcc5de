# SPDX-License-Identifier: Apache-2.0
"""The benchmark beside the peer in short form: both sides, their memory, and their velocities."""

import pytest

from benchmarks import peer_h200
from benchmarks.goals import find
from benchmarks.report_tables import TABLES

pytest.importorskip("modelopt", reason="the peer needs nvidia-modelopt")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:modelopt")


@pytest.fixture
def record(short_form):
    return short_form(peer_h200.main, "--case", "small", "--repeats", "2")


def test_both_sides_are_timed_and_compared(record):
    peer, ours = find(record["rows"], section="peer")
    assert (peer["name"], ours["name"]) == (peer_h200.PEER, "ours, VANILLA")
    assert len(peer["samples_s"]) == len(ours["samples_s"]) == 2
    assert peer["speedup"] == 1.0
    assert ours["speedup"] == pytest.approx(peer["median_s"] / ours["median_s"])
    # The same computation in other roundings.
    assert peer["velocity_error"] == 0.0 and 0.0 < ours["velocity_error"] < 0.1


def test_backends_that_are_not_there_are_recorded(record):
    skipped = {row["what"]: row["reason"] for row in find(record["rows"], section="skipped")}
    assert set(skipped) == {"ours with FA3", "ours with FA3_FP8"}
    assert all("Hopper" in reason for reason in skipped.values())


def test_the_table_has_a_line_for_each_side(record):
    rows = TABLES["peer"].rows(record)
    assert [row[0] for row in rows[1:]] == [peer_h200.PEER, "ours, VANILLA"]
