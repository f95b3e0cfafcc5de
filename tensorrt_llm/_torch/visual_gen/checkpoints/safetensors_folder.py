# SPDX-License-Identifier: Apache-2.0
"""A folder of safetensors shards as a lazy mapping from tensor name to tensor.

Names, dtypes and shapes come from the files' headers alone, so a checkpoint can be judged before a
byte of weight is read. Tensors are views of the mapped file; reading one copies nothing.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch
from safetensors import SafetensorError, safe_open

from tensorrt_llm._torch.visual_gen.checkpoints.layout import WEIGHTS_FILE, WEIGHTS_INDEX
from tensorrt_llm._torch.visual_gen.checkpoints.problems import (
    INDEX,
    MISSING_FILE,
    STORED_TWICE,
    UNREADABLE_FILE,
    Problems,
)
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_header import HeaderError, read_header

_SHOWN_NAMES = 5
NAME_PREFIX = "model."
"""What some exports put before every name."""


@dataclass(frozen=True)
class TensorSpec:
    """What a header says about one tensor.

    Attributes:
        dtype: As stored.
        shape: As stored.
        file: Name of its file in the folder; empty where the tensor is in memory.
        offset: Where its bytes start in that file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsFolder(Mapping[str, torch.Tensor]):
    """Tensors of one component folder, by name, without the ``model.`` prefix of some exports.

    With an index, the shards that it names are the checkpoint and other files don't count.

    Args:
        folder: Holds a single safetensors file, or shards and their index.

    Raises:
        ValueError: listing all of: no weights, an index that can't be read, shards that are
            missing, damaged or at odds with the index (each with its tensors), tensors stored
            twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._specs: dict[str, TensorSpec] = {}
        self._stored_names: dict[str, str] = {}
        self._handles: dict[str, object] = {}
        problems = Problems()
        for file, expected in self._files(problems).items():
            self._read_file(file, expected, problems)
        problems.raise_if_any(
            "The weight files are incomplete or damaged", self.folder, "intact files"
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        spec = self._specs[name]
        return self._handles[spec.file].get_tensor(self._stored_names[name])

    def __contains__(self, name: object) -> bool:
        return name in self._specs  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def spec(self, name: str) -> TensorSpec:
        """Dtype, shape and file of one tensor, from the header."""
        return self._specs[name]

    def _files(self, problems: Problems) -> dict[str, set[str] | None]:
        """Files to read, each with the names that the index promises in it (None: no index)."""
        if (self.folder / WEIGHTS_INDEX).is_file():
            return self._files_of_index(problems)
        if (self.folder / WEIGHTS_FILE).is_file():
            return {WEIGHTS_FILE: None}
        there = sorted(path.name for path in self.folder.glob("*"))
        found = f"the folder has {_listed(there)}" if there else "the folder is empty or missing"
        problems.add(MISSING_FILE, f"{WEIGHTS_INDEX} with its shards, or {WEIGHTS_FILE}; {found}")
        return {}

    def _files_of_index(self, problems: Problems) -> dict[str, set[str]]:
        try:
            text = (self.folder / WEIGHTS_INDEX).read_text(encoding="utf-8")
            weight_map = json.loads(text)["weight_map"]
            files: dict[str, set[str]] = {}
            for name, file in weight_map.items():
                if PurePath(file).name != file or not file.endswith(".safetensors"):
                    raise ValueError(f"it places {name} in {file!r}, which is no shard's name")
                files.setdefault(file, set()).add(name)
            if not files:
                raise ValueError("it is empty")
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            problems.add(UNREADABLE_FILE, f"{WEIGHTS_INDEX}: no usable weight_map ({error})")
            return {}
        return dict(sorted(files.items()))

    def _read_file(self, file: str, expected: set[str] | None, problems: Problems) -> None:
        path = self.folder / file
        promised = "" if expected is None else f" (with {_listed(expected)})"
        if not path.is_file():
            problems.add(MISSING_FILE, f"{file}{promised}")
            return
        try:
            entries = read_header(path)
            self._handles[file] = safe_open(path, framework="pt", device="cpu")
        except (HeaderError, SafetensorError, OSError) as error:
            problems.add(UNREADABLE_FILE, f"{file}: {error}{promised}")
            return
        names = {entry.name for entry in entries}
        if expected is not None and expected != names:
            lacks, more = expected - names, names - expected
            parts = [f"lacks {_listed(lacks)}"] if lacks else []
            parts += [f"has beside them {_listed(more)}"] if more else []
            problems.add(INDEX, f"{file} {' and '.join(parts)}")
        for entry in entries:
            name = entry.name.removeprefix(NAME_PREFIX)
            if name in self._specs:
                other = f"{self._specs[name].file} as {self._stored_names[name]}"
                problems.add(STORED_TWICE, f"{name}: in {other}, in {file} as {entry.name}")
            self._specs[name] = TensorSpec(entry.dtype, entry.shape, file, entry.offset)
            self._stored_names[name] = entry.name


def _listed(names: Collection[str]) -> str:
    more = f", ... {len(names)} in all" if len(names) > _SHOWN_NAMES else ""
    return f"{', '.join(sorted(names)[:_SHOWN_NAMES])}{more}"
