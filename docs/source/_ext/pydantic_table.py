# SPDX-License-Identifier: Apache-2.0
"""Tables of options, read from the code on every build.

``{pydantic-table} module.Model`` has the fields of a pydantic model; ``{extra-params-table}
module.MAPPING`` the entries of a mapping from name to ``ExtraParamSchema``.

A field's type and default come from the model. The meaning comes from the field's description, or
else from the model's docstring: its ``Attributes:`` section, or all of it where the model has one
field. A field with neither is a warning, so that no option can go undocumented.
"""

import importlib
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)


def type_text(annotation: Any) -> str:
    """Spell a type without module names and without the validators of ``Annotated``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_text(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_text(argument) for argument in arguments)
    if origin is typing.Literal:
        return " | ".join(repr(argument) for argument in arguments)
    if origin is not None:
        inner = ", ".join(type_text(argument) for argument in arguments)
        return f"{type_text(origin)}[{inner}]"
    if annotation is type(None):
        return "None"
    if annotation is Ellipsis:
        return "..."
    return getattr(annotation, "__name__", str(annotation))


def default_text(field: FieldInfo) -> str:
    """Spell a default; that of a nested model is the model's own table."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Path):
        # As it is for any reader, not for whoever builds the page.
        return repr(str(value).replace(str(Path.home()), "~"))
    return f"{type(value).__name__}()" if isinstance(value, BaseModel) else repr(value)


def attribute_texts(model: type[BaseModel]) -> dict[str, str]:
    """Read the ``Attributes:`` section of the docstring: field name to meaning."""
    section = re.search(r"\n( *)Attributes:\n((?:\1 +\S.*\n?|\s*\n)+)", f"{model.__doc__}\n")
    if section is None:
        names = list(model.model_fields)
        return {names[0]: " ".join(model.__doc__.split())} if len(names) == 1 else {}
    entries = re.split(rf"(?m)^{section[1]}    (?=\w+:)", section[2])
    pairs = (entry.split(":", 1) for entry in entries if ":" in entry)
    return {name.strip(): " ".join(text.split()) for name, text in pairs}


class TableOf(SphinxDirective):
    """A table about one object of a module, the directive's argument."""

    required_arguments = 1
    widths = (18, 22, 18, 42)

    def run(self) -> list[nodes.Node]:
        module_name, _, name = self.arguments[0].rpartition(".")
        module = importlib.import_module(module_name)
        self.env.note_dependency(module.__file__)
        return [self._table(self.rows(getattr(module, name)))]

    def rows(self, subject: Any) -> list[tuple[str, ...]]:
        raise NotImplementedError

    def _table(self, rows: list[tuple[str, ...]]) -> nodes.table:
        group = nodes.tgroup(cols=len(rows[0]))
        group += [nodes.colspec(colwidth=width) for width in self.widths]
        head, body = nodes.thead(), nodes.tbody()
        for part, lines in ((head, rows[:1]), (body, rows[1:])):
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


class PydanticTable(TableOf):
    """The fields of a model."""

    def rows(self, subject: type[BaseModel]) -> list[tuple[str, str, str, str]]:
        texts = attribute_texts(subject)
        rows = [("field", "type", "default", "meaning")]
        for name, field in subject.model_fields.items():
            meaning = field.description or texts.get(name)
            if not meaning:
                logger.warning("%s.%s has no description", subject.__name__, name)
            kind, default = type_text(field.annotation), default_text(field)
            rows.append((f"`{name}`", f"`{kind}`", f"`{default}`", meaning or ""))
        return rows


class ExtraParamsTable(TableOf):
    """The entries of a mapping from name to ``ExtraParamSchema``."""

    def rows(self, subject: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
        rows = [("key", "type", "values", "meaning")]
        for name, schema in subject.items():
            values = ", ".join(f"`{choice!r}`" for choice in schema.choices or ())
            if schema.range is not None:
                values = "{:g} to {:g}".format(*schema.range)
            meaning = schema.description
            if schema.default is not None:
                meaning += f" Default: `{schema.default!r}`."
            rows.append((f"`{name}`", f"`{schema.type}`", values, meaning))
        return rows


def hide_model_signature(
    app: Sphinx, what: str, name: str, subject: Any, options: Any, signature: str, returns: str
) -> tuple[str, None] | None:
    """Leave out a model's generated signature: validators and all, it is longer than the class."""
    is_model = what == "class" and isinstance(subject, type) and issubclass(subject, BaseModel)
    return ("", None) if is_model else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("pydantic-table", PydanticTable)
    app.add_directive("extra-params-table", ExtraParamsTable)
    app.connect("autodoc-process-signature", hide_model_signature)
    return {"version": "1", "parallel_read_safe": True}
