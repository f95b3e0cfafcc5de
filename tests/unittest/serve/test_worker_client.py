# SPDX-License-Identifier: Apache-2.0
"""The server's end of the worker: whenever it is told to stop, it stops and leaves no process."""

import asyncio
import contextlib
import os
import signal
import threading

import pytest

from tensorrt_llm.serve.worker_client import WorkerClient, WorkerSpec
from tests.support.serving import LONG, SCRIPTED

# Loads for longer than anything here waits: such a worker ends only if it is killed.
LOADING = WorkerSpec(SCRIPTED, {"load_seconds": 10 * LONG}, "stub")


async def stop(client: WorkerClient) -> None:
    try:
        # Not wait_for, which would let the loop turn once more before.
        async with asyncio.timeout(LONG):
            await client.stop()
    finally:
        left = client.pid is not None and os.path.exists(f"/proc/{client.pid}")
        client.kill()
    assert not left


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_a_stop_right_after_the_start_leaves_no_worker(turns):
    """In the same turn of the loop, while the process is being spawned, and once it is there."""

    async def run():
        client = WorkerClient(LOADING, lambda message: None, lambda: None)
        client.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        await stop(client)

    asyncio.run(run())


def test_a_stop_while_a_dead_worker_is_replaced_leaves_no_worker():
    async def run():
        restarting = asyncio.Event()
        client = WorkerClient(LOADING, lambda message: None, restarting.set)
        client.start()
        while client.pid is None:
            await asyncio.sleep(0.01)
        first = client.pid
        client.kill()
        await restarting.wait()
        # The new one is being spawned, and the client still has the old one.
        assert client.restarts == 1 and client.pid == first
        await stop(client)
        assert client.pid != first

    asyncio.run(run())


def test_the_exit_code_of_a_dead_worker_is_its_own_and_nobody_else_reaps_it(monkeypatch, caplog):
    # The order that loses it, made certain: the stream has ended, the worker is dead and is killed
    # for good, and only then does asyncio's thread ask for its exit code.
    killed, waitpid, kill = threading.Event(), os.waitpid, WorkerClient.kill

    def late_waitpid(pid, options):
        if threading.current_thread() is not threading.main_thread():
            killed.wait(LONG)
        return waitpid(pid, options)

    def kill_the_dead(client):
        if not killed.is_set():
            # Another child watcher, that of newer Pythons, may have been faster.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, client.pid, os.WEXITED | os.WNOWAIT)
        kill(client)
        killed.set()

    monkeypatch.setattr(os, "waitpid", late_waitpid)
    monkeypatch.setattr(WorkerClient, "kill", kill_the_dead)

    async def run():
        restarting = asyncio.Event()
        client = WorkerClient(LOADING, lambda message: None, restarting.set)
        client.start()
        while client.pid is None:
            await asyncio.sleep(0.01)
        os.kill(client.pid, signal.SIGKILL)
        await restarting.wait()
        await stop(client)

    asyncio.run(run())
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"The worker died (exit code {-signal.SIGKILL}); starting another."]
