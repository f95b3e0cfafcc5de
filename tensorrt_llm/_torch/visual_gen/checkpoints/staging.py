# SPDX-License-Identifier: Apache-2.0
"""A small ring of host memory through which bytes pass on their way to a device.

The memory is one anonymous mapping, cut into slots that are handed out oldest first. Where the
device is CUDA it is page-locked, so that a copy to the device is asynchronous and runs at the speed
of the bus. The mapping is our own, and not torch's pinned allocator, because that rounds sizes up
and keeps what was freed; this one is given back to the last page by ``close``. Huge pages, where
the kernel grants them, make locking it several times cheaper.
"""

import contextlib
import mmap
import queue
from collections.abc import Iterator
from types import TracebackType

import torch

from tensorrt_llm._utils import describe_error


class Slot:
    """One piece of the ring.

    Attributes:
        memory: Its bytes, to read a file into.
        tensor: The same memory as a uint8 tensor, to copy from.
    """

    def __init__(self, tensor: torch.Tensor, copied: torch.cuda.Event | None) -> None:
        self.memory = memoryview(tensor.numpy())
        self.tensor = tensor
        self._copied = copied

    def wait(self) -> None:
        """Wait until the copies out of the slot have been carried out."""
        if self._copied is not None:
            self._copied.synchronize()

    def mark(self, stream: torch.cuda.Stream | None) -> None:
        """Note that the copies out of the slot are those on the stream up to here."""
        if self._copied is not None:
            self._copied.record(stream)


class StagingRing:
    """Slots of host memory, page-locked for a CUDA device, and the stream that empties them.

    A context manager: on leaving, copies that are under way are waited for and the memory is freed.
    Slots may be taken by several threads.

    Args:
        device: Where the bytes go.
        num_slots: At least 1.
        slot_bytes: Size of a slot, a multiple of 16 so that every slot is aligned for any dtype.

    Raises:
        RuntimeError: the memory can't be page-locked.
    """

    def __init__(self, device: torch.device, num_slots: int, slot_bytes: int) -> None:
        size = num_slots * slot_bytes
        self._region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower to lock, no more
            self._region.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._region, dtype=torch.uint8)
        self._stream: torch.cuda.Stream | None = None
        events: list[torch.cuda.Event | None] = [None] * num_slots
        self._locked: int | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # What allocated or last used the destination on the caller's stream comes first.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            events = [torch.cuda.Event(blocking=True) for _ in range(num_slots)]
            _page_lock(whole.data_ptr(), size)
            self._locked = whole.data_ptr()
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for tensor, event in zip(whole.split(slot_bytes), events, strict=True):
            self._free.put(Slot(tensor, event))

    @contextlib.contextmanager
    def slot(self) -> Iterator[Slot]:
        """Take the oldest slot, when its last copy has left it; it goes back when the block ends.

        Inside `on_stream`, the copies that the block makes out of the slot may be asynchronous.
        """
        slot = self._free.get()
        try:
            slot.wait()
            yield slot
        finally:
            slot.mark(self._stream)
            self._free.put(slot)

    def on_stream(self) -> contextlib.AbstractContextManager:
        """Make the ring's stream the current one of the calling thread."""
        return torch.cuda.stream(self._stream)

    def close(self) -> None:
        """Wait for the copies that are under way and give the memory back, whoever still sees it.

        Raises:
            RuntimeError: a copy failed on the device.
        """
        try:
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            if self._locked is not None:
                _page_unlock(self._locked)
                self._locked = None
            # A traceback may keep views of the mapping alive; its pages go now.
            self._region.madvise(mmap.MADV_DONTNEED)

    def __enter__(self) -> "StagingRing":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Beside an error, what closing has to say is its consequence: the first one is reported.
        with contextlib.nullcontext() if error is None else contextlib.suppress(Exception):
            self.close()


def _page_lock(address: int, size: int) -> None:
    _check(torch.cuda.cudart().cudaHostRegister(address, size, 0), "cudaHostRegister", size)


def _page_unlock(address: int) -> None:
    _check(torch.cuda.cudart().cudaHostUnregister(address), "cudaHostUnregister", None)


def _check(code: object, call: str, size: int | None) -> None:
    if int(code) != 0:
        raise RuntimeError(
            describe_error(
                "The staging memory for loading could not be locked or unlocked",
                where=call if size is None else f"{call} of {size} bytes",
                expected="CUDA status 0",
                found=f"status {int(code)}",
                remedy=(
                    "free host memory and load again; if that fails too, check the driver with "
                    "nvidia-smi"
                ),
            )
        )
