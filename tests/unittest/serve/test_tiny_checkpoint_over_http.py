# SPDX-License-Identifier: Apache-2.0
"""End to end: the tiny checkpoint over real HTTP, by plain requests and by OpenAI's client."""

import base64
import io

import av
import httpx2 as httpx
import numpy as np
import openai
import pytest
from PIL import Image

from tensorrt_llm.serve.visual_gen_spec import visual_gen_spec
from tensorrt_llm.serve.worker_client import WorkerSpec
from tensorrt_llm.visual_gen.args import VisualGenArgs
from tests.support.faulty_visual_gen import FAULTY
from tests.support.serving import serving, until

pytestmark = [
    pytest.mark.cosmos3,
    # Of the service behind the client, not of this one.
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
]

IMAGE = {"prompt": "A robot arm.", "size": "96x64", "num_inference_steps": 4, "seed": 5}
VIDEO = {"size": "96x64", "num_frames": 9, "num_inference_steps": 4, "fps": 12, "seed": 5}


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_fp8_checkpoint):
    """The tiny checkpoint, with faults on demand."""
    args = VisualGenArgs(compilation_config={"skip_warmup": True})
    spec = visual_gen_spec(tiny_fp8_checkpoint, args)
    spec = WorkerSpec(FAULTY, spec.options, "tiny", spec.aliases)
    with serving(tmp_path_factory.mktemp("media"), spec) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    """OpenAI's client, as it comes."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def generate(server, **fields) -> bytes:
    body = IMAGE | {"response_format": "b64_json"} | fields
    answer = server.http.post("/v1/images/generations", json=body)
    assert answer.status_code == 200, answer.text
    return base64.b64decode(answer.json()["data"][0]["b64_json"])


@pytest.fixture(scope="module")
def fresh(server):
    """The first picture of a fresh process."""
    return generate(server)


def decode(content: bytes) -> tuple[int, tuple[int, int], float]:
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        frames = sum(1 for _ in container.decode(stream))
        return frames, (stream.width, stream.height), float(stream.average_rate)


def test_an_image_comes_as_base64_and_by_url_with_the_same_pixels(server, fresh):
    assert Image.open(io.BytesIO(fresh)).size == (96, 64)
    answer = server.http.post("/v1/images/generations", json=IMAGE).json()
    assert httpx.get(answer["data"][0]["url"]).content == fresh
    assert generate(server, seed=6) != fresh


def test_a_video_is_created_polled_downloaded_decoded_and_deleted(server):
    job = server.http.post("/v1/videos", json={"prompt": "A robot arm."} | VIDEO).json()
    done = server.wait(job["id"], status="completed")
    assert (done["size"], done["fps"], done["num_frames"], done["seed"]) == ("96x64", 12.0, 9, 5)
    content = server.http.get(f"/v1/videos/{job['id']}/content")
    assert decode(content.content) == (9, (96, 64), 12.0)
    generation, denoise = (
        float(phase.partition("dur=")[2]) for phase in content.headers["server-timing"].split(", ")
    )
    assert generation > denoise > 0
    assert server.http.delete(f"/v1/videos/{job['id']}").status_code == 200
    assert server.http.get(f"/v1/videos/{job['id']}").status_code == 404


def test_openais_client_generates_images(client, fresh):
    (model,) = client.models.list().data
    extra = {"num_inference_steps": 4, "seed": 5}
    result = client.images.generate(
        model=model.id,
        prompt="A robot arm.",
        size="96x64",
        response_format="b64_json",
        output_format="png",
        extra_body=extra,
    )
    assert base64.b64decode(result.data[0].b64_json) == fresh
    assert (result.size, result.output_format) == ("96x64", "png")
    by_url = client.images.generate(prompt="A robot arm.", size="96x64", n=2, extra_body=extra)
    contents = [httpx.get(image.url).content for image in by_url.data]
    assert contents[0] == fresh and contents[1] != fresh


def test_openais_client_handles_videos(client):
    extra = {"num_inference_steps": 4, "fps": 8, "extra_params": {"use_system_prompt": False}}
    video = client.videos.create_and_poll(
        prompt="A robot arm.",
        model="tiny",
        seconds="1",
        size="96x64",
        poll_interval_ms=50,
        extra_body=extra,
    )
    assert video.status == "completed" and video.progress == 100 and video.error is None
    assert (video.seconds, video.size, video.model) == ("1.125", "96x64", "tiny")
    assert client.videos.retrieve(video.id) == video
    content = client.videos.download_content(video.id, variant="video").read()
    assert decode(content) == (9, (96, 64), 8.0)
    queued = client.videos.create(prompt="Another.", size="96x64", extra_body=VIDEO)
    assert queued.status == "queued"
    assert {video.id, queued.id} <= {job.id for job in client.videos.list(limit=1)}
    assert client.videos.delete(queued.id).deleted and client.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError) as error:
        client.videos.retrieve(video.id)
    assert (error.value.type, error.value.param, error.value.code) == (
        "NotFoundError",
        "video_id",
        "404",
    )


def test_openais_client_starts_from_a_picture(client):
    buffer = io.BytesIO()
    Image.fromarray(np.full((64, 96, 3), 200, dtype=np.uint8)).save(buffer, "PNG")
    picture = buffer.getvalue()
    uri = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    for reference in (
        {"input_reference": ("start.png", picture, "image/png"), "extra_body": VIDEO},
        {"extra_body": VIDEO | {"input_reference": {"image_url": uri}}},
    ):
        video = client.videos.create_and_poll(
            prompt="A robot arm.", poll_interval_ms=50, **reference
        )
        assert video.status == "completed" and video.size == "96x64"
        client.videos.delete(video.id)


def test_openais_client_sees_errors_as_its_own(client):
    with pytest.raises(openai.UnprocessableEntityError, match="quality: unknown field"):
        client.images.generate(prompt="a", quality="hd")
    with pytest.raises(openai.BadRequestError, match="width: expected a multiple of 16"):
        client.videos.create(prompt="a", size="100x64")
    with pytest.raises(openai.BadRequestError, match="Another model is served here"):
        client.images.generate(prompt="a", model="gpt-image-1")


def test_an_error_names_the_field_that_the_client_sent(server):
    broken = {
        "input_reference": f"data:image/png;base64,{base64.b64encode(b'no picture').decode()}"
    }
    cut = io.BytesIO()
    Image.new("RGB", (64, 64)).save(cut, "PNG")
    uploads = {"input_reference": ("a.png", cut.getvalue()[:60], "image/png")}
    for route, field, body in (
        ("/v1/images/generations", "size", {"json": IMAGE | {"size": "100x128"}}),
        ("/v1/images/generations", "prompt", {"json": IMAGE | {"max_sequence_length": 1}}),
        ("/v1/videos", "input_reference", {"json": {"prompt": "a"} | VIDEO | broken}),
        ("/v1/videos", "input_reference", {"data": {"prompt": "a"}, "files": uploads}),
    ):
        answer = server.http.post(route, **body)
        assert (answer.status_code, answer.json()["param"]) == (400, field), answer.text


@pytest.mark.parametrize(
    ("prompt", "status", "code"),
    [
        ("raise", 500, "generation_failed"),
        ("out of memory", 503, "out_of_memory"),
        ("die", 500, "worker_died"),
    ],
)
def test_after_a_failure_in_mid_loop_the_next_output_is_that_of_a_fresh_process(
    server, fresh, prompt, status, code
):
    job = server.http.post("/v1/videos", json={"prompt": prompt} | VIDEO).json()
    assert server.wait(job["id"], status="failed")["error"]["code"] == code
    until(lambda: server.http.get("/health").json()["status"] == "ready")
    assert generate(server) == fresh
    if prompt != "die":
        answer = server.http.post("/v1/videos/sync", json={"prompt": prompt} | VIDEO)
        assert answer.status_code == status
        assert generate(server) == fresh
