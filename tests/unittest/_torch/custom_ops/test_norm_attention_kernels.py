# SPDX-License-Identifier: Apache-2.0
"""The norm and attention kernels without a GPU: Triton's interpreter, and the compiled code.

The interpreter shows indexing, masks, text rows, padding and the arithmetic in FP32 and FP16; BF16,
FP8 and the speed are shown by ``test_norm_attention_ops_gpu.py``.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensorrt_llm._torch.custom_ops.attention_arguments import QkvInputs
from tests.support.fp8_modules import assert_bit_equal, bits
from tests.support.qkv_inputs import (
    EPS,
    assert_within_ulps,
    centred,
    rms_norm,
    unfused,
    valid_rows,
)

pytest.importorskip("triton")

OPS_ROOT = Path(__file__).parents[4]
CASES = Path(__file__).with_name("norm_attention_interpreter_cases.py")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    path = tmp_path_factory.mktemp("interpreter") / "cases.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(OPS_ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CASES), str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(path)


def assert_close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def cut(case):
    """The inputs of a case with the lengths that the kernels use."""
    inputs = QkvInputs(*case["inputs"])
    return inputs._replace(text_lengths=inputs.text_lengths.clamp(0, inputs.text_rows))


def test_norm_kernel_is_the_formula_at_every_width(interpreted):
    assert len(interpreted["norm"]) == 5
    for case in interpreted["norm"]:
        x, residual, weight = case["x"], case["residual"], case["weight"]
        normed, added, total = case["wide"]
        assert_bit_equal(total, residual + x)
        for found, exact in ((normed, x), (added, total)):
            expected = rms_norm(exact, weight, EPS)
            assert_close(found, expected, TOLERANCE[x.dtype])
            if x.dtype == torch.float16:
                assert_within_ulps(found, expected, 1)


def test_norm_codes_are_the_rounded_result_over_the_scale(interpreted):
    for case in interpreted["norm"]:
        (normed, added, total), codes = case["wide"], case["codes"]
        assert_close(codes[0], (normed.float() / 0.0037).clamp(-448, 448))
        assert_close(codes[1], (added.float() / 0.0037).clamp(-448, 448))
        assert_bit_equal(codes[2], total)


def test_rotation_kernel_has_the_bits_of_the_unfused_steps(interpreted):
    # Inputs whose squares add up exactly, but rsqrt of the interpreter is no torch.rsqrt: FP32 may
    # differ by a rounding, and 16 bits hide it.
    assert len(interpreted["attention"]) == 5
    for case in interpreted["attention"]:
        inputs = cut(case)
        for found, expected in zip(case["found"], unfused(inputs), strict=True):
            if inputs.q.dtype == torch.float16:
                assert_bit_equal(found, expected)
            else:
                assert_close(found, expected)


def test_text_values_and_padding_are_copied_bit_for_bit(interpreted):
    for case in interpreted["attention"]:
        inputs = cut(case)
        _, keys, values = unfused(inputs)
        assert_bit_equal(case["found"][2], values)
        lengths = inputs.text_lengths.tolist()
        for branch, (length, end) in enumerate(zip(lengths, valid_rows(inputs), strict=True)):
            found = case["found"][1][branch]
            assert_bit_equal(found[:length], keys[branch, :length])
            assert not bits(found[end:]).any()


def test_means_and_descales_are_those_of_the_written_rows(interpreted):
    for case in interpreted["attention"]:
        inputs = cut(case)
        q, keys, values = (x.float() for x in case["found"])
        k_mean, v_mean, q_descale, k_descale, v_descale = case["scales"]
        for joined, mean, descale in ((keys, k_mean, k_descale), (values, v_mean, v_descale)):
            for branch, end in enumerate(valid_rows(inputs)):
                assert_close(mean[branch], joined[branch, :end].mean(0))
            assert_close(descale, centred(inputs, joined, mean).abs().amax((1, 3)) / 448)
        grouped = q.unflatten(2, (inputs.kv_heads, -1))
        assert_bit_equal(q_descale, grouped.abs().amax((1, 3, 4)) / 448)


def test_padding_of_the_text_changes_no_bit_of_means_and_descales(interpreted):
    for case in interpreted["attention"]:
        for found, expected in zip(case["scales_with_padding"], case["scales"], strict=True):
            assert_bit_equal(found, expected)


def test_codes_are_the_written_rows_less_their_means_over_their_descales(interpreted):
    for case in interpreted["attention"]:
        inputs = cut(case)
        q, keys, values = (x.float() for x in case["found"])
        k_mean, v_mean, *descales = case["scales"]
        q_scale, k_scale, v_scale = (scale[:, None, :, None] for scale in descales)
        per_head = q_scale.repeat_interleave(inputs.query_heads // inputs.kv_heads, dim=2)
        q8, k8, v8 = case["codes"]
        assert_close(q8, (q / per_head).clamp(-448, 448))
        assert_close(v8, (centred(inputs, values, v_mean) / v_scale).clamp(-448, 448))
        assert_close(k8, (centred(inputs, keys, k_mean) / k_scale).clamp(-448, 448), 1e-4)
        for branch, end in enumerate(valid_rows(inputs)):
            assert not bits(k8[branch, end:]).any() and not bits(v8[branch, end:]).any()


def test_each_head_gets_its_value_mean_and_the_codes_are_the_rounded_sum_s(interpreted):
    assert len(interpreted["value_mean"]) == 6
    for case in interpreted["value_mean"]:
        attended, v_mean = case["attended"], case["v_mean"]
        group = attended.shape[2] // v_mean.shape[1]
        total = attended.float() + v_mean.repeat_interleave(group, 1)[:, None]
        assert_bit_equal(case["wide"], total.to(attended.dtype))
        assert_close(case["codes"], (case["wide"].float() / 0.0037).clamp(-448, 448))


def test_head_scales_of_any_kind_give_the_ieee_quotient(interpreted):
    for case in interpreted["head_scales"]:
        expected = (case["x"] / case["scale"][:, None]).clamp(-448, 448)
        found = case["codes"]
        assert torch.equal(found.isnan(), expected.isnan())
        number = ~expected.isnan()
        assert_close(found[number], expected[number])
        assert torch.equal(found[number].signbit(), expected[number].signbit())


POINTERS = {
    **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16"),
    **dict.fromkeys(("cos_ptr", "sin_ptr", "text_k_ptr", "text_v_ptr"), "*bf16"),
    "lengths_ptr": "*i32",
}
STRIDES = dict.fromkeys(("q_batch", "q_row", "k_batch", "k_row", "v_batch", "v_row"), "i32")
COUNTS = dict.fromkeys(("media_rows", "text_rows", "programs"), "i32")
NANO = {"Q_HEADS": 32, "KV_HEADS": 8, "Q_TILE": 32, "KV_TILE": 8, "HALF": 64, "TEXT_ROWS": 4}


def ptx_of(kernel, types, constants, aligned, sm_version, num_warps, folder, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tensorrt_llm._torch.custom_ops.triton_kernels import _EXACT

    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", sm_version, 32)
    return compile(source, target=target, options={"num_warps": num_warps, **_EXACT}).asm["ptx"]


@pytest.mark.parametrize("sm_version", [90, 100])
def test_attention_kernels_compile_to_packed_arithmetic_without_exchange(
    sm_version, tmp_path, monkeypatch
):
    from tensorrt_llm._torch.custom_ops import attention_kernels

    scales = ("k_mean_ptr", "v_mean_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr")
    outputs = ("q_out_ptr", "k_out_ptr", "v_out_ptr")
    types = {**POINTERS, **STRIDES, **COUNTS, "eps": "fp32"}
    for quantize in (False, True):
        constants = {**NANO, "QUANTIZE": quantize}
        own = dict.fromkeys(outputs, "*fp8e4nv" if quantize else "*bf16")
        if quantize:
            own |= dict.fromkeys(scales, "*fp32")
        else:
            constants |= dict.fromkeys(scales)
        aligned = [*POINTERS, *STRIDES, *own]
        kernel, launch = attention_kernels._write_kernel, (sm_version, 4, tmp_path, monkeypatch)
        ptx = ptx_of(kernel, types | own, constants, aligned, *launch)
        # Halves of a head lie in one thread and rows in one warp, so nothing passes through shared
        # memory; roundings to BF16 are those of packed BF16 instructions; loads take 16 bytes.
        assert "ld.shared" not in ptx and "bar.sync" not in ptx
        assert "mul.rn.bf16x2" in ptx and "fma.rn.bf16" not in ptx
        assert "ld.global.v4.b32" in ptx
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == quantize
        assert not re.search(r"(min|max)\.(?!NaN)[a-z.]*f32", ptx)  # which would drop NaN


@pytest.mark.parametrize("sm_version", [90, 100])
def test_norm_kernel_reads_16_bytes_at_a_time_and_masks_no_known_width(
    sm_version, tmp_path, monkeypatch
):
    from tensorrt_llm._torch.custom_ops import norm_kernels

    pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "total_ptr"), "*bf16")
    pointers |= {"out_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    constants = {
        "SIZE": 5120,
        "MAIN": 4096,
        "TAIL": 1024,
        "ADD": True,
        "QUANTIZE": True,
        "BLOCK": 1,
    }
    ptx = ptx_of(
        norm_kernels._rms_norm_kernel,
        {**pointers, "rows": "i32", "eps": "fp32"},
        constants,
        list(pointers),
        *(sm_version, 4, tmp_path, monkeypatch),
    )
    # x, residual and weight: 5120 elements each over 128 threads, 8 a load.
    assert ptx.count("ld.global.v4.b32") == 3 * 5120 // 128 // 8
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    # A thread stores the columns that it loaded: only the sum goes through shared memory.
    assert "shared.v4" not in ptx
    loads = [line for line in ptx.splitlines() if "ld.global" in line]
    assert not any(line.strip().startswith("@") for line in loads)


@pytest.mark.parametrize("sm_version", [90, 100])
@pytest.mark.parametrize("quantize", [False, True], ids=["wide", "codes"])
@pytest.mark.parametrize("heads", [32, 64])
def test_value_mean_kernel_reads_16_bytes_at_a_time_without_exchange(
    heads, quantize, sm_version, tmp_path, monkeypatch
):
    from tensorrt_llm._torch.custom_ops import value_mean_kernels

    width = heads * 128
    pointers = {"attended_ptr": "*bf16", "mean_ptr": "*fp32"}
    pointers |= {"out_ptr": "*fp8e4nv" if quantize else "*bf16"}
    constants = {"WIDTH": width, "MEANS": 8 * 128, "HEAD": 128, "GROUP": heads // 8}
    constants |= {"TILE": width, "QUANTIZE": quantize, "BLOCK": 1}
    if quantize:
        pointers["scale_ptr"] = "*fp32"
    else:
        constants["scale_ptr"] = None
    ptx = ptx_of(
        value_mean_kernels._add_value_mean_kernel,
        {**pointers, "media_rows": "i32", "rows": "i32"},
        constants,
        list(pointers),
        *(sm_version, 4, tmp_path, monkeypatch),
    )
    # A thread has width / 128 columns: 8 of 16 bits a load, and 4 of the means' 32.
    assert ptx.count("ld.global.v4.b32") == width // 128 // 8 + width // 128 // 4
    assert "shared" not in ptx
    # The mask of a width that fills its tile is a constant.
    predicates = set(re.findall(r"@(%p\d+) (?:ld|st)\.global", ptx))
    assert all(re.search(rf"mov\.pred\s+{name}, -1;", ptx) for name in predicates)
    assert re.search(r"cvt\.rn\.bf16(x2)?\.f32", ptx)  # the sum is rounded before it is quantised
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == quantize
    assert not re.search(r"(min|max)\.(?!NaN)[a-z.]*f32", ptx)
