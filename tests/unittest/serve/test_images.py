# SPDX-License-Identifier: Apache-2.0
"""Image generations over HTTP."""

import base64
import io
import time

import httpx2 as httpx
import numpy as np
import pytest
from PIL import Image

from tests.support.serving import until

GENERATIONS = "/v1/images/generations"
BODY = {"prompt": "a", "size": "64x48", "num_inference_steps": 2}


def picture(content: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(content))
    image.load()
    return image


@pytest.mark.parametrize(
    ("fields", "name", "mime"),
    [
        ({}, "PNG", "image/png"),
        ({"format": "webp"}, "WEBP", "image/webp"),
        ({"format": "jpeg"}, "JPEG", "image/jpeg"),
        ({"output_format": "webp"}, "WEBP", "image/webp"),
    ],
)
def test_a_picture_by_url_has_the_format_that_its_type_says(server, fields, name, mime):
    before = time.time()
    answer = server.http.post(GENERATIONS, json=BODY | fields)
    assert answer.status_code == 200 and "generation;dur=" in answer.headers["server-timing"]
    body = answer.json()
    assert set(body) == {"created", "data", "output_format", "size"}
    assert body["size"] == "64x48" and body["output_format"] == mime.removeprefix("image/")
    assert int(before) <= body["created"] <= time.time()
    (data,) = body["data"]
    assert set(data) == {"url", "revised_prompt"} and data["revised_prompt"] == "a"
    content = httpx.get(data["url"])
    assert content.headers["content-type"] == mime
    assert picture(content.content).format == name
    assert picture(content.content).size == (64, 48)


def test_a_picture_in_base64_leaves_no_file(server):
    before = server.files()
    fields = {"response_format": "b64_json", "seed": 3, "n": 2}
    answer = server.http.post(GENERATIONS, json=BODY | fields).json()
    first, second = (base64.b64decode(data["b64_json"]) for data in answer["data"])
    assert set(answer["data"][0]) == {"b64_json", "revised_prompt"}
    # The stub draws the pixels of a seed once for all pictures of a request.
    drawn = np.random.default_rng(3).integers(0, 256, (1, 48, 64, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(picture(first)), drawn[0]) and first == second
    until(lambda: server.files() == before)


def test_several_pictures_have_a_url_each(server):
    answer = server.http.post(GENERATIONS, json=BODY | {"n": 3}).json()
    urls = [data["url"] for data in answer["data"]]
    assert len(set(urls)) == 3
    assert all(picture(httpx.get(url).content).size == (64, 48) for url in urls)
    assert httpx.get(urls[0].replace("/0/content", "/3/content")).status_code == 404


def test_the_resolved_size_is_reported(server):
    for size in ({}, {"size": "auto"}):
        body = {"prompt": "a", "response_format": "b64_json", **size}
        assert server.http.post(GENERATIONS, json=body).json()["size"] == "1024x1024"


def test_multipart_says_the_same_as_json(server):
    form = {"prompt": "a", "width": "64", "height": "48", "n": "2", "extra_params": "{}"}
    files = {name: (None, value) for name, value in form.items()}
    answer = server.http.post(GENERATIONS, files=files).json()
    assert answer["size"] == "64x48" and len(answer["data"]) == 2


def test_pictures_are_no_video_jobs(server):
    answer = server.http.post(GENERATIONS, json=BODY).json()
    id = answer["data"][0]["url"].split("/")[-3]
    assert all(job["id"] != id for job in server.http.get("/v1/videos").json()["data"])
    for answer in (
        server.http.get(f"/v1/videos/{id}"),
        server.http.delete(f"/v1/videos/{id}"),
        server.http.get(f"/v1/videos?after={id}"),
    ):
        assert answer.status_code == 404
    assert f"{id}-0.png" in server.files()


def test_a_client_that_leaves_takes_its_picture_with_it(server):
    body = BODY | {"prompt": '{"generate": 600.0}', "num_inference_steps": 1000}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{GENERATIONS}", json=body, timeout=0.3)
    until(lambda: server.manager.running == 0)
    assert server.http.post(GENERATIONS, json=BODY).status_code == 200


def test_the_model_may_be_named_and_must_be_the_served_one(server):
    assert server.http.post(GENERATIONS, json=BODY | {"model": "stub"}).status_code == 200
    other = server.http.post(GENERATIONS, json=BODY | {"model": "other"})
    assert other.status_code == 400 and other.json()["param"] == "model"
