# SPDX-License-Identifier: Apache-2.0
"""``TLLM_LOG_LEVEL``: which names it takes, and that no value of it stops an import."""

import logging
import os
import subprocess
import sys

import pytest

from tensorrt_llm.logger import level_of

IMPORT = "import logging, tensorrt_llm.logger; print(logging.getLogger('tensorrt_llm').level)"


def imported_with(level: str) -> tuple[int, str]:
    """Level and stderr of a process that imports the logger."""
    environment = os.environ | {"TLLM_LOG_LEVEL": level}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("internal_error", logging.CRITICAL),
        ("error", logging.ERROR),
        ("warning", logging.WARNING),
        ("info", logging.INFO),
        ("verbose", logging.DEBUG),
        ("debug", logging.DEBUG),
        ("critical", logging.CRITICAL),
        ("WARN", logging.WARNING),
        ("Verbose", logging.DEBUG),
        (" INFO ", logging.INFO),
    ],
)
def test_upstreams_names_and_pythons_are_levels_in_any_case(name, level):
    assert level_of(name) == level


@pytest.mark.parametrize("name", ["loud", "10", "verbose,info"])
def test_another_name_is_no_level(name):
    assert level_of(name) is None


def test_an_import_takes_upstreams_level_without_a_word():
    assert imported_with("verbose") == (logging.DEBUG, "")


def test_an_unknown_level_is_told_once_with_the_valid_ones_and_the_default_stays():
    level, told = imported_with("loud")
    assert level == imported_with("")[0] == logging.NOTSET
    assert told.count("\n") == 1 and "TLLM_LOG_LEVEL" in told and "'loud'" in told
    for name in ("verbose", "info", "warning", "error", "internal_error", "debug", "critical"):
        assert name in told
