# SPDX-License-Identifier: Apache-2.0
"""The worker thread and its queue, on a pipeline that does what a request says."""

import gc
import threading
import weakref

import pytest
import torch

from tensorrt_llm import VisualGenOutput
from tensorrt_llm._torch.visual_gen.executor import VisualGenExecutor, map_error
from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen.output import RequestCancelledError

LONG = 20  # seconds; waiting this long means that something hangs


class ScriptedPipeline:
    """Runs a request, which is a function of (on_step, should_cancel) or an error to raise."""

    def __init__(self):
        self.order = []

    def generate(self, request, *, on_step, should_cancel):
        self.order.append(request)
        if isinstance(request, BaseException):
            raise request
        if callable(request):
            request(on_step, should_cancel)
        return VisualGenOutput(metadata={"request": request})


class Gate:
    """A request that starts, tells so, and goes on when opened or cancelled."""

    def __init__(self):
        self.started, self.opened = threading.Event(), threading.Event()

    def __call__(self, on_step, should_cancel):
        on_step(1, 4)
        self.started.set()
        while not self.opened.wait(0.01):
            if should_cancel():
                raise RequestCancelledError("cancelled between steps")
        on_step(4, 4)


@pytest.fixture
def pipeline():
    return ScriptedPipeline()


@pytest.fixture
def executor(pipeline):
    executor = VisualGenExecutor(pipeline)
    yield executor
    executor.shutdown(cancel_running=True)


@pytest.fixture
def gate(executor):
    gate = Gate()
    gate.job = executor.submit(gate)
    assert gate.started.wait(LONG)
    return gate


def test_requests_run_in_order_and_are_numbered(executor, pipeline):
    jobs = [executor.submit(name) for name in "abc"]
    outputs = [job.future.result(LONG) for job in jobs]
    assert [output.request_id for output in outputs] == [0, 1, 2]
    assert [output.metadata["request"] for output in outputs] == list("abc")
    assert pipeline.order == list("abc")


@pytest.mark.parametrize(
    ("device", "made_current"), [("cuda:1", ["cuda:1"]), ("cpu", []), (None, [])]
)
def test_the_worker_makes_the_models_device_its_current_one(
    pipeline, monkeypatch, device, made_current
):
    seen = []  # each thread has a current device of its own: the caller's is not the worker's

    def note(device):
        seen.append((threading.current_thread().name, str(device)))

    monkeypatch.setattr(torch.cuda, "set_device", note)
    executor = VisualGenExecutor(pipeline, device and torch.device(device))
    executor.submit("a").future.result(LONG)
    executor.shutdown()
    assert seen == [("visual-gen", name) for name in made_current]


def test_progress_can_be_watched(executor, gate):
    waiting = executor.submit("a")
    assert waiting.progress == ("queued", 0, 0)
    assert gate.job.progress == ("generating", 1, 4)
    gate.opened.set()
    waiting.future.result(LONG)
    assert gate.job.progress == ("done", 4, 4)


def test_a_queued_request_is_cancelled_at_once_and_never_runs(executor, pipeline, gate):
    waiting, later = executor.submit("a"), executor.submit("b")
    assert waiting.cancel() is True
    with pytest.raises(RequestCancelledError, match="queued"):
        waiting.future.result(timeout=0)
    assert executor.stats() == {
        "queued": 1,
        "running": 1,
        "completed": 0,
        "failed": 0,
        "cancelled": 1,
    }
    gate.opened.set()
    later.future.result(LONG)
    assert pipeline.order == [gate, "b"]
    assert waiting.cancel() is False


def test_a_running_request_is_cancelled_between_steps_and_the_next_one_runs(executor, gate):
    later = executor.submit("b")
    assert gate.job.cancel() is True
    with pytest.raises(RequestCancelledError, match="between steps"):
        gate.job.future.result(LONG)
    assert later.future.result(LONG).metadata["request"] == "b"
    assert gate.job.cancel() is False and later.cancel() is False


def test_a_future_can_not_be_cancelled_around_the_executor(gate):
    assert gate.job.future.cancel() is False


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")
HOST = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 TB")


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        (ValueError("bad"), ValueError, "bad"),
        (NotImplementedError("not built"), NotImplementedError, "not built"),
        (MemoryError("full"), MemoryError, "full"),
        (OUT_OF_MEMORY, MemoryError, "Tried to allocate 9 GiB"),
        (HOST, MemoryError, "tried 9 TB"),
        (RuntimeError("boom"), RuntimeError, "boom"),
        (KeyError("missing"), RuntimeError, "KeyError.*missing"),
        (OSError("disk"), RuntimeError, "OSError: disk"),
        (KeyboardInterrupt(), RuntimeError, "KeyboardInterrupt"),
    ],
)
def test_errors_arrive_as_one_of_three_kinds_and_the_worker_goes_on(executor, raised, kind, text):
    with pytest.raises(kind, match=text):
        executor.submit(raised).future.result(LONG)
    assert executor.submit("next").future.result(LONG).metadata["request"] == "next"
    assert executor.stats()["failed"] == 1 and executor.stats()["completed"] == 1


def test_a_mapped_error_keeps_its_cause():
    cause = KeyError("missing")
    assert map_error(cause).__cause__ is cause


def test_a_mapped_error_of_ours_keeps_its_own_remedy_and_a_foreign_one_gets_one():
    own = describe_error("Gone", where="a", expected="b", found="c", remedy="log in")
    assert str(map_error(PermissionError(own))) == f"PermissionError: {own}"
    foreign = str(map_error(OSError("disk")))
    assert "found OSError: disk. Remedy: report it" in foreign


def test_a_real_exhausted_host_is_a_capacity_error(executor):
    def allocate(on_step, should_cancel):
        torch.empty(2**60, dtype=torch.uint8)

    with pytest.raises(MemoryError, match="Not enough memory"):
        executor.submit(allocate).future.result(LONG)


class Latents:
    """Stands for a tensor; can be weakly referenced."""


def test_a_failed_request_holds_nothing_of_its_work(executor):
    alive = []

    def fail(on_step, should_cancel):
        latents = Latents()
        alive.append(weakref.ref(latents))
        raise RuntimeError("in the middle")

    job = executor.submit(fail)
    with pytest.raises(RuntimeError, match="in the middle") as error:
        job.future.result(LONG)
    gc.collect()
    assert error.value is not None and alive[0]() is None


def test_an_output_is_the_callers_alone(executor):
    job = executor.submit("a")
    output = weakref.ref(job.future.result(LONG))
    del job
    gc.collect()
    assert output() is None


def test_shutdown_fails_what_is_queued_and_lets_the_running_request_end(executor, gate):
    waiting = executor.submit("a")
    closing = threading.Thread(target=executor.shutdown)
    closing.start()
    with pytest.raises(RuntimeError, match="shut down"):
        waiting.future.result(LONG)
    assert not gate.job.future.done()
    gate.opened.set()
    closing.join(LONG)
    assert not closing.is_alive() and gate.job.future.result(0) is not None
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit("b")
    executor.shutdown()


def test_shutdown_can_cancel_the_running_request(executor, gate):
    executor.shutdown(cancel_running=True)
    with pytest.raises(RequestCancelledError):
        gate.job.future.result(0)


def test_a_forgotten_executor_ends_its_thread(pipeline):
    executor = VisualGenExecutor(pipeline)
    thread = executor._thread
    del executor
    gc.collect()
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_forked_process_is_told_instead_of_waiting_forever(executor, monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: -1)  # what the copy in another process would see
    with pytest.raises(RuntimeError, match="forked process"):
        executor.submit("a")


def test_a_kept_error_does_not_keep_the_pipeline_and_still_tells_where(monkeypatch):
    # pytest keeps every log record, and a record its traceback.
    monkeypatch.setattr("tensorrt_llm.logger.logger.error", lambda *args, **kwargs: None)
    own = ScriptedPipeline()
    executor = VisualGenExecutor(own)
    error = executor.submit(KeyError("missing")).future.exception(LONG)
    executor.shutdown()
    kept = weakref.ref(own)
    del own, executor
    gc.collect()
    assert kept() is None
    assert "in generate" in "".join(error.__notes__)
