# SPDX-License-Identifier: Apache-2.0
"""Tables of the tasks' defaults and of the trained sizes, read from the code on every build.

``{task-defaults-table} module.DEFAULTS`` with the option ``build`` has a column for each task of
that build; families with the same defaults share it. ``{resolutions-table} module.RESOLUTIONS`` has
a row for each tier.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from docutils.parsers.rst import directives
from pydantic_table import TableOf
from sphinx.application import Sphinx

# What None means, by field.
NONE = {
    "frame_rate": "none",
    "num_inference_steps": "one for each noise level of the checkpoint",
    "guidance_interval": "everywhere",
    "negative_prompt": "the checkpoint's, see below",
    "flow_shift": "the checkpoint's own schedule",
    "source_tier": "none",
    "use_system_prompt": "the checkpoint's",
}


def value_text(name: str, value: Any) -> str:
    """Spell a default."""
    if value is None:
        return NONE[name]
    if isinstance(value, tuple):
        return str(list(value)) if value else "none"
    if value == "":
        return "empty"
    return f"{value:g}" if isinstance(value, float) else str(value)


class TaskDefaultsTable(TableOf):
    """The defaults of one build: a row for each value, a column for each task."""

    option_spec = {"build": directives.unchanged_required}

    def rows(self, subject: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[tuple[str, ...]]:
        build = self.options["build"]
        columns: dict[tuple[str, Any], list[str]] = {}
        for (family, of_build), tasks in subject.items():
            for task, row in tasks.items() if of_build == build else ():
                columns.setdefault((task, row), []).append(family.capitalize())
        self.widths = (24, *[18] * len(columns))
        head = [f"`{task}` ({', '.join(names)})" for (task, _), names in columns.items()]
        rows = [("value", *head)]
        (_, first), *_ = columns
        for field in fields(first):
            values = [value_text(field.name, getattr(row, field.name)) for _, row in columns]
            rows.append((f"`{field.name}`", *values))
        return rows


class ResolutionsTable(TableOf):
    """Width x height by tier and aspect ratio."""

    widths = (10, 18, 18, 18, 18, 18)

    def rows(self, subject: Mapping[str, Mapping[str, tuple[int, int]]]) -> list[tuple[str, ...]]:
        head = ("tier", *next(iter(subject.values())))
        sizes = [
            (tier, *(f"{width} x {height}" for width, height in of_tier.values()))
            for tier, of_tier in subject.items()
        ]
        return [head, *sizes]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("task-defaults-table", TaskDefaultsTable)
    app.add_directive("resolutions-table", ResolutionsTable)
    return {"version": "1", "parallel_read_safe": True}
