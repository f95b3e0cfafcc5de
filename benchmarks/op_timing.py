# SPDX-License-Identifier: Apache-2.0
"""Timing kernels on one GPU: variants of one operation, checked against each other, in turns."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

ROUNDS = 30
# The device waits this many cycles, so that a launch is queued before its clock starts.
_QUEUE_CYCLES = 200_000


@dataclass
class Variant:
    """One thing to time.

    Attributes:
        name: Of the operation.
        run: Writes ``outs``.
        size: Bytes that it moves at least, read and written.
        outs: What it writes, compared bit for bit with the first variant of the same ``compare``.
        compare: Which variants have to agree; None compares nothing.
        shape: Of the operands.
        block: Launch parameter, None for an op with its own.
        num_warps: Launch parameter.
    """

    name: str
    run: Callable[[], object]
    size: int
    outs: Sequence[torch.Tensor] = ()
    compare: str | None = None
    shape: Sequence[int] = ()
    block: int | None = None
    num_warps: int | None = None


@dataclass
class Row:
    """The samples of a variant, one a round, in milliseconds."""

    section: str
    name: str
    shape: list[int]
    block: int | None
    num_warps: int | None
    bytes: int
    samples_ms: list[float] = field(default_factory=list)
    median_ms: float = 0.0
    gb_per_s: float = 0.0
    of_copy: float = 0.0


def nbytes(*tensors: torch.Tensor) -> int:
    """Bytes of tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def check(variants: Sequence[Variant]) -> None:
    """Refuse to time variants whose outputs differ, or leave elements unwritten.

    Raises:
        SystemExit: naming the variant and how many bytes differ.
    """
    expected: dict[str, list[torch.Tensor]] = {}
    for variant in variants:
        as_bytes = [out.view(torch.uint8) for out in variant.outs]
        for out in as_bytes:
            out.fill_(0x5A)
        variant.run()
        if variant.compare is None:
            continue
        if variant.compare not in expected:
            expected[variant.compare] = [out.clone() for out in as_bytes]
            continue
        for out, other in zip(as_bytes, expected[variant.compare], strict=True):
            if not torch.equal(out, other):
                different = (out != other).sum().item()
                raise SystemExit(
                    f"{variant.name} ({variant.block}, {variant.num_warps}): {different} bytes "
                    "differ from the first variant's"
                )


def measure(section: str, variants: Sequence[Variant]) -> list[Row]:
    """Time the variants in turns; the order rotates by one each round."""
    rows = [Row(section, v.name, list(v.shape), v.block, v.num_warps, v.size) for v in variants]
    for variant in (*variants, *variants):
        variant.run()
    events = []
    for start in range(ROUNDS):
        for index in range(len(variants)):
            index = (index + start) % len(variants)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_QUEUE_CYCLES)
            begin.record()
            variants[index].run()
            end.record()
            events.append((index, begin, end))
    torch.cuda.synchronize()
    for index, begin, end in events:
        rows[index].samples_ms.append(begin.elapsed_time(end))
    for row in rows:
        row.median_ms = statistics.median(row.samples_ms)
        row.gb_per_s = row.bytes / row.median_ms / 1e6
    return rows
