# SPDX-License-Identifier: Apache-2.0
"""How a run ends: failures by name, skips by reason and number."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLE = """
import pytest

@pytest.mark.parametrize("case", range(30))
def test_elsewhere(case): pytest.skip("needs another machine")

@pytest.mark.skip(reason="needs a friend")
def test_together(): pass

@pytest.mark.xfail(reason="not yet")
def test_some_day(): raise AssertionError

def test_broken(): raise AssertionError("broken")
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]])
def test_skips_are_counted_by_reason_and_failures_named(tmp_path, workers):
    (tmp_path / "tests").mkdir()
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "tests" / "test_sample.py").write_text(SAMPLE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.lower().startswith("skipped")] == [
        "skipped 30: needs another machine",
        "skipped 1: needs a friend",
    ]
    assert "FAILED tests/test_sample.py::test_broken - AssertionError: broken" in lines
    assert lines[-1].startswith("1 failed, 31 skipped, 1 xfailed"), done.stdout
