# SPDX-License-Identifier: Apache-2.0
"""Bytes from files to their places, with reading and copying overlapped.

A few threads read. Each takes the next piece of the list, reads it with ``preadv`` and hands it on.
``preadv`` moves bytes out of the page cache without mapping them: no page faults (which cost more
than the copy itself), no growth of the process, readable errors in place of SIGBUS, and Python's
lock is free meanwhile. A piece that goes to memory of the host in its stored form is read right
there; any other is read into a slot of the ring (``staging.py``) and copied on from it, on CUDA
asynchronously, so that the next slot is being filled while the device takes this one.
"""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch

from tensorrt_llm._torch.visual_gen.checkpoints.staging import StagingRing
from tensorrt_llm._utils import describe_error

READERS = 8
"""Reading threads. H200 machine, Nano out of the page cache: 0.50 s with 8, 0.65 s with 4, 0.57 s
with 16 (benchmarks/results/load_nano_h200.json)."""

SLOTS_PER_READER = 2
"""One is filled while the other is being copied."""

SLOT_BYTES = 8 * 2**20
"""Large against the cost of a call (about 50 us), small enough to stay in the last-level cache."""

_REPORT_SECONDS = 0.1


class Target(ABC):
    """Where the bytes of one tensor go. Used by several threads, for disjoint ranges.

    Attributes:
        memory: Writable bytes of the destination, if a file may be read straight into them.
    """

    memory: memoryview | None = None

    @abstractmethod
    def put(self, start: int, data: torch.Tensor) -> None:
        """Take over bytes ``start`` and following of the tensor as it is stored.

        Args:
            start: A multiple of 16.
            data: uint8 on the host, valid until the current stream has passed this call. Its
                address is not aligned.
        """


@dataclass(frozen=True)
class Transfer:
    """One tensor's way: ``size`` bytes at ``offset`` of the file ``path``, to ``target``."""

    path: Path
    offset: int
    size: int
    target: Target


@dataclass
class _Read:
    """A run of one file; the ranges of the tensors in it, in order, fill it exactly."""

    path: Path
    offset: int
    size: int = 0
    parts: list[tuple[Target, int, int]] = field(default_factory=list)  # target, start, length

    def add(self, target: Target, start: int, length: int) -> None:
        self.parts.append((target, start, length))
        self.size += length


class ByteStream:
    """Threads that carry out a list of transfers; they run from entering to leaving the context.

    Leaving it early, by an exception, stops them after the piece that each is at. Afterwards no
    thread is left, no file is open, no staging memory is held, and on CUDA every copy is done.

    Args:
        transfers: The work, in the order in which it is begun. A generator is asked for more by the
            threads, one at a time, so that what makes a target overlaps with reading.
        device: Where the targets are: one device.
        num_bytes: About how many bytes there are; a small load takes small slots.

    Raises:
        RuntimeError: on entering: the staging memory can't be locked.
    """

    def __init__(self, transfers: Iterable[Transfer], device: torch.device, num_bytes: int) -> None:
        self._device = device
        # A multiple of 16, so that pieces of any dtype start on a whole element.
        self._slot_bytes = min(SLOT_BYTES, max(16, -(-num_bytes // 16) * 16))
        self._reads = _cut(transfers, self._slot_bytes)
        readers = max(1, min(READERS, len(os.sched_getaffinity(0))))
        self._threads = [
            threading.Thread(target=self._work, name=f"weight-reader-{index}")
            for index in range(readers)
        ]
        self._inference = torch.is_inference_mode_enabled()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._done = 0
        self._files: dict[Path, int] = {}
        self._resources = ExitStack()

    def __enter__(self) -> "ByteStream":
        slots = len(self._threads) * SLOTS_PER_READER
        self._ring = self._resources.enter_context(
            StagingRing(self._device, slots, self._slot_bytes)
        )
        self._resources.callback(self._close_files)
        self._resources.callback(self._halt)
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._resources.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._resources.__exit__(kind, error, traceback)

    def wait(self, report: Callable[[int], object]) -> None:
        """Wait for the end of all transfers.

        Args:
            report: Called now and then, from this thread, with the number of bytes since last time.

        Raises:
            BaseException: what the first thread that failed raised, as it is.
        """
        told = 0
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_REPORT_SECONDS)
                done = self._done
                report(done - told)
                told = done
        report(self._done - told)
        # Kept nowhere else: its traceback leads to frames that hold this object and the targets.
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _work(self) -> None:
        try:
            with torch.inference_mode(self._inference), self._ring.on_stream():
                while not self._stop.is_set():
                    with self._lock:
                        read = next(self._reads, None)
                        if read is None:
                            return
                        file = self._open(read.path)
                    self._carry_out(read, file)
                    with self._lock:
                        self._done += read.size
        except BaseException as error:
            self._stop.set()
            with self._lock:
                self._error = self._error or error

    def _carry_out(self, read: _Read, file: int) -> None:
        target, start, length = read.parts[0]
        if target.memory is not None:
            _read_whole(file, target.memory[start : start + length], read)
            return
        with self._ring.slot() as slot:
            _read_whole(file, slot.memory[: read.size], read)
            position = 0
            for target, start, length in read.parts:
                target.put(start, slot.tensor[position : position + length])
                position += length

    def _open(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[path]

    def _halt(self) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _close_files(self) -> None:
        for file in self._files.values():
            os.close(file)


def _cut(transfers: Iterable[Transfer], limit: int) -> Iterator[_Read]:
    """Cut transfers into pieces of at most ``limit`` bytes; neighbours in a file share a piece.

    Only whole tensors (and the end of a large one) share, so every cut is at a multiple of
    ``limit`` from the start of its tensor. A piece that is read straight into place stays alone. A
    tensor without elements has nothing to carry.
    """
    open_read: _Read | None = None
    for transfer in transfers:
        if transfer.size == 0:
            continue
        staged = transfer.target.memory is None
        if (
            open_read is not None
            and staged
            and open_read.path == transfer.path
            and open_read.offset + open_read.size == transfer.offset
            and open_read.size + transfer.size <= limit
        ):
            open_read.add(transfer.target, 0, transfer.size)
            continue
        if open_read is not None:
            yield open_read
            open_read = None
        for start in range(0, transfer.size, limit):
            if open_read is not None:
                yield open_read
            open_read = _Read(transfer.path, transfer.offset + start)
            open_read.add(transfer.target, start, min(limit, transfer.size - start))
        if open_read is not None and not staged:
            yield open_read
            open_read = None
    if open_read is not None:
        yield open_read


def _read_whole(file: int, memory: memoryview, read: _Read) -> None:
    """Fill ``memory`` from where the piece starts in the file."""
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done:]], read.offset + done)
        if count == 0:
            raise ValueError(
                describe_error(
                    "A checkpoint file ended before its last tensor",
                    where=read.path,
                    expected=f"at least {read.offset + len(memory)} bytes",
                    found=f"{read.offset + done} bytes",
                    remedy="it changed while it was loaded, or its download broke off: download "
                    "it again",
                )
            )
        done += count
