# SPDX-License-Identifier: Apache-2.0
"""GET /health, /version, /v1/models, /metrics."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from tensorrt_llm.serve import metrics
from tensorrt_llm.serve.common import errors, manager_of, no_query
from tensorrt_llm.serve.responses import Health, Model, ModelList, Version
from tensorrt_llm.version import __version__

router = APIRouter(dependencies=[no_query])


@router.get(
    "/health",
    response_model=Health,
    responses={503: {"model": Health, "description": "loading, draining or failed"}},
)
async def health(request: Request) -> JSONResponse:
    """State of the server."""
    manager = manager_of(request)
    content = {
        "status": manager.state,
        "model": manager.worker.spec.model,
        "reason": manager.worker.reason,
    }
    return JSONResponse(content, 200 if manager.state == "ready" else 503)


@router.get("/version", responses=errors())
async def version() -> Version:
    """Version of the package."""
    return Version(version=__version__)


@router.get("/v1/models", responses=errors())
async def models(request: Request) -> ModelList:
    """The served model."""
    model = Model(
        id=manager_of(request).worker.spec.model,
        created=request.app.state.started,
        owned_by="tensorrt_llm",
    )
    return ModelList(data=[model])


@router.get("/metrics", response_class=PlainTextResponse, responses=errors())
async def prometheus_metrics(request: Request) -> PlainTextResponse:
    """Counters in Prometheus' text format."""
    manager = manager_of(request)
    text = manager.metrics.text(
        state=manager.state,
        queued=manager.queued,
        running=manager.running,
        media_bytes=manager.folder.used,
        restarts=manager.worker.restarts,
    )
    return PlainTextResponse(text, headers={"Content-Type": metrics.CONTENT_TYPE})
