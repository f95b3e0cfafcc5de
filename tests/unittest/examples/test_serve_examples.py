# SPDX-License-Identifier: Apache-2.0
"""The example clients against a server with a generator of no time."""

import importlib.util
import io
import os
import shutil
import subprocess
from pathlib import Path

import av
import pytest
from click.testing import CliRunner
from PIL import Image

from tests.support.serving import LONG, serving

EXAMPLES = Path(__file__).parents[3] / "examples/visual_gen/serve"
SMALL = ["--size", "64x64", "--num_inference_steps", "2", "--seed", "1"]

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    key = "the-key"
    with serving(
        tmp_path_factory.mktemp("media"), headers={"Authorization": f"Bearer {key}"}, api_key=key
    ) as server:
        yield server


@pytest.fixture
def run(server, monkeypatch, tmp_path):
    """Run an example's command in a folder of its own; what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRTLLM_SERVE_API_KEY", "the-key")

    def call(name, *arguments, code=0):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        options = ["--base_url", f"{server.url}/v1", *map(str, arguments)]
        result = CliRunner().invoke(module.main, options)
        assert result.exit_code == code, (result.output, result.exception)
        return result.output

    return call


def frames(path: Path) -> int:
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


def test_the_image_client_saves_each_picture(run, tmp_path):
    output = run("image_client", *SMALL, "--n", "2")
    assert "Saved image.png, 64x64." in output and "image-1.png" in output
    assert Image.open(tmp_path / "image-1.png").size == (64, 64)


def test_the_async_client_follows_its_job_downloads_and_deletes_it(run, server, tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "start.png")
    output = run(
        "async_video_client",
        *SMALL,
        *("--seconds", "0.5", "--poll_seconds", "0.01", "--delete"),
        *("--input_reference", tmp_path / "start.png"),
    )
    assert "seed 1." in output and "queued" in output and "Deleted video_" in output
    assert frames(tmp_path / "video.mp4") == 13
    assert server.http.get("/v1/videos").json()["data"] == []


def test_the_async_client_tells_why_a_job_failed(run):
    output = run("async_video_client", *SMALL, "--prompt", '{"raise": "MemoryError"}', code=1)
    assert "out_of_memory: a scripted MemoryError" in output


def test_the_sync_client_waits_for_its_video(run, tmp_path):
    output = run("sync_video_client", *SMALL, "--num_frames", "5", "--fps", "8")
    assert "generation;dur=" in output and frames(tmp_path / "video.mp4") == 5
    assert "width" in run("sync_video_client", "--size", "0x64", code=1)


def test_jobs_are_deleted_by_id_or_all(run, server):
    ids = [server.create() for _ in range(3)]
    assert run("delete_video", ids[0]) == f"Deleted {ids[0]}.\n"
    assert "There is no video" in run("delete_video", ids[0], code=1)
    assert "Give ids, or --all" in run("delete_video", code=2)
    run("delete_video", "--all")
    assert server.http.get("/v1/videos").json()["data"] == []


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_script_goes_through_everything(server, tmp_path):
    environment = os.environ | {
        "URL": server.url,
        "OUT": str(tmp_path),
        "FIELDS": ', "size": "64x64", "num_inference_steps": 2',
        "TRTLLM_SERVE_API_KEY": "the-key",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [EXAMPLES / "curl.sh"], env=environment, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done.stderr
    assert Image.open(io.BytesIO((tmp_path / "image.png").read_bytes())).size == (64, 64)
    assert frames(tmp_path / "sync.mp4") == frames(tmp_path / "job.mp4") == 5
    assert (tmp_path / "head.bin").stat().st_size == 1024
    assert '"deleted":true' in done.stdout
