# SPDX-License-Identifier: Apache-2.0
"""Every byte arrives once, whatever its tensor's size; an error ends all threads and is raised."""

import contextlib
import gc
import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from tensorrt_llm._torch.visual_gen.checkpoints import byte_stream
from tensorrt_llm._torch.visual_gen.checkpoints.byte_stream import ByteStream, Target, Transfer

SLOT = 64
CPU = torch.device("cpu")
# Around the size of a slot, and of no multiple of anything.
SIZES = [0, 1, 15, 63, 64, 65, 1, 1, 0, 128, 129, 7, 1000, 3]


class Staged(Target):
    """Keeps what it is given, with the calls."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.calls: list[tuple[int, int]] = []

    def put(self, start: int, data: torch.Tensor) -> None:
        self.data[start : start + len(data)] = bytes(data.numpy())
        self.calls.append((start, len(data)))


class Direct(Staged):
    """Is read into."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.memory = memoryview(self.data)

    def put(self, start: int, data: torch.Tensor) -> None:
        raise AssertionError("staged, although the file can be read straight into place")


class Failing(Staged):
    def __init__(self, size: int, error: BaseException) -> None:
        super().__init__(size)
        self.error = error

    def put(self, start: int, data: torch.Tensor) -> None:
        raise self.error


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    monkeypatch.setattr(byte_stream, "SLOT_BYTES", SLOT)
    monkeypatch.setattr(byte_stream, "READERS", 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    open_before = set(os.listdir("/proc/self/fd"))
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("weight-reader")]
    assert set(os.listdir("/proc/self/fd")) <= open_before


def write(path: Path, num_bytes: int, seed: int = 0) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    content = values.numpy().tobytes()
    path.write_bytes(content)
    return content


def run(transfers, report=lambda _: None) -> None:
    total = sum(t.size for t in transfers) if isinstance(transfers, list) else 10**6
    with ByteStream(transfers, CPU, total) as stream:
        stream.wait(report)


def laid_out(path: Path, sizes: list[int], kinds, gap: int = 0) -> list[Transfer]:
    """Transfers of tensors that follow one another in a file, ``gap`` bytes apart."""
    transfers, offset = [], 5
    for index, size in enumerate(sizes):
        transfers.append(Transfer(path, offset, size, kinds[index % len(kinds)](size)))
        offset += size + gap
    return transfers


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("kinds", [[Staged], [Direct], [Staged, Direct, Direct]])
def test_every_byte_arrives_for_sizes_around_the_slot(tmp_path, kinds, gap):
    content = write(tmp_path / "a", 5 + sum(SIZES) + gap * len(SIZES))
    transfers = laid_out(tmp_path / "a", SIZES, kinds, gap)
    run(transfers)
    for transfer in transfers:
        stored = content[transfer.offset : transfer.offset + transfer.size]
        assert bytes(transfer.target.data) == stored


def test_tensors_of_several_files_in_any_order(tmp_path):
    contents = {name: write(tmp_path / name, 500, seed) for seed, name in enumerate("abc")}
    # The last three: offsets that follow one another, in files that do not.
    places = [("b", 100, 300), ("a", 0, 500), ("c", 499, 1), ("b", 0, 9), ("c", 9, 9), ("a", 18, 9)]
    transfers = [Transfer(tmp_path / n, start, size, Staged(size)) for n, start, size in places]
    run(transfers)
    for transfer, (name, start, size) in zip(transfers, places, strict=True):
        assert bytes(transfer.target.data) == contents[name][start : start + size]


def test_a_tensor_without_elements_has_nothing_to_carry(tmp_path):
    write(tmp_path / "a", 5 + 20)
    transfers = laid_out(tmp_path / "a", [10, 0, 10, 0], [Staged])
    run(transfers)
    assert [transfer.target.calls for transfer in transfers] == [[(0, 10)], [], [(0, 10)], []]


def test_a_large_tensor_is_cut_at_multiples_of_the_slot(tmp_path):
    write(tmp_path / "a", 5 + 3 + 1000)
    small, large = laid_out(tmp_path / "a", [3, 1000], [Staged])
    run([small, large])
    assert sorted(large.target.calls) == [(s, min(SLOT, 1000 - s)) for s in range(0, 1000, SLOT)]


def counted(monkeypatch, limit: int | None = None) -> list[int]:
    """Count calls of preadv; ``limit`` cuts what one call returns."""
    original, counts = os.preadv, []

    def preadv(file, buffers, offset):
        buffers = [b[:limit] for b in buffers]
        counts.append(original(file, buffers, offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", preadv)
    return counts


def test_small_neighbours_are_read_with_one_call(tmp_path, monkeypatch):
    write(tmp_path / "a", 5 + 10 * 6)
    counts = counted(monkeypatch)
    run(laid_out(tmp_path / "a", [6] * 10, [Staged]))
    assert counts == [60]


def test_every_byte_is_read_once(tmp_path, monkeypatch):
    write(tmp_path / "a", 5 + sum(SIZES))
    counts = counted(monkeypatch)
    run(laid_out(tmp_path / "a", SIZES, [Staged, Direct]))
    assert sum(counts) == sum(SIZES)


@pytest.mark.parametrize("kind", [Staged, Direct])
def test_a_read_that_comes_up_short_is_continued(tmp_path, monkeypatch, kind):
    content = write(tmp_path / "a", 5 + 200)
    counted(monkeypatch, limit=7)
    (transfer,) = laid_out(tmp_path / "a", [200], [kind])
    run([transfer])
    assert bytes(transfer.target.data) == content[5:]


@pytest.mark.parametrize("kind", [Staged, Direct])
def test_a_file_that_ends_early_is_refused_by_name(tmp_path, kind):
    write(tmp_path / "cut.safetensors", 100)
    transfer = Transfer(tmp_path / "cut.safetensors", 90, 20, kind(20))
    with pytest.raises(ValueError, match=r"ended before its last tensor .*cut\.safetensors") as e:
        run([transfer])
    assert "at least 110 bytes" in str(e.value) and "100 bytes" in str(e.value)


def test_the_slots_are_few_and_used_again(tmp_path):
    addresses = set()

    class Noting(Staged):
        def put(self, start, data):
            addresses.add(data.data_ptr())
            super().put(start, data)

    write(tmp_path / "a", 5 + SLOT * 200)
    run(laid_out(tmp_path / "a", [SLOT] * 200, [Noting]))
    assert 1 <= len(addresses) <= 3 * byte_stream.SLOTS_PER_READER


def test_a_small_load_takes_small_slots(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_stream, "SLOT_BYTES", 2**40)  # would not fit any memory
    write(tmp_path / "a", 5 + 100)
    run(laid_out(tmp_path / "a", [99, 1], [Staged]))


def test_progress_is_told_from_the_waiting_thread_and_adds_up(tmp_path):
    write(tmp_path / "a", 5 + sum(SIZES))
    told, threads = [], set()

    def report(num_bytes):
        told.append(num_bytes)
        threads.add(threading.current_thread())

    run(laid_out(tmp_path / "a", SIZES, [Staged, Direct]), report)
    assert sum(told) == sum(SIZES)
    assert threads == {threading.main_thread()}


@pytest.mark.parametrize("mode", [True, False])
def test_targets_run_in_the_callers_inference_mode(tmp_path, mode):
    seen = []

    class Noting(Staged):
        def put(self, start, data):
            seen.append(torch.is_inference_mode_enabled())

    write(tmp_path / "a", 5 + 10)
    with torch.inference_mode(mode):
        run(laid_out(tmp_path / "a", [10], [Noting]))
    assert seen == [mode]


# ---- Errors ----


@pytest.mark.parametrize("error", [RuntimeError("target"), KeyboardInterrupt()])
def test_the_first_error_of_a_thread_is_raised_as_it_is_and_the_others_stop(tmp_path, error):
    write(tmp_path / "a", 5 + SLOT * 5000)
    slow = []

    class Slow(Staged):
        def put(self, start, data):
            slow.append(start)
            time.sleep(0.001)

    sizes = [SLOT] * 5000
    transfers = laid_out(tmp_path / "a", sizes, [Slow])
    transfers[20] = Transfer(transfers[20].path, transfers[20].offset, SLOT, Failing(SLOT, error))
    with pytest.raises(type(error)) as caught:
        run(transfers)
    assert caught.value is error
    assert len(slow) < 500


def test_an_error_while_a_target_is_made_is_raised(tmp_path):
    write(tmp_path / "a", 5 + 300)
    made = laid_out(tmp_path / "a", [100, 100, 100], [Staged])

    def transfers():
        yield made[0]
        raise LookupError("no target")

    with pytest.raises(LookupError, match="no target"):
        run(transfers())


def test_a_missing_file_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        run([Transfer(tmp_path / "absent", 0, 10, Staged(10))])


def test_an_interrupt_of_the_waiting_thread_stops_the_readers(tmp_path):
    write(tmp_path / "a", 5 + SLOT * 5000)
    slow = []

    class Slow(Staged):
        def put(self, start, data):
            slow.append(start)
            time.sleep(0.001)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(laid_out(tmp_path / "a", [SLOT] * 5000, [Slow]), interrupt)
    assert len(slow) < 2000


def test_a_thread_that_cannot_start_leaves_nothing_running(tmp_path, monkeypatch):
    write(tmp_path / "a", 5 + 300)
    original, started = threading.Thread.start, []

    def start(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        run(laid_out(tmp_path / "a", [100, 100, 100], [Staged]))


def test_nothing_holds_the_targets_once_the_error_is_gone(tmp_path):
    class Raising(Staged):  # an error of its own, which the target doesn't hold
        def put(self, start, data):
            raise RuntimeError("target")

    write(tmp_path / "a", 5 + 300)
    gc.disable()
    try:
        transfers = laid_out(tmp_path / "a", [100, 100], [Staged])
        transfers.append(Transfer(tmp_path / "a", 205, 100, Raising(100)))
        targets = [weakref.ref(transfer.target) for transfer in transfers]
        with contextlib.suppress(RuntimeError):
            run(transfers)
        del transfers
        assert [ref() for ref in targets] == [None] * 3
    finally:
        gc.enable()
