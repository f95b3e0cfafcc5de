# SPDX-License-Identifier: Apache-2.0
"""Errors as HTTP: one envelope for every status, and the table from exceptions to statuses."""

import http
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tensorrt_llm.logger import logger

# Names that OpenAI's clients and TensorRT-LLM use for the statuses.
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    416: "RangeNotSatisfiableError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_MAX_MESSAGE = 4000
# Where pydantic's own words name its options or a Python class.
_PROBLEMS = {
    "extra_forbidden": "unknown field",
    "model_type": "expected an object",
    "dict_type": "expected an object",
}


class ApiError(Exception):
    """An answer other than success.

    Args:
        status: HTTP status.
        message: For the caller; without data of others, paths and prompts.
        type: The envelope's type; that of the status by default.
        param: The request field concerned.
        retry_after: Seconds after which trying again makes sense.
        headers: Further headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.type = type or _TYPES.get(status, "Error")
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    def response(self) -> JSONResponse:
        """The envelope."""
        return JSONResponse(
            {
                "object": "error",
                "message": _printable(self.message),
                "type": self.type,
                "param": None if self.param is None else _printable(self.param),
                "code": self.status,
            },
            status_code=self.status,
            headers=self.headers,
        )


def unprocessable(problems: Sequence[tuple[str, str]]) -> ApiError:
    """The 422 of a request whose fields don't fit; all of them at once.

    Args:
        problems: (field, problem) pairs; "" for the request as a whole.
    """
    text = "; ".join(f"{field}: {problem}" if field else problem for field, problem in problems)
    return ApiError(422, f"Request validation failed: {text}.", param=problems[0][0] or None)


def validation_problems(errors: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(field, problem) pairs of pydantic's errors, without the values that were sent."""
    problems = []
    for error in errors:
        place = [str(part) for part in error["loc"]]
        # Pydantic's mark of a dictionary's key; a client's field of that name can only be unknown.
        if place[-1:] == ["[key]"] and error["type"] != "extra_forbidden":
            del place[-1]
        problem = _PROBLEMS.get(error["type"]) or error["msg"].removeprefix("Value error, ")
        problems.append((".".join(place)[:200], problem))
    return problems


def install_error_handlers(app: FastAPI) -> None:
    """Let every error of an application leave it in the envelope."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI puts "query" or "path" before the place: where, not which field.
        errors = [found | {"loc": found["loc"][1:]} for found in error.errors()]
        return unprocessable(validation_problems(errors)).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = {
            404: f"No such route: {request.method} {request.url.path[:200]}.",
            405: f"{request.url.path[:200]} doesn't take {request.method[:20]}.",
        }.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> JSONResponse:
        # The text of an unexpected error may quote the request: the log gets its type and place.
        logger.error("%s failed with %s.", request.scope.get("path"), type(error).__name__)
        return ApiError(500, f"Internal error: {type(error).__name__}.").response()


def _printable(text: str) -> str:
    """``text`` as something that UTF-8 can encode, of a length that a log can bear."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 3]}..."


def status_phrase(status: int) -> str:
    """The reason phrase of a status, for the OpenAPI document."""
    return http.HTTPStatus(status).phrase
