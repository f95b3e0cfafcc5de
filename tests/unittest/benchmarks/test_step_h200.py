# SPDX-License-Identifier: Apache-2.0
"""The step benchmark in short form: its variants, its ceilings, and what it leaves out and why."""

import json
import statistics

import pytest
import torch

from benchmarks import ceilings, step_h200
from benchmarks.common import CASES, FAMILIES, Record
from benchmarks.counted_work import counted_bytes, other_bytes
from benchmarks.goals import find
from benchmarks.random_model import Inputs, Variant, random_transformer, variant_of
from benchmarks.report_tables import TABLES
from benchmarks.step_h200 import PlannedCase

CPU = torch.device("cpu")


@pytest.fixture
def record(short_form):
    return short_form(step_h200.main)


def test_every_variant_has_all_samples_and_its_ratio_to_a_ceiling_of_the_same_run(record):
    rows = find(record["rows"], section="step")
    keys = {(row["variant"], row["mode"]) for row in rows}
    assert keys == {
        *(("base", "w8a8"), ("base", "w8a16"), ("topology", "w8a8"), ("topology", "w8a16")),
        ("sharing", "w8a8"),
    }
    for row in rows:
        assert len(row["samples_s"]) == 2 and min(row["samples_s"]) > 0
        assert row["median_s"] == statistics.median(row["samples_s"])
        (ceiling,) = find(record["rows"], section="ceiling", mode=row["mode"])
        assert row["ceiling_s"] == ceiling["median_s"]
        assert row["of_ceiling"] == pytest.approx(row["median_s"] / ceiling["median_s"])
    fused = find(rows, variant="topology")[0]
    assert (fused["topology"], fused["sharing"]) == ("fused", True)
    assert find(rows, variant="sharing")[0]["sharing"] is False


def test_all_variants_compute_the_same(record):
    for row in find(record["rows"], section="step"):
        assert row["velocity_error"] == 0.0


def test_what_can_not_run_here_is_recorded_with_its_reason(record):
    skipped = {row["what"]: row["reason"] for row in find(record["rows"], section="skipped")}
    assert "Hopper" in skipped["fp8_attention, small"]
    assert "CUDA" in skipped["graphs, small"]
    assert "base variant" in skipped["vanilla, small"]
    assert "CUDA" in skipped["breakdown of base/w8a8, small"]


def test_the_record_says_where_and_how_it_was_made(record):
    assert record["device"] == "cpu" and record["sm_version"] == 0
    assert record["torch"] == torch.__version__ and record["fa3_fwd"] is None
    assert {"date", "triton", "command", "family", "seconds"} <= record.keys()


def test_a_ceiling_is_its_kernels_in_the_mix_and_the_counted_bytes_at_copy_speed(record):
    (copy,) = find(record["rows"], section="copy")
    assert copy["gb_s"] == pytest.approx(copy["bytes"] / copy["median_ms"] / 1e6)
    for row in find(record["rows"], section="ceiling"):
        size = other_bytes(FAMILIES["small"], CASES["small"], row["mode"], row["attention"])
        assert row["other_bytes"] == size
        assert row["others_s"] == pytest.approx(size / copy["gb_s"] / 1e9)
        sums = [part["linears"] + part["attention"] + row["others_s"] for part in row["parts_s"]]
        assert row["median_s"] == pytest.approx(statistics.median(sums))
        assert all(part["others"] > 0 for part in row["parts_s"])


def test_the_tables_of_a_step_show_every_row(record):
    tables = {
        "step_nano": ("step",),
        "ceilings_nano": ("ceiling",),
        "alone_nano": ("gemm", "attention"),
    }
    for name, sections in tables.items():
        lines = TABLES[name].rows(record)[1:]
        assert len(lines) == sum(row["section"] in sections for row in record["rows"]) > 0


def test_a_mix_moves_the_counted_bytes_between_its_kernels(monkeypatch):
    family, case = FAMILIES["small"], CASES["small"]
    tensors = ceilings.StepTensors(family, case, CPU)
    mix = ceilings.FloorMix(tensors, "w8a8", "VANILLA")
    moved, multiplied = [], []
    monkeypatch.setattr(tensors, "move", moved.append)
    monkeypatch.setattr(tensors, "linear", lambda name, mode: multiplied.append(name))
    mix.run(ceilings.Clock(CPU), 1)
    counted = counted_bytes(family, case, "w8a8", "bf16")
    expected = sum(counted[name] for name in counted if name != "boundary")
    assert sum(moved) == pytest.approx(expected, rel=0.02)
    assert multiplied == list(family.linears) * family.layers


@pytest.mark.parametrize("text", ["900p", "small=speed", "small*x", "small=topology;sharing"])
def test_a_plan_that_names_nothing_known_is_refused(text, tmp_path, capsys):
    with pytest.raises(ValueError, match="CASE"):
        PlannedCase.parse(text)
    with pytest.raises(SystemExit):
        step_h200.main(["--device", "cpu", "--out", str(tmp_path / "x"), "--plan", text])
    assert "CASE" in capsys.readouterr().err


def test_a_plan_names_case_repeats_and_comparisons():
    graphed = PlannedCase.parse("image+graphs*4=topology,eager")
    assert graphed.graphs and graphed.repeats == 4
    made = {v.name: v for v in step_h200.variants(graphed, torch.device("cpu"))}
    assert made["base"].graphs and made["topology"].graphs and not made["eager"].graphs
    assert made["topology"].topology == "fused"
    planned = PlannedCase.parse("720p*3=fp8_attention,graphs")
    assert not planned.graphs
    assert (planned.case, planned.repeats) == (CASES["720p"], 3)
    assert planned.comparisons == ("fp8_attention", "graphs")
    assert PlannedCase.parse("480p") == PlannedCase(CASES["480p"], 5, ())


def test_a_default_plan_measures_every_goal():
    plans = {name: [PlannedCase.parse(t) for t in step_h200.PLANS[name]] for name in FAMILIES}
    compared = {(p.case.name, c) for p in plans["nano"] for c in p.comparisons if p.repeats >= 5}
    assert any((case, "topology") in compared for case in CASES)
    assert any((case, "sharing") in compared for case in CASES)
    cases = {(name, p.case.name) for name in plans for p in plans[name]}
    wanted = {("nano", "720p"), ("nano", "480p"), ("nano", "image"), ("super", "480p")}
    assert wanted <= cases
    for name, plan in plans.items():
        assert all("fp8_attention" in p.comparisons for p in plan), name


def test_variants_share_the_weights_and_a_fused_one_joins_them():
    family = FAMILIES["small"]
    base = random_transformer(family, CPU, Variant("base", "VANILLA"))
    unshared = variant_of(base, family, Variant("sharing", "VANILLA", sharing=False))
    fused = variant_of(base, family, Variant("topology", "VANILLA", topology="fused"))
    ours = dict(base.named_parameters())
    assert all(p is ours[name] for name, p in unshared.named_parameters())
    layer, other = base.gen_layers[1], fused.gen_layers[1]
    joined = [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]
    joined = torch.cat([w.view(torch.uint8) for w in joined])
    assert torch.equal(other.mlp.gate_up_proj.weight.view(torch.uint8), joined)
    assert other.mlp.down_proj.weight is layer.mlp.down_proj.weight
    assert not unshared.gen_layers[0].mlp._maybe_share_gate_up_quantize
    assert base.gen_layers[0].mlp._maybe_share_gate_up_quantize
    assert base.gen_layers[0].cross_attention._maybe_share_qkv_quantize
    assert not unshared.gen_layers[0].cross_attention._maybe_share_qkv_quantize


def test_both_modes_run_in_their_own_precision():
    family, case = FAMILIES["small"], CASES["small"]
    model = random_transformer(family, CPU, Variant("base", "VANILLA"))
    inputs = Inputs(family, case, CPU)
    velocities = {mode: inputs.step(model, mode) for mode in ("w8a8", "w8a16")}
    assert model.gen_precision == "w8a16"
    assert velocities["w8a8"].shape == (2, 48, *case.latent_shape)
    assert not torch.equal(*velocities.values())


def test_a_run_that_breaks_off_keeps_what_it_has_measured(tmp_path):
    record = Record(tmp_path / "x.json", CPU)
    record.add("copy", gb_s=1.0)
    with pytest.raises(LookupError), record.part("a case"):
        record.add("step", median_s=1.0)
        raise LookupError("stop here")
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["section"] for row in rows] == ["copy", "step", "failed"]
    assert rows[-1]["error"] == "LookupError: stop here"


def test_the_ceilings_alone_have_every_linear_and_every_attention_kernel(short_form):
    record = short_form(ceilings.main, "--cases", "small", "--repeats", "1")
    gemms = find(record["rows"], section="gemm")
    expected = [(name, mode) for mode in ("w8a8", "w8a16") for name in FAMILIES["small"].linears]
    assert [(row["name"], row["mode"]) for row in gemms] == expected
    kernels = {row["name"] for row in find(record["rows"], section="attention")}
    skipped = {row["what"] for row in find(record["rows"], section="skipped")}
    assert kernels == {"VANILLA"}
    assert skipped == {"attention FA3, small", "attention FA3_FP8, small"}
    assert {row["mode"] for row in find(record["rows"], section="ceiling")} == {"w8a8", "w8a16"}


def test_the_full_size_wants_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        step_h200.main(["--out", str(tmp_path / "x.json")])
