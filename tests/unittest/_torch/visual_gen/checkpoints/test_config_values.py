# SPDX-License-Identifier: Apache-2.0
"""Configuration values without sense are refused by name, before anything is built from them."""

import copy
import json
import math
import shutil

import diffusers
import pytest

from tensorrt_llm._torch.visual_gen.checkpoints.components import (
    plan_sound_tokenizer,
    plan_vae,
    read_scheduler,
)
from tensorrt_llm._torch.visual_gen.checkpoints.config_values import (
    FLAG,
    NATURAL_NUMBER,
    NUMBER,
    POSITIVE_INTEGER,
    POSITIVE_NUMBER,
    check_values,
    list_of,
    or_null,
)
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs
from tests.support.spoiled_checkpoints import json_changed

NAN, INF = math.nan, math.inf
VAE, SCHEDULER, SOUND = "vae/config.json", "scheduler/scheduler_config.json", "sound_tokenizer"
FILES = {VAE: plan_vae, SCHEDULER: read_scheduler, f"{SOUND}/config.json": plan_sound_tokenizer}


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (POSITIVE_INTEGER, [1, 10**6], [0, -1, 1.0, "1", True, None, NAN, [1]]),
        (NATURAL_NUMBER, [0, 15000], [-1, 0.0, "0", False, None]),
        (POSITIVE_NUMBER, [1, 1e-6, 5e6], [0, -0.1, NAN, INF, "1", True, None, [1.0]]),
        (NUMBER, [-1, 0, 0.5], [NAN, -INF, "0", False, None]),
        (FLAG, [True, False], [0, 1, "true", None]),
        (or_null(POSITIVE_INTEGER), [None, 2], [0, "2", True]),
        (list_of(POSITIVE_NUMBER), [[1], (0.5, 2)], [[], [1, 0], [1, None], 1, "12", None, {}]),
        (list_of(NUMBER, 2), [[0, 1]], [[0], [0, 1, 2], [0, NAN]]),
    ],
)
def test_a_rule_holds_for_what_it_says_and_nothing_else(rule, right, wrong):
    for value in right:
        check_values({"field": value}, {"field": rule}, "config.json")
    for value in wrong:
        with pytest.raises(ValueError) as refusal:
            check_values({"field": value, "other": value}, {"field": rule}, "config.json")
        message = str(refusal.value)
        assert "(where: config.json, field)" in message and f"field: {rule.expected}" in message
        assert f"found field: {value!r}. Remedy: " in message


def test_all_bad_values_are_named_at_once_and_absent_ones_are_left_alone():
    rules = {"a": FLAG, "b": POSITIVE_INTEGER, "c": NUMBER}
    with pytest.raises(ValueError, match="config.json, a, b.*a: true or false; b: an integer"):
        check_values({"a": 1, "b": -1}, rules, "config.json")
    check_values({}, rules, "config.json")


@pytest.fixture
def checkpoint(tiny_fp8_checkpoint, tmp_path):
    return shutil.copytree(tiny_fp8_checkpoint, tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        *((VAE, "z_dim", value) for value in (0, -48, "48", 48.5, None)),
        *((VAE, "base_dim", value) for value in (0, "8")),
        *((VAE, "latents_std", value) for value in ([0.0] * 48, [NAN] * 48, [1.0] * 47, 1.0)),
        *((VAE, "latents_mean", value) for value in ([INF] * 48, ["0"] * 48, [0.0] * 49, [])),
        *((VAE, name, 0) for name in ("patch_size", "num_res_blocks", "out_channels")),
        *((VAE, "dim_mult", value) for value in ([], [1, 2, 0, 4], "many")),
        (VAE, "temperal_downsample", [0, 1, 1]),
        *((SCHEDULER, "num_train_timesteps", value) for value in (0, -1000, "1000", 1e3, NAN)),
        *((SCHEDULER, "flow_shift", value) for value in (0, -1.0, NAN, INF, "3")),
        *((SCHEDULER, "sigma_max", value) for value in (-200.0, NAN, 0.1, "200")),
        *((SCHEDULER, "sigma_min", value) for value in (0, NAN, 201.0)),
        (SCHEDULER, "use_karras_sigmas", "no"),
        *((f"{SOUND}/config.json", "sampling_rate", value) for value in (0, "48000", NAN)),
        *((f"{SOUND}/config.json", "hop_size", value) for value in (-1920, "1920")),
    ],
)
def test_a_part_with_a_number_without_sense_is_refused_by_field(checkpoint, file, name, value):
    json_changed(file, lambda content: content.update({name: value}))(checkpoint)
    with pytest.raises(ValueError) as refusal:
        FILES[file](checkpoint)
    message = str(refusal.value)
    assert f"{file}, " in message and name in message, message
    assert "can't be read" not in message and "Remedy: " in message, message


@pytest.mark.parametrize(
    "change",
    [
        {"patch_size": None, "in_channels": 3, "out_channels": 3},
        {"temperal_downsample": [False, False, True]},
    ],
)
def test_a_vae_of_another_compression_is_refused(checkpoint, change):
    config = json.loads((checkpoint / VAE).read_text()) | change
    diffusers.AutoencoderKLWan.from_config(config).save_pretrained(checkpoint / "vae")
    with pytest.raises(NotImplementedError, match="expected 16 pixels and 4 frames a cell, found"):
        plan_vae(checkpoint)


@pytest.mark.cosmos3
@pytest.mark.parametrize(
    ("file", "change", "error", "named"),
    [
        (
            "transformer/config.json",
            {"hidden_size": "64"},
            ValueError,
            "transformer/config.json, hidden_size.*found hidden_size: '64'",
        ),
        (
            "transformer/config.json",
            {"backbone_type": "cosmos3_edge_nemotron_dense"},
            NotImplementedError,
            "backbone_type.*cosmos3_edge_nemotron_dense.*Nano or Super",
        ),
        (VAE, {"latents_std": [-1.0] * 48}, ValueError, "vae/config.json, latents_std"),
        (SCHEDULER, {"flow_shift": "3"}, ValueError, "scheduler_config.json, flow_shift"),
    ],
)
def test_a_load_ends_there(checkpoint, file, change, error, named):
    json_changed(file, lambda content: content.update(copy.deepcopy(change)))(checkpoint)
    with pytest.raises(error, match=named):
        PipelineLoader(VisualGenArgs(model=str(checkpoint)), device="cpu").load(skip_warmup=True)


def test_the_published_kinds_of_values_are_accepted(checkpoint):
    for file, read in FILES.items():
        assert json.loads((checkpoint / file).read_text()) and read(checkpoint) is not None
