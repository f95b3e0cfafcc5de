# SPDX-License-Identifier: Apache-2.0
"""Keys, limits of bodies, addresses, and what stays out of the logs."""

import json
import socket
import time

import httpx2 as httpx
import pytest
from serve_process import ServerProcess

from tensorrt_llm.serve.settings import ServeSettings
from tests.support.serving import LONG, SMALL, serving


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server with a key and small limits."""
    headers = {"Authorization": "Bearer secret-key"}
    limits = {"max_json_bytes": 2000, "max_body_bytes": 5000, "body_timeout": 1.0}
    media = tmp_path_factory.mktemp("media")
    with serving(media, headers=headers, api_key="secret-key", **limits) as server:
        yield server


@pytest.mark.parametrize(
    "authorization",
    [None, "secret-key", "Bearer", "Bearer wrong", "Bearer secret-key2", "Basic secret-key"],
)
def test_without_the_key_nothing_but_health_answers(guarded, authorization):
    headers = {} if authorization is None else {"Authorization": authorization}
    for method, path in (
        ("GET", "/v1/videos"),
        ("POST", "/v1/videos"),
        ("DELETE", "/v1/videos/video_0"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
    ):
        answer = httpx.request(method, guarded.url + path, headers=headers)
        assert answer.status_code == 401 and answer.json()["type"] == "AuthenticationError"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "secret" not in answer.text
    assert httpx.get(f"{guarded.url}/health").json()["status"] == "ready"


def test_with_the_key_everything_answers(guarded):
    guarded.wait(guarded.create(), status="completed")
    document = guarded.http.get("/openapi.json").json()
    assert document["security"] == [{"key": []}]


def test_bodies_over_their_limit_are_refused_declared_or_not(guarded):
    json_headers = {"Content-Type": "application/json"}
    long = json.dumps({"prompt": "x" * 3000}).encode()
    declared = guarded.http.post("/v1/videos", content=long, headers=json_headers)
    chunked = guarded.http.post("/v1/videos", content=iter([long]), headers=json_headers)
    files = {"image_reference": ("a.png", b"x" * 6000)}
    upload = guarded.http.post("/v1/videos", data={"prompt": "x"}, files=files)
    for answer, limit in ((declared, 2000), (chunked, 2000), (upload, 5000)):
        assert answer.status_code == 413 and f"at most {limit} bytes" in answer.json()["message"]
    # Uploads may be larger than JSON.
    files = {"image_reference": ("a.png", b"x" * 3000)}
    small = guarded.http.post("/v1/videos", data={"prompt": "x"}, files=files)
    assert small.status_code == 400


def test_a_body_that_does_not_arrive_ends_the_request(guarded):
    host, port = guarded.url.removeprefix("http://").split(":")
    head = (
        "POST /v1/videos HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret-key\r\n"
        "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    )
    started = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=LONG) as connection:
        connection.sendall(head.encode())
        answer = connection.recv(4096)
    assert b" 408 " in answer.partition(b"\r\n")[0]
    assert time.monotonic() - started >= 0.9


def test_only_this_machine_is_served_unless_told_otherwise():
    settings = ServeSettings()
    assert settings.host == "127.0.0.1" and settings.is_loopback
    assert ServeSettings(host="localhost").is_loopback and ServeSettings(host="::1").is_loopback
    assert not ServeSettings(host="0.0.0.0").is_loopback


def test_settings_do_not_show_the_key():
    assert "secret" not in repr(ServeSettings(api_key="secret-key"))


def test_prompts_stay_out_of_the_log(tmp_path):
    log = tmp_path / "log"
    secret = "xyzzy-the-secret-prompt"
    with ServerProcess(tmp_path / "media", log=log) as process:
        with httpx.Client(base_url=process.url, timeout=LONG) as http:
            for fields in (
                {},
                {"negative_prompt": secret},
                {"num_frames": secret},
                {"unknown": secret},
                {secret: 1},
                {"size": secret},
                {"image_reference": f"http://{secret}@127.0.0.1/{secret}"},
                {"image_reference": f"data:{secret}"},
                {"extra_params": {"flow_shift": secret}},
            ):
                body = {"prompt": secret, **SMALL, **fields}
                http.post("/v1/videos/sync", json=body)
                http.post("/v1/images/generations", json=body)
            http.post("/v1/videos", content=f'{{"prompt": "{secret}"')
            http.get(f"/v1/videos/{secret}?x={secret}")
        assert process.stop() == 0
    said = log.read_text()
    assert "is queued" in said and secret not in said
