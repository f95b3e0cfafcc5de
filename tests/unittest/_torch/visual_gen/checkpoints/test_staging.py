# SPDX-License-Identifier: Apache-2.0
"""The ring hands out its oldest slot when the copy out of it is done, and gives all memory back.

The order of calls to CUDA is checked on a recorder in its place; ``test_weight_apply_gpu.py`` runs
the real one.
"""

import threading

import pytest
import torch

from tensorrt_llm._torch.visual_gen.checkpoints.staging import StagingRing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Recorder:
    """Stands for the parts of torch.cuda that the ring uses, and notes what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events = 0
        self.lock_status = 0
        self.synchronize_error: Exception | None = None
        recorder = self

        class Stream:
            def __init__(self, device):
                recorder.calls.append("stream")

            def wait_stream(self, other):
                recorder.calls.append(f"wait for {other}")

            def synchronize(self):
                recorder.calls.append("synchronize")
                if recorder.synchronize_error is not None:
                    raise recorder.synchronize_error

        class Event:
            def __init__(self, blocking):
                self.number = recorder.events
                recorder.events += 1

            def record(self, stream):
                assert isinstance(stream, Stream)
                recorder.calls.append(f"record {self.number}")

            def synchronize(self):
                recorder.calls.append(f"wait {self.number}")

        self.Stream, self.Event = Stream, Event

    def current_stream(self, device):
        return "the caller's stream"

    def cudart(self):
        return self

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 - CUDA's name
        self.calls.append(f"lock {size}")
        self.locked = address
        return self.lock_status

    def cudaHostUnregister(self, address):  # noqa: N802 - CUDA's name
        assert address == self.locked
        self.calls.append("unlock")
        return 0


@pytest.fixture
def cuda(monkeypatch):
    recorder = Recorder()
    for name in ("Stream", "Event", "current_stream", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(recorder, name))
    return recorder


def test_slots_are_separate_and_come_back_oldest_first():
    with StagingRing(CPU, 3, 32) as ring:
        with ring.slot() as first, ring.slot() as second, ring.slot() as third:
            slots = [first, second, third]
            for value, slot in enumerate(slots, 1):
                slot.tensor.fill_(value)
            assert [set(bytes(slot.memory)) for slot in slots] == [{1}, {2}, {3}]
            assert {len(slot.memory) for slot in slots} == {32}
            assert all(slot.tensor.data_ptr() % 16 == 0 for slot in slots)
        for slot in (third, second, first, third):  # in the order in which the blocks ended
            with ring.slot() as again:
                assert again is slot


def test_a_slot_comes_back_also_when_its_block_fails():
    with StagingRing(CPU, 1, 16) as ring:
        with pytest.raises(LookupError), ring.slot():
            raise LookupError
        with ring.slot() as slot:
            assert len(slot.memory) == 16


def test_nobody_gets_a_slot_that_is_in_use():
    with StagingRing(CPU, 1, 16) as ring:
        order = []

        def second():
            with ring.slot():
                order.append("second")

        with ring.slot():
            thread = threading.Thread(target=second)
            thread.start()
            thread.join(0.05)
            order.append("first")
        thread.join()
        assert order == ["first", "second"]


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_the_memory_is_given_back_although_somebody_still_sees_it(error):
    try:
        with StagingRing(CPU, 2, 4096) as ring:
            with ring.slot() as slot:
                slot.tensor.fill_(7)
            if error is not None:
                raise error
    except RuntimeError:
        pass
    # The kernel has taken the page: whoever looks finds a new one, of zeros.
    assert not slot.tensor.any()


def test_on_cuda_a_slot_waits_for_its_own_copies_and_marks_new_ones(cuda):
    with StagingRing(CUDA, 2, 64) as ring:
        assert cuda.calls == ["stream", "wait for the caller's stream", "lock 128"]
        cuda.calls.clear()
        for _ in range(3):
            with ring.slot():
                cuda.calls.append("use")
    turns = [f"wait {n}, use, record {n}" for n in (0, 1, 0)]
    assert ", ".join(cuda.calls) == ", ".join([*turns, "synchronize", "unlock"])


def test_on_cuda_an_error_waits_for_copies_before_the_memory_goes(cuda):
    with pytest.raises(LookupError), StagingRing(CUDA, 1, 64) as ring, ring.slot():
        raise LookupError
    assert cuda.calls[-3:] == ["record 0", "synchronize", "unlock"]


def test_a_failed_copy_is_raised_and_the_memory_is_unlocked_all_the_same(cuda):
    cuda.synchronize_error = RuntimeError("illegal address")
    with pytest.raises(RuntimeError, match="illegal address"), StagingRing(CUDA, 1, 64):
        pass
    assert cuda.calls[-1] == "unlock"


def test_beside_an_error_what_closing_says_is_not_reported(cuda):
    cuda.synchronize_error = RuntimeError("illegal address")
    with pytest.raises(LookupError), StagingRing(CUDA, 1, 64):
        raise LookupError
    assert cuda.calls[-1] == "unlock"


def test_memory_that_cannot_be_locked_is_an_error_that_says_so(cuda):
    cuda.lock_status = 2
    with pytest.raises(
        RuntimeError, match="could not be locked .*cudaHostRegister of 64 bytes"
    ) as e:
        StagingRing(CUDA, 1, 64)
    assert "status 2" in str(e.value)
    assert "unlock" not in cuda.calls
