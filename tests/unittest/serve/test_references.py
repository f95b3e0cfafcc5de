# SPDX-License-Identifier: Apache-2.0
"""References of video requests: uploads, URLs, data URIs, and what is not read."""

import base64
import io
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from PIL import Image

from tensorrt_llm.serve.media_folder import MediaFolder, StorageFullError
from tensorrt_llm.serve.references import Reference, keep_reference, media_policy
from tensorrt_llm.serve.settings import ServeSettings
from tensorrt_llm.visual_gen.media_writer import write_video
from tests.support.serving import SMALL, serving, until


def png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def mp4(tmp_path_factory):
    pixels = np.zeros((5, 64, 64, 3), dtype=np.uint8)
    return write_video(tmp_path_factory.mktemp("clip") / "clip.mp4", pixels, 24, 90).read_bytes()


@pytest.fixture
def folder(tmp_path):
    folder = MediaFolder(tmp_path / "media", 2**20)
    yield folder
    folder.close()


POLICY = media_policy(ServeSettings())


def test_uploads_go_by_their_bytes_whatever_the_field_leaves_open(folder, mp4):
    for field, content, name in (
        ("image_reference", png(), "image_reference"),
        ("video_reference", mp4, "video_reference"),
        ("input_reference", png(), "image_reference"),
        ("input_reference", mp4, "video_reference"),
    ):
        reference = Reference(field, io.BytesIO(content))
        found, path = keep_reference(reference, f"video_{field}_{name}", folder, POLICY)
        assert found == name and path.read_bytes() == content
        assert path.parent == folder.uploads
    used = folder.used
    folder.remove_upload(path)
    assert folder.used == used - len(mp4) and not path.exists()


@pytest.mark.parametrize(
    ("field", "what", "expected"),
    [
        ("image_reference", "mp4", "an image"),
        ("video_reference", "png", "video"),
        ("input_reference", "text", "an image or a video"),
    ],
)
def test_an_upload_of_the_wrong_kind_is_refused_and_leaves_nothing(
    folder, mp4, field, what, expected
):
    content = {"mp4": mp4, "png": png(), "text": b"hello"}[what]
    with pytest.raises(ValueError, match=f"{field}.*expected {expected}"):
        keep_reference(Reference(field, io.BytesIO(content)), "video_0", folder, POLICY)
    assert not list(folder.uploads.iterdir()) and folder.used == 0


def test_data_uris_say_what_they_are(folder, mp4):
    for mime, content, name in (
        ("image/png", png(), "image_reference"),
        ("video/mp4", mp4, "video_reference"),
    ):
        uri = f"data:{mime};base64,{base64.b64encode(content).decode()}"
        found, path = keep_reference(Reference("input_reference", uri), f"v{name}", folder, POLICY)
        assert found == name and path.read_bytes() == content


def test_an_upload_that_does_not_fit_the_folder_is_refused(tmp_path):
    folder = MediaFolder(tmp_path, 50)
    with pytest.raises(StorageFullError, match="No room"):
        keep_reference(Reference("input_reference", io.BytesIO(png())), "v", folder, POLICY)
    assert not list(folder.uploads.iterdir()) and folder.used == 0
    folder.close()


@pytest.fixture(scope="module")
def web():
    """A web server on loopback with one picture."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(png())))
            self.end_headers()
            self.wfile.write(png())

        def log_message(self, *arguments):
            pass

    web = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{web.server_port}/a.png"
    web.shutdown()
    thread.join()


def test_a_private_address_is_refused(server, web):
    answer = server.post(image_reference=web)
    assert answer.status_code == 400 and answer.json()["param"] == "image_reference"
    assert not [name for name in server.files() if name.endswith("-image")]


def test_every_way_of_giving_a_reference_reaches_the_generator(tmp_path, web, mp4, monkeypatch):
    local = tmp_path / "local.png"
    local.write_bytes(png())
    uri = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    form = {name: str(value) for name, value in SMALL.items()} | {"prompt": '{"encode": 0.3}'}
    options = {"allow_private_addresses": True, "allow_local_media": True}
    with serving(tmp_path / "media", **options) as server:
        ids = [
            server.create({"encode": 0.3}, **{field: value})
            for field, value in (
                ("image_reference", web),
                ("image_reference", uri),
                ("image_reference", str(local)),
                ("input_reference", local.as_uri()),
                ("input_reference", {"image_url": uri}),
            )
        ]
        for field, content, kind in (
            ("image_reference", png(), "image"),
            ("video_reference", mp4, "video"),
            ("input_reference", mp4, "video"),
        ):
            files = {field: ("../../evil", content, "application/octet-stream")}
            answer = server.http.post("/v1/videos", data=form, files=files)
            assert answer.status_code == 202, answer.text
            ids.append(answer.json()["id"])
            assert f"{ids[-1]}-{kind}" in server.files()
        form_uri = form | {"input_reference[image_url]": uri}
        answer = server.http.post("/v1/videos", files={k: (None, v) for k, v in form_uri.items()})
        ids.append(answer.json()["id"])
        for id in ids:
            server.wait(id, status="completed")
        until(lambda: server.files() == sorted(f"{id}.mp4" for id in ids))
        # The variable of whoever runs the server is stronger than its option.
        monkeypatch.setenv("TRTLLM_DISALLOW_LOCAL_MEDIA_PATH", "1")
        for value in (str(local), local.as_uri()):
            answer = server.post(image_reference=value)
            assert answer.status_code == 400 and "forbidden" in answer.json()["message"]
        assert server.post(image_reference=uri).status_code == 202


def test_uploads_of_cancelled_and_failed_jobs_are_removed(server):
    files = {"image_reference": ("a.png", png(), "image/png")}
    before = server.files()
    for script, end in (('{"generate": 50.0}', "delete"), ('{"raise": "ValueError"}', "fail")):
        form = {name: str(value) for name, value in SMALL.items()} | {"prompt": script}
        id = server.http.post("/v1/videos", data=form, files=files).json()["id"]
        if end == "delete":
            server.http.delete(f"/v1/videos/{id}")
        else:
            server.wait(id, status="failed")
        until(lambda: server.files() == before)
