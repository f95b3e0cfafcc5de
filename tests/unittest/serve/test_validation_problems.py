# SPDX-License-Identifier: Apache-2.0
"""A refusal speaks of the fields of the request, not of the classes and validators behind them."""

import asyncio
import json
import re
from typing import Annotated

import httpx2 as httpx
import pytest
from fastapi import FastAPI, Query, Request

from tensorrt_llm.serve.bodies import read_body
from tensorrt_llm.serve.errors import ApiError, install_error_handlers
from tensorrt_llm.serve.requests import ImageGenerationRequest, VideoGenerationRequest
from tensorrt_llm.serve.responses import ListQuery

MODELS = [ImageGenerationRequest, VideoGenerationRequest]
REFERENCE_KINDS = "expected text or an object with image_url"
SURROGATE = "expected valid Unicode, found a lone surrogate"
WRONG = [
    *(5, True, 1.5, -1, "\ud800", "x", [], {}, [[1]], {"image_url": 5}, {"\ud800": 1}),
    *({"image_url": "\ud800"}, {"image_url": "a", "b": 1}, {"b": {"c": 1}}, 10**400),
]
# What only Python and pydantic call so.
INTERNAL = re.compile(r"function-|\[|_check|Strict|\wRequest|Object|dictionary|instance of")


def refusal(body, model=VideoGenerationRequest) -> ApiError | None:
    """What ``read_body`` refuses a JSON body with."""
    content = json.dumps(body).encode()

    async def receive():
        return {"type": "http.request", "body": content, "more_body": False}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    try:
        asyncio.run(read_body(Request(scope, receive), model))
    except ApiError as error:
        assert error.status == 422
        return error
    return None


@pytest.mark.parametrize(
    ("reference", "param", "problem"),
    [
        (5, "input_reference", REFERENCE_KINDS),
        (["a"], "input_reference", REFERENCE_KINDS),
        ("\ud800", "input_reference", SURROGATE),
        ({"image_url": 5}, "input_reference.image_url", "Input should be a valid string"),
        ({"image_url": "\ud800"}, "input_reference.image_url", SURROGATE),
        ({}, "input_reference.image_url", "Field required"),
        ({"image_url": "a", "file_id": "b"}, "input_reference.file_id", "unknown field"),
    ],
    ids=str,
)
def test_a_wrong_reference_is_refused_once_by_the_field_that_is_wrong(reference, param, problem):
    error = refusal({"prompt": "a", "input_reference": reference})
    assert error.param == param
    assert error.message == f"Request validation failed: {param}: {problem}."


@pytest.mark.parametrize("model", MODELS)
def test_no_wrong_value_of_any_field_brings_up_an_internal_name(model):
    refused = 0
    for name in model.model_fields:
        for value in WRONG:
            error = refusal({"prompt": "a", name: value}, model)
            if error is not None:
                refused += 1
                assert error.param is None or error.param.split(".")[0] == name
                assert not INTERNAL.search(f"{error.param} {error.message}"), error.message
    assert refused > 5 * len(model.model_fields)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("body", [[], 5, "text", None], ids=str)
def test_a_body_that_is_no_object_is_told_so(model, body):
    error = refusal(body, model)
    assert (error.message, error.param) == ("Request validation failed: expected an object.", None)


def test_extra_params_that_are_no_object_are_told_so():
    error = refusal({"prompt": "a", "extra_params": 5})
    assert error.message == "Request validation failed: extra_params: expected an object."


def test_a_key_that_is_no_text_is_named_without_a_word_about_keys():
    # How pydantic spells what can't be spelled is its own affair.
    param = refusal({"prompt": "a", "extra_params": {"k\ud800": 1}}).param
    assert re.fullmatch(r"extra_params\.k\W+", param) and "[" not in param


@pytest.mark.parametrize("name", ["body", "query", "path"])
def test_an_unknown_field_is_named_whatever_its_name(name):
    error = refusal({"prompt": "a", name: 1})
    assert error.param == name and f"{name}: unknown field" in error.message


@pytest.mark.parametrize("name", ["limit", "query"])
def test_a_query_parameter_is_named_without_the_place_it_stands_in(name):
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/")
    async def read(query: Annotated[ListQuery, Query()]) -> None:
        pass

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/", params={name: "-1"})

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["param"]) == (422, name)
