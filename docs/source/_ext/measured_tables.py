# SPDX-License-Identifier: Apache-2.0
"""Tables of committed measurements, read from ``benchmarks/results`` on every build.

``{measured-table} step_nano_h200`` renders the file of that name. A figure can't stand in the
documentation without the result behind it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docutils import nodes
from pydantic_table import TableOf
from sphinx.application import Sphinx

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


def step_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """One denoising step by case, mode and variant."""
    rows = [("case", "precision", "variant", "seconds a step", "peak GiB")]
    for row in record["rows"]:
        seconds = f"{row['median_s']:.3f}"
        rows.append((row["case"], row["mode"], row["variant"], seconds, f"{row['peak_gib']:.1f}"))
    return rows


def load_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """A load against moving the same bytes."""
    summary = record["summary"]
    rows = [("what", "seconds")]
    rows.append(("the same bytes read and copied, nothing else", f"{summary['reference_s']:.3f}"))
    rows.append(("our load, in all", f"{summary['load_s']:.3f}"))
    rows += [(f"of which {name}", f"{s:.3f}") for name, s in summary["phases_s"].items()]
    rows.append(("safetensors' load_file", f"{record['load_file_s']:.3f}"))
    rows.append(("ratio of our load to the bytes alone", f"{summary['ratio']:.2f}"))
    return rows


def test_rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """Outcomes of a list of GPU tests."""
    return [("outcome", "tests")] + [(k, str(n)) for k, n in sorted(record["counts"].items())]


READERS: dict[str, Callable[[dict[str, Any]], list[tuple[str, ...]]]] = {
    "step": step_rows,
    "load": load_rows,
    "gpu": test_rows,
}


class MeasuredTable(TableOf):
    """The rows of one result file, and where it was measured."""

    def run(self) -> list[nodes.Node]:
        path = RESULTS / f"{self.arguments[0]}.json"
        self.env.note_dependency(str(path))
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = READERS[path.stem.partition("_")[0]](record)
        self.widths = tuple(100 // len(rows[0]) for _ in rows[0])
        where = f"{record['device']}, torch {record['torch']}, {record['date']} ({path.name})."
        return [nodes.paragraph(text=where), self._table(rows)]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("measured-table", MeasuredTable)
    return {"parallel_read_safe": True}
