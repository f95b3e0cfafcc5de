# SPDX-License-Identifier: Apache-2.0
"""The kernels that are timed, on the meta device: names that the goals read, bytes, launches.

No kernel runs: tensors have no data, ops give shapes, and launch functions check their arguments.
"""

import inspect
from dataclasses import asdict

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import goals, op_cases
from benchmarks.common import CASES, FAMILIES
from benchmarks.op_timing import Row
from tensorrt_llm._torch.custom_ops.attention_scale_kernels import Partials

ROWS = CASES["720p"].rows


@pytest.fixture
def variants(monkeypatch):
    """The variants of each section."""

    def bound(launch):
        def check(*args, **kwargs):
            inspect.signature(launch).bind(*args, **kwargs)
            if launch.__name__ == "launch_qkv_statistics":
                return Partials(*(torch.empty(3, device="meta") for _ in range(3)), block=8)

        return check

    monkeypatch.setattr(op_cases, "DEVICE", "meta")
    modules = (
        *("kernels", "norm_kernels", "attention_kernels", "attention_scale_kernels"),
        "value_mean_kernels",
    )
    for module in (getattr(op_cases, name) for name in modules):
        for name, launch in vars(module).copy().items():
            if name.startswith("launch_") and name != "launch_arguments":
                monkeypatch.setattr(module, name, bound(launch))
    monkeypatch.setattr(op_cases, "quantize_dividing", bound(op_cases.quantize_dividing))
    return {name: make() for name, make in op_cases.SECTIONS.items()}


def test_the_sections_are_those_that_the_report_reads(variants):
    families = ["swiglu", "swiglu super", "quantise", "norm", "norm super", "qkv", "qkv super"]
    assert list(variants) == [*families, "qkv image"]
    for section in variants.values():
        assert section[0].name == "copy"


def test_both_swiglu_ops_have_a_row_of_their_own_under_the_name_of_their_launches(variants):
    for name, family in (("swiglu", "nano"), ("swiglu super", "super")):
        shape = [ROWS, FAMILIES[family].intermediate]
        assert shape in goals.SWIGLU_SHAPES
        for form in ("two inputs", "fused input"):
            label = f"swiglu {form} -> float8_e4m3fn"
            found = [v for v in variants[name] if v.name == label]
            assert all(list(v.shape) == shape for v in found)
            assert [v.block for v in found].count(None) == 1 and len(found) > 2
            # gate and up of 2 bytes, and the codes.
            assert {v.size for v in found} == {5 * shape[0] * shape[1]}


def test_line_1_judges_the_rows_of_these_variants(variants):
    rows = []
    for section, of_section in variants.items():
        for v in of_section:
            row = Row(section, v.name, list(v.shape), v.block, v.num_warps, v.size)
            row.section = section.removesuffix(" super")
            # Every launch is faster than the fused op, and the op with two inputs slower.
            row.median_ms = {None: 1.0}.get(v.block, 0.5) + ("two inputs" in v.name)
            row.samples_ms, row.of_copy = [row.median_ms] * 30, 0.99
            rows.append(asdict(row))

    class Results:
        def rows(self, stem, section):
            return goals.find(rows, section=section) if stem == "ops_h200" else []

        def record(self, stem):
            return {"launch_table": {"torch.float8_e4m3fn": [8192, 8]}}

    findings = list(goals.line_1(Results()))
    assert [finding.value for finding in findings] == [0.99, 2.0] * 2


def test_the_mean_values_are_added_to_codes_and_to_16_bit_with_every_rowwise_launch(variants):
    for name, family in (("qkv", FAMILIES["nano"]), ("qkv super", FAMILIES["super"])):
        for label, item in (("float8_e4m3fn", 1), ("bfloat16", 2)):
            found = [v for v in variants[name] if v.name == f"add value mean -> {label}"]
            assert [(v.block, v.num_warps) for v in found] == op_cases.ROWWISE
            elements = ROWS * family.heads * family.head_dim
            means = 2 * family.kv_heads * family.head_dim * 4
            assert {v.size for v in found} == {elements * (2 + item) + means}
            assert len({v.compare for v in found}) == 1


def test_variants_that_are_compared_have_outputs_of_one_kind(variants):
    for of_section in variants.values():
        kinds = {}
        for v in of_section:
            if v.compare is not None:
                kind = [(out.dtype, tuple(out.shape)) for out in v.outs]
                assert kind and kinds.setdefault(v.compare, kind) == kind


def test_every_variant_calls_its_op_or_launch_with_arguments_that_it_takes(variants):
    for of_section in variants.values():
        for v in of_section:
            v.run()
