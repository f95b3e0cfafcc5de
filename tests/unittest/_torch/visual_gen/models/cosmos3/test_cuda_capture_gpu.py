# SPDX-License-Identifier: Apache-2.0
"""Captures on a GPU beside what other threads of the process do."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

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
