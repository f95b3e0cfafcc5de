# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file, read and checked against the file's size.

``safetensors`` checks a file too, but its messages name neither tensor nor sizes, and of two
entries of one name it silently takes the last. Format: 8 bytes little-endian length, that many
bytes of JSON, then the data of all tensors without a gap (huggingface/safetensors, README).
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_LFS_POINTER = b"version https://git-lfs"

# safetensors' spelling -> dtype and bits. Every dtype that some quantised export stores is here, so
# that the judge of the weights, who knows what they are for, refuses it.
_DTYPES = {
    "F64": (torch.float64, 64),
    "F32": (torch.float32, 32),
    "F16": (torch.float16, 16),
    "BF16": (torch.bfloat16, 16),
    "F8_E4M3": (torch.float8_e4m3fn, 8),
    "F8_E5M2": (torch.float8_e5m2, 8),
    "F8_E8M0": (torch.float8_e8m0fnu, 8),
    "F4": (torch.float4_e2m1fn_x2, 4),
    "I64": (torch.int64, 64),
    "I32": (torch.int32, 32),
    "I16": (torch.int16, 16),
    "I8": (torch.int8, 8),
    "U64": (torch.uint64, 64),
    "U32": (torch.uint32, 32),
    "U16": (torch.uint16, 16),
    "U8": (torch.uint8, 8),
    "BOOL": (torch.bool, 8),
}


class HeaderError(ValueError):
    """A file is no intact safetensors file; the message says why, for a list of problems."""


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a header, under the name that the file gives it.

    Attributes:
        name: As stored.
        dtype: As stored.
        shape: As stored.
        offset: Where its bytes start in the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> list[HeaderEntry]:
    """Read a file's header. No tensor data is read.

    Returns:
        The tensors in the header's order.

    Raises:
        HeaderError: the file can't be opened, is cut short or too long, or its header is malformed
            or has a tensor twice (naming the tensor).
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if len(start) < _LENGTH_BYTES or length > min(size, _MAX_HEADER_BYTES) - _LENGTH_BYTES:
                raise HeaderError(_no_header(start + file.read(64), size))
            text = file.read(length)
    except OSError as error:
        raise HeaderError(error.strerror or str(error)) from error
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"its header is no JSON ({error})") from error
    if not isinstance(pairs, _Pairs):
        raise HeaderError("its header is no JSON object")
    tensors = [(name, value) for name, value in pairs if name != "__metadata__"]
    counts = Counter(name for name, _ in tensors)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise HeaderError(f"its header has {', '.join(twice)} twice")
    data = _LENGTH_BYTES + length
    entries = [_entry(*pair, data) for pair in tensors]
    _check_spans([span for _, span in entries], size - data)
    return [entry for entry, _ in entries]


class _Pairs(list):
    """A JSON object as a list of pairs, which keeps a name that stands there twice."""


_Span = tuple[int, int, str]
"""First byte, end and name of one tensor's data."""


def _entry(name: str, value: Any, data: int) -> tuple[HeaderEntry, _Span]:
    fields = dict(value) if isinstance(value, _Pairs) else {}
    dtype, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (_are_sizes(shape) and _are_sizes(span) and len(span) == 2):
        raise HeaderError(f"its entry of {name} has no shape and data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise HeaderError(f"{name} has the unknown dtype {dtype!r}")
    torch_dtype, bits = _DTYPES[dtype]
    if math.prod(shape) * bits != (span[1] - span[0]) * 8:
        raise HeaderError(f"{name} has {span[1] - span[0]} bytes for {dtype} {shape}")
    return HeaderEntry(name, torch_dtype, tuple(shape), data + span[0]), (*span, name)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_spans(spans: Sequence[_Span], size: int) -> None:
    """Check that the tensors fill the file's data without gap or overlap."""
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            raise HeaderError(f"the data of {name} starts at byte {first} instead of {end}")
        end = last
    if end != size:
        cut = "it is cut short" if end > size else "it is too long"
        raise HeaderError(f"{cut}: its header promises {end} bytes of data, and it has {size}")


def _no_header(start: bytes, size: int) -> str:
    if start.startswith(_LFS_POINTER):
        return "it is a Git LFS pointer, not the file itself"
    return f"its {size} bytes hold no safetensors header"
