# SPDX-License-Identifier: Apache-2.0
"""Which files of a checkpoint a pipeline is made of: the diffusers layout of Cosmos3.

One list serves what is fetched from the Hub and what has to be there before anything is loaded.
Examples, pickled states (``modelopt_state.pth``) and the reasoner's vision tower are on no list.
Importing this module costs no torch.
"""

import json
from collections.abc import Sequence
from pathlib import Path

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"
WEIGHTS_INDEX = f"{WEIGHTS_FILE}.index.json"

# Folders with a config.json and weights. Only the checkpoints with sound have the last.
_REQUIRED_FOLDERS = ("transformer", "vae")
_WEIGHT_FOLDERS = (*_REQUIRED_FOLDERS, "sound_tokenizer")
_REQUIRED_FILES = (
    "model_index.json",
    "scheduler/scheduler_config.json",
    "text_tokenizer/tokenizer_config.json",
)

DESCRIPTIONS: tuple[str, ...] = (
    *_REQUIRED_FILES,
    *(f"text_tokenizer/*.{suffix}" for suffix in ("json", "txt", "model", "jinja")),
    "assets/negative_prompt.json",
    *(f"{folder}/config.json" for folder in _WEIGHT_FOLDERS),
    *(f"{folder}/{WEIGHTS_INDEX}" for folder in _WEIGHT_FOLDERS),
)
"""Patterns of the small files, which say what else is needed."""


def weight_files(root: Path, folders: Sequence[str] = _WEIGHT_FOLDERS) -> list[str]:
    """Paths, relative to the root, of all weight files: the shards of an index, or the single file.

    An index that can't be read names none: whoever opens the folder reports it.

    Args:
        root: A checkpoint whose small files are there.
        folders: The component folders meant.
    """
    files: list[str] = []
    for folder in folders:
        index = root / folder / WEIGHTS_INDEX
        if not index.is_file():
            files.append(f"{folder}/{WEIGHTS_FILE}")
            continue
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files += sorted(f"{folder}/{shard}" for shard in shards)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return files


def missing_descriptions(root: Path) -> list[str]:
    """Paths, relative to the root, of the small files that a pipeline needs and doesn't find."""
    needed = [*_REQUIRED_FILES, *(f"{folder}/config.json" for folder in _REQUIRED_FOLDERS)]
    return [file for file in needed if not (root / file).is_file()]


def missing_files(root: Path) -> list[str]:
    """Paths, relative to the root, of what a pipeline needs and the checkpoint lacks."""
    optional = set(_WEIGHT_FOLDERS) - set(_REQUIRED_FOLDERS)
    absent = {folder for folder in optional if not (root / folder / "config.json").is_file()}
    weights = weight_files(root, [folder for folder in _WEIGHT_FOLDERS if folder not in absent])
    return [
        *missing_descriptions(root),
        *(file for file in weights if not (root / file).is_file()),
    ]
