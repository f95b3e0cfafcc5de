# SPDX-License-Identifier: Apache-2.0
"""Results of the benchmarks' short forms, each run once."""

import json
from unittest import mock

import pytest

from benchmarks import common


@pytest.fixture(scope="session")
def short_form(tmp_path_factory):
    """Run a benchmark's ``main`` at its small size on the CPU; give the file that it writes."""
    folder = tmp_path_factory.mktemp("benchmarks")
    done = {}

    def run(main, *arguments):
        key = (main.__module__, arguments)
        if key not in done:
            out = folder / f"{main.__module__}{len(done)}.json"
            size = ("--family", "small", "--device", "cpu", "--settle", "0", "--out", str(out))
            # Samples of their full length would say no more on a CPU.
            with mock.patch.object(common, "SAMPLE_SECONDS", 0.05):
                main([*size, *arguments])
            done[key] = json.loads(out.read_text(encoding="utf-8"))
        return done[key]

    return run
