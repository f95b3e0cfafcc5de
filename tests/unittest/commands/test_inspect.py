# SPDX-License-Identifier: Apache-2.0
"""The command: exit codes, what goes where, and its name."""

import importlib
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from tensorrt_llm.commands.inspect import main
from tests.support.fake_cosmos_guardrail import package
from tests.support.hub import fill_cache

pytestmark = pytest.mark.cosmos3

COMMIT = "c" * 40


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_checkpoint_that_loads_gives_0_and_a_report_in_blocks(tiny_fp8_checkpoint):
    result = run(tiny_fp8_checkpoint)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert text.startswith(f"{tiny_fp8_checkpoint}\n")
    blocks = re.findall(r"(?m)^[A-Z]+$", text)
    assert blocks == ["VERDICT", "CONTENTS", "MEMORY", "FIDELITY"]
    assert "loads: the loader's own plan accepts it" in text
    assert "8 of 14 shards (57%) would be rounded a second time" in text
    assert "12 of 20 shards (60%)" in text
    assert "--fidelity reads the weights" in text
    assert not [line for line in text.splitlines() if line.rstrip() != line]


MISSING_GUARDRAILS = "asks for guardrails, which can't be loaded here"


@pytest.mark.parametrize("asks", [True, None, False])
def test_missing_guardrails_are_told_where_the_checkpoint_asks_for_them(
    tiny_fp8_checkpoint, tmp_path, monkeypatch, asks
):
    monkeypatch.setitem(sys.modules, "cosmos_guardrail", None)  # an import of it fails
    root = shutil.copytree(tiny_fp8_checkpoint, tmp_path / "asking")
    index = json.loads((root / "model_index.json").read_text())
    index["enable_safety_checker"] = asks
    if asks is None:  # absent means that it asks
        del index["enable_safety_checker"]
    (root / "model_index.json").write_text(json.dumps(index))
    result, document = run(root), json.loads(run(root, "--json").stdout)
    assert result.exit_code == 0 and document["verdict"]["loads"] is True
    if asks is False:
        assert MISSING_GUARDRAILS not in result.stdout and document["verdict"]["notices"] == []
        return
    (notice,) = document["verdict"]["notices"]
    assert f"  but {notice}\n" in result.stdout
    for part in (MISSING_GUARDRAILS, "or use_guardrails False", "cosmos-guardrail"):
        assert part in notice
    monkeypatch.setenv("TRTLLM_DISABLE_COSMOS3_GUARDRAILS", "1")
    assert json.loads(run(root, "--json").stdout)["verdict"]["notices"] == []


def test_guardrails_that_are_there_are_not_told_of(tiny_fp8_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cosmos_guardrail", package())
    root = shutil.copytree(tiny_fp8_checkpoint, tmp_path / "asking")
    index = json.loads((root / "model_index.json").read_text()) | {"enable_safety_checker": True}
    (root / "model_index.json").write_text(json.dumps(index))
    assert MISSING_GUARDRAILS not in run(root).stdout


def test_json_alone_is_on_stdout_also_while_measuring(tiny_fp8_checkpoint):
    result = run(tiny_fp8_checkpoint, "--json", "--fidelity")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["verdict"]["loads"] is True
    upstream = document["fidelity"]["fusions"]["upstream"]
    assert (upstream["rounded_twice"], upstream["shards"]) == (8, 14)
    assert 1e-3 < upstream["relative_error"] < 5e-2


def test_a_refused_checkpoint_gives_1_with_the_reason(tiny_fp8_checkpoint, tmp_path):
    root = shutil.copytree(tiny_fp8_checkpoint, tmp_path / "refused")
    (root / "vae/config.json").unlink()
    result = run(root)
    assert result.exit_code == 1
    assert "refused: ValueError: The checkpoint is incomplete" in result.stdout
    assert "vae/config.json" in result.stdout
    assert json.loads(run(root, "--json").stdout)["verdict"]["loads"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./no-such-folder"], "The checkpoint folder does not exist"),
        (["{tiny}", "--revision", "fp8"], "A revision for a local checkpoint"),
        (["{tiny}/transformer"], "Not a pipeline folder"),
        (["{tiny}", "--height", "100"], "height"),
        (["{tiny}", "--num_frames", "-3"], "num_frames"),
        (["{tiny}", "--width", "wide"], "not a valid integer"),
        (["{tiny}", "--no-such-option"], "No such option"),
        ([], "Missing argument 'MODEL'"),
    ],
)
def test_what_can_not_be_carried_out_gives_2(tiny_fp8_checkpoint, arguments, message):
    result = run(*(argument.format(tiny=tiny_fp8_checkpoint) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert not result.stdout


def test_the_requests_options_reach_the_estimate(tiny_fp8_checkpoint):
    options = {"height": 480, "width": 832, "num_frames": 93, "guidance": 1}
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    request = json.loads(run(tiny_fp8_checkpoint, "--json", *flags).stdout)["memory"]["request"]
    assert request == {
        "height": 480,
        "width": 832,
        "num_frames": 93,
        "guidance_scale": 1.0,
        "branches": 1,
        "tokens_per_branch": 24 * 15 * 26,
    }


def test_a_hub_id_is_taken_at_its_revision(tiny_fp8_checkpoint, tmp_path, monkeypatch):
    fill_cache(tmp_path, "org/tiny", {"fp8": COMMIT}, COMMIT, tiny_fp8_checkpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    document = json.loads(run("org/tiny", "--revision", "fp8", "--json").stdout)
    found = [document[key] for key in ("model", "revision", "commit")]
    assert found == ["org/tiny", "fp8", COMMIT]
    missing = run("org/tiny", "--revision", "bf16")
    assert missing.exit_code == 2
    assert "Offline, and the checkpoint is not in the cache" in missing.stderr


def test_the_distribution_installs_the_command():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    module, _, name = project["project"]["scripts"]["trtllm-inspect"].partition(":")
    assert getattr(importlib.import_module(module), name) is main
