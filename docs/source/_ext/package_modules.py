# SPDX-License-Identifier: Apache-2.0
"""``{package-modules} package``: every module below a package, in sections, by its docstrings.

The list is read from the package on every build, so that a new module can't be left out.
``:except:`` names modules that another page documents; one that doesn't exist is a warning.
"""

import importlib
import pkgutil
from itertools import groupby
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)


class PackageModules(SphinxDirective):
    """The directive."""

    required_arguments = 1
    option_spec = {"except": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        package = importlib.import_module(self.arguments[0])
        walk = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        modules = {module.name for module in walk if not module.ispkg}
        left_out = set(self.options.get("except", "").split())
        for name in sorted(left_out - modules):
            logger.warning("there is no module %s to leave out", name)
        # By package, outer ones first.
        names = sorted(
            modules - left_out, key=lambda name: (name.rpartition(".")[0].split("."), name)
        )
        return [
            self._section(parent, [self._module(name) for name in members])
            for parent, members in groupby(names, key=lambda name: name.rpartition(".")[0])
        ]

    def _module(self, name: str) -> nodes.section:
        body = f"```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```"
        return self._section(name, self.parse_text_to_nodes(body))

    def _section(self, title: str, children: list[nodes.Node]) -> nodes.section:
        section = nodes.section(ids=[nodes.make_id(f"in-{title}")], names=[title])
        section += nodes.title(text=title)
        section += children
        return section


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("package-modules", PackageModules)
    return {"version": "1", "parallel_read_safe": True}
