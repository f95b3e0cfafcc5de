# SPDX-License-Identifier: Apache-2.0
"""What every test sees: GPU skips, the shared folder, and the option that runs one test list.

A run ends with its failures; skipped tests are counted, a line for each reason.

``pytest --test-list l0_cpu`` runs exactly the tests that
``tests/integration/test_lists/test-db/l0_cpu.yml`` names; ``--test-list=PATH.yml`` takes a list
from elsewhere (with ``=``: pytest would take a path of its own for a place to find tests).
A list that names a file or a test that does not exist is a usage error, never a smaller run.
"""

from collections import Counter
from pathlib import Path

import pytest
import yaml

TESTS = Path(__file__).resolve().parent
TEST_DB = TESTS / "integration" / "test_lists" / "test-db"
SHARED = TESTS.parent.parent / "shared"


def read_test_list(path: Path) -> list[str]:
    """Read the test ids of a list, in order.

    The file maps the list's name (that of the file) to blocks; a block has a ``condition`` (a
    mapping that says which machine the block is for) and ``tests``, pytest ids relative to
    ``tests/``: a folder, a file, or ``file::test``.

    Raises:
        pytest.UsageError: the file is missing, has another shape, names no test, names a test
            twice, or names a file that does not exist.
    """
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in TEST_DB.glob("*.yml")))
        raise pytest.UsageError(f"no test list {path}; the lists here are: {known}")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or set(content) - {"version"} != {path.stem}:
        raise pytest.UsageError(f"{path}: expected one mapping key '{path.stem}' (and 'version')")
    names: list[str] = []
    for block in content[path.stem] or []:
        if not isinstance(block, dict) or set(block) != {"condition", "tests"}:
            raise pytest.UsageError(f"{path}: a block has exactly 'condition' and 'tests': {block}")
        names += block["tests"] or []
    if not names:
        raise pytest.UsageError(f"{path} names no test")
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise pytest.UsageError(f"{path} names more than once: {', '.join(duplicates)}")
    if missing := [name for name in names if not (TESTS / name.split("::")[0]).exists()]:
        raise pytest.UsageError(f"{path} names what is not there: {', '.join(missing)}")
    return names


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--test-list",
        metavar="NAME",
        help="run exactly the tests of tests/integration/test_lists/test-db/NAME.yml, or of the "
        "list at PATH.yml (--test-list=PATH.yml)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--test-list")
    if name is None:
        return
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        raise pytest.UsageError("--test-list chooses the tests: give no files or ids beside it")
    path = Path(name) if name.endswith(".yml") else TEST_DB / f"{name}.yml"
    # From here pytest treats them like ids given by hand: one that matches nothing is its error.
    config.args = [str(TESTS / test) for test in read_test_list(path)]
    config.args_source = pytest.Config.ArgsSource.ARGS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # here, because most runs of one CPU test need no second import of it

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
        for item in gpu_items:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were skipped for each reason: a line for each test would bury the rest."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, (tuple, list))  # an expected failure has another kind
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The project's shared folder (prompts, images, clips) beside the checkout."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the shared folder, and there is none at {SHARED}")
    return SHARED
