# SPDX-License-Identifier: Apache-2.0
"""The command ``trtllm-serve`` up to the server, which is tested elsewhere."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx
import pytest
from click.testing import CliRunner

from tensorrt_llm.commands import serve as command
from tensorrt_llm.serve import server as server_module
from tensorrt_llm.serve.manager import JobManager
from tensorrt_llm.serve.media_folder import MediaFolder
from tensorrt_llm.serve.settings import ServeSettings
from tensorrt_llm.serve.worker_client import WorkerSpec
from tensorrt_llm.visual_gen.args import VisualGenArgs
from tests.support.serving import until


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Call the command; the server itself is replaced by a note of what it would serve."""
    served = {}

    def serve(settings, spec, listener, on_started):
        on_started()
        listener.close()
        served.update(settings=settings, spec=spec)
        return 0

    monkeypatch.setattr(server_module, "serve", serve)
    monkeypatch.setenv("TRTLLM_MEDIA_STORAGE_PATH", str(tmp_path / "media"))

    def call(*arguments, code=0):
        result = CliRunner().invoke(command.main, ["--port", "0", *map(str, arguments)])
        assert result.exit_code == code, result.output
        return result.output, served.get("settings"), served.get("spec")

    return call


def test_a_checkpoint_folder_is_served_under_its_own_name(run, tmp_path):
    folder = tmp_path / "some-checkpoint"
    folder.mkdir()
    output, settings, spec = run(folder)
    assert "Serving some-checkpoint on http://127.0.0.1:" in output
    assert spec.model == "some-checkpoint" and spec.aliases == (str(folder),)
    assert spec.options == {"model": str(folder), "args": {}}
    assert settings.media_path == tmp_path / "media" and settings.host == "127.0.0.1"
    assert "Whoever" not in output


def test_options_reach_the_settings_and_the_arguments_of_the_model(run, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("compilation_config: {skip_warmup: true}\nmodel: nvidia/Cosmos3-Nano\n")
    options = {
        "--revision": "fp8",
        "--visual_gen_args": file,
        "--host": "0.0.0.0",
        "--media_limit_mib": 7,
        "--expire_after": 60,
        "--max_queue_size": 3,
        "--job_timeout": 5,
        "--drain_timeout": 2,
        "--max_body_mib": 9,
        "--api_key": "k",
    }
    flags = ["--allow_local_media", "--allow_private_addresses"]
    _, settings, spec = run(*(part for option in options.items() for part in option), *flags)
    assert (settings.max_queue_size, settings.expire_after, settings.job_timeout) == (3, 60, 5)
    assert (settings.drain_timeout, settings.api_key, settings.host) == (2, "k", "0.0.0.0")
    assert (settings.max_body_bytes, settings.media_limit_bytes) == (9 * 2**20, 7 * 2**20)
    assert settings.allow_local_media and settings.allow_private_addresses
    assert spec.model == "nvidia/Cosmos3-Nano"
    args = VisualGenArgs(**spec.options["args"])
    assert args.revision == "fp8" and args.compilation_config.skip_warmup is True
    # What wasn't set isn't sent as if it had been.
    assert set(spec.options["args"]) == {"revision", "model", "compilation_config"}


def test_an_open_address_without_a_key_is_pointed_out(run):
    output, _, _ = run("--host", "0.0.0.0", "nvidia/Cosmos3-Nano")
    assert "there is no --api_key" in output


def test_the_key_may_come_from_the_environment(run, monkeypatch):
    monkeypatch.setenv("TRTLLM_SERVE_API_KEY", "from-environment")
    output, settings, _ = run("--host", "0.0.0.0", "nvidia/Cosmos3-Nano")
    assert settings.api_key == "from-environment" and "from-environment" not in output


def test_without_a_model_the_tiny_checkpoint_is_served_and_it_says_so(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tensorrt_llm.visual_gen.tiny_checkpoint.cached_tiny_checkpoint",
        lambda report: tmp_path,
    )
    output, _, spec = run()
    assert "No MODEL: a tiny checkpoint with random weights" in output
    assert spec.options["model"] == str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--visual_gen_args", "no-such-file.yaml", "m"], "Can't read the arguments"),
        (["--max_queue_size", "0", "m"], "max_queue_size"),
        (["--job_timeout", "nan", "m"], "job_timeout"),
        (["--revision", "fp8"], "A revision belongs to a model"),
        (["--host", "192.0.2.1", "m"], "The address can't be used.*192.0.2.1"),
    ],
)
def test_mistakes_are_told_before_anything_is_started(run, arguments, words):
    output, _, spec = run(*arguments, code=1)
    assert re.search(words, output) and spec is None and "Traceback" not in output


@pytest.mark.parametrize("model", [[], ["m" * 5000]], ids=["no MODEL", "an endless MODEL"])
def test_what_the_file_system_refuses_is_told_in_one_line(run, tmp_path, monkeypatch, model):
    # A file where the cache's folder belongs: nobody can make that, root included.
    cache = tmp_path / "a file"
    cache.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    output, _, spec = run(*model, code=1)
    error = output[output.index("Error: ") :]
    assert error.count("\n") == 1 and spec is None and "Traceback" not in output
    if not model:
        assert "The tiny checkpoint can't be made" in error and str(cache) in error
        assert "XDG_CACHE_HOME" in error and "name a MODEL" in error


def test_a_media_folder_in_use_is_told_and_nothing_is_started(tmp_path, monkeypatch):
    folder = MediaFolder(tmp_path, 2**20)
    arguments = ["--port", "0", "--media_path", str(tmp_path), "nvidia/Cosmos3-Nano"]
    result = CliRunner().invoke(command.main, arguments)
    folder.close()
    assert result.exit_code == 1 and "The media folder is in use" in result.output
    assert "Serving" not in result.output


def test_the_address_is_told_once_it_answers(tmp_path):
    # An empty folder: its loading fails, which the server outlives and tells.
    arguments = ["--port", "0", "--media_path", str(tmp_path / "media"), str(tmp_path)]
    command_line = [sys.executable, "-m", "tensorrt_llm.commands.serve", *arguments]
    told = tmp_path / "told"
    with told.open("w") as output, subprocess.Popen(command_line, stdout=output) as process:
        try:
            url = until(lambda: re.search(r"Serving .* on (\S+) ", told.read_text()))[1]
            health = httpx.get(f"{url}/health", trust_env=False).json()
            assert health["status"] in ("loading", "failed")
        finally:
            process.terminate()
        assert process.wait(60) == 0


def test_a_start_that_fails_is_not_announced(tmp_path, monkeypatch):
    async def fail(manager):
        raise RuntimeError("a scripted failure")

    monkeypatch.setattr(JobManager, "start", fail)
    settings, told = ServeSettings(port=0, media_path=tmp_path), []
    with server_module.bind(settings) as listener, contextlib.suppress(SystemExit):
        server_module.serve(settings, WorkerSpec("none"), listener, lambda: told.append("started"))
    assert not told


def test_a_missing_package_is_told_with_what_to_install(monkeypatch):
    # The command imports the package anew and binds that at its parent: bound back at the end.
    monkeypatch.setattr("tensorrt_llm.serve", sys.modules["tensorrt_llm.serve"])
    for name in [name for name in sys.modules if name.startswith("tensorrt_llm.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = CliRunner().invoke(command.main, ["m"])
    assert result.exit_code == 1 and "pip install 'tensorrt-llm-cosmos3[serve]'" in result.output


def test_the_command_is_installed():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'trtllm-serve = "tensorrt_llm.commands.serve:main"' in text
