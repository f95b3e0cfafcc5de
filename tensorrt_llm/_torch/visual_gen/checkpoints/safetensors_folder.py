# SPDX-License-Identifier: Apache-2.0
"""A folder of safetensors shards as a lazy mapping from tensor name to tensor.

Names, dtypes and shapes come from the files' headers alone, so a checkpoint can be judged before a
byte of weight is read. Tensors are views of the mapped file; reading one copies nothing.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tensorrt_llm._utils import describe_error

_SINGLE_FILE = "diffusion_pytorch_model.safetensors"
_INDEX_FILE = "diffusion_pytorch_model.safetensors.index.json"

# safetensors' header spellings of the dtypes that a Cosmos3 checkpoint may hold.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorSpec:
    """What a header says about one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str

    @property
    def num_bytes(self) -> int:
        """Size of the data in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsFolder(Mapping[str, torch.Tensor]):
    """Tensors of one component folder, by name, without the ``model.`` prefix of some exports.

    Args:
        folder: Holds a single safetensors file, or shards and their index.

    Raises:
        ValueError: no weights, an index that names absent shards or tensors, a corrupt file, a name
            in two files, an unknown dtype.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._specs: dict[str, TensorSpec] = {}
        self._stored_names: dict[str, str] = {}
        self._handles: dict[str, object] = {}
        for file, expected in self._files().items():
            self._read_header(file, expected)

    def __getitem__(self, name: str) -> torch.Tensor:
        spec = self._specs[name]
        return self._handles[spec.file].get_tensor(self._stored_names[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def spec(self, name: str) -> TensorSpec:
        """Dtype, shape and file of one tensor, from the header."""
        return self._specs[name]

    def _files(self) -> dict[str, set[str] | None]:
        """Files to read, each with the names that the index promises in it (None: no index)."""
        index = self.folder / _INDEX_FILE
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                files: dict[str, set[str] | None] = {}
                for name, file in weight_map.items():
                    files.setdefault(file, set()).add(name)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise _unreadable(index, f"no usable weight_map ({error})") from error
            absent = sorted(file for file in files if not (self.folder / file).is_file())
            if absent:
                raise ValueError(
                    describe_error(
                        "Shards named by the index are missing",
                        where=index,
                        expected=f"{len(files)} files",
                        found=f"{len(absent)} absent: {', '.join(absent[:5])}",
                        remedy="download the checkpoint again",
                    )
                )
            return files
        if (self.folder / _SINGLE_FILE).is_file():
            return {_SINGLE_FILE: None}
        raise ValueError(
            describe_error(
                "No weights found",
                where=self.folder,
                expected=f"{_INDEX_FILE} with its shards, or {_SINGLE_FILE}",
                found="neither",
                remedy="pass a checkpoint folder in the diffusers layout",
            )
        )

    def _read_header(self, file: str, expected: set[str] | None) -> None:
        path = self.folder / file
        try:
            handle = safe_open(path, framework="pt", device="cpu")
            names = list(handle.keys())
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        if expected is not None and expected != set(names):
            missing, surplus = sorted(expected - set(names)), sorted(set(names) - expected)
            raise ValueError(
                describe_error(
                    "A shard and its index disagree",
                    where=path,
                    expected=f"{len(expected)} tensors",
                    found=f"{len(missing)} missing {missing[:3]}, "
                    f"{len(surplus)} more {surplus[:3]}",
                    remedy="download the checkpoint again",
                )
            )
        self._handles[file] = handle
        for stored in names:
            name = stored.removeprefix("model.")
            piece = handle.get_slice(stored)
            dtype = _DTYPES.get(piece.get_dtype())
            if dtype is None or name in self._specs:
                raise ValueError(
                    describe_error(
                        "Unknown tensor dtype" if dtype is None else "A tensor is stored twice",
                        where=f"{path}, {stored}",
                        expected="a floating, integer or FP8 tensor under a name of its own",
                        found=piece.get_dtype() if dtype is None else self._specs[name].file,
                        remedy="use a checkpoint exported by ModelOpt or diffusers",
                    )
                )
            self._specs[name] = TensorSpec(dtype, tuple(piece.get_shape()), file)
            self._stored_names[name] = stored


def _unreadable(path: Path, reason: object) -> ValueError:
    return ValueError(
        describe_error(
            "A checkpoint file can't be read",
            where=path,
            expected="an intact file",
            found=reason,
            remedy="download it again",
        )
    )
