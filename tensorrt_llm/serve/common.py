# SPDX-License-Identifier: Apache-2.0
"""What the routes share."""

import asyncio
import contextlib
from typing import Any

from fastapi import Depends, Request

from tensorrt_llm.serve.errors import ApiError, status_phrase, unprocessable
from tensorrt_llm.serve.jobs import LiveJob
from tensorrt_llm.serve.manager import JobManager
from tensorrt_llm.serve.responses import ErrorResponse


def manager_of(request: Request) -> JobManager:
    """The server's manager."""
    return request.app.state.manager


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Documentation of the errors of a route; 401 and 422 are those of every route."""
    return {
        status: {"model": ErrorResponse, "description": status_phrase(status)}
        for status in sorted({401, 422, *statuses})
    }


def _refuse_query(request: Request) -> None:
    if request.query_params:
        names = sorted(set(request.query_params))[:10]
        raise unprocessable([(name[:200], "unknown query parameter") for name in names])


# For routes that read no query: a parameter there would do nothing.
no_query = Depends(_refuse_query)


def check_model(manager: JobManager, model: str | None) -> None:
    """Raises ApiError (400) for another model than the served one."""
    spec = manager.worker.spec
    if model is not None and model not in (spec.model, *spec.aliases):
        raise ApiError(
            400,
            f"Another model is served here: expected {spec.model!r}, found {model[:200]!r}.",
            param="model",
        )


async def wait_for(manager: JobManager, request: Request, job: LiveJob) -> None:
    """Wait for a job on behalf of a synchronous request.

    A client that goes away takes its job with it.

    Raises:
        ApiError: the job failed or was deleted.
    """
    gone = asyncio.ensure_future(_gone(request))
    ended = asyncio.ensure_future(job.ended.wait())
    try:
        await asyncio.wait({gone, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (gone, ended):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    if not job.ended.is_set():
        if not job.stored:
            await manager.cancel(job)
        # A picture that was complete before the cancellation came has a row by now.
        await manager.delete(job.record.id)
        raise ApiError(499, "The client has gone.")
    if job.failure is not None:
        raise job.failure.error()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
