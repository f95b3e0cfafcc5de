# SPDX-License-Identifier: Apache-2.0
"""GET /metrics, /health, /version, /v1/models and the OpenAPI document."""

import re

from tensorrt_llm.serve.metrics import Metrics
from tensorrt_llm.version import __version__

LINE = re.compile(r'trtllm_serve_\w+(\{(\w+="[^"\n]*",?)+\})? [0-9.e+-]+')


def test_counters_follow_what_happened(server):
    done, failed = server.create(), server.create({"raise": "ValueError"})
    deleted = server.create({"generate": 30.0})
    server.wait(done, status="completed")
    server.wait(failed, status="failed")
    server.http.delete(f"/v1/videos/{deleted}")
    server.http.request("BREW", "/v1/videos/secret")
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = answer.text
    assert all(LINE.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))
    for line in (
        'jobs_created_total{kind="video"} 3',
        'jobs_ended_total{kind="video",outcome="completed"} 1',
        'jobs_ended_total{kind="video",outcome="failed"} 1',
        'jobs_ended_total{kind="video",outcome="cancelled"} 1',
        'http_requests_total{method="POST",route="/v1/videos",status="202"} 3',
        'http_requests_total{method="DELETE",route="/v1/videos/{video_id}",status="200"} 1',
        'state{state="ready"} 1',
        'state{state="draining"} 0',
        "queued_requests 0",
        "timed_jobs_total 1",
    ):
        assert f"trtllm_serve_{line}\n" in text
    assert 'method="other"' in text and "secret" not in text
    size = (server.media_path / "media" / f"{done}.mp4").stat().st_size
    assert f"trtllm_serve_media_bytes {size}\n" in text


def test_labels_are_escaped_and_large_counts_are_exact():
    metrics = Metrics()
    metrics.count_request("GET", 'a"b\\c\nd', 200)
    metrics.created["video"] = 123_456_789_012
    text = metrics.text(state="ready", queued=0, running=0, media_bytes=2**40, restarts=0)
    assert r'route="a\"b\\c\nd"' in text
    assert " 123456789012\n" in text and f" {2**40}\n" in text


def test_small_routes(server):
    assert server.http.get("/version").json() == {"version": __version__}
    assert server.http.get("/health").json() == {"status": "ready", "model": "stub", "reason": None}
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["id"] == "stub" and model["object"] == "model"


def test_the_document_describes_bodies_and_errors_of_every_route(server):
    document = server.http.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/health",
        "/version",
        "/v1/models",
        "/metrics",
        "/v1/images/generations",
        "/v1/images/{image_id}/{index}/content",
        "/v1/videos",
        "/v1/videos/sync",
        "/v1/videos/{video_id}",
        "/v1/videos/{video_id}/content",
    }
    create = document["paths"]["/v1/videos"]["post"]
    assert set(create["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    assert {"202", "400", "413", "415", "422", "429", "503"} <= set(create["responses"])
    schemas = document["components"]["schemas"]
    assert schemas["VideoGenerationRequest"]["additionalProperties"] is False
    form = schemas["VideoGenerationRequestForm"]["properties"]["image_reference"]
    assert {"type": "string", "format": "binary"} in form["anyOf"]
    assert "security" not in document
