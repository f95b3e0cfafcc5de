# SPDX-License-Identifier: Apache-2.0
"""Video jobs over HTTP: their life, order, progress, cancellation and lists."""

import io
import re
import threading
import time

import av
import httpx2 as httpx
import pytest

from tests.support.serving import LONG, serving, until


def decode(content: bytes) -> tuple[int, tuple[int, int], float]:
    """(frames, (width, height), rate) of an MP4."""
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        frames = sum(1 for _ in container.decode(stream))
        return frames, (stream.width, stream.height), float(stream.average_rate)


def test_a_video_is_created_polled_downloaded_and_deleted(server):
    created = server.post("a prompt", seed=7, fps=12)
    job = created.json()
    assert created.status_code == 202 and re.fullmatch("video_[0-9a-f]{32}", job["id"])
    assert (job["status"], job["stage"], job["progress"]) == ("queued", None, 0)
    assert job["completed_at"] is job["expires_at"] is job["error"] is None
    done = server.wait(job["id"], status="completed")
    assert done["progress"] == 100 and done["step"] == done["num_steps"] == 4
    assert (done["size"], done["fps"], done["num_frames"], done["seed"]) == ("64x64", 12, 5, 7)
    assert done["duration"] == pytest.approx(5 / 12, abs=1e-6)
    assert float(done["seconds"]) == pytest.approx(5 / 12)
    assert (done["object"], done["model"], done["prompt"]) == ("video", "stub", "a prompt")
    assert done["created_at"] <= done["completed_at"] <= time.time()
    assert done["expires_at"] == pytest.approx(done["completed_at"] + 86400, abs=1)
    content = server.http.get(f"/v1/videos/{job['id']}/content")
    assert content.headers["content-type"] == "video/mp4"
    assert re.fullmatch(
        r"generation;dur=[\d.]+, denoise;dur=[\d.]+", content.headers["server-timing"]
    )
    assert decode(content.content) == (5, (64, 64), 12.0)
    assert f"{job['id']}.mp4" in server.files()
    deleted = server.http.delete(f"/v1/videos/{job['id']}")
    assert deleted.json() == {"id": job["id"], "object": "video.deleted", "deleted": True}
    assert f"{job['id']}.mp4" not in server.files()
    for answer in (
        server.http.get(f"/v1/videos/{job['id']}"),
        server.http.get(f"/v1/videos/{job['id']}/content"),
        server.http.delete(f"/v1/videos/{job['id']}"),
    ):
        assert answer.status_code == 404


def test_a_request_without_size_and_rate_shows_the_values_that_are_used(server):
    job = server.http.post("/v1/videos", json={"prompt": "a", "num_frames": 6}).json()
    assert (job["size"], job["fps"], job["num_frames"]) == ("1280x720", 24.0, 9)
    assert isinstance(job["seed"], int)
    server.wait(job["id"], status="completed")


@pytest.mark.parametrize(
    ("fields", "frames", "fps"),
    [
        ({"seconds": "1", "fps": 8}, 9, 8.0),
        ({"seconds": 0.5}, 13, 24.0),
        ({"seconds": 0.001, "frame_rate": 1.0}, 5, 1.0),
    ],
)
def test_a_length_in_seconds_follows_the_rate(server, fields, frames, fps):
    body = {"prompt": "a", "size": "64x64", **fields}
    job = server.http.post("/v1/videos", json=body).json()
    assert (job["num_frames"], job["fps"]) == (frames, fps)


def test_steps_are_counted_in_the_job(server):
    id = server.create({"generate": 0.6}, num_inference_steps=6)
    seen = set()

    def look():
        job = server.job(id)
        seen.add((job["status"], job["stage"], job["step"], job["progress"]))
        return job["status"] == "completed"

    until(look)
    steps = sorted({step for _, stage, step, _ in seen if stage == "generating"})
    assert len(steps) >= 3 and steps[-1] <= 6
    # The last step is no completion: 100 comes with the files.
    counted = {step: p for _, stage, step, p in seen if stage == "generating"}
    assert all(p == min(99, 100 * step // 6) for step, p in counted.items())
    assert ("completed", None, 6, 100) in seen


def test_jobs_run_first_come_first_served(server):
    ids = [server.create({"generate": 0.05}) for _ in range(5)]

    def look():
        # Last to first: when one has been started, all before it must have been.
        states = [server.job(id)["status"] for id in reversed(ids)]
        started = [state != "queued" for state in states]
        assert started == sorted(started)
        return set(states) == {"completed"}

    until(look)


def test_one_job_generates_at_a_time_while_the_one_before_is_encoded(server):
    first = server.create({"encode": 1.0})
    second, third = server.create({"generate": 0.8}), server.create()
    server.wait(first, stage="postprocessing")
    server.wait(second, stage="generating")
    assert server.job(first)["stage"] == "postprocessing"
    assert server.job(third)["status"] == "queued"
    # Answers come at once meanwhile (the full-size load run measures how fast).
    started = time.monotonic()
    for _ in range(10):
        server.job(first)
    assert time.monotonic() - started < 2
    for id in (first, second, third):
        server.wait(id, status="completed")


def test_deleting_a_queued_job_means_that_it_never_runs(server):
    running = server.create({"generate": 0.3})
    queued = server.create({"die": 0})
    assert server.http.delete(f"/v1/videos/{queued}").status_code == 200
    server.wait(running, status="completed")
    server.wait(server.create(), status="completed")


def test_deleting_a_generating_job_frees_the_worker(server):
    id = server.create({"generate": 50.0}, num_inference_steps=100)
    server.wait(id, stage="generating")
    later = server.create()
    started = time.monotonic()
    assert server.http.delete(f"/v1/videos/{id}").status_code == 200
    server.wait(later, status="completed")
    assert time.monotonic() - started < 20
    assert server.http.get(f"/v1/videos/{id}").status_code == 404
    assert not [name for name in server.files() if id in name]


def test_deleting_a_job_that_is_encoded_leaves_no_file(server):
    id = server.create({"encode": 40.0})
    server.wait(id, stage="postprocessing")
    until(lambda: [name for name in server.files() if id in name])
    started = time.monotonic()
    assert server.http.delete(f"/v1/videos/{id}").status_code == 200
    # Its encoder stopped within a frame, not after the 5 s that DELETE would wait for it.
    assert time.monotonic() - started < 4
    # Its file is gone when the answer comes, not some time later.
    assert not [name for name in server.files() if id in name]
    server.wait(server.create(), status="completed")
    assert server.http.get(f"/v1/videos/{id}").status_code == 404


def test_deleting_a_job_whose_encoder_does_not_listen_leaves_no_file_either(server):
    id = server.create({"deaf": 0.6})
    server.wait(id, stage="postprocessing")
    assert server.http.delete(f"/v1/videos/{id}").status_code == 200
    assert not [name for name in server.files() if id in name]
    server.wait(server.create(), status="completed")


def test_a_deleted_job_has_no_file_left_even_where_removing_takes_its_time(server, monkeypatch):
    folder = server.manager.folder
    remove = folder.remove_partial

    def slowly(id):
        time.sleep(0.3)
        remove(id)

    monkeypatch.setattr(folder, "remove_partial", slowly)
    id = server.create({"deaf": 0.3})
    server.wait(id, stage="postprocessing")
    assert server.http.delete(f"/v1/videos/{id}").status_code == 200
    assert not [name for name in server.files() if id in name]


def test_the_content_of_a_job_that_is_not_complete_is_an_error_that_says_so(server):
    id = server.create({"generate": 0.3})
    early = server.http.get(f"/v1/videos/{id}/content")
    assert early.status_code == 400 and "not completed" in early.json()["message"]
    failed = server.create({"raise": "ValueError"})
    server.wait(failed, status="failed")
    late = server.http.get(f"/v1/videos/{failed}/content")
    assert late.status_code == 400 and "a scripted ValueError" in late.json()["message"]


def test_lists_are_paged_in_both_orders(server):
    for job in server.http.get("/v1/videos?limit=100").json()["data"]:
        server.http.delete(f"/v1/videos/{job['id']}")
    empty = server.http.get("/v1/videos").json()
    assert empty == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    ids = [server.create() for _ in range(5)]
    for order, expected in (("asc", ids), ("desc", ids[::-1])):
        seen, after = [], ""
        while True:
            page = server.http.get(f"/v1/videos?limit=2&order={order}{after}").json()
            found = [job["id"] for job in page["data"]]
            assert (page["first_id"], page["last_id"]) == (found[0], found[-1])
            seen += found
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        assert seen == expected


def test_a_synchronous_request_gets_the_video_and_leaves_a_job(server):
    body = {"prompt": "a", "size": "64x64", "num_frames": 5}
    # A range of a POST's answer means nothing.
    answer = server.http.post("/v1/videos/sync", json=body, headers={"Range": "bytes=0-3"})
    assert answer.status_code == 200 and answer.headers["content-type"] == "video/mp4"
    assert decode(answer.content) == (5, (64, 64), 24.0)
    assert "generation;dur=" in answer.headers["server-timing"]
    assert server.http.get(answer.headers["content-location"]).content == answer.content


def test_a_synchronous_client_that_leaves_takes_its_job_with_it(server):
    # Longer than `until` waits: a job that goes on never completes here.
    body = {"prompt": '{"generate": 500.0}', "size": "64x64", "num_frames": 5}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/videos/sync", json=body, timeout=1.0)

    def nothing_goes_on():
        newest = server.http.get("/v1/videos?limit=1").json()["data"]
        return server.manager.running == 0 and all(j["status"] == "completed" for j in newest)

    until(nothing_goes_on)


def test_a_job_of_a_waiting_client_can_be_deleted_by_another(server):
    body = {"prompt": '{"generate": 50.0}', "size": "64x64", "num_frames": 5}
    answers = []
    waiting = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{server.url}/v1/videos/sync", json=body, timeout=LONG)
        )
    )
    waiting.start()
    until(lambda: server.manager.running)
    (job,) = server.http.get("/v1/videos?limit=1").json()["data"]
    server.http.delete(f"/v1/videos/{job['id']}")
    waiting.join(LONG)
    assert answers[0].status_code == 404 and "deleted" in answers[0].json()["message"]


def test_a_full_queue_says_when_to_come_again_and_what_is_deleted_makes_room(tmp_path):
    with serving(tmp_path, max_queue_size=2) as server:
        running = server.create({"generate": 50.0})
        server.wait(running, stage="generating")
        waiting = [server.create() for _ in range(2)]
        full = server.post()
        assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
        assert full.json()["type"] == "RateLimitError" and "at most 2" in full.json()["message"]
        image = server.http.post("/v1/images/generations", json={"prompt": "a"})
        assert image.status_code == 429
        # Nothing of a body is read then.
        headers = {"Content-Type": "application/json"}
        unread = server.http.post("/v1/videos", content=b"no JSON", headers=headers)
        assert unread.status_code == 429
        server.http.delete(f"/v1/videos/{waiting[0]}")
        again = server.create()
        server.http.delete(f"/v1/videos/{running}")
        for id in (waiting[1], again):
            server.wait(id, status="completed")


def test_a_job_past_its_deadline_fails_queued_or_running_and_the_next_one_runs(tmp_path):
    with serving(tmp_path, job_timeout=1.0) as server:
        running = server.create({"generate": 50.0}, num_inference_steps=100)
        queued = server.create({"generate": 50.0})
        for id in (running, queued):
            job = server.wait(id, status="failed")
            assert job["error"]["code"] == "deadline_exceeded"
        assert server.http.get(f"/v1/videos/{running}/content").status_code == 400
        sync = {"prompt": '{"encode": 40.0}', "size": "64x64", "num_frames": 5}
        answer = server.http.post("/v1/videos/sync", json=sync)
        assert answer.status_code == 503 and "longer" in answer.json()["message"]
        server.wait(server.create(), status="completed")
        until(lambda: len(server.files()) == 1)


def test_jobs_and_files_expire(tmp_path):
    with serving(tmp_path, expire_after=0.4) as server:
        done, failed = server.create(), server.create({"raise": "RuntimeError"})
        until(lambda: server.files() == [f"{done}.mp4"])
        until(lambda: server.http.get(f"/v1/videos/{failed}").status_code == 404)
        until(lambda: server.http.get(f"/v1/videos/{done}").status_code == 404)
        until(lambda: not server.files() and server.manager.folder.used == 0)
