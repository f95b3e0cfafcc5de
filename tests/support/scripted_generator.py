# SPDX-License-Identifier: Apache-2.0
"""The stub generator of the benchmarks, whose prompts may say what is to happen, as JSON.

``{"generate": 0.5, "encode": 1.0}`` takes that many seconds; ``"raise"`` names an exception,
``"die"`` kills the process after so many seconds, ``"hang"`` ignores a cancellation for as long,
``"deaf"`` does so while it encodes, ``"garbage"`` writes something else than a video, ``"full"``
finds the disk full; ``"resolve"`` names an exception of the check before the queue,
``"resolve_seconds"`` its time.
"""

import builtins
import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from serve_stub import SlowOutput, StubGenerator, StubResult

from tensorrt_llm.visual_gen.output import RequestBlockedError, VisualGenOutput
from tensorrt_llm.visual_gen.params import VisualGenParams


class ScriptedGenerator(StubGenerator):
    """See above."""

    def resolve(self, inputs: str, params: VisualGenParams) -> dict[str, Any]:
        script = script_of(inputs)
        time.sleep(script.get("resolve_seconds", 0.0))
        _raise(script.get("resolve"))
        return super().resolve(inputs, params)

    def generate_async(self, inputs: str, params: VisualGenParams) -> "ScriptedResult":
        result = ScriptedResult(self.resolve(inputs, params), inputs)
        script = script_of(inputs)
        self._worker.submit(
            result.run,
            script.get("generate", self._generate_seconds),
            script.get("encode", self._encode_seconds),
        )
        return result


class ScriptedResult(StubResult):
    """See above."""

    def run(self, generate_seconds: float, encode_seconds: float) -> None:
        script = script_of(self._prompt)
        if "die" in script:
            time.sleep(script["die"])
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(script.get("hang", 0.0))
        try:
            _raise(script.get("raise"))
        except Exception as error:
            self._future.set_exception(error)
        else:
            super().run(generate_seconds, encode_seconds)

    def _output(self, taken: float, encode_seconds: float) -> VisualGenOutput:
        output = super()._output(taken, encode_seconds)
        script = script_of(self._prompt)
        if {"garbage", "full", "deaf"} & set(script):
            broken = BrokenOutput.model_construct(**dict(output))
            broken.full, broken.deaf_seconds = "full" in script, script.get("deaf", 0.0)
            return broken
        return output


class BrokenOutput(SlowOutput):
    """An output whose files can't be written or are no media, or that ignores a cancellation."""

    full: bool = False
    deaf_seconds: float = 0.0

    def save(self, path: Path, should_stop: Any = None, **options: Any) -> Path:
        if self.deaf_seconds:
            time.sleep(self.deaf_seconds)
            return super().save(path, **options)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        path.write_bytes(b"<html>not a video</html>")
        return path


def script_of(prompt: str) -> dict[str, Any]:
    """What a prompt says is to happen."""
    return json.loads(prompt) if prompt.startswith("{") else {}


def _raise(name: str | None) -> None:
    if name is not None:
        kind = RequestBlockedError if name == "RequestBlockedError" else getattr(builtins, name)
        raise kind(f"a scripted {name}")


def fail_to_load(how: str) -> None:
    """A factory that raises, or whose process dies."""
    if how == "die":
        os._exit(3)
    raise ValueError("a scripted bad checkpoint")
