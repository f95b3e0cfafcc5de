# SPDX-License-Identifier: Apache-2.0
"""The option ``--test-list``: it runs what the list names, and refuses what is not there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import read_test_list

REPOSITORY = Path(__file__).resolve().parents[3]
TEST_DB = Path("tests/integration/test_lists/test-db")
SAMPLE = """
import pytest

def test_first(): pass

@pytest.mark.parametrize("case", ["one", "two"])
def test_second(case): pass

class TestGroup:
    def test_inner(self): pass

@pytest.mark.gpu
def test_on_gpu(): raise AssertionError("ran")
"""


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def write_list(project: Path, *tests: str) -> None:
    lines = ["mine:", "- condition: {}", "  tests:", *(f"  - {test}" for test in tests)]
    (project / TEST_DB / "mine.yml").write_text("\n".join(lines) + "\n")


@pytest.fixture
def project(tmp_path):
    """A checkout in small: our own conftest and configuration, one test module, one list."""
    (tmp_path / TEST_DB).mkdir(parents=True)
    (tmp_path / "tests/unittest").mkdir()
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "tests/unittest/test_sample.py").write_text(SAMPLE)
    return tmp_path


def test_list_runs_exactly_the_named_tests(project):
    sample = "unittest/test_sample.py"
    write_list(project, f"{sample}::test_second[two]", f"{sample}::TestGroup")
    code, output = run_pytest(project, "--test-list", "mine", "-v")
    assert code == 0, output
    assert "2 passed" in output
    assert "test_first" not in output and "one" not in output


def test_list_may_name_a_file_or_a_folder_and_gpu_tests_skip_with_the_reason(project):
    import torch

    if torch.cuda.is_available():
        pytest.skip("shows what happens on a machine without CUDA")
    write_list(project, "unittest")
    code, output = run_pytest(project, "--test-list=" + str(TEST_DB / "mine.yml"))
    assert code == 0, output
    assert "4 passed, 1 skipped" in output
    assert "needs a CUDA device" in output


@pytest.mark.parametrize(
    "names",
    [
        ("test_that_is_not_there.py", "no_such_folder"),
        (
            "test_sample.py::test_no_such_function",
            "test_sample.py::TestGroup::test_no_such_method",
            "test_sample.py::test_second[no_such_case]",
        ),
    ],
    ids=["files", "tests"],
)
def test_list_that_names_missing_tests_fails_with_each_name_and_runs_nothing(project, names):
    listed = [f"unittest/{name}" for name in ("test_sample.py::test_first", *names)]
    write_list(project, *listed)
    code, output = run_pytest(project, "--test-list", "mine")
    assert code == pytest.ExitCode.USAGE_ERROR, output
    assert "passed" not in output
    # pytest leaves the case in brackets out of its message.
    assert all(name.partition("[")[0] in output for name in listed[1:]), output
    assert f"{listed[0]}\n" not in output


def test_list_in_several_processes_runs_the_same_tests_and_fails_for_a_missing_one(project):
    # pytest-xdist keeps the workers' usage error to itself: the exit status is "no tests ran".
    sample = "unittest/test_sample.py"
    write_list(project, f"{sample}::test_first", f"{sample}::test_no_such_function")
    code, output = run_pytest(project, "--test-list", "mine", "-n", "1")
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED, output
    write_list(project, f"{sample}::test_first")
    code, output = run_pytest(project, "--test-list", "mine", "-n", "1")
    assert code == 0 and "1 passed" in output, output


def test_unknown_list_is_refused_with_the_known_names(project):
    write_list(project, "unittest")
    code, output = run_pytest(project, "--test-list", "no_such_list")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "the lists here are: mine" in output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("other: []\n", "one mapping key 'mine'"),
        ("[]\n", "one mapping key 'mine'"),
        ("mine: []\n", "names no test"),
        ("mine:\n- tests: [unittest]\n", "exactly 'condition' and 'tests'"),
        ("mine:\n- {condition: {}, tests: [unittest, unittest]}\n", "more than once"),
    ],
)
def test_malformed_list_is_refused(tmp_path, content, message):
    path = tmp_path / "mine.yml"
    path.write_text(content)
    with pytest.raises(pytest.UsageError, match=message):
        read_test_list(path)


def test_list_and_explicit_tests_together_are_refused(project):
    write_list(project, "unittest")
    code, output = run_pytest(project, "--test-list", "mine", "tests/unittest/test_sample.py")
    assert code == pytest.ExitCode.USAGE_ERROR, output
    assert "give no files or ids beside it" in output


def collected(*arguments: str) -> list[str]:
    code, output = run_pytest(REPOSITORY, "--collect-only", *arguments)
    assert code == 0, output
    return sorted(line for line in output.splitlines() if "::" in line)


def test_cpu_list_names_only_existing_tests():
    assert collected("--test-list", "l0_cpu")


@pytest.fixture(scope="module")
def gpu_tests():
    return collected("-m", "gpu")


@pytest.mark.parametrize("name", ["l0_h200", "l0_b200"])
def test_gpu_list_names_only_existing_tests_and_every_gpu_test(name, gpu_tests):
    assert gpu_tests
    assert collected("-m", "gpu", "--test-list", name) == gpu_tests


def test_no_list_is_left_out_of_these_tests():
    lists = {path.stem for path in (REPOSITORY / TEST_DB).iterdir()}
    assert lists == {"l0_cpu", "l0_h200", "l0_b200"}
