# SPDX-License-Identifier: Apache-2.0
"""``{code-table} module.NAME``: a table of a constant in the code, read on every build.

The constant is a mapping (two columns; its keys are set as code), or a sequence of objects whose
attributes ``:attributes:`` names, one a column. ``:titles:`` heads the columns, separated by ``|``.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class CodeTable(SphinxDirective):
    """The directive."""

    required_arguments = 1
    option_spec = {
        "titles": directives.unchanged_required,
        "attributes": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        module_name, _, name = self.arguments[0].rpartition(".")
        module = importlib.import_module(module_name)
        self.env.note_dependency(module.__file__)
        constant = getattr(module, name)
        titles = [title.strip() for title in self.options["titles"].split("|")]
        if isinstance(constant, Mapping):
            rows = [(f"`{key}`", self._text(value)) for key, value in constant.items()]
        else:
            names = self.options["attributes"].split()
            rows = [[getattr(item, name) for name in names] for item in constant]
        return [self._table(titles, rows)]

    def _text(self, value: object) -> str:
        return value if isinstance(value, str) else ", ".join(f"`{item}`" for item in value)

    def _table(self, titles: list[str], rows: list[Any]) -> nodes.table:
        group = nodes.tgroup(cols=len(titles))
        group += [nodes.colspec(colwidth=1) for _ in titles]
        head, body = nodes.thead(), nodes.tbody()
        for part, lines in ((head, [titles]), (body, rows)):
            for line in lines:
                row = nodes.row()
                for cell in line:
                    entry = nodes.entry()
                    entry += self.parse_text_to_nodes(cell)
                    row += entry
                part += row
        group += [head, body]
        table = nodes.table()
        table += group
        return table


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("code-table", CodeTable)
    return {"version": "1", "parallel_read_safe": True}
