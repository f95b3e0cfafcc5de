# SPDX-License-Identifier: Apache-2.0
"""Attention: q, k and v share one quantisation of their input, and when they must not."""

import pytest
import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import (
    StepPrecisionController,
    install_step_precision,
)
from tensorrt_llm._torch.visual_gen.modules import QKVMode
from tests.support.attention_modules import (
    BF16,
    HIDDEN,
    QKV,
    SCALE,
    activation,
    build,
    load,
    members,
    shards,
)
from tests.support.fp8_modules import (
    FP8,
    assert_bit_equal,
    bound_w8a16,
    quantize,
    seen_inputs,
)

# --- the shared quantisation --------------------------------------------------------------------


def test_q_k_and_v_receive_one_fp8_storage():
    attention = load(build(), shards())
    with seen_inputs(attention) as seen:
        attention(activation())
    assert seen.dtypes() == {"to_q": FP8, "to_k": FP8, "to_v": FP8, "to_out.0": BF16}
    assert seen.one_storage(*QKV)


def test_sharing_is_bit_equal_to_not_sharing():
    x = activation() * 40  # some values clamp
    shared, alone = load(build(), shards()), load(build(share=False), shards())
    assert alone._maybe_share_qkv_quantize is False
    with seen_inputs(alone) as seen:
        assert_bit_equal(alone(x), shared(x))
    assert set(seen.dtypes().values()) == {BF16}


@pytest.mark.parametrize("mode", QKVMode)
def test_a_caller_may_quantise_the_input_with_the_calibrated_scale_unless_a_step_is_16_bit(mode):
    attention = load(build(mode), shards())
    first = attention.to_q if mode is QKVMode.SEPARATE_QKV else attention.qkv_proj
    assert attention.fp8_input_scale() is first.input_scale and first.input_scale == SCALE
    with bound_w8a16(first):
        assert attention.fp8_input_scale() is None
    assert load(build(mode, None), shards(None)).fp8_input_scale() is None


def test_a_caller_quantises_no_input_of_a_dynamic_recipe_or_of_projections_that_do_not_share():
    assert load(build(QKVMode.FUSE_QKV, "dynamic"), shards()).fp8_input_scale() is None
    assert load(build(share=False), shards()).fp8_input_scale() is None


def test_an_encoder_tensor_of_its_own_is_not_shared():
    shared, alone = load(build(), shards()), load(build(share=False), shards())
    x, other = activation(), activation(2, 9, HIDDEN, seed=8)
    assert shared._can_share_qkv_quantize(x, other) is False
    assert shared._can_share_qkv_quantize(x, x.clone()) is False
    with seen_inputs(shared) as seen:
        assert_bit_equal(shared(x, other), alone(x, other))
    assert set(seen.dtypes().values()) == {BF16}


def test_the_same_tensor_as_encoder_is_shared():
    attention, x = load(build(), shards()), activation()
    assert attention._can_share_qkv_quantize(x, x) is True
    with seen_inputs(attention) as seen:
        assert_bit_equal(attention(x, x), attention(x))
    assert seen.one_storage(*QKV)


def test_an_fp8_activation_passes_straight_through():
    attention, x = load(build(), shards()), activation()
    quantised = quantize(x, torch.tensor(SCALE))
    assert attention._can_share_qkv_quantize(quantised, None) is False
    assert_bit_equal(attention(quantised), attention(x))


@pytest.mark.parametrize("mode", QKVMode)
def test_no_fp8_tensor_reaches_a_linear_on_a_16_bit_step(mode):
    attention = load(build(mode), shards())
    controller = StepPrecisionController(1, 1)
    install_step_precision(attention, controller)
    for step in (0, 2):
        controller.set_step(step, num_steps=3)
        with seen_inputs(attention) as seen:
            attention(activation())
        assert set(seen.dtypes().values()) == {BF16}


@pytest.mark.parametrize("name", QKV)
def test_one_member_at_16_bit_stops_the_sharing(name):
    attention, x = load(build(), shards()), activation()
    assert attention._can_share_qkv_quantize(x, None) is True
    with bound_w8a16(getattr(attention, name)):
        assert attention._can_share_qkv_quantize(x, None) is False
        with seen_inputs(attention) as seen:
            attention(x)
    assert set(seen.dtypes().values()) == {BF16}


@pytest.mark.parametrize("name", QKV)
def test_a_missing_scale_is_not_shared(name):
    attention = load(build(), shards())
    getattr(attention, name).input_scale = None
    assert attention._can_share_qkv_quantize(activation(), None) is False


def test_what_is_not_calibrated_is_not_shared():
    attention = load(build(quant=None), shards(None))
    assert attention._shares_qkv_input_quant() is False
    assert attention._maybe_share_qkv_quantize is False
    assert attention._can_share_qkv_quantize(activation(), None) is False


def test_the_static_facts_are_real_bools():
    attention = build()
    assert attention._shares_qkv_input_quant() is True
    assert attention._maybe_share_qkv_quantize is True
    fused = build(QKVMode.FUSE_QKV)
    assert fused._shares_qkv_input_quant() is False
    assert fused._maybe_share_qkv_quantize is False


# --- after loading ------------------------------------------------------------------------------


@pytest.mark.parametrize("at_16_bit", [False, True])
@pytest.mark.parametrize("odd_one", range(3))
def test_different_input_scales_are_refused_every_time(odd_one, at_16_bit):
    scales = [SCALE] * 3
    scales[odd_one] = 0.5
    attention = build(module_name="gen_layers.3.cross_attention")
    with pytest.raises(ValueError, match="same calibrated input_scale"):
        load(attention, shards(scales=scales))
    with bound_w8a16(*(members(attention) if at_16_bit else [])):
        for _ in range(2):
            with pytest.raises(ValueError, match="same calibrated input_scale") as caught:
                attention.post_load_weights()
            for part in ("gen_layers.3.cross_attention", f"{QKV[odd_one]}.input_scale = 0.5"):
                assert part in str(caught.value)


@pytest.mark.parametrize(
    "mode, share, quant",
    [
        (QKVMode.FUSE_QKV, False, "static"),
        (QKVMode.SEPARATE_QKV, False, "static"),
        (QKVMode.SEPARATE_QKV, True, None),
    ],
)
def test_the_scale_check_leaves_alone_what_is_not_shared(mode, share, quant):
    attention = load(build(mode, quant, share), shards(quant, scales=(0.1, 0.2, 0.3)))
    attention.post_load_weights()
    assert attention._maybe_share_qkv_quantize is False
