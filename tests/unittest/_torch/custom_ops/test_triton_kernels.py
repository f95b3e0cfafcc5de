# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for sm_90 and sm_100.

The interpreter shows indexing, masks, shapes and the FP32 formula; the rounding to BF16 and FP8,
and bit-equality with the CPU, are shown by ``test_ops_gpu.py``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.fp8_modules import assert_bit_equal

pytest.importorskip("triton")

OPS_ROOT = Path(__file__).parents[4]
CASES = Path(__file__).with_name("triton_interpreter_cases.py")


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


def swiglu(gate, up, limit, alpha, beta, scale):
    gate, up = gate.double(), up.double()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    value = gate * torch.sigmoid(alpha * gate) * (up + beta)
    return value if scale is None else (value / scale).clamp(-448, 448)


def assert_close(found, expected):
    rtol = {torch.float32: 2e-6, torch.float16: 1e-3}[found.dtype]
    torch.testing.assert_close(
        found, expected.to(found.dtype), rtol=rtol, atol=1e-6, equal_nan=True
    )


def test_swiglu_kernels_compute_the_formula_at_every_shape(interpreted):
    assert len(interpreted["swiglu"]) >= 7 * 4 * 2
    for case in interpreted["swiglu"]:
        assert_close(case["two"], swiglu(case["gate"], case["up"], *case["options"]))


def test_fused_and_two_input_kernels_store_the_same_bits(interpreted):
    for case in interpreted["swiglu"]:
        assert_bit_equal(case["one"].nan_to_num(1234.0), case["two"].nan_to_num(1234.0))


def test_quantise_kernels_divide_and_clamp_at_every_shape(interpreted):
    for case in interpreted["conversion"]:
        x, scale = case["x"], case["scale"]
        assert_close(case["static"], (x / scale).clamp(-448, 448))
        assert_bit_equal(case["dynamic_scale"], x.abs().amax() / 448)
        assert_close(case["dynamic"], (x / case["dynamic_scale"]).clamp(-448, 448))
    assert interpreted["zero_amax_scale"] == 1.0


def test_dequantise_kernel_multiplies_with_the_rounded_scale(interpreted):
    for case in interpreted["conversion"]:
        expected = case["x"] * case["scale"].half().float()
        assert_bit_equal(case["back"], expected.half())


def test_quantise_kernel_keeps_nan_signs_and_ieee_division_by_any_scale(interpreted):
    for case in interpreted["special"]:
        expected = (case["x"] / case["scale"]).clamp(-448, 448)
        found = case["static"]
        assert torch.equal(found.isnan(), expected.isnan())
        number = ~expected.isnan()
        assert_close(found[number], expected[number])
        assert torch.equal(found[number].signbit(), expected[number].signbit())


@pytest.mark.parametrize("sm_version", [90, 100])
def test_kernels_compile_to_exact_division_wide_loads_and_saturating_conversion(
    sm_version, tmp_path, monkeypatch
):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tensorrt_llm._torch.custom_ops import triton_kernels
    from tensorrt_llm._torch.custom_ops.torch_custom_ops import _silu_and_mul_2in_launch_params

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block, num_warps = _silu_and_mul_2in_launch_params(sm_version, torch.float8_e4m3fn)
    names = triton_kernels._silu_and_mul_2in_kernel.arg_names
    types = {
        "gate_ptr": "*bf16",
        "up_ptr": "*bf16",
        "out_ptr": "*fp8e4nv",
        "scale_ptr": "*fp32",
        "numel": "i32",
        "limit": "fp32",
        "alpha": "fp32",
        "beta": "fp32",
    }
    constants = {"HAS_LIMIT": True, "QUANTIZE": True, "BLOCK": block}
    source = ASTSource(
        fn=triton_kernels._silu_and_mul_2in_kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in ("gate_ptr", "up_ptr", "out_ptr", "numel")
        },
    )
    ptx = compile(
        source,
        target=GPUTarget("cuda", sm_version, 32),
        options={"num_warps": num_warps, **triton_kernels._EXACT},
    ).asm["ptx"]
    per_thread = block // (32 * num_warps)
    # IEEE divisions: the shared reciprocal, and each element for scales out of its range. The
    # approximate ones are the sigmoids'.
    assert ptx.count("div.rn.f32") == 1 + per_thread
    assert ptx.count("div.full.f32") == per_thread
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "min.NaN" in ptx and "min.f32" not in ptx and "max.f32" not in ptx
    # Loads of 16 bytes, 8 BF16 values: gate and up.
    assert ptx.count("ld.global.v4.b32") == 2 * per_thread // 8
