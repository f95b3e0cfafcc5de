# SPDX-License-Identifier: Apache-2.0
"""The application: routes, errors, limits and jobs of one server put together."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tensorrt_llm.serve import routes_images, routes_system, routes_videos
from tensorrt_llm.serve.errors import install_error_handlers
from tensorrt_llm.serve.manager import JobManager
from tensorrt_llm.serve.metrics import Metrics
from tensorrt_llm.serve.middleware import Gate
from tensorrt_llm.serve.requests import (
    REFERENCE_FIELDS,
    ImageGenerationRequest,
    VideoGenerationRequest,
)
from tensorrt_llm.serve.settings import ServeSettings
from tensorrt_llm.serve.worker_client import WorkerSpec
from tensorrt_llm.version import __version__

_BODIES = {model.__name__: model for model in (ImageGenerationRequest, VideoGenerationRequest)}


def create_app(settings: ServeSettings, spec: WorkerSpec) -> FastAPI:
    """Make the application; its lifespan owns the worker process and the media folder.

    Args:
        settings: How it is run.
        spec: What generates: ``VisualGen`` for a checkpoint (``visual_gen_spec``), or anything
            with that part of its interface which ``worker.Generator`` names.

    Returns:
        The application; ``app.state.manager`` is its ``JobManager``.
    """
    metrics = Metrics()
    manager = JobManager(settings, spec, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await manager.start()
            yield
        finally:
            await manager.close()

    app = FastAPI(
        title="trtllm-serve",
        version=__version__,
        summary="Images and videos from Cosmos3 checkpoints, for OpenAI's clients.",
        lifespan=lifespan,
        docs_url=None,  # its scripts would come from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.manager = manager
    app.state.started = int(time.time())
    for routes in (routes_system, routes_images, routes_videos):
        app.include_router(routes.router)
    install_error_handlers(app)
    app.add_middleware(Gate, settings=settings, metrics=metrics)
    app.openapi = lambda: _openapi(app, settings)
    return app


def _openapi(app: FastAPI, settings: ServeSettings) -> dict[str, Any]:
    """The OpenAPI document, with the bodies that the routes read for themselves."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes
    )
    schemas = document["components"]["schemas"]
    for name, model in _BODIES.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[name] = schema
        schemas[f"{name}Form"] = _form_schema(schema)
    for path in document["paths"].values():
        for operation in path.values():
            name = operation.pop("x-body", None)
            if name is not None:
                operation["requestBody"] = {
                    "required": True,
                    "content": {
                        "application/json": {"schema": _ref(name)},
                        "multipart/form-data": {"schema": _ref(f"{name}Form")},
                    },
                }
    if settings.api_key is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    app.openapi_schema = document
    return document


def _form_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A body as multipart: no nulls, and files for references."""
    fields = {}
    for name, field in schema["properties"].items():
        options = [o for o in field.get("anyOf", []) if o != {"type": "null"}]
        if name in REFERENCE_FIELDS:
            options = [{"type": "string"}, {"type": "string", "format": "binary"}]
        form = {key: value for key, value in field.items() if key not in ("anyOf", "default")}
        if len(options) == 1:
            form |= options[0]
        elif options:
            form["anyOf"] = options
        fields[name] = form
    return {**schema, "properties": fields}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
