# SPDX-License-Identifier: Apache-2.0
"""The work that is counted: against the published totals, and against a count by hand."""

from dataclasses import replace

import pytest

from benchmarks.common import CASES, FAMILIES, Case, Family
from benchmarks.counted_work import (
    attention_flops,
    counted_bytes,
    layer_bytes,
    linear_flops,
    other_bytes,
)

TINY = Family("tiny", 2, 8, 16, 2, 1, head_dim=4)
SMALL = Case("small", 32, 32, 5, (3, 2))


@pytest.mark.parametrize(
    ("family", "case", "linears", "attention"),
    [
        # performance.md, PFLOP of 35 steps; its attention has next to no text keys.
        ("nano", "720p", 42.9, 81.1),
        ("nano", "480p", 18.2, 14.7),
        ("super", "480p", 82, 52),
    ],
)
def test_operations_are_those_of_the_specification(family, case, linears, attention):
    family, case = FAMILIES[family], CASES[case]
    assert linear_flops(family, case) * 35 / 1e15 == pytest.approx(linears, rel=0.005)
    counted = attention_flops(family, case) * 35 / 1e15
    text = sum(case.text) / (2 * case.tokens)
    assert counted == pytest.approx(attention * (1 + text), rel=0.02)


def test_tokens_are_those_of_the_specification():
    tokens = {name: CASES[name].tokens for name in ("720p", "480p", "image")}
    assert tokens == {"720p": 44160, "480p": 18720, "image": 1024}


def test_the_bytes_of_an_fp8_step_are_those_counted_by_hand():
    # 2 latent frames of one patch: 2 tokens a branch, 4 rows.
    m = SMALL.rows
    assert m == 4
    norms = m * 8 * (2 + 1)  # the first has no residual
    norms += 3 * m * 8 * (2 + 2 + 2 + 1)
    norms += m * 8 * 6  # the final one
    text_row, row = 2 * 4, 8 + 4 + 4
    tables = m * 2 * 4 * 2
    rope = 2 * (m * row * 2 + tables + m * row * 2 + (3 + 2) * text_row * (2 + 2))
    expected = {
        "norm_residual": norms,
        "qk_norm_rope": rope,
        "swiglu": 2 * m * 16 * (2 + 2 + 1),
        "quantize_attended": 2 * m * 8 * (2 + 1),
        "boundary": m * 8 * (2 + 4 + 2),
    }
    assert counted_bytes(TINY, SMALL, "w8a8", "bf16") == expected
    assert other_bytes(TINY, SMALL, "w8a8", "bf16") == sum(expected.values())


def test_fp8_attention_writes_half_and_reads_twice():
    plain = counted_bytes(TINY, SMALL, "w8a8", "bf16")
    fp8 = counted_bytes(TINY, SMALL, "w8a8", "fp8")
    written = 2 * (SMALL.rows * 16 + 5 * 8)
    assert plain["qk_norm_rope"] - fp8["qk_norm_rope"] == written
    again = 2 * (SMALL.rows * 16 * 2 + SMALL.rows * 2 * 4 * 2 + 5 * 8 * 2)
    assert fp8["attention_fp8"] == again and "attention_fp8" not in plain
    # The pass that adds the mean values is the one that quantises.
    assert fp8["quantize_attended"] == plain["quantize_attended"]


def test_a_16_bit_step_quantises_nothing_and_its_weights_belong_to_the_linears():
    counted = counted_bytes(TINY, SMALL, "w8a16", "bf16")
    assert "quantize_attended" not in counted
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    assert counted["dequantize"] == 2 * 3 * weights
    assert other_bytes(TINY, SMALL, "w8a16", "bf16") == sum(counted.values()) - 6 * weights


def test_the_bytes_of_a_layer_are_what_one_more_adds_to_a_step():
    m = SMALL.rows
    both = m * (8 + 4 + 4) * 2
    norms = 2 * m * 8 * (2 + 2 + 2 + 1)  # both with a residual, and no final norm
    rope = 2 * both + m * 2 * 4 * 2 + (3 + 2) * 2 * 4 * (2 + 2)
    swiglu = m * 16 * (2 + 2 + 1)
    quantize = m * 8 * (2 + 1)
    assert layer_bytes(TINY, SMALL, "w8a8", "bf16") == norms + rope + swiglu + quantize
    for layers in (1, 2, 36):
        family = replace(TINY, layers=layers)
        assert layer_bytes(family, SMALL, "w8a16", "bf16") == layer_bytes(
            TINY, SMALL, "w8a16", "bf16"
        )
