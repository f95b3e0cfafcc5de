# SPDX-License-Identifier: Apache-2.0
"""The interpreter that the Makefile chooses, and what ``.ci/run`` gives to it; installs nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not (shutil.which("make") and shutil.which("git")), reason="needs make and git"
)
# What the Makefile asks an interpreter about itself, and an answer that no interpreter gives.
ANOTHER = "#!/bin/sh\necho /another/python 3.11.0\n"
MAKE = ["make", "--no-print-directory"]


def run(command: list[str], folder: Path, **environment: str) -> str:
    """The output of a command, which has to succeed, without PYTHON and make's own variables."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHON" and not k.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=folder, env=inherited | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def checkout(tmp_path):
    """A folder with the Makefile and a complete .venv, by its stamps."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    version = tmp_path / "tensorrt_llm" / "version.py"
    version.parent.mkdir()
    version.touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(ANOTHER)
    python.chmod(0o755)
    stamps = run([*MAKE, "--eval", "stamps: ; @echo $(BASE) $(FULL)", "stamps"], tmp_path)
    for stamp in stamps.split():
        (tmp_path / stamp).touch()
    return tmp_path


def asked(checkout: Path, target: str, *arguments: str, **environment: str) -> str:
    """The commands that make would run."""
    return run([*MAKE, "-n", target, *arguments], checkout, **environment)


@pytest.mark.parametrize("target", ["demo", "lint"])
def test_a_finished_environment_is_used_as_it_is(checkout, target):
    commands = asked(checkout, target)
    assert "-m venv" not in commands and "pip install" not in commands


@pytest.mark.parametrize("target", ["demo", "lint"])
def test_another_interpreter_makes_the_environment_anew_and_installs_into_it(checkout, target):
    for commands in (
        asked(checkout, target, f"PYTHON={sys.executable}"),
        asked(checkout, target, PYTHON=sys.executable),
    ):
        create, install = (commands.index(text) for text in ("-m venv --clear", "pip install"))
        assert f"{sys.executable} -m venv --clear .venv" in commands and create < install


def test_the_interpreter_of_the_environment_changes_nothing(checkout):
    same = checkout / "python-of-the-same-name"
    same.write_text(ANOTHER)
    same.chmod(0o755)
    for python in (same, ".venv/bin/python"):
        commands = asked(checkout, "demo", f"PYTHON={python}")
        assert "-m venv" not in commands and "pip install" not in commands


def test_an_interpreter_is_asked_about_itself_in_words_that_it_understands(checkout):
    (checkout / ".venv" / "bin" / "python").unlink()
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    assert "-m venv" not in asked(checkout, "demo", f"PYTHON={sys.executable}")


def test_an_interpreter_that_is_not_there_fails_and_leaves_the_environment(checkout):
    command = [*MAKE, "demo", "PYTHON=no-such-python"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert done.returncode != 0 and "no-such-python" in done.stderr
    assert (checkout / ".venv" / "bin" / "python").exists()


def test_ci_has_a_cache_of_its_own_and_keeps_what_pip_has_downloaded(tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_CACHE_DIR", raising=False)  # set where this runs in .ci/run
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    targets = (
        "demo test:\n\t@echo $@ $$XDG_CACHE_HOME $$PIP_CACHE_DIR; ls $$XDG_CACHE_HOME || true\n"
    )
    (tmp_path / "Makefile").write_text(targets)
    for command in (["git", "init", "-q"], ["git", "add", "-A"]):
        run(command, tmp_path)
    cache = tmp_path / "users-cache"
    (cache / "tensorrt-llm-cosmos3").mkdir(parents=True)
    lines = run([".ci/run"], tmp_path, XDG_CACHE_HOME=str(cache)).splitlines()
    assert [line.split()[0] for line in lines] == ["demo", "test"]
    for line in lines:
        _, own, pip = line.split()
        assert own != str(cache) and not Path(own).exists()
        assert pip == f"{cache}/pip"
