# SPDX-License-Identifier: Apache-2.0
"""Run the tests of one GPU list and record every outcome with the device and the versions.

``python benchmarks/gpu_tests.py --list l0_h200 --out benchmarks/results/gpu_tests_h200.json``

CI has no GPU, so this file is how a committed result says what was proven where. The shapes of a
case are part of its test id. The exit code is pytest's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent


def run_list(name: str, report: Path, workers: int) -> int:
    """Run the gpu-marked tests of a list; pytest writes its JUnit report to ``report``."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--test-list", name]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "loadfile"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def read_outcomes(report: Path) -> list[dict]:
    """Test id, outcome, seconds and, where it did not pass, the reason."""
    outcomes = []
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((c for c in case if c.tag in {"failure", "error", "skipped"}), None)
        outcome = {
            "test": f"{case.get('classname')}::{case.get('name')}",
            "outcome": "passed" if problem is None else problem.tag,
            "seconds": float(case.get("time", 0)),
        }
        if problem is not None:
            outcome["reason"] = (problem.get("message") or "")[:400]
        outcomes.append(outcome)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", required=True, help="name of a list, such as l0_h200")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--workers", type=int, default=1, help="test processes on the one GPU")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        code = run_list(arguments.list, report, arguments.workers)
        outcomes = read_outcomes(report)
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[outcome["outcome"]] = counts.get(outcome["outcome"], 0) + 1
    record = {
        "list": arguments.list,
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "exit_code": code,
        "counts": counts,
        "tests": outcomes,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{arguments.out}: {counts}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
