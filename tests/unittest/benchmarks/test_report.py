# SPDX-License-Identifier: Apache-2.0
"""The report makes its tables from result files, and the documentation shows the same tables."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.report import main, markdown, table_text
from benchmarks.report_tables import RESULTS, TABLES, read_result

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "source" / "measurements.md"


def test_every_table_of_the_committed_results_can_be_made(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for table in TABLES.values():
        assert f"## {table.title}" in out
    assert len(re.findall(r"(?m)^\| --- ", out)) >= 3  # what is committed is shown


def test_the_page_shows_every_table_once():
    shown = re.findall(r"\{measured-table\} (\w+)", PAGE.read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(TABLES)


def test_no_figure_of_a_table_stands_in_the_page_itself():
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"\d+\.\d{3,}", text)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_table_says_where_it_was_measured_or_that_it_was_not(table, tmp_path):
    assert "Not measured yet" in table_text(table, tmp_path)
    record = read_result(table.stem)
    if record is None or len(table.rows(record)) < 2:
        assert "Not measured yet" in table_text(table)
    else:
        assert f"{record['device']}, torch {record['torch']}" in table_text(table)
        assert len({len(line) for line in table.rows(record)}) == 1


def test_a_file_without_the_rows_of_a_table_is_not_measured_yet(tmp_path):
    content = {"device": "NVIDIA H200", "torch": "2", "rows": []}
    (tmp_path / "step_nano_h200.json").write_text(json.dumps(content), encoding="utf-8")
    assert "Not measured yet" in table_text(TABLES["step_nano"], tmp_path)


def test_markdown_has_a_line_for_each_row():
    assert markdown([("a", "b"), ("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_committed_results_are_readable():
    for path in RESULTS.glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))
