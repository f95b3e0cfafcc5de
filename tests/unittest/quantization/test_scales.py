# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from tensorrt_llm.quantization.scales import (
    ScaleError,
    check_scale,
    resolve_fp8_scale,
    resolve_fp8_scales,
)

AMAX = torch.tensor(3.296875, dtype=torch.bfloat16)
INPUT_AMAX = torch.tensor(17.25, dtype=torch.bfloat16)
MODELOPT = {
    "weight_quantizer._amax": AMAX,
    "weight_quantizer._scale": AMAX / 448,  # BF16, as ModelOpt stores it
    "input_quantizer._amax": INPUT_AMAX,
}
SCALES = {"weight_scale": AMAX.float() / 448, "input_scale": INPUT_AMAX.float() / 448}


def same_bits(a, b):
    return a.dtype == b.dtype == torch.float32 and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.gpu
def test_scales_of_buffers_on_cuda_are_those_of_the_cpu():
    for amax in torch.rand(64).split(1):
        expected, _ = resolve_fp8_scales({"weight_quantizer._amax": amax}, "lin")
        found, _ = resolve_fp8_scales({"weight_quantizer._amax": amax.cuda()}, "lin")
        assert same_bits(found.cpu(), expected)


@pytest.mark.parametrize("tensors", [SCALES, MODELOPT, SCALES | MODELOPT])
def test_either_dialect_or_both_give_the_same_fp32_scales(tensors):
    weight_scale, input_scale = resolve_fp8_scales(tensors, "lin")
    assert same_bits(weight_scale, SCALES["weight_scale"])
    assert same_bits(input_scale, SCALES["input_scale"])


def test_amax_is_preferred_to_modelopts_rounded_scale():
    assert MODELOPT["weight_quantizer._scale"].float() != SCALES["weight_scale"]
    without_amax = {"weight_quantizer._scale": MODELOPT["weight_quantizer._scale"]}
    weight_scale, input_scale = resolve_fp8_scales(without_amax, "lin")
    assert same_bits(weight_scale, MODELOPT["weight_quantizer._scale"].float())
    assert input_scale is None


def test_nothing_told_gives_none():
    assert resolve_fp8_scales({"weight": torch.zeros(2)}, "lin") == (None, None)


def test_an_amax_that_was_rounded_to_bf16_agrees_with_the_unrounded_scale():
    amax = torch.tensor(1.0039)  # between two BF16 values
    tensors = {"weight_scale": amax / 448, "weight_quantizer._amax": amax.bfloat16()}
    assert tensors["weight_quantizer._amax"].float() / 448 != tensors["weight_scale"]
    assert same_bits(resolve_fp8_scales(tensors, "lin")[0], amax / 448)


def test_a_subnormal_fp16_scale_agrees_within_its_coarse_step():
    amax = torch.tensor(0.0045, dtype=torch.float16)
    tensors = {"weight_quantizer._amax": amax, "weight_quantizer._scale": amax / 448}
    exact = amax.float() / 448
    off = (tensors["weight_quantizer._scale"].float() - exact).abs() / exact
    assert off > torch.finfo(torch.float16).eps  # beyond the relative rounding of normal numbers
    assert same_bits(resolve_fp8_scales(tensors, "lin")[0], exact)


@pytest.mark.parametrize(
    ("key", "other", "factor"),
    [
        ("weight_scale", "weight_quantizer._amax", 1.02),
        ("weight_scale", "weight_quantizer._scale", 0.98),
        ("input_scale", "input_quantizer._amax", 2.0),
    ],
)
def test_dialects_that_disagree_are_refused_with_both_keys_and_values(key, other, factor):
    tensors = SCALES | MODELOPT
    tensors[key] = tensors[key] * factor
    with pytest.raises(ValueError, match="disagree") as error:
        resolve_fp8_scales({k: tensors[k] for k in (key, other)}, "layers.0.mlp.up_proj")
    message = str(error.value)
    assert "layers.0.mlp.up_proj" in message and key in message and other in message
    assert f"{tensors[key].item():.9g}" in message


def test_fp32_sources_must_agree_to_fp32_rounding():
    tensors = {"weight_scale": SCALES["weight_scale"], "weight_quantizer._amax": AMAX.float()}
    resolve_fp8_scales(tensors, "lin")
    tensors["weight_scale"] = tensors["weight_scale"] * (1 + 1e-5)
    with pytest.raises(ValueError, match="disagree"):
        resolve_fp8_scales(tensors, "lin")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_scales_of_any_rank_load(shape):
    assert same_bits(check_scale(torch.full(shape, 0.25), "s"), torch.tensor(0.25))


@pytest.mark.parametrize("shape", [(2,), (0,), (2, 1), (1, 1, 1)])
def test_other_shapes_are_refused_by_name(shape):
    with pytest.raises(ValueError, match=r"one element \(where: lin.weight_scale\)"):
        check_scale(torch.ones(shape), "lin.weight_scale")


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((64,), "per-channel"), ((64, 1), "per-channel"), ((4, 8), "block"), ((0,), None)],
)
def test_scales_of_several_elements_are_called_what_they_are(shape, layout):
    with pytest.raises(ScaleError) as error:
        check_scale(torch.ones(shape), "lin.weight_scale")
    assert error.value.name == "lin.weight_scale"
    told = "" if layout is None else f", {layout} scales"
    assert error.value.fault.endswith(f"shape {shape}{told} found")


def test_an_amax_so_small_that_its_scale_is_zero_is_refused():
    with pytest.raises(ScaleError, match="lin.weight_quantizer._amax"):
        resolve_fp8_scale({"weight_quantizer._amax": torch.tensor(1e-44)}, "lin", "weight_scale")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["weight_scale", "input_quantizer._amax"])
def test_scales_that_are_not_finite_and_positive_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"finite and positive \(where: lin.{key}\)"):
        resolve_fp8_scales({key: torch.tensor(value)}, "lin")


def test_an_integer_scale_is_refused():
    with pytest.raises(ValueError, match="found torch.int64"):
        check_scale(torch.tensor(1), "lin.weight_scale")
