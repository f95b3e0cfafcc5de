# SPDX-License-Identifier: Apache-2.0
"""Tables of committed measurements, made by ``benchmarks.report_tables`` on every build.

``{measured-table} NAME`` shows the table of that name, with where and when it was measured. Here
is no figure and no column: ``python -m benchmarks.report`` prints the same tables.
"""

import sys
from pathlib import Path

from docutils import nodes
from pydantic_table import TableOf
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.report_tables import (  # noqa: E402
    NOT_MEASURED,
    RESULTS,
    TABLES,
    read_result,
    where_measured,
)


class MeasuredTable(TableOf):
    """One table of the report, and where it was measured; a sentence where it was not."""

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name not in TABLES:
            raise self.error(f"no table {name!r} in benchmarks.report_tables: {list(TABLES)}")
        table = TABLES[name]
        file = f"{table.stem}.json"
        self.env.note_dependency(str(RESULTS / file))
        record = read_result(table.stem)
        rows = [] if record is None else table.rows(record)
        if len(rows) < 2:
            return [self._sentence(NOT_MEASURED.format(file=file))]
        self.widths = tuple(100 // len(rows[0]) for _ in rows[0])
        return [self._sentence(where_measured(record, table.stem)), self._table(rows)]

    def _sentence(self, text: str) -> nodes.paragraph:
        return nodes.paragraph("", "", *self.parse_text_to_nodes(text)[0].children)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("measured-table", MeasuredTable)
    return {"parallel_read_safe": True}
