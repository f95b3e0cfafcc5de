# SPDX-License-Identifier: Apache-2.0
"""Kernels are sorted by their names, and each family is set against its own ceiling."""

import re
from pathlib import Path

import pytest

from benchmarks.breakdown import Kernel, breakdown_rows, family_of, idle_seconds
from benchmarks.common import CASES, FAMILIES
from benchmarks.counted_work import counted_bytes

ROOT = Path(__file__).resolve().parents[3]
FAMILY, CASE = FAMILIES["small"], CASES["small"]
CEILING = {"linears_s": 2.0, "attention_s": 4.0, "copy_gb_s": 1.0}


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<>>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6", "attention"),
        ("nvjet_qqtst_128x256_128x4_1x2_h_bz_coopA_TNT", "FP8 GEMM"),
        ("nvjet_sm90_qqtst_128x256_128x4_1x2_h_bz_coopA_TNT", "FP8 GEMM"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "BF16 GEMM"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64", "FP8 GEMM"),
        ("_silu_and_mul_2in_kernel", "SwiGLU"),
        ("_add_rms_norm_kernel", "norm + residual"),
        ("_write_kernel", "qk norm + RoPE"),
        ("_statistics_kernel", "qk norm + RoPE"),
        ("_quantize_e4m3_kernel", "quantise"),
        ("_add_value_mean_kernel", "quantise"),
        ("_dequantize_e4m3_kernel", "dequantise"),
        ("Memcpy DtoD (Device -> Device)", "copies and elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "copies and elementwise"),
        ("a_kernel_that_nobody_knows", "other"),
    ],
)
def test_a_kernel_belongs_to_the_family_of_its_name(kernel, family):
    assert family_of(kernel) == family


def test_every_triton_kernel_of_the_tree_has_a_family():
    sources = (ROOT / "tensorrt_llm" / "_torch" / "custom_ops").glob("*.py")
    pattern = r"@triton\.jit\ndef (\w+_kernel)\("
    names = [n for path in sources for n in re.findall(pattern, path.read_text(encoding="utf-8"))]
    families = {name: family_of(name) for name in names}
    assert len(families) >= 4
    assert not [name for name, family in families.items() if family in ("other", "BF16 GEMM")]


def test_families_are_set_against_their_ceilings_and_unknown_kernels_are_named():
    kernels = [
        Kernel("flash", 0.0, 5.0),
        Kernel("nvjet_qqtst_a", 5.0, 1.0),
        Kernel("nvjet_qqtst_b", 7.0, 1.5),
        Kernel("_silu_and_mul_2in_kernel", 8.5, 1.0),
        Kernel("mystery", 9.5, 0.5),
    ]
    rows = breakdown_rows(kernels, FAMILY, CASE, "w8a8", "bf16", CEILING)
    by_name = {row["kernel_family"]: row for row in rows}
    assert by_name["attention"]["of_ceiling"] == pytest.approx(5 / 4)
    assert by_name["FP8 GEMM"]["of_ceiling"] == pytest.approx(2.5 / 2)
    assert by_name["FP8 GEMM"]["count"] == 2
    swiglu = counted_bytes(FAMILY, CASE, "w8a8", "bf16")["swiglu"]
    assert by_name["SwiGLU"]["ceiling_s"] == pytest.approx(swiglu / 1e9)
    assert by_name["other"]["kernels"] == {"mystery": [1, 0.5]}
    assert "of_ceiling" not in by_name["other"]
    assert by_name["idle"]["seconds"] == pytest.approx(1.0)
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert [row["kernel_family"] for row in rows[:2]] == ["attention", "FP8 GEMM"]


def test_the_linears_of_a_16_bit_step_are_split_into_gemms_and_dequantisation():
    kernels = [Kernel("nvjet_tst", 0.0, 1.9), Kernel("_dequantize_e4m3_kernel", 1.9, 0.2)]
    rows = breakdown_rows(kernels, FAMILY, CASE, "w8a16", "bf16", CEILING)
    by_name = {row["kernel_family"]: row for row in rows}
    moving = counted_bytes(FAMILY, CASE, "w8a16", "bf16")["dequantize"] / 1e9
    assert by_name["dequantise"]["ceiling_s"] == pytest.approx(moving)
    assert by_name["BF16 GEMM"]["ceiling_s"] == pytest.approx(2.0 - moving)


def test_kernels_that_overlap_leave_no_idle_time():
    kernels = [Kernel("a", 0.0, 2.0), Kernel("b", 1.0, 0.5), Kernel("c", 2.5, 1.0)]
    assert idle_seconds(kernels) == pytest.approx(0.5)
    assert idle_seconds([]) == 0.0
