# SPDX-License-Identifier: Apache-2.0
"""The request benchmark in short form: phases, settled steps, and requests that don't end well."""

import pytest
import torch

from benchmarks import request_h200
from benchmarks.common import CASES, FAMILIES, Record
from benchmarks.goals import find
from benchmarks.random_model import Variant
from benchmarks.report_tables import TABLES
from benchmarks.request_components import prompt_of, random_pipeline

CPU = torch.device("cpu")


@pytest.fixture
def record(short_form):
    arguments = ("--case", "small", "--steps", "8", "--lifecycle-steps", "7")
    return short_form(request_h200.main, *arguments)


@pytest.fixture(scope="module")
def pipeline():
    return random_pipeline(FAMILIES["small"], CPU, Variant("request", "VANILLA"))


def test_a_request_has_seconds_for_every_phase_and_step(record):
    (row,) = find(record["rows"], section="request")
    assert set(row["phases_s"]) == {"text", "denoise", "decode", "rest", "mp4"}
    assert row["total_s"] == pytest.approx(sum(row["phases_s"].values()))
    assert row["steps"] == 8 and row["size"] == [64, 96, 9] and row["first_after_warm_up"]
    steps = find(record["rows"], section="request_step")
    assert [step["mode"] for step in steps] == ["w8a16"] * 3 + ["w8a8"] * 2 + ["w8a16"] * 3
    assert sum(step["seconds"] for step in steps) == pytest.approx(row["phases_s"]["denoise"])
    assert all(tokens > 0 for tokens in row["text_tokens"])


def test_a_request_after_a_cancelled_and_a_failed_one_gives_the_same_bits(record):
    (row,) = find(record["rows"], section="lifecycle")
    assert row["bit_identical"] is True and row["largest_difference"] == 0
    assert set(row["after"]) == {"cancelled", "failed"}
    assert {state["precision"] for state in row["after"].values()} == {"w8a8"}
    assert (row["steps"], row["stopped_at_step"]) == (7, 3)


def test_the_table_of_a_request_has_its_phases(record):
    rows = dict(TABLES["request"].rows(record)[1:])
    assert {"text", "denoise", "decode", "mp4", "whole request"} <= rows.keys()
    assert rows["latents after a cancelled and a failed request of 7 steps"] == "the same bits"


def test_without_pyav_the_mp4_is_left_out_with_the_reason(pipeline, tmp_path, monkeypatch):
    monkeypatch.setattr(request_h200.importlib.util, "find_spec", lambda _: None)
    record = Record(tmp_path / "x.json", CPU)
    request = request_h200.make_request(pipeline, CASES["small"], 2)
    request_h200.measure_request(pipeline, request, CPU, record)
    (skipped,) = find(record.content["rows"], section="skipped")
    assert "av" in skipped["reason"]
    (row,) = find(record.content["rows"], section="request")
    assert "mp4" not in row["phases_s"]


def test_latents_that_differ_are_seen(pipeline, tmp_path, monkeypatch):
    record = Record(tmp_path / "x.json", CPU)
    request = request_h200.make_request(pipeline, CASES["small"], 2)
    weight = pipeline.transformer.llm2vae.weight
    before = weight.detach().clone()
    denoise, runs = pipeline.denoise, []

    def changing(*arguments, **options):
        runs.append(options)
        if len(runs) == 4:  # the first, the cancelled, the failed, the last
            weight.data.mul_(1.01)
        return denoise(*arguments, **options)

    monkeypatch.setattr(pipeline, "denoise", changing)
    request_h200.lifecycle(pipeline, request, CPU, record)
    weight.data.copy_(before)
    (row,) = find(record.content["rows"], section="lifecycle")
    assert row["bit_identical"] is False and row["largest_difference"] > 0


def test_steps_count_as_settled_by_their_start_and_are_set_against_their_own_mode():
    modes = ["w8a16", "w8a16", "w8a8", "w8a8", "w8a8", "w8a16"]
    rows = request_h200.step_rows(modes, [6.0, 6.0, 4.0, 5.0, 4.0, 5.0], settling=10.0)
    assert [row["start_s"] for row in rows] == [0.0, 6.0, 12.0, 16.0, 21.0, 25.0]
    assert [row["settled"] for row in rows] == [False, False, True, True, True, True]
    assert [row["of_median"] for row in rows] == [None, None, 1.0, 1.25, 1.0, 1.0]


def test_a_vae_with_random_weights_decodes_finite_and_different_pixels(pipeline):
    latents = torch.randn(1, 48, 2, 4, 6, generator=torch.Generator().manual_seed(0))
    pixels = pipeline.decode(latents)
    assert pixels.shape == (1, 5, 64, 96, 3) and len(pixels.unique()) > 50


def test_a_prompt_has_about_the_tokens_that_are_asked_for(pipeline):
    for tokens in (100, 1600):
        prompt = prompt_of(pipeline, tokens)
        count = len(pipeline.components.tokenizer(prompt)["input_ids"])
        assert count == pytest.approx(tokens, rel=0.1)
