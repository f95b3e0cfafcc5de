# SPDX-License-Identifier: Apache-2.0
"""The error of FP8 attention: what is caught, what is compared, and the quantisation itself."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks import attention_error_h200
from benchmarks.attention_error_h200 import MediaAttention, attention_errors, structured_latents
from benchmarks.attention_kernels import quantize_qkv, why_missing
from benchmarks.common import CASES, FAMILIES
from benchmarks.goals import find
from benchmarks.report_tables import TABLES
from tests.support.fp8_modules import assert_bit_equal
from tests.support.qkv_inputs import qkv_inputs

CPU = torch.device("cpu")


@pytest.fixture
def record(short_form):
    return short_form(attention_error_h200.main, "--case", "small")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_every_layer_and_branch_has_an_error_at_every_noise_level(record):
    rows = find(record["rows"], section="layer")
    keys = {(row["sigma"], row["layer"], row["branch"]) for row in rows}
    layers = range(FAMILIES["small"].layers)
    wanted = {(s, n, b) for s in attention_error_h200.SIGMAS for n in layers for b in (0, 1)}
    assert keys == wanted and len(rows) == len(wanted)
    assert all(0 < row[name] < 0.2 for row in rows for name in attention_error_h200.WAYS)


def test_what_stands_for_the_kernel_is_said(record):
    assert record["kernel"] == "FP32 on the codes"
    (skipped,) = find(record["rows"], section="skipped")
    assert skipped["reason"] == why_missing("FA3_FP8", CPU)


def test_the_tables_have_a_line_for_each_layer_and_peak(record):
    assert len(TABLES["attention_error"].rows(record)) == 1 + FAMILIES["small"].layers
    peaked = len(attention_error_h200.PEAKS) * len(attention_error_h200.VALUE_MEANS)
    assert len(TABLES["attention_peaked"].rows(record)) == 1 + peaked


def test_a_cell_has_the_larger_error_of_the_two_branches_in_each_way(record):
    layers = find(record["rows"], section="layer", layer=1)
    head, _, line = TABLES["attention_error"].rows(record)
    assert head == ("layer", "noise 0.9", "noise 0.5", "noise 0.15") and line[0] == "1"
    for cell, sigma in zip(line[1:], (0.9, 0.5, 0.15), strict=True):
        rows = find(layers, sigma=sigma)
        names = ("error", "error_value_mean_kept", "error_key_mean_kept")
        largest = [f"{max(row[name] for row in rows):.4f}" for name in names]
        assert cell == f"{largest[0]} ({largest[1]}, {largest[2]})"


def test_rows_of_another_quantisation_are_in_no_table(record):
    old = {"section": "peaked", "peak": 1.0, "error": 0.1, "error_mean_kept": 0.2}
    layer = {"section": "layer", "layer": 0, "sigma": 0.5, "error": 0.3, "error_mean_kept": 0.3}
    for name in ("attention_error", "attention_peaked"):
        assert len(TABLES[name].rows({**record, "rows": [old, layer]})) == 1


def test_subtracting_a_mean_helps_where_there_is_one(record):
    rows = find(record["rows"], section="peaked")
    assert {row["value_mean"] for row in rows} == {0.0, 3.0}
    for row in rows:
        assert row["error"] < row["error_key_mean_kept"]
        if row["value_mean"]:
            assert 1.5 * row["error"] < row["error_value_mean_kept"]


def test_codes_stand_for_the_values_and_each_key_head_has_its_own_scale():
    q, k, v = normal(1, 7, 4, 8), normal(1, 9, 2, 8, seed=1), normal(1, 9, 2, 8, seed=2)
    k[:, :, 1] *= 100
    quantized = quantize_qkv(q, k, v, keep_key_mean=True, keep_value_mean=True)
    assert not quantized.v_mean.any()
    assert [scale.shape for scale in quantized.descales] == [(1, 2)] * 3
    amax = k.float().abs().amax(dim=(1, 3))
    assert torch.equal(quantized.descales[1], amax / 448)
    # q's scale covers the query heads that one key head serves.
    group = q.float().abs().amax(dim=(1, 3)).view(1, 2, 2).amax(-1)
    assert torch.equal(quantized.descales[0], group / 448)
    for value, original in zip(quantized.values(), (q, k, v), strict=True):
        assert torch.allclose(value, original.float(), rtol=0.07, atol=2e-2)
    assert torch.equal(quantize_qkv(q, 0 * k, v).descales[1], torch.ones(1, 2))


def test_the_means_are_the_head_s_own_and_attention_does_not_change():
    q = normal(1, 7, 4, 8)
    k, v = normal(1, 9, 2, 8, seed=1) + 5, normal(1, 9, 2, 8, seed=2) + 5
    quantized = quantize_qkv(q, k, v)
    assert quantized.v_mean.shape == (1, 2, 8)
    torch.testing.assert_close(quantized.v_mean, v.float().mean(dim=1))
    for value in quantized.values()[1:]:
        assert value.mean(dim=1).abs().max() < 0.1
    errors = attention_errors(q, k, v, "FP32 on the codes")
    assert set(errors) == set(attention_error_h200.WAYS)
    for name in ("error_value_mean_kept", "error_key_mean_kept"):
        assert 1.5 * errors["error"] < errors[name]


def test_the_quantisation_is_that_of_the_op_in_the_layers():
    inputs = qkv_inputs((4, 2, 16), (1, 9, 5), [5])
    q, k, v = torch.ops.trtllm.qk_norm_rope(*inputs)
    quantized = quantize_qkv(q, k, v)
    found = (*quantized.codes, *quantized.descales, quantized.v_mean)
    for one, expected in zip(found, torch.ops.trtllm.qkv_norm_rope_e4m3(*inputs), strict=True):
        assert_bit_equal(one, expected)


def test_only_attention_over_the_media_is_caught():
    seen = []
    q, k = normal(2, 4, 5, 8), normal(2, 2, 7, 8)
    with MediaAttention(lambda *qkv: seen.append([tuple(x.shape) for x in qkv])):
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert seen == [[(1, 5, 4, 8), (1, 7, 2, 8), (1, 7, 2, 8)]] * 2
    with pytest.raises(RuntimeError, match="mask"), MediaAttention(lambda *_: None):
        F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.bool))


def test_latents_are_smooth_and_mixed_with_noise_as_the_schedule_does():
    noise = torch.randn(2, 48, *CASES["480p"].latent_shape[:1], 8, 8)
    assert torch.equal(structured_latents(noise, 1.0, seed=2), noise)
    smooth = structured_latents(noise, 0.0, seed=2)
    assert smooth.shape == noise.shape and torch.equal(smooth[0], smooth[1])
    assert smooth.std().item() == pytest.approx(1.0, abs=1e-3)
    assert (smooth[..., 1:] - smooth[..., :-1]).std() < 0.7 * noise.std()
    half = structured_latents(noise, 0.5, seed=2)
    assert torch.allclose(half, 0.5 * smooth + 0.5 * noise)
