# SPDX-License-Identifier: Apache-2.0
"""A generator that takes a fixed time and no GPU: for load, fuzz runs and the server's tests.

``ServerProcess`` (serve_process.py) serves it by running this file. It judges requests as the real
pipeline does and encodes real files; the pixels mean nothing. Sizes above ``MAX_PIXELS`` are drawn
small, so that a huge request costs no more time than another.
"""

import json
import secrets
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import resolve_request
from tensorrt_llm.visual_gen.output import (
    RequestCancelledError,
    VisualGenMetrics,
    VisualGenOutput,
    VisualGenProgress,
)
from tensorrt_llm.visual_gen.params import VisualGenParams

MAX_PIXELS = 2**18
_SMALL = (5, 64, 64)
_ENCODE_PARTS = 200
# Requests of this size or more "don't fit", as on a small GPU.
_CAPACITY_PIXELS = 2**28

_TRAITS = SimpleNamespace(
    family="nano",
    build="base",
    has_sound=False,
    default_use_system_prompt=False,
    requires_guardrails=False,
    video_negative_prompt="blurry",
    fixed_sigmas=None,
)


class StubGenerator:
    """Stands for ``VisualGen``.

    Args:
        generate_seconds: Time of each generation.
        encode_seconds: Time of each encoding, beside the real one's.
        load_seconds: Time of loading.
    """

    def __init__(
        self,
        generate_seconds: float = 0.05,
        encode_seconds: float = 0.0,
        load_seconds: float = 0.0,
    ) -> None:
        time.sleep(load_seconds)
        self._generate_seconds, self._encode_seconds = generate_seconds, encode_seconds
        self._worker = ThreadPoolExecutor(1, "stub")

    def resolve(self, inputs: str, params: VisualGenParams) -> dict[str, Any]:
        """Judge a request as Cosmos3-Nano's pipeline does."""
        values = resolve_request(inputs, params, _TRAITS)
        pixels = values.num_frames * values.height * values.width
        if pixels >= _CAPACITY_PIXELS:
            raise MemoryError(f"{pixels} pixels don't fit the stub's memory.")
        return values.report()

    def generate_async(self, inputs: str, params: VisualGenParams) -> "StubResult":
        """Queue a generation."""
        result = StubResult(self.resolve(inputs, params), inputs)
        self._worker.submit(result.run, self._generate_seconds, self._encode_seconds)
        return result

    def shutdown(self) -> None:
        """Take no more."""
        self._worker.shutdown(wait=False, cancel_futures=True)


class StubResult:
    """Stands for ``VisualGenResult``."""

    def __init__(self, report: dict[str, Any], prompt: str) -> None:
        self.progress = VisualGenProgress("queued", 0, 0)
        self._report, self._prompt = report, prompt
        self._future: Future[VisualGenOutput] = Future()
        self._cancelled = threading.Event()

    def result(self, timeout: float | None = None) -> VisualGenOutput:
        """The output."""
        return self._future.result(timeout)

    def cancel(self) -> bool:
        """Stop before the next step."""
        self._cancelled.set()
        return not self._future.done()

    def run(self, generate_seconds: float, encode_seconds: float) -> None:
        """Take the time, step by step."""
        steps = self._report["num_inference_steps"]
        started = time.perf_counter()
        try:
            for step in range(steps):
                if self._cancelled.wait(generate_seconds / steps):
                    raise RequestCancelledError("The request was cancelled between two steps.")
                self.progress = VisualGenProgress("generating", step + 1, steps)
            taken = time.perf_counter() - started
            self._future.set_result(self._output(taken, encode_seconds))
        except BaseException as error:
            self._future.set_exception(error)

    def _output(self, taken: float, encode_seconds: float) -> VisualGenOutput:
        import numpy as np

        report = self._report
        shape = (report["num_frames"], report["height"], report["width"])
        if shape[0] * shape[1] * shape[2] > MAX_PIXELS:
            shape = (min(shape[0], _SMALL[0]), *_SMALL[1:])
        draw = np.random.default_rng(report["seed"])
        pixels = draw.integers(0, 256, (*shape, 3), dtype=np.uint8)
        metrics = VisualGenMetrics(
            generation=taken, pre_denoise=0.0, denoise=taken, post_denoise=0.0
        )
        if report["num_frames"] > 1:
            content = {"video": pixels, "frame_rate": report["frame_rate"]}
        else:
            count = report["num_images_per_prompt"]
            content = {"image": pixels[0] if count == 1 else np.repeat(pixels, count, axis=0)}
        output = SlowOutput(metrics=metrics, **content)
        output.encode_seconds = encode_seconds
        return output


class SlowOutput(VisualGenOutput):
    """An output whose encoding can take its time."""

    encode_seconds: float = 0.0

    def save(self, path: Path, should_stop: Any = None, **options: Any) -> Path:
        """Write half a file beside the target, as encoders do, before the real writing."""
        if self.encode_seconds:
            partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
            try:
                for _ in range(_ENCODE_PARTS):
                    with partial.open("ab") as file:
                        file.write(b"half a file")
                    time.sleep(self.encode_seconds / _ENCODE_PARTS)
                    if should_stop is not None and should_stop():
                        raise RequestCancelledError("The request was cancelled while encoded.")
            finally:
                partial.unlink(missing_ok=True)
        return super().save(path, should_stop=should_stop, **options)


def main() -> int:
    """Serve with the settings and the generator of the JSON argument; print the URL first."""
    from tensorrt_llm.serve.server import bind, serve, url_of
    from tensorrt_llm.serve.settings import ServeSettings
    from tensorrt_llm.serve.worker_client import WorkerSpec

    options = json.loads(sys.argv[1])
    settings = ServeSettings(**{"port": 0, **options["settings"]})
    listener = bind(settings)
    print(url_of(listener), flush=True)
    spec = WorkerSpec(options["factory"], options["stub"], "stub")
    return serve(settings, spec, listener)


if __name__ == "__main__":
    sys.exit(main())
