# SPDX-License-Identifier: Apache-2.0
"""Folders and Hub repositories: what is fetched, from which commit, and each way it can fail."""

import json
import os
import re
import subprocess
import sys

import pytest
from huggingface_hub import close_session, constants, errors

from tensorrt_llm._torch.visual_gen.checkpoints.layout import missing_files
from tensorrt_llm._torch.visual_gen.checkpoints.source import resolve_source
from tensorrt_llm.visual_gen import VisualGen, VisualGenArgs, VisualGenParams
from tests.support.hub import Repository, fill_cache, serve_hub

OLD, NEW = "a" * 40, "b" * 40
INDEX = "diffusion_pytorch_model.safetensors.index.json"
NEEDED = {
    "model_index.json",
    "assets/negative_prompt.json",
    "scheduler/scheduler_config.json",
    "sound_tokenizer/config.json",
    "sound_tokenizer/diffusion_pytorch_model.safetensors",
    "text_tokenizer/chat_template.jinja",
    "text_tokenizer/merges.txt",
    "text_tokenizer/tokenizer_config.json",
    "transformer/config.json",
    f"transformer/{INDEX}",
    "transformer/part-1.safetensors",
    "transformer/part-2.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
}
NOT_NEEDED = {
    "README.md",
    "assets/example_t2v_prompt.json",
    "assets/example_i2v_input.jpg",
    "config.json",
    "text_tokenizer/code.py",
    "transformer/modelopt_state.pth",
    "transformer/diffusion_pytorch_model.safetensors",
    "transformer/diffusion_pytorch_model.fp16.safetensors",
    "vae/diffusion_pytorch_model.bin",
    "vision_encoder/model.safetensors",
}


def write_repository(folder, marker):
    """A checkpoint in form only: the right names, and ``marker`` in every file."""
    for name in NEEDED | NOT_NEEDED:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{marker} {name}")
    shards = {"a": "part-1.safetensors", "b": "part-2.safetensors"}
    (folder / "transformer" / INDEX).write_text(json.dumps({"weight_map": shards}))
    return folder


def listing(path):
    return {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub with org/nano (branches main and fp8, tag v1) and an empty cache, both in use."""
    folders = {
        OLD: write_repository(tmp_path / "old", "old"),
        NEW: write_repository(tmp_path / "new", "new"),
    }
    nano = Repository({"main": OLD, "fp8": NEW, "v1": OLD}, folders)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()  # a client of an earlier test would not know of it
    with serve_hub({"org/nano": nano}) as server:
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server
    close_session()


@pytest.fixture
def cache(hub, tmp_path, monkeypatch):
    """The cache's folder, with the Hub out of reach: HF_HUB_OFFLINE=1."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def message_of(kind, model, revision=None):
    """The exact message of the refusal, and the library's exception behind it."""
    with pytest.raises(kind) as caught:
        resolve_source(model, revision)
    assert caught.type is kind
    return str(caught.value), caught.value.__cause__


@pytest.mark.parametrize(
    ("revision", "commit", "marker"),
    [(None, OLD, "old"), ("fp8", NEW, "new"), ("v1", OLD, "old"), (NEW, NEW, "new")],
)
def test_a_branch_tag_or_commit_gives_all_files_of_its_commit_and_no_other(
    hub, revision, commit, marker
):
    source = resolve_source("org/nano", revision)
    assert (source.commit, source.revision, source.model) == (commit, revision, "org/nano")
    assert listing(source.path) == NEEDED == hub.fetched
    for name in NEEDED - {f"transformer/{INDEX}"}:
        assert (source.path / name).read_text() == f"{marker} {name}"


def test_a_branch_that_moves_while_it_is_fetched_gives_no_mixture(hub, monkeypatch):
    nano = hub.repositories["org/nano"]
    moving = nano.commit

    def commit(revision):
        found = moving(revision)
        nano.revisions["main"] = NEW  # moves after the first request
        return found

    monkeypatch.setattr(nano, "commit", commit)
    source = resolve_source("org/nano", None)
    assert source.commit == OLD
    assert (source.path / "transformer/part-1.safetensors").read_text().startswith("old ")


def test_a_checkpoint_without_sound_and_index_gives_the_single_file(hub, tmp_path):
    folder = write_repository(tmp_path / "single", "one")
    (folder / "transformer" / INDEX).unlink()
    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        (folder / "sound_tokenizer" / name).unlink()
    hub.repositories["org/nano"].folders[OLD] = folder
    found = listing(resolve_source("org/nano", None).path)
    assert "transformer/diffusion_pytorch_model.safetensors" in found
    assert not {name for name in found if "part-" in name or name.startswith("sound_")}


def test_a_filled_cache_is_not_fetched_again(hub):
    first = resolve_source("org/nano", "fp8")
    hub.requests.clear()
    assert resolve_source("org/nano", "fp8") == first
    assert not hub.fetched


def test_a_broken_download_goes_on_where_it_stopped(hub):
    nano = hub.repositories["org/nano"]
    nano.cut = "vae/diffusion_pytorch_model.safetensors"
    message_of(ConnectionError, "org/nano")
    nano.cut = None
    hub.requests.clear()
    assert listing(resolve_source("org/nano", None).path) == NEEDED
    assert "vae/diffusion_pytorch_model.safetensors" in hub.fetched
    assert "model_index.json" not in hub.fetched


@pytest.mark.parametrize(("revision", "commit"), [("fp8", NEW), (NEW, NEW), (None, OLD)])
def test_offline_a_prepared_cache_serves_branches_and_commits(cache, tmp_path, revision, commit):
    for target, name in ((OLD, "old"), (NEW, "new")):
        fill_cache(cache, "org/nano", {"main": OLD, "fp8": NEW}, target, tmp_path / name)
    source = resolve_source("org/nano", revision)
    assert source.commit == commit == source.path.name
    assert missing_files(source.path) == []


def test_a_hub_that_is_down_leaves_a_filled_cache_usable(hub, tmp_path):
    fill_cache(tmp_path / "cache", "org/nano", {"main": OLD}, OLD, tmp_path / "old")
    hub.repositories["org/nano"].error = (503, None)
    assert resolve_source("org/nano", None).commit == OLD
    # Asked once: the library would ask for the commit's listing again and again, for 23 seconds.
    assert not [path for _, path in hub.requests if "/tree/" in path]


def test_the_librarys_own_environment_variables_are_honoured(hub, tmp_path):
    code = (
        "from tensorrt_llm._torch.visual_gen.checkpoints.source import resolve_source\n"
        "print(resolve_source('org/nano', 'fp8').commit)"
    )
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    env.pop("HF_HUB_CACHE", None)
    for offline in ("0", "1"):
        hub.requests.clear()
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env | {"HF_HUB_OFFLINE": offline},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.strip() == NEW, done.stderr
        assert bool(hub.requests) == (offline == "0")


@pytest.mark.cosmos3
def test_the_resolved_commit_is_in_the_outputs_metadata(cache, tiny_fp8_checkpoint):
    fill_cache(cache, "org/tiny", {"fp8": NEW}, NEW, tiny_fp8_checkpoint)
    args = VisualGenArgs(revision="fp8", compilation_config={"skip_warmup": True})
    params = VisualGenParams(
        num_frames=1, height=64, width=64, num_inference_steps=1, guidance_scale=1.0
    )
    with VisualGen("org/tiny", args) as generator:
        metadata = generator.generate("A cup.", params).metadata
    found = (metadata["model"], metadata["revision"], metadata["commit"])
    assert found == ("org/tiny", "fp8", NEW)


def test_missing_revision(hub):
    message, cause = message_of(ValueError, "org/nano", "fp4")
    assert message == (
        "The repository has no such revision (where: model 'org/nano', revision 'fp4'): expected a "
        "branch, tag or commit of the repository, found the Hub knows none of that name. Remedy: "
        "correct the revision; without one the default branch is used."
    )
    assert isinstance(cause, errors.RevisionNotFoundError)


@pytest.mark.parametrize("where", ["error", "file_error"])
def test_gated_repository_whether_the_hub_denies_its_description_or_its_files(hub, where):
    setattr(hub.repositories["org/nano"], where, (403, "GatedRepo"))
    message, cause = message_of(PermissionError, "org/nano")
    assert message == (
        "The repository is gated, and this account has no access to it (where: model 'org/nano'): "
        "expected an account that has accepted the repository's terms, found the Hub denies "
        "access. Remedy: accept the terms on the repository's page, then log in with "
        "`hf auth login` or set HF_TOKEN."
    )
    assert isinstance(cause, errors.GatedRepoError)


def test_missing_repository(hub):
    message, cause = message_of(ValueError, "org/nanno")
    assert message == (
        "No such repository on the Hub, and no such folder here (where: model 'org/nanno'): "
        "expected a folder, or a repository that this account can read, found neither. Remedy: "
        "correct the name; for a private repository log in with `hf auth login` or set HF_TOKEN."
    )
    assert isinstance(cause, errors.RepositoryNotFoundError)


@pytest.mark.parametrize(
    ("status", "code"), [(401, "Invalid"), (403, None)], ids=["bad token", "no permission"]
)
def test_refused_token(hub, status, code):
    hub.repositories["org/nano"].error = (status, code)
    message, cause = message_of(PermissionError, "org/nano")
    assert message == (
        "The Hub refuses access with this token (where: model 'org/nano'): expected a valid token "
        f"that may read the repository, or none, found HTTP status {status}. Remedy: log in again "
        "with `hf auth login`, or correct HF_TOKEN."
    )
    assert cause is not None


def test_folder_with_a_revision_also_past_the_arguments_own_check(tmp_path):
    folder = write_repository(tmp_path / "nano", "local")
    message, _ = message_of(ValueError, str(folder), "fp8")
    assert message == (
        "A revision for a local checkpoint (where: VisualGenArgs.revision): expected None, since a "
        f"local folder has one state, found 'fp8' with '{folder}'. Remedy: leave revision out; to "
        "fetch a Hub repository of that name, start where no such folder is."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        VisualGenArgs(model=str(folder), revision="fp8")


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./nano", "../nano", "~/nano", "a/b/c", "nano/", r"C:\nano"]
)
def test_path_that_does_not_exist(hub, model):
    message, _ = message_of(ValueError, model)
    assert message == (
        f"The checkpoint folder does not exist (where: model {model!r}): expected an existing "
        "folder with model_index.json, found no such path. Remedy: correct the path; a Hub id has "
        "the form owner/name."
    )
    assert not hub.requests


def test_name_that_is_neither_folder_nor_hub_id(hub):
    message, cause = message_of(ValueError, "Cosmos3 Nano")
    assert message.startswith("Neither a folder nor a Hub id (where: model 'Cosmos3 Nano')")
    assert isinstance(cause, errors.HFValidationError)
    message, _ = message_of(ValueError, "")
    assert message.startswith("No model was named (where: VisualGenArgs.model)")


def test_folder_or_file_that_is_no_pipeline(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    for model, found in ((tmp_path, "no model_index.json"), (file, "a file")):
        message, _ = message_of(ValueError, str(model))
        assert message == (
            f"Not a pipeline folder (where: model '{model}'): expected model_index.json and the "
            f"component folders beside it, found {found}. Remedy: pass the checkpoint's root "
            "folder, not one of its components."
        )


def test_offline_with_an_empty_cache(cache):
    message, cause = message_of(ConnectionError, "org/nano", "fp8")
    assert message == (
        "Offline, and the checkpoint is not in the cache (where: model 'org/nano', revision "
        f"'fp8'): expected a snapshot of this revision in {cache}, found none, and HF_HUB_OFFLINE "
        "forbids fetching it. Remedy: unset HF_HUB_OFFLINE and start once, or set HF_HOME to a "
        "cache that has it."
    )
    assert isinstance(cause, errors.LocalEntryNotFoundError)


def test_offline_with_an_incomplete_cache(cache, tmp_path):
    snapshot = fill_cache(cache, "org/nano", {"main": OLD}, OLD, tmp_path / "old")
    (snapshot / "transformer/part-2.safetensors").unlink()
    (snapshot / "vae/config.json").unlink()
    message, _ = message_of(ConnectionError, "org/nano")
    assert message == (
        "The cached checkpoint is incomplete, and the Hub can't be asked for the rest (where: "
        "model 'org/nano'): expected every file of the pipeline in the cache, found 2 missing: "
        "vae/config.json, transformer/part-2.safetensors. Remedy: start once with network and "
        "without HF_HUB_OFFLINE: only what is missing is fetched."
    )


def test_offline_after_a_broken_download(hub, monkeypatch):
    """The library has the repository's listing then, and names the incomplete snapshot itself."""
    hub.repositories["org/nano"].cut = "vae/diffusion_pytorch_model.safetensors"
    message_of(ConnectionError, "org/nano")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message, cause = message_of(ConnectionError, "org/nano")
    assert "incomplete" in message
    assert "1 missing: vae/diffusion_pytorch_model.safetensors" in message
    assert isinstance(cause, errors.LocalEntryNotFoundError)


def test_no_network_with_an_empty_cache(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: closed
    message, cause = message_of(ConnectionError, "org/nano")
    assert message == (
        "The Hub can't be reached, and the checkpoint is not in the cache (where: model "
        f"'org/nano'): expected an answer, or a snapshot of this revision in {tmp_path}/cache, "
        f"found {cause.__cause__}. Remedy: see to the network (proxy, HF_ENDPOINT), or start again "
        "when the Hub answers."
    )
    assert "Connection refused" in message


def test_broken_download(hub):
    hub.repositories["org/nano"].cut = "transformer/part-1.safetensors"
    message, cause = message_of(ConnectionError, "org/nano")
    assert message.startswith(
        "The download broke off (where: model 'org/nano'): expected every file of the pipeline, "
        "whole, found OSError: Consistency check failed: file should be of size 34 but has size 17 "
    )
    assert message.endswith(
        "Remedy: start again: files that are complete are not fetched twice; see that the disk has "
        "room."
    )
    assert isinstance(cause, OSError)
