# SPDX-License-Identifier: Apache-2.0
"""Captures on a GPU: beside other threads of the process, and what they leave behind."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tensorrt_llm._torch.custom_ops import w8a16_ops
from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import CudaCapture

pytestmark = [pytest.mark.gpu, pytest.mark.cosmos3]

# Larger than any block that torch's allocator could cut it from: a capture begins with its cache
# emptied, so the driver is asked.
NEVER_SEEN = 301 * 2**20 + 4096


def device_allocations() -> int:
    return torch.cuda.memory_stats()["num_device_alloc"]


def test_another_thread_may_ask_the_driver_for_memory_while_a_graph_is_captured():
    x = torch.ones(1024, device="cuda")
    asked = []

    def allocate():
        before = device_allocations()
        other = torch.empty(NEVER_SEEN, dtype=torch.uint8, device="cuda")
        asked.append(device_allocations() - before)
        del other

    with ThreadPoolExecutor(1) as thread:

        def run():
            # In the midst of the capture, and over before it goes on.
            doubled = x * 2
            if torch.cuda.is_current_stream_capturing():
                thread.submit(allocate).result()
            return doubled + 1

        captured = CudaCapture()(run)
    assert asked == [1]
    x.fill_(3)
    captured.replay()
    assert torch.equal(captured.output, torch.full_like(x, 7))


def test_the_scratch_buffer_stays_as_long_as_a_graph_and_is_given_back_with_the_last(monkeypatch):
    monkeypatch.setattr(w8a16_ops, "_SCRATCH", {})
    x = torch.randn(64, 1024, dtype=torch.bfloat16, device="cuda")
    weight = torch.randint(0, 0x70, (4096, 1024), dtype=torch.uint8, device="cuda")
    weight, scale = weight.view(torch.float8_e4m3fn), torch.tensor(0.01, device="cuda")

    def run():
        return torch.ops.trtllm.linear_w8a16(x, weight, scale)

    capture = CudaCapture()
    graphs = [capture(run) for _ in range(2)]
    ((key, buffer),) = w8a16_ops._SCRATCH.items()
    buffer = weakref.ref(buffer)
    graphs.pop(0)
    assert key in w8a16_ops._SCRATCH
    w8a16_ops._SCRATCH.clear()  # as another model on this stream does
    with torch.cuda.stream(capture._stream):  # whose allocations would take its place
        taken = torch.full((4096, 1024), 7.0, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    x.normal_()
    graphs[0].replay()
    expected = torch.nn.functional.linear(x, weight.to(x.dtype) * scale.to(x.dtype))
    assert torch.equal(graphs[0].output, expected)
    assert bool((taken == 7).all())
    graphs.clear()
    assert buffer() is None

    again = capture(run)
    assert len(w8a16_ops._SCRATCH) == 1
    del again
    assert not w8a16_ops._SCRATCH
