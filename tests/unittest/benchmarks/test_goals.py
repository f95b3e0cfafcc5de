# SPDX-License-Identifier: Apache-2.0
"""The goals judge result files: one that meets all of them, and each way to miss one."""

import copy
import json

import pytest

from benchmarks import goals
from benchmarks.report import main

DEVICE = "NVIDIA H200"
SIZE = [720, 1280, 189]


def step(family, case, mode, attention, of_ceiling=1.03, **changes):
    samples = [1.0, 1.01, 1.02, 1.01, 1.0]
    row = {
        "section": "step",
        "family": family,
        "case": case,
        "mode": mode,
        "attention": attention,
        "variant": "base" if attention == "bf16" else "fp8_attention",
        "topology": "split",
        "sharing": True,
        "samples_s": samples,
        "median_s": 1.01,
        "of_ceiling": of_ceiling,
        "peak_gib": 20.0,
    }
    return row | changes


def step_file(family, cases):
    rows = []
    for case in cases:
        for mode, attention in goals.STEPS:
            rows.append(step(family, case, mode, attention))
            rows += [
                {
                    "section": "breakdown",
                    "case": case,
                    "mode": mode,
                    "attention": attention,
                    "kernel_family": name,
                    "seconds": 1.0,
                    "share": 0.3,
                    "of_ceiling": 1.01,
                }
                for name in ("attention", "FP8 GEMM", "SwiGLU")
            ]
    return {"device": DEVICE, "torch": "2", "rows": rows}


@pytest.fixture
def results():
    """Content of every file, all goals met."""
    nano = step_file("nano", ["720p", "480p", "image"])
    slower = {"samples_s": [1.1, 1.11, 1.12, 1.11, 1.1], "median_s": 1.11}
    nano["rows"] += [
        step("nano", "480p", "w8a8", "bf16", variant="topology", topology="fused", **slower),
        step("nano", "480p", "w8a8", "bf16", variant="sharing", sharing=False, **slower),
    ]
    swiglu = [
        {
            "section": "swiglu",
            "name": f"swiglu {form} -> float8_e4m3fn",
            "shape": shape,
            "median_ms": 1.2,
            "samples_ms": [1.2] * 5,
            "bytes": 5 * shape[0] * shape[1],
            "of_copy": 0.99,
        }
        for shape in goals.SWIGLU_SHAPES
        for form in ("two inputs", "fused input")
    ]

    def side(name, attention, **changes):
        row = {"section": "peer", "name": name, "attention": attention, "size": SIZE}
        return row | {"velocity_error": 0.03, "peak_gib": 20.0} | changes

    peers = [
        side("diffusers + ModelOpt FP8", "bf16", speedup=1.0, peak_gib=21.5),
        side("ours, VANILLA", "bf16"),
        side("ours, FA3", "bf16", speedup=1.35),
        side("ours, FA3_FP8", "fp8", speedup=1.65),
    ]
    state = {"precision": "w8a8", "allocated_bytes": 1}
    request = [
        {
            "section": "request",
            "size": SIZE,
            "steps": 35,
            "first_after_warm_up": True,
            "phases_s": dict.fromkeys(goals.PHASES, 1.0),
            "slowest_of_median": 1.01,
        },
        {
            "section": "lifecycle",
            "size": SIZE,
            "before": state,
            "after": {"cancelled": state, "failed": state},
            "bit_identical": True,
        },
    ]
    head = {"device": DEVICE, "torch": "2"}
    return {
        "ops_h200": {**head, "rows": swiglu},
        "step_nano_h200": nano,
        "step_super_h200": step_file("super", ["480p"]),
        "peer_nano_h200": {**head, "rows": peers},
        "request_nano_h200": {**head, "rows": request},
    }


@pytest.fixture
def judged(results, tmp_path):
    """Write the files and judge them: the findings that are not met, as "line: goal"."""

    def judge():
        for stem, content in results.items():
            (tmp_path / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
        found = goals.evaluate(tmp_path)
        names = {id(goal): name for name, goal in goals.GOALS.items()}
        return [f"{f.line}: {names[id(f.goal)]}" for f in found if not f.met]

    return judge


def rows_of(content, **values):
    return goals.find(content["rows"], **values)


def test_results_that_meet_every_goal_pass(judged, tmp_path, capsys):
    assert judged() == []
    assert main(["--check", "--results", str(tmp_path)]) == 0
    assert "0 of" not in capsys.readouterr().out


def test_every_line_without_results_is_named(tmp_path, capsys):
    assert main(["--check", "--results", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "lines not met: 1, 2, 3, 4, 5, 6, 7" in out
    assert out.count("MISSING") == len(goals.evaluate(tmp_path))


def test_results_of_another_device_do_not_count(results, judged):
    for content in results.values():
        content["device"] = "NVIDIA B200"
    assert {line.split(":")[0] for line in judged()} == set("1234567")


@pytest.mark.parametrize(
    ("stem", "which", "change", "failed"),
    [
        ("ops_h200", {"shape": [88320, 25600]}, {"of_copy": 0.979}, ["1: swiglu"]),
        (
            "ops_h200",
            {"shape": [88320, 12288], "name": "swiglu fused input -> float8_e4m3fn"},
            {"samples_ms": [1.1] * 5},
            ["1: swiglu_fused"],
        ),
        ("step_nano_h200", {"variant": "topology"}, {"samples_s": [0.9] * 5}, ["2: topology"]),
        ("step_nano_h200", {"variant": "sharing"}, {"samples_s": [0.9] * 5}, ["2: sharing"]),
        ("step_nano_h200", {"variant": "sharing"}, {"samples_s": [2.0] * 4}, ["2: sharing"]),
        (
            "step_nano_h200",
            {"case": "720p", "mode": "w8a16"},
            {"of_ceiling": 1.051},
            ["3: step_720p"],
        ),
        (
            "step_nano_h200",
            {"section": "step", "case": "image", "attention": "fp8"},
            {"of_ceiling": 1.2},
            ["5: step"],
        ),
        (
            "step_super_h200",
            {"section": "step", "mode": "w8a8", "attention": "bf16"},
            {"of_ceiling": 1.2},
            ["5: step"],
        ),
        ("peer_nano_h200", {"name": "ours, FA3"}, {"speedup": 1.29}, ["4: peer_bf16"]),
        ("peer_nano_h200", {"name": "ours, FA3_FP8"}, {"speedup": 1.59}, ["4: peer_fp8"]),
        ("peer_nano_h200", {"name": "ours, FA3_FP8"}, {"peak_gib": 21.5}, ["4: peer_memory"]),
        (
            "peer_nano_h200",
            {"name": "ours, FA3"},
            {"velocity_error": float("nan")},
            ["4: peer_velocity"],
        ),
        ("request_nano_h200", {"section": "request"}, {"slowest_of_median": 1.021}, ["6: steps"]),
        (
            "request_nano_h200",
            {"section": "request"},
            {"steps": 8},
            ["6: phases", "6: steps"],
        ),
        (
            "request_nano_h200",
            {"section": "request"},
            {"phases_s": {"text": 1.0, "denoise": 1.0, "decode": 1.0}},
            ["6: phases"],
        ),
        (
            "request_nano_h200",
            {"section": "lifecycle"},
            {"bit_identical": False},
            ["7: lifecycle"],
        ),
        ("request_nano_h200", {"section": "lifecycle"}, {"size": [64, 96, 9]}, ["7: lifecycle"]),
        (
            "request_nano_h200",
            {"section": "lifecycle"},
            {"before": {"precision": "w8a16"}},
            ["7: lifecycle"],
        ),
        (
            "request_nano_h200",
            {"section": "lifecycle"},
            {"after": {"cancelled": {"precision": "w8a8"}}},
            ["7: lifecycle"],
        ),
    ],
)
def test_a_value_beyond_its_limit_fails_its_goal_alone(
    results, judged, stem, which, change, failed
):
    rows = rows_of(results[stem], **which)
    assert rows
    for row in rows:
        row.update(change)
    assert judged() == failed


@pytest.mark.parametrize(
    ("stem", "which", "failed"),
    [
        ("ops_h200", {"shape": [88320, 25600]}, {"1: swiglu", "1: swiglu_fused"}),
        ("step_nano_h200", {"variant": "topology"}, {"2: topology"}),
        ("step_nano_h200", {"case": "720p", "section": "step"}, {"3: step_720p"}),
        ("step_nano_h200", {"case": "480p", "section": "breakdown"}, {"5: breakdown"}),
        ("request_nano_h200", {"section": "lifecycle"}, {"7: lifecycle"}),
    ],
)
def test_what_was_not_measured_is_missing(results, judged, stem, which, failed):
    gone = rows_of(results[stem], **which)
    results[stem]["rows"] = [row for row in results[stem]["rows"] if row not in gone]
    assert set(judged()) == failed


def test_a_breakdown_without_ceilings_is_not_enough(results, judged):
    for row in rows_of(results["step_super_h200"], section="breakdown", kernel_family="SwiGLU"):
        del row["of_ceiling"]
    assert judged() == ["5: breakdown"] * 3


def test_the_fastest_split_variant_stands_for_a_step(results, judged):
    rows = results["step_nano_h200"]["rows"]
    slow = rows_of(results["step_nano_h200"], section="step", case="image")
    for row in slow:
        rows.append(copy.deepcopy(row) | {"variant": "graphs"})
        row["of_ceiling"] = 1.4
    assert judged() == []
    # A fused or unshared one does not.
    for row in rows_of(results["step_nano_h200"], variant="graphs"):
        row["topology"] = "fused"
    assert judged() == ["5: step"] * 3


def test_a_difference_within_the_ranges_is_no_difference():
    close = [1.0, 1.01, 1.02] * 2, [1.0, 1.005, 1.01] * 2
    higher = goals.judge_not_slower("topology", "x", *close)
    assert higher.met and "overlap" in higher.note and higher.value > 1
    # Wide ranges are no excuse for a median far above.
    wide = goals.judge_not_slower("topology", "x", [1.0, 1.1, 1.2] * 2, [1.0, 1.05, 1.1] * 2)
    assert not wide.met and "overlap" not in wide.note
    apart = goals.judge_not_slower("topology", "x", [1.2, 1.21] * 3, [1.0, 1.1] * 3)
    assert not apart.met
    faster = goals.judge_not_slower("topology", "x", [0.8] * 5, [1.0] * 5)
    assert faster.met and "overlap" not in faster.note


def test_one_outlier_does_not_widen_the_range_of_many_samples():
    samples = [1.0] * 29 + [9.0]
    assert goals.sample_range(samples) == (1.0, 1.0)
    assert goals.sample_range(samples[-5:]) == (1.0, 9.0)


def test_the_launch_that_ships_is_judged_among_those_that_were_tried(results, judged):
    shape = [88320, 12288]
    two = {"shape": shape, "name": "swiglu two inputs -> float8_e4m3fn"}
    (row,) = rows_of(results["ops_h200"], **two)
    row |= {"block": 2048, "num_warps": 4}
    tried = row | {"block": 512, "num_warps": 8, "of_copy": 0.5, "median_ms": 9.0}
    results["ops_h200"]["rows"].append(tried)
    results["ops_h200"]["launch_table"] = {"torch.float8_e4m3fn": [2048, 4]}
    assert judged() == []
    results["ops_h200"]["launch_table"] = {"torch.float8_e4m3fn": [512, 8]}
    assert "1: swiglu" in judged()


def test_the_swiglu_ops_are_compared_with_each_other_whatever_launches_were_tried(results, judged):
    rows = results["ops_h200"]["rows"]
    for row in rows_of(results["ops_h200"], name="swiglu fused input -> float8_e4m3fn"):
        rows.append(
            row | {"block": 4096, "num_warps": 4, "median_ms": 1.0, "samples_ms": [1.0] * 5}
        )
    for row in rows_of(results["ops_h200"], name="swiglu two inputs -> float8_e4m3fn"):
        rows.append(row | {"block": 2048, "num_warps": 4, "median_ms": 1.4, "of_copy": 0.9})
    results["ops_h200"]["launch_table"] = {"torch.float8_e4m3fn": [2048, 4]}
    assert judged() == []
    for row in rows_of(results["ops_h200"], block=None, name="swiglu two inputs -> float8_e4m3fn"):
        row |= {"median_ms": 1.3, "samples_ms": [1.3] * 5}
    assert judged() == ["1: swiglu_fused"] * 2
