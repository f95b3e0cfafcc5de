# SPDX-License-Identifier: Apache-2.0
"""Facts about the checkout itself: licence lines, sizes of files, documented commands, imports."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREES = ("tensorrt_llm", "tests", "examples", "benchmarks", "scripts", "docs/source", ".ci")
SPDX = "# SPDX-License-Identifier: Apache-2.0"
MAX_LINES = 400


def _files() -> list[Path]:
    """Every file of ours: the trees and the files beside them, without what builds leave there."""
    inside = [path for tree in TREES for path in (ROOT / tree).rglob("*")]
    beside = [path for path in ROOT.iterdir() if path.name != ".git"]
    return sorted(p for p in inside + beside if p.is_file() and "__pycache__" not in p.parts)


FILES = _files()
SOURCES = [path for path in FILES if path.suffix == ".py"]
TEXTS = [
    p for p in FILES if p.suffix in {".py", ".md", ".yml", ".yaml", ".toml", ".txt", ".json", ""}
]
MODULES = sorted((ROOT / "tensorrt_llm").rglob("*.py"))
PAGES = sorted((ROOT / "docs/source").rglob("*.md"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def test_every_source_file_starts_with_the_licence_line():
    assert SOURCES
    bad = [_name(p) for p in SOURCES if not p.read_text(encoding="utf-8").startswith(SPDX + "\n")]
    assert not bad


def test_no_file_is_longer_than_one_reads_in_a_sitting():
    lines = {_name(p): len(_lines(p)) for p in SOURCES}
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    pattern = re.compile(r"/(?:work|root|home/\w+)/|/opt/(?:pypi|wheels)|/tmp/dev")
    this = Path(__file__)
    found = [
        f"{_name(path)}:{number}"
        for path in TEXTS
        if path != this
        for number, line in enumerate(_lines(path), 1)
        if pattern.search(line)
    ]
    assert not found


def test_every_folder_with_modules_is_a_package():
    # Without __init__.py, setuptools would leave the folder out of the wheel.
    assert not [
        _name(folder)
        for folder in {p.parent for p in MODULES}
        if not (folder / "__init__.py").exists()
    ]


@pytest.mark.parametrize("page", ["README.md", *map(_name, PAGES)])
def test_make_commands_in_the_documentation_exist(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?m)^([a-z]+):(?!=)", makefile))
    text = (ROOT / page).read_text(encoding="utf-8")
    used = set(re.findall(r"(?m)(?:^|`)make (?:[A-Z]+=\S+ )*([a-z]+)", text))
    assert used <= targets
    if page == "README.md":
        assert {"demo", "test"} <= used


@pytest.mark.parametrize("page", ["README.md", *map(_name, PAGES)])
def test_paths_in_the_documentation_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    roots = "|".join(("tensorrt_llm", "tests", "examples", "benchmarks", "scripts", "docs"))
    named = set(re.findall(rf"`((?:{roots})/[\w./-]+)`", text))
    # A page of the mapping names upstream's paths as well; only ours have to be here.
    if page.endswith("upstream_mapping.md"):
        named = set(re.findall(r"(?m)^\| `([^`]+)`", text))
    built = "docs/build/"
    assert not sorted(n for n in named if not n.startswith(built) and not (ROOT / n).exists())


def test_upstream_mapping_covers_every_module():
    text = (ROOT / "docs/source/upstream_mapping.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"(?m)^\| `([^`]+)`", text))
    names = [_name(p) for p in MODULES if p.name != "__init__.py"]
    # A row is a module's own or that of its folder.
    assert not [n for n in names if n not in rows and n.rpartition("/")[0] + "/" not in rows]
