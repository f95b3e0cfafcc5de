# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration. ``make docs`` builds with every warning as an error."""

import sys
from pathlib import Path

from tensorrt_llm.version import __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "tensorrt-llm-cosmos3"
author = "The tensorrt-llm-cosmos3 authors"
project_copyright = "The tensorrt-llm-cosmos3 authors, Apache-2.0"
release = version = __version__

extensions = [
    "measured_tables",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "pydantic_table",
    "package_modules",
    "task_tables",
    "inspect_output",
    "code_tables",
]
exclude_patterns = ["_ext"]
html_theme = "alabaster"
html_static_path = ["_static"]
html_theme_options = {
    "description": "Cosmos3 pictures and video from static FP8 checkpoints",
    "page_width": "1100px",
}
html_show_sourcelink = False

myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# pydantic's own attribute; what it configures is in the class's docstring.
autodoc_default_options = {"exclude-members": "model_config"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# The attributes of a class as one list in its docstring, not as entries of their own.
napoleon_use_ivar = True
