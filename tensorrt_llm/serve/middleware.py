# SPDX-License-Identifier: Apache-2.0
"""What happens to every request before its route: authorisation, limits of the body, counting."""

import asyncio
import hmac
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tensorrt_llm.serve.bodies import content_kind
from tensorrt_llm.serve.errors import ApiError
from tensorrt_llm.serve.metrics import Metrics
from tensorrt_llm.serve.settings import ServeSettings

_OPEN_PATHS = ("/health",)


class Gate:
    """Pure ASGI, so that neither bodies nor downloads are buffered.

    Args:
        app: The application.
        settings: The API key and the limits.
        metrics: Counts every answer.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            headers = Headers(scope=scope)
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await refusal.response()(scope, receive, counting_send)
                return
            limit = self._limit(headers)
            deadline = time.monotonic() + self._settings.body_timeout
            await self._app(scope, _limited(receive, limit, deadline), counting_send)
        finally:
            # The router notes the route that it found, a pattern.
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.count_request(scope["method"], route, status)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        key = self._settings.api_key
        if key is not None and path not in _OPEN_PATHS:
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = token.strip().encode() if scheme.lower() == "bearer" else b""
            if not hmac.compare_digest(given, key.encode()):
                return ApiError(
                    401,
                    "A valid API key is needed: Authorization: Bearer KEY.",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            return ApiError(400, "The Content-Length is no number.")
        limit = self._limit(headers)
        return _too_large(limit) if int(length) > limit else None

    def _limit(self, headers: Headers) -> int:
        if content_kind(headers.get("content-type", "")) == "multipart":
            return self._settings.max_body_bytes
        return self._settings.max_json_bytes


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body is too large: at most {limit} bytes.")


def _limited(receive: Receive, limit: int, deadline: float) -> Receive:
    """``receive`` that gives up on a body which is too long or too slow."""
    left, complete = limit, False

    async def limited_receive() -> Message:
        nonlocal left, complete
        if complete:
            # What follows a body is the end of the connection: that may take as long as it likes.
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise ApiError(408, "The body took too long to arrive.") from None
        if message["type"] == "http.request":
            left -= len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if left < 0:
                raise _too_large(limit)
        return message

    return limited_receive
