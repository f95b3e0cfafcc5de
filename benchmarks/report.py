# SPDX-License-Identifier: Apache-2.0
"""Tables of the committed results, and whether they meet the goals.

``python -m benchmarks.report`` prints every table as Markdown. ``--check`` judges the goals
(``goals.py``) instead, and exits 1 if one is not met or has no result, each named by its line.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.goals import evaluate
from benchmarks.report_tables import (
    NOT_MEASURED,
    RESULTS,
    TABLES,
    Rows,
    Table,
    read_result,
    where_measured,
)


def markdown(rows: Rows) -> str:
    """A heading and lines as a Markdown table."""
    head, *lines = rows
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def table_text(table: Table, folder: Path = RESULTS) -> str:
    """One table with its title and where it was measured, or that it was not."""
    record = read_result(table.stem, folder)
    rows = [] if record is None else table.rows(record)
    if len(rows) < 2:
        body = NOT_MEASURED.format(file=f"{table.stem}.json")
    else:
        body = f"{where_measured(record, table.stem)}\n\n{markdown(rows)}"
    return f"## {table.title}\n\n{body}\n"


def check(folder: Path) -> int:
    """Print every goal with its result; the number of those that are not met."""
    findings = evaluate(folder)
    for finding in findings:
        print(finding)
    failed = [finding for finding in findings if not finding.met]
    lines = sorted({finding.line for finding in failed})
    print(f"{len(findings) - len(failed)} of {len(findings)} goals met")
    if failed:
        print(f"lines not met: {', '.join(map(str, lines))}")
    return len(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="judge the goals instead")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    options = parser.parse_args(arguments)
    if options.check:
        return 1 if check(options.results) else 0
    print("\n".join(table_text(table, options.results) for table in TABLES.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
