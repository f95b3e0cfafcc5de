# SPDX-License-Identifier: Apache-2.0
"""Bodies to models: JSON and multipart say the same, and nothing is dropped."""

import asyncio
import json
from typing import Any

import httpx2 as httpx
import pytest
from fastapi import Request

from tensorrt_llm._torch.visual_gen.models.cosmos3.violations import MAX_GUIDANCE_SCALE
from tensorrt_llm.serve.bodies import read_body
from tensorrt_llm.serve.errors import ApiError
from tensorrt_llm.serve.requests import ImageGenerationRequest, VideoGenerationRequest

FILES = ("image_reference", "video_reference", "input_reference")


def read(message: httpx.Request, model=VideoGenerationRequest, file_fields=FILES):
    """``read_body`` of what a client would send: (fields that were given, contents of files)."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": message.read(), "more_body": False}

    headers = [(name.lower().encode(), value.encode()) for name, value in message.headers.items()]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b""}

    async def run():
        body, files = await read_body(Request(scope, receive), model, file_fields)
        contents = {name: await file.read() for name, file in files.items()}
        return body.model_dump(exclude_unset=True), contents

    return asyncio.run(run())


def as_json(**fields) -> httpx.Request:
    return httpx.Request("POST", "http://x/", json=fields)


def as_form(*fields: tuple[str, str], files: dict | None = None) -> httpx.Request:
    parts = [(name, (None, value)) for name, value in fields] + list((files or {}).items())
    return httpx.Request("POST", "http://x/", files=parts)


def test_a_form_gives_the_values_that_json_gives():
    fields = {
        "prompt": "12",
        "model": "m",
        "seed": 7,
        "width": 64,
        "height": 48,
        "num_frames": 9,
        "fps": 12.5,
        "guidance_scale": 3.0,
        "negative_prompt": "",
        "format": "mp4",
    }
    form = as_form(*((name, str(value)) for name, value in fields.items()))
    assert read(form)[0] == read(as_json(**fields))[0] == fields


@pytest.mark.parametrize("seconds", ["4", "0.5"])
def test_seconds_may_be_text_as_openai_clients_send_them(seconds):
    for message in (
        as_json(prompt="a", seconds=seconds),
        as_form(("prompt", "a"), ("seconds", seconds)),
    ):
        assert read(message)[0]["seconds"] == float(seconds)


def test_nested_values_of_a_form_come_as_json_or_in_brackets():
    expected = {"flow_shift": 3.5, "output_type": "video", "condition_video_latent_indexes": [0, 1]}
    bracketed = as_form(
        ("prompt", "a"),
        ("extra_params[flow_shift]", "3.5"),
        ("extra_params[output_type]", "video"),
        ("extra_params[condition_video_latent_indexes][]", "0"),
        ("extra_params[condition_video_latent_indexes][]", "1"),
    )
    whole = as_form(("prompt", "a"), ("extra_params", json.dumps(expected)))
    for message in (bracketed, whole):
        assert read(message)[0]["extra_params"] == expected
    reference = as_form(("prompt", "a"), ("input_reference[image_url]", "http://x/a.png"))
    assert read(reference)[0]["input_reference"] == {"image_url": "http://x/a.png"}


def test_files_come_apart_from_the_fields():
    message = as_form(("prompt", "a"), files={"input_reference": ("../x.png", b"bytes")})
    body, files = read(message)
    assert files == {"input_reference": b"bytes"} and body["prompt"] == "a"


@pytest.mark.parametrize(
    ("message", "status", "words"),
    [
        (as_form(("prompt", "a"), ("prompt", "b")), 422, "prompt: given more than once"),
        (
            as_form(("prompt", "a"), ("extra_params", "{}"), ("extra_params", "{}")),
            422,
            "extra_params: given more than once",
        ),
        (
            as_form(("prompt", "a"), ("extra_params[a]", "1"), ("extra_params[a]", "2")),
            422,
            r"extra_params\[a\]: given more than once",
        ),
        (
            as_form(("prompt", "a"), ("extra_params[a]", "1"), ("extra_params[a][]", "2")),
            422,
            r"extra_params\[a\]\[\]: given more than once",
        ),
        (
            as_form(("prompt", "a"), ("extra_params", "x"), ("extra_params[a]", "2")),
            422,
            r"extra_params\[a\]: given more than once",
        ),
        (as_form(("prompt", "a"), ("size[w]", "1")), 422, r"size\[w\]: unknown field"),
        (as_json(prompt="a", nope=1, also=2), 422, "nope: unknown field; also: unknown field"),
        (as_json(size="a"), 422, "prompt: Field required; size: expected 'WIDTHxHEIGHT'"),
    ],
)
def test_what_can_not_be_right_is_refused_by_name(message, status, words):
    with pytest.raises(ApiError, match=words) as error:
        read(message)
    assert error.value.status == status


@pytest.mark.parametrize(
    ("model", "file_fields"), [(ImageGenerationRequest, ()), (VideoGenerationRequest, FILES)]
)
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["mask"], r"mask: unknown field \(a file\)"),
        (["size[w]"], r"size\[w\]: unknown field"),
        (["prompt"], "prompt: expected text, found a file"),
        (["extra_params[a]"], r"extra_params\[a\]: expected text, found a file"),
        (["a", "b", "c", "d"], "a: unknown field .*; b: unknown .*; c: .*; d: unknown field"),
    ],
    ids=str,
)
def test_a_file_that_no_field_takes_is_refused_by_name(model, file_fields, names, words):
    message = as_form(("prompt", "a"), files={name: ("x.png", b"x") for name in names})
    with pytest.raises(ApiError, match=words) as error:
        read(message, model, file_fields)
    assert (error.value.status, error.value.param) == (422, names[0])


@pytest.mark.parametrize("model", [ImageGenerationRequest, VideoGenerationRequest])
def test_guidance_has_the_range_of_the_pipeline(model):
    highest = MAX_GUIDANCE_SCALE
    assert read(as_json(prompt="a", guidance_scale=highest), model)[0]["guidance_scale"] == highest
    with pytest.raises(ApiError, match="guidance_scale: .*less than or equal to 100") as error:
        read(as_json(prompt="a", guidance_scale=highest + 1), model)
    assert (error.value.status, error.value.param) == (422, "guidance_scale")


def test_values_that_were_sent_are_not_quoted_in_the_refusal():
    with pytest.raises(ApiError) as error:
        read(as_json(prompt=["the secret prompt"], seed="the secret prompt"))
    assert "secret" not in error.value.message and error.value.param == "prompt"


def test_requests_become_the_params_of_the_generator():
    video = VideoGenerationRequest(
        prompt="a", size="96x64", fps=12, num_frames=9, seed=3, extra_params={"flow_shift": 2.0}
    )
    assert video.params() == {
        "width": 96,
        "height": 64,
        "frame_rate": 12.0,
        "num_frames": 9,
        "seed": 3,
        "extra_params": {"flow_shift": 2.0},
    }
    assert VideoGenerationRequest(prompt="a", size="auto").params() == {}
    image = ImageGenerationRequest(prompt="a", n=2, max_sequence_length=77, negative_prompt="")
    assert image.params() == {
        "num_frames": 1,
        "num_images_per_prompt": 2,
        "max_sequence_length": 77,
        "negative_prompt": "",
    }
