# SPDX-License-Identifier: Apache-2.0
"""The plainest fast way from files in the page cache to a device: what a load is measured against.

It knows byte ranges and nothing of tensors. On CUDA each thread fills one of its two pinned buffers
while the other is copied; on a CPU the files are read straight into the destination.
"""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Range:
    """``size`` bytes at ``offset`` of a file."""

    path: Path
    offset: int
    size: int


def read_and_copy(
    ranges: list[Range], device: torch.device, threads: int, chunk: int
) -> tuple[torch.Tensor, float]:
    """Read the ranges into one new buffer on the device, one after another.

    Returns:
        The buffer, uint8, and the seconds that allocating it and the pinned memory took. All bytes
        have arrived.
    """
    started = time.perf_counter()
    on_cuda = device.type == "cuda"
    buffer = torch.empty(sum(r.size for r in ranges), dtype=torch.uint8, device=device)
    pinned = [
        [torch.empty(chunk, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        for _ in range(threads if on_cuda else 0)
    ]
    prepared = time.perf_counter() - started
    files = {path: os.open(path, os.O_RDONLY) for path in {r.path for r in ranges}}
    work = _pieces(ranges, files, chunk)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def next_piece() -> tuple[int, int, int, int] | None:
        with lock:
            return next(work, None)

    def straight() -> None:
        view = memoryview(buffer.numpy())
        while piece := next_piece():
            file, offset, target, size = piece
            _read(file, view[target : target + size], offset)

    def through(buffers: list[torch.Tensor]) -> None:
        stream = torch.cuda.Stream(device)
        slots = [(b, memoryview(b.numpy()), torch.cuda.Event()) for b in buffers]
        turn = 0
        with torch.cuda.stream(stream):
            while piece := next_piece():
                file, offset, target, size = piece
                source, view, copied = slots[turn]
                turn = 1 - turn
                copied.synchronize()
                _read(file, view[:size], offset)
                buffer[target : target + size].copy_(source[:size], non_blocking=True)
                copied.record(stream)
        stream.synchronize()

    def run(index: int) -> None:
        try:
            through(pinned[index]) if on_cuda else straight()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for file in files.values():
        os.close(file)
    if errors:
        raise errors[0]
    return buffer, prepared


def _pieces(
    ranges: list[Range], files: dict[Path, int], chunk: int
) -> Iterator[tuple[int, int, int, int]]:
    """(file descriptor, offset in the file, place in the buffer, size) of each piece."""
    place = 0
    for item in ranges:
        for start in range(0, item.size, chunk):
            size = min(chunk, item.size - start)
            yield files[item.path], item.offset + start, place + start, size
        place += item.size


def _read(file: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if count == 0:
            raise EOFError(f"the file ended at byte {offset + done}")
        done += count
