# SPDX-License-Identifier: Apache-2.0
"""The JSON files of a checkpoint. Importing this module does not import torch."""

import json
import reprlib
from pathlib import Path
from typing import Any

from tensorrt_llm._utils import describe_error


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint.

    Raises:
        ValueError: it can't be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, "JSON", error) from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The same for a file that has to hold an object.

    A component's configuration is read here before diffusers or transformers see it: a string in
    its place they take for the name of a repository on the Hub, and ask there.

    Raises:
        ValueError: it can't be read, or is something else than a JSON object.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(
            describe_error(
                "A configuration of the checkpoint is no JSON object",
                where=path,
                expected="an object, {...}",
                found=reprlib.repr(json.dumps(content)),
                remedy="restore this file from the published checkpoint",
            )
        )
    return content


def unreadable(path: Path, expected: str, error: Exception) -> ValueError:
    """The error for a file, or folder, of which a reader made ``error``."""
    return ValueError(
        describe_error(
            "A checkpoint file can't be read",
            where=path,
            expected=expected,
            found=f"{type(error).__name__}: {error}",
            remedy="restore it from the published checkpoint",
        )
    )
