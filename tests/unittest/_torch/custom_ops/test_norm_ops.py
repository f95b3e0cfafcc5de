# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and residual addition with RMSNorm on the CPU: the module's bits, and the contract."""

import subprocess
import sys

import pytest
import torch

import tensorrt_llm._torch.custom_ops  # noqa: F401
from tensorrt_llm._torch.modules.rms_norm import RMSNorm
from tests.support.fp8_modules import assert_bit_equal, bits, quantize
from tests.support.qkv_inputs import rms_norm

FP8 = torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPS = torch.ops.trtllm
EPS = 1e-6
SCALE = torch.tensor(0.0123)  # saturates at both ends
DTYPES = [(BF16, BF16), (FP16, FP16), (FP32, FP32), (FP32, BF16), (BF16, FP32)]  # x, weight
SHAPES = [(64,), (5, 64), (2, 3, 7, 16), (3, 80)]


def normal(shape, dtype=BF16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


def norm_inputs(shape, dtype=BF16, weight_dtype=BF16):
    weight = normal(shape[-1:], weight_dtype, seed=2) * 0.1 + 1
    return normal(shape, dtype), normal(shape, dtype, seed=1), weight


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_norm_has_the_bits_of_the_module(shape, dtype, weight_dtype):
    x, _, weight = norm_inputs(shape, dtype, weight_dtype)
    module = RMSNorm(shape[-1], EPS, weight_dtype)
    module.weight.copy_(weight)
    found = OPS.rms_norm(x, weight, EPS)
    assert_bit_equal(found, rms_norm(x, weight, EPS))
    assert_bit_equal(found, module(x))


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_addition_is_rounded_once_and_normed_as_rounded(shape, dtype, weight_dtype):
    x, residual, weight = norm_inputs(shape, dtype, weight_dtype)
    normed, total = OPS.add_rms_norm(x, residual, weight, EPS)
    assert_bit_equal(total, residual + x)
    assert_bit_equal(normed, rms_norm(residual + x, weight, EPS))


@pytest.mark.parametrize(("dtype", "weight_dtype"), DTYPES, ids=str)
def test_codes_are_the_static_quantisation_of_the_rounded_result(dtype, weight_dtype):
    x, residual, weight = norm_inputs((13, 64), dtype, weight_dtype)
    codes = OPS.rms_norm(x, weight, EPS, SCALE)
    assert_bit_equal(codes, quantize(OPS.rms_norm(x, weight, EPS), SCALE))
    codes, total = OPS.add_rms_norm(x, residual, weight, EPS, SCALE)
    assert_bit_equal(codes, quantize(OPS.add_rms_norm(x, residual, weight, EPS)[0], SCALE))
    assert_bit_equal(total, residual + x)


def test_eps_bounds_a_vanishing_input():
    found = OPS.rms_norm(torch.full((1, 8), 1e-3), torch.ones(8), 1e-2)
    torch.testing.assert_close(found, torch.full((1, 8), 1e-3 / (1e-6 + 1e-2) ** 0.5))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_strided_inputs_give_the_bits_of_the_formula_in_contiguous_results(dtype):
    wide = normal((5, 7, 3 * 16), dtype)
    weight = normal((16,), dtype)
    residual = normal((7, 5, 16), dtype, seed=1).transpose(0, 1)
    for x in (wide[..., 16:32], normal((16, 5, 7), dtype).permute(1, 2, 0)):
        normed, total = OPS.add_rms_norm(x, residual, weight, EPS)
        results = (OPS.rms_norm(x, weight, EPS), OPS.rms_norm(x, weight, EPS, SCALE), normed, total)
        assert all(result.is_contiguous() for result in results)
        assert_bit_equal(results[0], rms_norm(x, weight, EPS))
        assert_bit_equal(results[1], quantize(results[0], SCALE))
        assert_bit_equal(normed, rms_norm(residual + x, weight, EPS))
        assert_bit_equal(total, residual + x)


def test_nan_fills_its_row_alone():
    x, residual, weight = norm_inputs((3, 64))
    x[1, 5] = float("nan")
    codes, total = OPS.add_rms_norm(x, residual, weight, EPS, SCALE)
    assert (bits(codes)[1] == 0x7F).all() and (bits(codes)[[0, 2]] & 0x7F != 0x7F).all()
    assert total.isnan().sum() == 1
    assert OPS.rms_norm(x, weight, EPS).isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (2, 0, 6)], ids=str)
def test_empty_tensors_give_empty_results(shape):
    x, residual, weight = norm_inputs(shape)
    assert OPS.rms_norm(x, weight, EPS, SCALE).shape == shape
    assert [t.shape for t in OPS.add_rms_norm(x, residual, weight, EPS)] == [shape, shape]


def test_inputs_are_not_changed_and_results_are_new():
    inputs = norm_inputs((4, 8), FP32, FP32)
    kept = [t.clone() for t in inputs]
    x, residual, weight = inputs
    results = [OPS.rms_norm(x, weight, EPS), *OPS.add_rms_norm(x, residual, weight, EPS)]
    addresses = {t.data_ptr() for t in inputs}
    assert len(addresses | {t.data_ptr() for t in results}) == 6
    for tensor, before in zip(inputs, kept, strict=True):
        assert_bit_equal(tensor, before)


def test_arguments_that_do_not_fit_are_refused_by_what_differs():
    x, residual, weight = norm_inputs((4, 8))
    one = torch.tensor(1.0)
    for args, message in [
        ((x.double(), weight, EPS), "x.*float64"),
        ((quantize(x, SCALE), weight, EPS), "x.*float8"),
        ((x, weight.double(), EPS), "weight.*float64"),
        ((x, weight[:7], EPS), r"last dimension.*\(4, 8\) and weight \(7,\)"),
        ((x, weight[None], EPS), "last dimension"),
        ((x[0, 0], weight, EPS), "last dimension"),
        ((x, weight.to("meta"), EPS), "same device.*weight"),
        ((x, torch.ones(16, dtype=BF16)[::2], EPS), "contiguous.*weight"),
        ((x, weight, EPS, torch.ones(1)), "0-d.*scale|scale.*0-d"),
        ((x, weight, EPS, one.double()), "float64"),
        ((x, weight, EPS, one.to("meta")), "same device.*scale"),
    ]:
        with pytest.raises(ValueError, match=message):
            OPS.rms_norm(*args)
        with pytest.raises(ValueError, match=message):
            OPS.add_rms_norm(args[0], args[0].clone(), *args[1:])
    for other, message in [
        (residual[:3], r"same shape and dtype.*\(4, 8\).*\(3, 8\)"),
        (residual.float(), "same shape and dtype.*bfloat16.*float32"),
        (residual.to("meta"), "same device.*residual"),
    ]:
        with pytest.raises(ValueError, match=message):
            OPS.add_rms_norm(x, other, weight, EPS)


@pytest.mark.parametrize("scale", [None, SCALE], ids=["wide", "fp8"])
def test_opcheck_passes(scale):
    x, residual, weight = norm_inputs((2, 3, 16))
    for view in (x, x.transpose(0, 1)):
        torch.library.opcheck(OPS.rms_norm.default, (view, weight, EPS, scale))
        torch.library.opcheck(
            OPS.add_rms_norm.default, (view, residual.view(view.shape), weight, EPS, scale)
        )


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
def test_opcheck_passes_for_inputs_that_require_grad():
    x, residual, weight = (t.requires_grad_() for t in norm_inputs((4, 8)))
    torch.library.opcheck(OPS.add_rms_norm.default, (x, residual, weight, EPS))


def test_compiled_fullgraph_equals_eager_bit_for_bit():
    def forward(x, residual, weight, scale):
        normed, total = OPS.add_rms_norm(x * 2, residual.transpose(0, 1), weight, EPS)
        return normed, total, OPS.rms_norm(total.transpose(0, 1), weight, EPS, scale)

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 8):
        x, residual, weight = norm_inputs((rows, 5, 16))
        args = x, residual.transpose(0, 1).contiguous(), weight, SCALE
        for found, expected in zip(compiled(*args), forward(*args), strict=True):
            assert_bit_equal(found, expected)


def test_cpu_ops_work_without_triton_and_the_cuda_path_names_it():
    program = """
import sys
sys.modules["triton"] = None
import torch
from tensorrt_llm._torch.custom_ops import attention_ops, norm_ops
torch.ops.trtllm.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6)
for ops in (attention_ops, norm_ops):
    try:
        ops._kernels()
    except RuntimeError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Triton did not import") == 2
