# SPDX-License-Identifier: Apache-2.0
"""VisualGen: load a checkpoint, generate pictures and video from text."""

import asyncio
import contextlib
import functools
import os
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen.args import VisualGenArgs
from tensorrt_llm.visual_gen.output import VisualGenOutput, VisualGenProgress
from tensorrt_llm.visual_gen.params import ExtraParamSchema, VisualGenParams

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.executor import Job


class VisualGenResult:
    """A request under way. ``await`` it, or call ``result``."""

    def __init__(self, job: "Job") -> None:
        self._job = job

    def __repr__(self) -> str:
        return f"VisualGenResult(request_id={self.request_id}, progress={self.progress})"

    def __await__(self) -> Generator[Any, None, VisualGenOutput]:
        return self.aresult().__await__()

    @property
    def request_id(self) -> int:
        """Number of the request within its ``VisualGen``."""
        return self._job.request_id

    @property
    def done(self) -> bool:
        """Whether an output or an error is there."""
        return self._job.future.done()

    @property
    def progress(self) -> VisualGenProgress:
        """Stage and denoising steps, as of now."""
        return self._job.progress

    def result(self, timeout: float | None = None) -> VisualGenOutput:
        """Wait for the output.

        Args:
            timeout: Seconds to wait; None waits on.

        Raises:
            TimeoutError: not finished in time. The request goes on.
            RequestCancelledError: (a RuntimeError) it was cancelled.
            ValueError, MemoryError, RuntimeError: as ``VisualGen.generate``.
        """
        return self._job.future.result(timeout)

    async def aresult(self, timeout: float | None = None) -> VisualGenOutput:
        """``result`` for asyncio. An awaiting task that is cancelled leaves the request running."""
        loop, finished = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: object) -> None:
            # A loop that is closed by now has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(finished.set)

        self._job.future.add_done_callback(wake)
        await asyncio.wait_for(finished.wait(), timeout)
        return self._job.future.result()

    def cancel(self) -> bool:
        """Ask for an end: at once if queued, between two steps if running.

        Returns:
            False when it had already finished.
        """
        return self._job.cancel()


class VisualGen:
    """A loaded checkpoint that generates. Use it as a context manager, or call ``shutdown``.

    Args:
        model: A local checkpoint folder or a Hub id.
        args: Runtime options; their ``model``, if set, must be the same.

    Raises:
        ValueError: a checkpoint or option that doesn't fit.
        NotImplementedError: an option or a variant that is not built yet, by name.
        MemoryError: the checkpoint or the warm-up doesn't fit.
        RuntimeError: anything else.
    """

    def __init__(self, model: str | os.PathLike[str], args: VisualGenArgs | None = None) -> None:
        self.args = _with_model(args, model)
        # Here, so that importing this module costs no torch.
        from tensorrt_llm._torch.visual_gen.executor import VisualGenExecutor, map_error
        from tensorrt_llm._torch.visual_gen.models.cosmos3.memory_estimate import (
            request_capacity,
        )
        from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader

        try:
            self._pipeline = PipelineLoader(self.args).load()
        except Exception as error:
            mapped = map_error(error)
            if mapped is error:
                raise
            raise mapped from error
        self._executor = VisualGenExecutor(self._pipeline, self._pipeline.components.device)
        self._capacity = request_capacity(self._pipeline.components)

    def __enter__(self) -> "VisualGen":
        return self

    def __exit__(self, exception_type: type | None, *exception: object) -> None:
        # Left by an error (Ctrl-C while waiting, say), nobody is left to take the running request.
        self._executor.shutdown(cancel_running=exception_type is not None)

    @staticmethod
    def supported_models() -> list[str]:
        """Hub ids of the checkpoints that this version is made for."""
        from tensorrt_llm._torch.visual_gen.pipeline_registry import supported_models

        return supported_models()

    @property
    def default_params(self) -> VisualGenParams:
        """A fresh ``VisualGenParams`` with the defaults that all tasks of the checkpoint share.

        What depends on the task stays None, so that setting ``num_frames`` 1 or a reference brings
        that task's defaults; ``task_defaults`` has them.
        """
        return self._pipeline.default_params

    @property
    def task_defaults(self) -> dict[str, dict[str, Any]]:
        """The checkpoint's tasks, and what a request of each gets where it says nothing.

        Without a reference at hand: size and rate of image to video and video to video follow it.
        """
        return self._pipeline.task_defaults

    @property
    def extra_param_specs(self) -> dict[str, ExtraParamSchema]:
        """What ``VisualGenParams.extra_params`` may hold for this checkpoint."""
        return self._pipeline.extra_param_specs

    @overload
    def generate(self, inputs: str, params: VisualGenParams | None = None) -> VisualGenOutput: ...

    @overload
    def generate(
        self,
        inputs: Sequence[str],
        params: VisualGenParams | Sequence[VisualGenParams | None] | None = None,
    ) -> list[VisualGenOutput]: ...

    def generate(self, inputs, params=None):
        """Generate and wait. An interruption while waiting (Ctrl-C) cancels what it waits for.

        Args:
            inputs: A prompt, or a list of them.
            params: Options; for a list, one for all or one for each.

        Returns:
            An output for a prompt. A list of outputs for a list: an item that failed carries
            ``error`` and doesn't stop the others.

        Raises:
            ValueError: the caller's mistake; all parameter errors at once, after
                "Parameter validation failed:".
            NotImplementedError: an option that is not built yet.
            MemoryError: the request doesn't fit.
            RuntimeError: anything else.
        """
        if isinstance(inputs, str):
            with _cancelled_on_interrupt() as results:
                results.append(self.generate_async(inputs, params))
                return results[0].result()
        if not isinstance(inputs, (list, tuple)):
            raise ValueError(
                describe_error(
                    "Bad inputs",
                    where="VisualGen.generate",
                    expected="a prompt or a list of prompts",
                    found=type(inputs).__name__,
                    remedy="pass a str, or a list of str for several outputs",
                )
            )
        prompts = list(inputs)
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(
                describe_error(
                    "Prompts and params don't pair up",
                    where="VisualGen.generate",
                    expected=f"one params for all, or {len(prompts)}",
                    found=len(each),
                    remedy=(
                        "pass one VisualGenParams for all prompts, or a list of as many as prompts"
                    ),
                )
            )
        with _cancelled_on_interrupt() as results:
            # All are queued before the first is waited for.
            waits = [
                self._submit_or_error(*pair, results) for pair in zip(prompts, each, strict=True)
            ]
            return [wait() for wait in waits]

    def generate_async(self, inputs: str, params: VisualGenParams | None = None) -> VisualGenResult:
        """Check a request, queue it, and return at once.

        Raises:
            ValueError, NotImplementedError: as ``generate``, before anything is queued.
            RuntimeError: after ``shutdown``.
        """
        return VisualGenResult(self._executor.submit(self._prepare(inputs, params)))

    def resolve(self, inputs: str, params: VisualGenParams | None = None) -> dict[str, Any]:
        """Check a request and fill in its defaults, without queueing it.

        Returns:
            Every value that it would run with, as in ``VisualGenOutput.metadata["request"]``. A
            seed that wasn't given is drawn anew by each call.

        Raises:
            ValueError, NotImplementedError: as ``generate``.
            MemoryError: it can't fit the device, by a lower bound of its need.
        """
        from tensorrt_llm._torch.visual_gen.models.cosmos3.memory_estimate import check_fits

        request = self._prepare(inputs, params)
        check_fits(request, self._pipeline.components, self._capacity)
        return request.values.report()

    async def get_stats_async(self) -> dict[str, int]:
        """Requests ``queued`` and ``running`` now, and ``completed``, ``failed``, ``cancelled``."""
        return self._executor.stats()

    def shutdown(self) -> None:
        """Fail what is queued, finish what runs, end the worker. Calling it again does nothing."""
        self._executor.shutdown()

    def _prepare(self, inputs: str, params: VisualGenParams | None) -> Any:
        """A checked request."""
        if params is not None and not isinstance(params, VisualGenParams):
            raise ValueError(
                describe_error(
                    "Bad params",
                    where="VisualGen",
                    expected="a VisualGenParams or None",
                    found=type(params).__name__,
                    remedy="pass VisualGenParams(height=..., ...), or None for the defaults",
                )
            )
        return self._pipeline.prepare_request(inputs, params)

    def _submit_or_error(
        self, prompt: str, params: VisualGenParams | None, results: list[VisualGenResult]
    ):
        """A function that waits for the item's output; it never raises for the item's own sake.

        The item's result, if it could be queued, is added to ``results``.
        """
        try:
            result = self.generate_async(prompt, params)
        except Exception as error:
            return functools.partial(VisualGenOutput, error=str(error))
        results.append(result)
        return functools.partial(_output_or_error, result)


@contextlib.contextmanager
def _cancelled_on_interrupt() -> Iterator[list[VisualGenResult]]:
    """A list for the results that a block waits for; whatever ends the block early cancels them.

    After Ctrl-C nobody is left to take them, and the next request would have to wait for them.
    """
    results: list[VisualGenResult] = []
    try:
        yield results
    except BaseException:
        for result in results:
            result.cancel()
        raise


def _output_or_error(result: VisualGenResult) -> VisualGenOutput:
    try:
        return result.result()
    except Exception as error:
        return VisualGenOutput(request_id=result.request_id, error=str(error))


def _with_model(args: VisualGenArgs | None, model: str | os.PathLike[str]) -> VisualGenArgs:
    if args is None:
        return VisualGenArgs(model=model)
    given = VisualGenArgs(**{**dict(args), "model": model})
    if args.model not in (None, given.model):
        raise ValueError(
            describe_error(
                "Two different models",
                where="VisualGen",
                expected=f"args.model {args.model!r} or None",
                found=repr(given.model),
                remedy="leave args.model out, or give it the same value",
            )
        )
    return given
