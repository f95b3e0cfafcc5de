# SPDX-License-Identifier: Apache-2.0
"""The layer benchmark in short form: what it times, on which inputs, and against which ceiling."""

import statistics
from dataclasses import replace

import pytest
import torch

from benchmarks import layer_h200
from benchmarks.ceilings import GRAPH_ROWS
from benchmarks.common import CASES, FAMILIES, Clock
from benchmarks.counted_work import layer_bytes
from benchmarks.goals import find
from benchmarks.layer_h200 import LayerInputs, Timed, layer_call
from benchmarks.random_model import Inputs, Variant, random_transformer
from benchmarks.report_tables import TABLES
from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import Captured, LayerGraphs

CPU = torch.device("cpu")
FAMILY, CASE = FAMILIES["small"], CASES["small"]
KEYS = {
    *("family", "case", "size", "shape", "text_tokens", "mode", "variant", "attention", "backend"),
    *("topology", "sharing", "graphs", "samples_s", "median_s", "ceiling_s", "of_ceiling"),
    *("output_error", "card"),
}


@pytest.fixture
def record(short_form):
    return short_form(layer_h200.main)


@pytest.fixture
def model():
    return random_transformer(FAMILY, CPU, Variant("base", "VANILLA"))


def test_every_variant_has_all_samples_and_its_ratio_to_a_ceiling_of_the_same_run(record):
    rows = find(record["rows"], section="layer")
    assert [(row["variant"], row["mode"]) for row in rows] == [
        *(("base", "w8a8"), ("base", "w8a16"), ("topology", "w8a8"), ("topology", "w8a16")),
        ("sharing", "w8a8"),
    ]
    for row in rows:
        assert row.keys() >= KEYS
        assert len(row["samples_s"]) == 3 and min(row["samples_s"]) > 0
        assert row["median_s"] == statistics.median(row["samples_s"])
        (ceiling,) = find(record["rows"], section="ceiling", mode=row["mode"])
        assert row["ceiling_s"] == ceiling["median_s"]
        assert row["of_ceiling"] == pytest.approx(row["median_s"] / ceiling["median_s"])
        assert row["shape"] == [2, CASE.tokens, FAMILY.hidden]
        assert row["graphs"] is False


def test_all_variants_compute_the_same(record):
    for row in find(record["rows"], section="layer"):
        assert row["output_error"] == 0.0


def test_a_ceiling_is_that_of_one_layer(record):
    (copy,) = find(record["rows"], section="copy")
    for row in find(record["rows"], section="ceiling"):
        size = layer_bytes(FAMILY, CASE, row["mode"], row["attention"])
        assert row["other_bytes"] == size
        sums = [p["linears"] + p["attention"] + size / copy["gb_s"] / 1e9 for p in row["parts_s"]]
        assert row["median_s"] == pytest.approx(statistics.median(sums))


def test_the_mix_runs_one_layer(monkeypatch, tmp_path):
    families = []

    def tensors(family, *arguments):
        families.append(family)
        raise LookupError("seen")

    monkeypatch.setattr(layer_h200, "StepTensors", tensors)
    out = str(tmp_path / "x.json")
    with pytest.raises(LookupError):
        layer_h200.main(["--family", "small", "--device", "cpu", "--out", out])
    assert families == [replace(FAMILY, layers=1)]


def test_the_understanding_layer_has_its_policys_precision_and_no_ceiling(record):
    (row,) = find(record["rows"], section="text_layer")
    assert row["shape"] == [1, CASE.text[0], FAMILY.hidden]
    assert row["mode"] == "w8a16" and "of_ceiling" not in row
    assert len(row["samples_s"]) == 3


def test_fp8_attention_is_left_out_with_its_reason(record):
    (row,) = find(record["rows"], section="skipped")
    assert row["what"] == "fp8_attention, small" and "Hopper" in row["reason"]


def test_the_table_shows_every_layer_and_what_it_is_measured_against(record):
    head, *lines = TABLES["layer_nano"].rows(record)
    lines = [dict(zip(head, line, strict=True)) for line in lines]
    rows = find(record["rows"], section="layer")
    assert len(lines) == len(rows) + 1
    for line, row in zip(lines, rows, strict=False):
        assert (line["case"], line["linears"], line["variant"]) == (
            *("small", row["mode"], row["variant"]),
        )
        assert line["ms"] == f"{row['median_s'] * 1e3:.3f}"
        assert line["range"].startswith(f"{min(row['samples_s']) * 1e3:.3f} to ")
        assert line["ceiling ms"] == f"{row['ceiling_s'] * 1e3:.3f}"
        assert line["of ceiling"] == f"{row['of_ceiling']:.3f}"
        assert line["run"] == "eager"
    text = lines[-1]
    assert text["case"] == f"text, {CASE.text[0]} tokens" and text["variant"] == "understanding"
    assert text["ceiling ms"] == text["of ceiling"] == "-"


def test_the_table_names_what_ran_as_a_graph(record):
    (row, *_) = find(record["rows"], section="layer")
    _, line = TABLES["layer_nano"].rows({"rows": [row | {"graphs": True}]})
    assert "graph" in line and "eager" not in line


def test_a_layer_reads_what_it_reads_in_a_step_and_gives_the_same_each_time(model):
    outputs = []
    layer = model.gen_layers[-1]

    def keep(_, arguments, __):
        hidden, delta = arguments[0].take()
        outputs.append(delta.clone())
        arguments[0].put(hidden, delta)

    handle = layer.register_forward_hook(keep)
    step = Inputs(FAMILY, CASE, CPU)
    inputs = LayerInputs.of(model, step)
    handle.remove()
    assert not layer._forward_pre_hooks  # it would keep the tensors of every call
    assert inputs.delta is not None and not torch.equal(inputs.hidden, inputs.delta)
    call = layer_call(model, "w8a8", inputs)
    assert torch.equal(call(), outputs[0]) and torch.equal(call(), outputs[0])
    assert not torch.equal(layer_call(model, "w8a16", inputs)(), outputs[0])


def test_where_steps_run_as_graphs_the_layer_reads_the_graphs_own_inputs(model, monkeypatch):
    step = Inputs(FAMILY, CASE, CPU)
    eager = layer_call(model, "w8a8", LayerInputs.of(model, step))()
    model.reset_cache()

    def capture(run):
        first = run()
        return Captured(first, run(), lambda: None)

    monkeypatch.setattr(model, "_captures", lambda hidden: True)
    monkeypatch.setattr(model, "_graphs", LayerGraphs(model._run_tokens, False, capture))
    inputs = LayerInputs.of(model, step)
    (graph_inputs,) = model._graphs._inputs.values()
    assert inputs.text is graph_inputs.text and inputs.cos is graph_inputs.cos
    assert torch.equal(layer_call(model, "w8a8", inputs)(), eager)


def test_a_captured_layer_is_replayed_and_not_called_again():
    done = []

    def call():
        done.append("call")
        return torch.ones(1)

    def capture(run):
        return Captured(run(), torch.zeros(1), lambda: done.append("replay"))

    timed = Timed(call, capture)
    clock = Clock(CPU)
    timed.run(clock, 2)
    assert done == ["call", "replay", "replay"]
    assert timed.output.item() == 1.0  # of the first run: a replay may overwrite the graph's own
    assert [label for label, _ in clock.intervals()] == ["layer"]
    Timed(call, None).run(Clock(CPU), 1)
    assert done[3:] == ["call", "call"]


def test_a_result_that_is_not_finite_is_no_measurement():
    with pytest.raises(RuntimeError, match="not finite"):
        Timed(lambda: torch.full((1,), torch.inf), None)


def test_a_layer_is_captured_where_its_mix_is():
    cuda = torch.device("cuda")
    captured = [name for name in CASES if layer_h200.captures(cuda, CASES[name].rows)]
    assert captured == ["image", "small"]
    assert not layer_h200.captures(cuda, GRAPH_ROWS)
    assert not layer_h200.captures(CPU, 1)


def test_the_default_plan_has_the_cases_of_the_goals():
    assert set(layer_h200.DEFAULT_CASES["nano"]) == {"720p", "480p", "image"}
    assert layer_h200.DEFAULT_CASES["super"] == ("480p",)
    assert layer_h200.DEFAULT_CASES.keys() == FAMILIES.keys()
