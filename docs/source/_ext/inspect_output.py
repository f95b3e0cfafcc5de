# SPDX-License-Identifier: Apache-2.0
"""``{inspect-output} OPTIONS``: what ``trtllm-inspect tiny OPTIONS`` prints, run on every build.

The tiny checkpoint of seed 0 is made once a build, in a temporary folder.
"""

import functools
import shlex
import tempfile
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_FOLDER = tempfile.TemporaryDirectory(prefix="tiny-for-docs-")


@functools.cache
def tiny_checkpoint() -> Path:
    """The static FP8 tiny checkpoint."""
    from tensorrt_llm.visual_gen.tiny_checkpoint import make_tiny_checkpoint

    return make_tiny_checkpoint(Path(_FOLDER.name) / "tiny")


class InspectOutput(SphinxDirective):
    """The directive; its argument holds the command's options."""

    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        from click.testing import CliRunner

        from tensorrt_llm.commands.inspect import main

        options = self.arguments[0] if self.arguments else ""
        path = str(tiny_checkpoint())
        result = CliRunner().invoke(main, [path, *shlex.split(options)])
        if result.exit_code != 0:
            raise self.error(f"trtllm-inspect ended with {result.exit_code}: {result.output}")
        text = f"$ trtllm-inspect tiny {options}".rstrip() + "\n"
        text += result.stdout.replace(path, "tiny")
        block = nodes.literal_block(text, text)
        block["language"] = "text"
        return [block]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("inspect-output", InspectOutput)
    return {"version": "1", "parallel_read_safe": True}
