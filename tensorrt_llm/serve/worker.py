# SPDX-License-Identifier: Apache-2.0
"""The worker process: owns the generator, checks requests, generates and encodes.

``python -m tensorrt_llm.serve.worker FD`` is started by ``worker_client``. A process of its own
keeps the server answering whatever a generation does to its interpreter, its memory or its GPU. It
ends when the server does, however that ends.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tensorrt_llm.logger import logger
from tensorrt_llm.serve.channel import WorkerChannel
from tensorrt_llm.visual_gen.output import RequestCancelledError, VisualGenOutput
from tensorrt_llm.visual_gen.params import ParameterError, VisualGenParams

_POLL_SECONDS = 0.05
_CHECK_THREADS = 4
# A clip of which only the frame rate is of interest yet.
_FEW_FRAMES = 5
# What the server wants to know of a resolved request; the texts it has.
_REPORTED = (
    "task",
    "height",
    "width",
    "num_frames",
    "frame_rate",
    "num_inference_steps",
    "seed",
)


class Generator(Protocol):
    """What the worker needs: a part of ``VisualGen``."""

    def resolve(self, inputs: str, params: VisualGenParams) -> dict[str, Any]:
        """Every value of a request, checked; see ``VisualGen.resolve``."""

    def generate_async(self, inputs: str, params: VisualGenParams) -> Any:
        """A ``VisualGenResult``."""

    def shutdown(self) -> None:
        """End."""


class Worker:
    """Serves the messages of one server.

    Args:
        generator: Loaded.
        channel: To the server.
    """

    def __init__(self, generator: Generator, channel: WorkerChannel) -> None:
        self._generator, self._channel = generator, channel
        self._checks = ThreadPoolExecutor(_CHECK_THREADS, "check")
        self._cancelled: dict[str, threading.Event] = {}

    def handle(self, message: dict[str, Any]) -> None:
        """Start what a message asks for, and return at once."""
        match message["op"]:
            case "check":
                self._checks.submit(self._check, message["call"], message["request"])
            case "run":
                self._cancelled[message["job"]] = threading.Event()
                thread = threading.Thread(
                    target=self._run, args=(message,), name=message["job"], daemon=True
                )
                thread.start()
            case "cancel":
                # None: it has ended, and the server will read so.
                event = self._cancelled.get(message["job"])
                if event is not None:
                    event.set()

    def _check(self, call: int, request: dict[str, Any]) -> None:
        try:
            params = self._params(request)
            report = self._generator.resolve(request["prompt"], params)
        except Exception as error:
            self._channel.send(
                {"event": "check_failed", "call": call, "error": describe_exception(error)}
            )
            return
        report = {name: report[name] for name in _REPORTED if name in report}
        self._channel.send({"event": "checked", "call": call, "report": report})

    def _run(self, message: dict[str, Any]) -> None:
        job = message["job"]
        try:
            output = self._generate(job, message["request"])
            self._channel.send({"event": "generated", "job": job})
            names = self._encode(job, output, Path(message["folder"]), message["format"])
        except BaseException as error:
            reply = {"event": "failed", "job": job, "error": describe_exception(error)}
        else:
            metrics = {} if output.metrics is None else output.metrics.model_dump()
            reply = {"event": "finished", "job": job, "files": names, "metrics": metrics}
        del self._cancelled[job]
        self._channel.send(reply)

    def _generate(self, job: str, request: dict[str, Any]) -> VisualGenOutput:
        cancelled = self._cancelled[job]
        result = self._generator.generate_async(request["prompt"], self._params(request))
        reported = None
        while True:
            try:
                return result.result(_POLL_SECONDS)
            except TimeoutError:
                if cancelled.is_set():
                    result.cancel()
            progress = result.progress
            if progress != reported:
                reported = progress
                self._channel.send({"event": "progress", "job": job, "step": progress.step})

    def _encode(self, job: str, output: VisualGenOutput, folder: Path, format: str) -> list[str]:
        """Write the files of an output; their names."""
        suffix = {"jpeg": "jpg"}.get(format, format)
        cancelled = self._cancelled[job].is_set
        if format == "mp4":
            names = [f"{job}.mp4"]
            output.save(folder / names[0], format="mp4", should_stop=cancelled)
            return names
        image = output.image
        pictures = [image] if image.ndim == 3 else list(image)
        names = [f"{job}-{index}.{suffix}" for index in range(len(pictures))]
        for name, picture in zip(names, pictures, strict=True):
            if cancelled():
                raise RequestCancelledError("The request was cancelled while it was encoded.")
            output.model_copy(update={"image": picture}).save(folder / name, format=suffix)
        return names

    def _params(self, request: dict[str, Any]) -> VisualGenParams:
        values = dict(request["params"])
        for name, path in request["references"].items():
            values[name] = Path(path).read_bytes()
        if request["seconds"] is not None:
            values |= self._length(request, values)
        return VisualGenParams(**values)

    def _length(self, request: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        """``num_frames`` for a length in seconds, at the rate that the request will have."""
        rate = values.get("frame_rate")
        if rate is None:
            few = VisualGenParams(**values | {"num_frames": _FEW_FRAMES})
            rate = self._generator.resolve(request["prompt"], few)["frame_rate"]
        # A single frame would be an image.
        return {"num_frames": max(2, round(request["seconds"] * rate)), "frame_rate": rate}


def describe_exception(error: BaseException) -> dict[str, Any]:
    """What the server learns of an error: whose fault, its type, its text, what was refused."""
    if isinstance(error, RequestCancelledError):
        kind = "cancelled"
    elif isinstance(error, MemoryError):
        kind = "memory"
    elif isinstance(error, (ValueError, NotImplementedError)):
        kind = "client"
    elif isinstance(error, OSError):
        # It happens where files are read and written, and its text names them.
        return {"kind": "storage", "type": type(error).__name__, "message": str(error.strerror)}
    else:
        kind = "internal"
    names = error.names if isinstance(error, ParameterError) else ()
    return {"kind": kind, "type": type(error).__name__, "message": str(error), "names": names}


def load_generator(factory: str, options: dict[str, Any]) -> Generator:
    """Call a factory, given as ``module:function``, with keyword options."""
    module, _, name = factory.partition(":")
    return getattr(import_module(module), name)(**options)


def main(descriptor: int) -> None:
    """Serve until the server is gone or says so."""
    # Ctrl-C in a terminal and systemd's SIGTERM reach every process; the server decides what they
    # mean.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    channel = WorkerChannel(descriptor)
    messages = iter(channel)
    start = next(messages, None)
    if start is None:
        return
    sys.path[:] = start["sys_path"]
    # While it loads, nobody reads the channel: a server that dies now must still be noticed.
    watch = threading.Thread(target=_die_with, args=(start["server"],), daemon=True)
    watch.start()
    try:
        generator = load_generator(start["factory"], start["options"])
    except Exception as error:
        logger.exception("The generator can't be loaded.")
        channel.send({"event": "load_failed", "error": describe_exception(error)})
        return
    channel.send({"event": "ready"})
    worker = Worker(generator, channel)
    for message in messages:
        if message["op"] == "stop":
            with contextlib.suppress(Exception):
                generator.shutdown()
            break
        worker.handle(message)
    # Not through the interpreter's end, which would wait for threads that still work.
    os._exit(0)


def _die_with(server: int) -> None:
    """End when the server, this process' parent, is no longer that."""
    while os.getppid() == server:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
