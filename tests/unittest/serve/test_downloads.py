# SPDX-License-Identifier: Apache-2.0
"""Downloads: whole, by range, and of what isn't there."""

import pytest


@pytest.fixture(scope="module")
def video(server):
    id = server.create()
    server.wait(id, status="completed")
    path = f"/v1/videos/{id}/content"
    return path, server.http.get(path).content


def test_the_whole_file_comes_with_what_a_player_needs(server, video):
    path, content = video
    answer = server.http.get(path)
    assert answer.status_code == 200 and answer.headers["accept-ranges"] == "bytes"
    assert int(answer.headers["content-length"]) == len(content)
    assert answer.headers["content-disposition"].endswith('.mp4"')
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("range", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-9", 5, 10),
        ("bytes=10-", 10, None),
        ("bytes=-7", -7, None),
        ("bytes=0-999999999", 0, None),
        ("bytes=-999999999", 0, None),
        ("bytes = 1-2", 1, 3),
    ],
)
def test_a_range_is_that_part_of_the_file(server, video, range, start, stop):
    path, content = video
    answer = server.http.get(path, headers={"Range": range})
    part = content[start:stop]
    assert answer.status_code == 206 and answer.content == part
    first = len(content) + start if start < 0 else start
    span = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
    assert answer.headers["content-range"] == span
    assert int(answer.headers["content-length"]) == len(part)
    assert answer.headers["content-type"] == "video/mp4"


@pytest.mark.parametrize(
    "range", ["bytes=9-5", "bytes=-", "bytes=a-b", "items=0-1", "bytes=0-1,3-4", "", "0-1"]
)
def test_what_is_no_single_range_gets_the_whole_file(server, video, range):
    path, content = video
    answer = server.http.get(path, headers={"Range": range})
    assert answer.status_code == 200 and answer.content == content


@pytest.mark.parametrize("range", ["bytes=999999999-", "bytes=-0", "bytes=999999998-999999999"])
def test_a_range_outside_the_file_is_an_error_with_its_size(server, video, range):
    path, content = video
    answer = server.http.get(path, headers={"Range": range})
    assert answer.status_code == 416 and answer.json()["code"] == 416
    assert answer.headers["content-range"] == f"bytes */{len(content)}"


def test_a_range_counts_only_for_the_file_that_the_client_has(server, video):
    path, content = video
    etag = server.http.get(path).headers["etag"]
    for given, status in ((etag, 206), ('"another"', 200)):
        headers = {"Range": "bytes=0-3", "If-Range": given}
        assert server.http.get(path, headers=headers).status_code == status


def test_a_file_that_is_removed_during_its_download_comes_whole(server):
    id = server.create(size="512x256")
    server.wait(id, status="completed")
    with server.http.stream("GET", f"/v1/videos/{id}/content") as answer:
        assert server.http.delete(f"/v1/videos/{id}").status_code == 200
        assert len(answer.read()) == int(answer.headers["content-length"])


def test_a_file_that_somebody_removed_is_not_there(server):
    id = server.create()
    server.wait(id, status="completed")
    (server.media_path / "media" / f"{id}.mp4").unlink()
    assert server.http.get(f"/v1/videos/{id}/content").status_code == 404
    assert server.http.delete(f"/v1/videos/{id}").status_code == 200
