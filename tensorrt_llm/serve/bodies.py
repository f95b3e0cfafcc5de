# SPDX-License-Identifier: Apache-2.0
"""Request bodies, JSON or multipart, to a validated model; nothing in them is silently dropped."""

import json
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from tensorrt_llm.serve.errors import ApiError, unprocessable, validation_problems

M = TypeVar("M", bound=BaseModel)

# Stands for an uploaded file while the fields are validated.
_UPLOADED = "uploaded file"
_MAX_PARTS = 100
# More than any field takes: a file too many is refused by its name, which the parser doesn't tell.
# Not many more, for each may hold a descriptor.
_MAX_FILES = 16
# A prompt may be long; longer text is refused by the pipeline, which says how long it may be.
_MAX_TEXT_PART = 8 * 2**20
_BRACKETS = re.compile(r"(\w+)\[(\w+)\](\[\])?", re.ASCII)
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}", re.ASCII)
_NUMBER = re.compile(r"[+-]?([0-9]{1,30}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,3})?")


async def read_body(
    request: Request, model: type[M], file_fields: Iterable[str] = ()
) -> tuple[M, dict[str, UploadFile]]:
    """Read and validate a body.

    Args:
        request: Its body may be JSON or multipart.
        model: What it must fit.
        file_fields: Fields that a multipart body may hold a file in.

    Returns:
        The model, and the uploaded files by field; the model holds a placeholder for them. They
        stay open until the request ends.

    Raises:
        ApiError: 415 another content type, 422 fields that don't fit, 400 broken multipart.
    """
    kind = content_kind(request.headers.get("content-type", ""))
    files: dict[str, UploadFile] = {}
    if kind == "json":
        values = _parse_json(await request.body())
    elif kind == "multipart":
        values, files = await _read_form(request, model, frozenset(file_fields))
    else:
        raise ApiError(
            415,
            "The body must be JSON (Content-Type: application/json) or multipart/form-data.",
        )
    try:
        return model.model_validate(values), files
    except ValidationError as error:
        raise unprocessable(validation_problems(error.errors(include_url=False))) from None


def content_kind(content_type: str) -> str | None:
    """ "json", "multipart", or None for another content type."""
    mime = content_type.partition(";")[0].strip().lower()
    return {"application/json": "json", "multipart/form-data": "multipart"}.get(mime)


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(data, object_pairs_hook=_without_duplicates)
    # RecursionError: brackets, a hundred thousand deep. ValueError: UnicodeDecodeError too.
    except (ValueError, RecursionError) as error:
        text = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise unprocessable([("", f"the body is no valid JSON ({text})")]) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise unprocessable([("", "the body gives a field more than once")])
    return values


async def _read_form(
    request: Request, model: type[BaseModel], file_fields: frozenset[str]
) -> tuple[dict[str, Any], dict[str, UploadFile]]:
    try:
        form = await request.form(
            max_files=_MAX_FILES, max_fields=_MAX_PARTS, max_part_size=_MAX_TEXT_PART
        )
    except HTTPException as error:
        raise ApiError(400, f"The multipart body can't be read: {error.detail}") from None
    kinds = _kinds_of_fields(model)
    values: dict[str, Any] = {}
    files: dict[str, UploadFile] = {}
    problems = []
    for name, value in form.multi_items():
        match = _BRACKETS.fullmatch(name)
        is_member = match is not None and "object" in kinds.get(match[1], ())
        if isinstance(value, UploadFile):
            if name not in file_fields:
                known = name in kinds or is_member
                problem = "expected text, found a file" if known else "unknown field (a file)"
                problems.append((name[:200], problem))
                continue
            files[name], value = value, _UPLOADED
        if is_member:
            _set_member(values.setdefault(match[1], {}), match, value, problems)
        elif name in values:
            problems.append((name[:200], "given more than once"))
        else:
            values[name] = _convert(value, kinds.get(name, ()))
    if problems:
        raise unprocessable(problems)
    return values, files


def _set_member(members: Any, match: re.Match[str], value: str, problems: list) -> None:
    """``field[key]=value`` and ``field[key][]=item``, as OpenAI's clients spell nested values."""
    if not isinstance(members, dict) or (match[2] in members) > bool(match[3]):
        problems.append((match[0], "given more than once"))
    elif match[3]:
        items = members.setdefault(match[2], [])
        if isinstance(items, list):
            items.append(_json_or_text(value))
        else:
            problems.append((match[0], "given more than once"))
    else:
        members[match[2]] = _json_or_text(value)


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _convert(value: str, kinds: Iterable[str]) -> Any:
    """A form's text as what the field takes; text that is none of it stays, to be refused."""
    if "integer" in kinds and _INTEGER.fullmatch(value):
        return int(value)
    if "number" in kinds and _NUMBER.fullmatch(value):
        return float(value)
    if "object" in kinds and value.lstrip().startswith("{"):
        return _parse_json(value.encode("utf-8", "surrogatepass"))
    return value


def _kinds_of_fields(model: type[BaseModel]) -> dict[str, set[str]]:
    """JSON types of each field."""
    schema = model.model_json_schema()
    kinds = {}
    for name, field in schema["properties"].items():
        options = field.get("anyOf", [field])
        # A reference is to another model: an object.
        nested = [o for option in options for o in option.get("anyOf", [option])]
        kinds[name] = {option.get("type", "object") for option in nested}
    return kinds
