# SPDX-License-Identifier: Apache-2.0
"""GatedMLP: split and fused agree, the shared activation is quantised once, refusals."""

import pytest
import torch
import torch.nn.functional as F

from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.modules.gated_mlp import GatedMLP
from tensorrt_llm._torch.modules.linear import WeightMode
from tensorrt_llm._torch.modules.swiglu import swiglu_2in
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import (
    StepPrecisionController,
    install_step_precision,
)
from tensorrt_llm.models.modeling_utils import QuantConfig
from tests.support.fp8_modules import (
    FP8,
    assert_bit_equal,
    bits,
    bound_w8a16,
    quantize,
    relative_error,
    seen_inputs,
    shard,
    w8a8,
    w8a16,
)

HIDDEN, INTERMEDIATE = 32, 48
SCALE, DOWN_SCALE = 0.01, 0.004
BF16 = torch.bfloat16


def build(split=True, quant="static", hidden=HIDDEN, intermediate=INTERMEDIATE, **kwargs):
    config = ModelConfig(
        quant_config=QuantConfig(quant_algo=None if quant is None else "FP8"),
        force_dynamic_quantization=quant == "dynamic",
    )
    options = {"bias": False, "dtype": BF16, "config": config} | kwargs
    return GatedMLP(
        hidden_size=hidden, intermediate_size=intermediate, split_gate_up=split, **options
    )


def shards(quant="static", equal=False, gate_scale=SCALE, up_scale=SCALE, bias=False):
    """Tensors of gate, up, down; the weight scales of gate and up differ fourfold unless equal."""
    fp8 = quant is not None
    tensors = {
        "gate": shard(
            INTERMEDIATE, HIDDEN, seed=1, input_scale=gate_scale if fp8 else None, bias=bias
        ),
        "up": shard(
            INTERMEDIATE, HIDDEN, seed=2, gain=4, input_scale=up_scale if fp8 else None, bias=bias
        ),
        "down": shard(
            HIDDEN, INTERMEDIATE, seed=3, input_scale=DOWN_SCALE if fp8 else None, bias=bias
        ),
    }
    if equal and fp8:
        tensors["up"]["weight_scale"] = tensors["gate"]["weight_scale"].clone()
    return tensors


def load(mlp, tensors):
    if mlp.split_gate_up:
        mlp.gate_proj.load_weights([tensors["gate"]])
        mlp.up_proj.load_weights([tensors["up"]])
    else:
        mlp.gate_up_proj.load_weights([tensors["gate"], tensors["up"]])
    mlp.down_proj.load_weights([tensors["down"]])
    mlp.post_load_weights()
    return mlp


def activation(*shape, seed=7, dtype=BF16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (5, HIDDEN)), generator=generator).to(dtype)


def members(mlp):
    return [linear for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]


# --- topology -----------------------------------------------------------------------------------


def test_the_fused_mlp_has_one_gate_up_projection_and_no_others():
    mlp = build(split=False)
    assert mlp.gate_up_proj.out_features == 2 * INTERMEDIATE
    assert mlp.gate_up_proj.weights_loading_config.weight_mode is WeightMode.FUSED_GATE_UP_LINEAR
    assert not hasattr(mlp, "gate_proj") and not hasattr(mlp, "up_proj")
    assert mlp._maybe_share_gate_up_quantize is False


def test_the_split_mlp_keeps_the_bytes_and_scales_of_each_projection():
    tensors = shards()
    assert tensors["gate"]["weight_scale"] * 2 < tensors["up"]["weight_scale"]
    mlp = load(build(), tensors)
    assert mlp.gate_up_proj is None
    for name in ("gate", "up"):
        linear = getattr(mlp, f"{name}_proj")
        assert linear.weights_loading_config.weight_mode is WeightMode.VANILLA
        assert torch.equal(bits(linear.weight), bits(tensors[name]["weight"]))
        assert torch.equal(linear.weight_scale, tensors[name]["weight_scale"])
        assert torch.equal(linear.input_scale, tensors[name]["input_scale"])


@pytest.mark.parametrize("split", [False, True])
def test_a_mlp_built_on_meta_is_complete_after_to_empty_and_loading(split):
    with torch.device("meta"):
        mlp = build(split)
    assert mlp.down_proj.weight.is_meta
    if split:
        with pytest.raises(ValueError, match="meta"):
            mlp.post_load_weights()
    load(mlp.to_empty(device="cpu"), shards(equal=True))
    assert_bit_equal(mlp(activation()), load(build(split), shards(equal=True))(activation()))


def test_weights_may_be_created_after_construction():
    config = ModelConfig(
        quant_config=QuantConfig(quant_algo="FP8"), skip_create_weights_in_init=True
    )
    mlp = build(config=config)
    assert mlp._maybe_share_gate_up_quantize is True
    for linear in members(mlp):
        assert linear.quant_method is None
        linear.create_weights()
    assert_bit_equal(load(mlp, shards())(activation()), load(build(), shards())(activation()))


def test_the_dtype_comes_from_the_diffusion_config_where_none_is_given():
    mlp = GatedMLP(
        hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, bias=False,
        config=DiffusionModelConfig(),
    )  # fmt: skip
    assert mlp.down_proj.dtype is BF16
    assert build(dtype=torch.float16).down_proj.dtype is torch.float16


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_static_fp8_follows_the_formulas(bias):
    tensors, x = shards(bias=bias), activation()
    gate, up = w8a8(x, tensors["gate"]), w8a8(x, tensors["up"])
    hidden = F.silu(gate.float()) * up.float()
    expected = w8a8(quantize(hidden, tensors["down"]["input_scale"]), tensors["down"])
    assert relative_error(load(build(bias=bias), tensors)(x), expected) < 1e-3


@pytest.mark.parametrize("bias", [False, True])
def test_a_16_bit_step_equals_the_bf16_mlp_with_dequantised_weights(bias):
    tensors, x = shards(bias=bias), activation()
    mlp = load(build(bias=bias), tensors)
    with bound_w8a16(*members(mlp)):
        found = mlp(x)
    hidden = swiglu_2in(w8a16(x, tensors["gate"]), w8a16(x, tensors["up"]))
    assert_bit_equal(found, w8a16(hidden, tensors["down"]))
    assert relative_error(found, mlp(x)) > 1e-2  # the two modes can be told apart


@pytest.mark.parametrize("quant", [None, "static"])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("limits", [{}, {"swiglu_limit": 0.7, "swiglu_alpha": 1.7,
                                         "swiglu_beta": 1.0}])  # fmt: skip
def test_split_is_bit_equal_to_fused_with_equal_scales(quant, rows, limits):
    tensors, x = shards(quant, equal=True), activation(rows, HIDDEN)
    fused = load(build(split=False, quant=quant, **limits), tensors)
    split = load(build(split=True, quant=quant, **limits), tensors)
    assert_bit_equal(split(x), fused(x))


@pytest.mark.parametrize("option", ["swiglu_limit", "swiglu_alpha", "swiglu_beta"])
@pytest.mark.parametrize("split", [False, True])
def test_each_swiglu_option_changes_the_result(option, split):
    tensors, x = shards(equal=True), activation()
    plain = load(build(split), tensors)(x)
    assert not torch.equal(load(build(split, **{option: 0.5}), tensors)(x), plain)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("quant", [None, "static"])
def test_rank_3_and_strided_inputs_equal_their_rank_2_view(split, quant):
    mlp = load(build(split, quant), shards(quant, equal=True))
    x = activation(2, 6, HIDDEN)
    flat = mlp(x.reshape(12, HIDDEN))
    assert_bit_equal(mlp(x), flat.view(2, 6, HIDDEN))
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert_bit_equal(mlp(strided), flat.view(2, 6, HIDDEN))
    assert_bit_equal(mlp(x[0, 0]), flat[0])


@pytest.mark.parametrize("quant, step", [(None, 9), ("static", 9), ("static", 0)])
@pytest.mark.parametrize("split", [False, True])
def test_compiled_fullgraph_is_bit_equal_to_eager(split, quant, step):
    mlp = load(build(split, quant), shards(quant, equal=True))
    controller = StepPrecisionController(1, 0)
    install_step_precision(mlp, controller)
    controller.set_step(step, num_steps=10)
    x = activation(2, 3, HIDDEN)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    assert_bit_equal(compiled(x), mlp(x))


def test_a_compiled_mlp_follows_a_change_of_mode():
    mlp = load(build(), shards())
    controller = StepPrecisionController(1, 1)
    install_step_precision(mlp, controller)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    x = activation()
    for step in (0, 1, 2, 0):
        controller.set_step(step, num_steps=3)
        assert_bit_equal(compiled(x), mlp(x))


# --- the shared quantisation --------------------------------------------------------------------


def test_gate_and_up_receive_one_fp8_storage_and_down_receives_fp8():
    mlp = load(build(), shards())
    with seen_inputs(mlp) as seen:
        mlp(activation(2, 3, HIDDEN))
    assert set(seen.dtypes().values()) == {FP8}
    assert seen.one_storage("gate_proj", "up_proj")


def test_the_fused_mlp_hands_fp8_to_down():
    mlp = load(build(split=False), shards(equal=True))
    with seen_inputs(mlp) as seen:
        mlp(activation())
    assert seen.dtypes() == {"gate_up_proj": BF16, "down_proj": FP8}


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_sharing_is_bit_equal_to_not_sharing(dtype):
    mlp, x = load(build(dtype=dtype), shards()), activation(dtype=dtype) * 40  # some values clamp
    shared = mlp(x)
    mlp._maybe_share_gate_up_quantize = False
    with seen_inputs(mlp) as seen:
        assert_bit_equal(mlp(x), shared)
    assert seen.dtypes()["gate_proj"] is dtype


@pytest.mark.parametrize("split", [False, True])
def test_an_fp8_activation_passes_straight_through(split):
    tensors, x = shards(equal=True), activation()
    mlp = load(build(split), tensors)
    quantised = quantize(x, tensors["gate"]["input_scale"])
    if split:
        assert mlp._can_share_gate_up_quantization(quantised) is False
    assert_bit_equal(mlp(quantised), mlp(x))


@pytest.mark.parametrize("split", [False, True])
def test_no_fp8_tensor_reaches_a_linear_on_a_16_bit_step(split):
    mlp = load(build(split), shards(equal=True))
    controller = StepPrecisionController(1, 1)
    install_step_precision(mlp, controller)
    for step, high in ((0, True), (1, False), (2, True)):
        controller.set_step(step, num_steps=3)
        with seen_inputs(mlp) as seen:
            mlp(activation())
        assert (FP8 in seen.dtypes().values()) is not high


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_one_member_at_16_bit_stops_the_sharing(name):
    mlp, x = load(build(), shards()), activation()
    assert mlp._can_share_gate_up_quantization(x) is True
    with bound_w8a16(getattr(mlp, name)):
        assert mlp._can_share_gate_up_quantization(x) is False
        with seen_inputs(mlp) as seen:
            mlp(x)
    assert seen.dtypes() == {"gate_proj": BF16, "up_proj": BF16, "down_proj": FP8}
    assert mlp._can_share_gate_up_quantization(x) is True


@pytest.mark.parametrize("split", [False, True])
def test_a_down_projection_at_16_bit_receives_16_bit(split):
    mlp = load(build(split), shards(equal=True))
    with bound_w8a16(mlp.down_proj), seen_inputs(mlp) as seen:
        mlp(activation())
    assert seen.dtypes()["down_proj"] is BF16


def test_what_is_not_calibrated_is_not_shared():
    x = activation()
    bf16 = load(build(quant=None), shards(None))
    assert bf16._maybe_share_gate_up_quantize is False
    assert bf16._can_share_gate_up_quantization(x) is False
    with seen_inputs(bf16) as seen:
        bf16(x)
    assert set(seen.dtypes().values()) == {BF16}


@pytest.mark.parametrize("names", [["gate_proj"], ["up_proj"], ["gate_proj", "up_proj"]])
def test_a_missing_scale_is_not_shared(names):
    mlp, x = load(build(), shards()), activation()
    for name in names:
        getattr(mlp, name).input_scale = None
    assert mlp._can_share_gate_up_quantization(x) is False


@pytest.mark.parametrize("split", [False, True])
def test_a_caller_may_quantise_the_input_with_the_calibrated_scale_unless_a_step_is_16_bit(split):
    mlp = load(build(split), shards())
    first = mlp.gate_proj if split else mlp.gate_up_proj
    assert mlp.fp8_input_scale() is first.input_scale and first.input_scale == SCALE
    with bound_w8a16(first):
        assert mlp.fp8_input_scale() is None
    assert load(build(split, None), shards(None)).fp8_input_scale() is None


def test_a_dynamic_recipe_keeps_swiglu_at_16_bit():
    tensors, x = shards(equal=True), activation()
    mlp = load(build(split=False, quant="dynamic"), tensors)
    assert mlp._maybe_emit_fp8 is False and mlp.fp8_input_scale() is None
    with seen_inputs(mlp) as seen:
        found = mlp(x)
    assert set(seen.dtypes().values()) == {BF16}
    hidden = swiglu_2in(w8a16(x, tensors["gate"]), w8a16(x, tensors["up"]))
    assert 1e-3 < relative_error(found, w8a16(hidden, tensors["down"])) < 0.1


# --- after loading ------------------------------------------------------------------------------


def test_sharing_is_decided_at_construction_and_confirmed_after_loading():
    mlp = build()
    assert mlp._maybe_share_gate_up_quantize is True
    assert load(mlp, shards())._maybe_share_gate_up_quantize is True
    mlp.gate_proj.input_scale = mlp.up_proj.input_scale = None
    mlp.post_load_weights()
    assert mlp._maybe_share_gate_up_quantize is False


@pytest.mark.parametrize("at_16_bit", [False, True])
def test_different_input_scales_are_refused_every_time(at_16_bit):
    mlp = build(layer_idx=5)
    with pytest.raises(ValueError, match="same calibrated input_scale"):
        load(mlp, shards(up_scale=0.5))
    with bound_w8a16(*(members(mlp) if at_16_bit else [])):
        for _ in range(2):
            with pytest.raises(ValueError, match="same calibrated input_scale") as caught:
                mlp.post_load_weights()
            for part in ("gate_proj.input_scale = 0.0", "up_proj.input_scale = 0.5", "layer 5"):
                assert part in str(caught.value)


def test_scales_that_differ_in_the_last_bit_are_refused():
    neighbour = torch.nextafter(torch.tensor(SCALE), torch.tensor(1.0)).item()
    with pytest.raises(ValueError, match="same calibrated input_scale"):
        load(build(), shards(up_scale=neighbour))


def test_scales_that_were_never_loaded_are_refused():
    with pytest.raises(ValueError, match="same calibrated input_scale"):
        build().post_load_weights()


@pytest.mark.parametrize("split, quant", [(False, "static"), (False, None), (True, None)])
def test_the_scale_check_leaves_fused_and_bf16_alone(split, quant):
    mlp = load(build(split, quant), shards(quant, equal=True, up_scale=0.5))
    mlp.post_load_weights()
    assert mlp._maybe_share_gate_up_quantize is False


# --- refusals -----------------------------------------------------------------------------------


def test_split_with_dynamic_quantisation_is_refused_at_construction():
    with pytest.raises(ValueError, match="force_dynamic_quantization"):
        build(split=True, quant="dynamic")


@pytest.mark.parametrize("split", [False, True])
def test_lora_is_refused(split):
    mlp = load(build(split), shards(equal=True))
    with pytest.raises(NotImplementedError, match="LoRA is not supported"):
        mlp(activation(), lora_params={})


@pytest.mark.parametrize("split", [False, True])
def test_another_activation_is_refused_when_called(split):
    mlp = load(build(split, activation=F.gelu), shards(equal=True))
    with pytest.raises(NotImplementedError, match="requires SwiGLU"):
        mlp(activation())
