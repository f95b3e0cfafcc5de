# SPDX-License-Identifier: Apache-2.0
"""Attention: structure, values, excluded modules, refusals."""

import pytest
import torch
import torch.nn.functional as F

from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.modules.linear import WeightMode
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.config_fields import AttentionConfig, ParallelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import (
    StepPrecisionController,
    install_step_precision,
)
from tensorrt_llm._torch.visual_gen.modules import Attention, QKVMode
from tensorrt_llm.models.modeling_utils import QuantConfig
from tests.support.attention_modules import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    KV_SIZE,
    Q_SIZE,
    QKV,
    activation,
    build,
    config_of,
    load,
    members,
    shards,
)
from tests.support.fp8_modules import (
    FP8,
    assert_bit_equal,
    bits,
    bound_w8a16,
    relative_error,
    seen_inputs,
    w8a8,
    w8a16,
)

# --- structure ----------------------------------------------------------------------------------


def test_separate_mode_keeps_the_bytes_and_scales_of_each_projection():
    tensors = shards()
    ratios = [(tensors[n]["weight_scale"] / tensors["to_q"]["weight_scale"]).item() for n in QKV]
    assert ratios[0] * 1.5 < ratios[1] and ratios[1] * 1.5 < ratios[2]
    attention = load(build(), tensors)
    assert not hasattr(attention, "qkv_proj")
    for name in QKV:
        linear = getattr(attention, name)
        assert torch.equal(bits(linear.weight), bits(tensors[name]["weight"]))
        assert torch.equal(linear.weight_scale, tensors[name]["weight_scale"])
        assert torch.equal(linear.input_scale, tensors[name]["input_scale"])


def test_fused_mode_has_one_projection_of_all_heads():
    attention = build(QKVMode.FUSE_QKV)
    assert attention.qkv_proj.out_features == Q_SIZE + 2 * KV_SIZE
    assert attention.qkv_proj.weights_loading_config.weight_mode is WeightMode.FUSED_QKV_LINEAR
    assert not any(hasattr(attention, name) for name in QKV)
    assert [mode.value for mode in QKVMode] == ["fuse_qkv", "separate"]


def test_head_counts_have_defaults():
    attention = Attention(64, 4)
    assert (attention.num_key_value_heads, attention.head_dim) == (4, 16)
    assert attention.qkv_mode is QKVMode.FUSE_QKV
    assert attention.norm_q.weight.shape == attention.norm_k.weight.shape == (16,)
    assert len(attention.to_out) == 1
    assert attention.to_out[0].bias is not None


@pytest.mark.parametrize("mode", QKVMode)
def test_a_plain_model_config_is_one_with_defaults_for_the_rest(mode):
    recipe = QuantConfig(quant_algo="FP8", exclude_modules=["block.to_out.0"])
    config, tensors = ModelConfig(quant_config=recipe), shards()
    tensors["to_out"] = shards(None)["to_out"]
    plain, full = (
        load(build(mode, config=c, module_name="block"), tensors)
        for c in (config, DiffusionModelConfig(quant_config=recipe))
    )
    assert not plain.to_out[0].has_fp8_qdq
    assert plain.norm_q.weight.dtype == torch.bfloat16
    assert_bit_equal(plain(activation()), full(activation()))
    config.force_dynamic_quantization = True
    with pytest.raises(ValueError, match="force_dynamic_quantization"):
        build(config=config)


def test_eps_reaches_the_norms():
    attention = build(eps=0.25)
    assert attention.norm_q.eps == attention.norm_k.eps == 0.25


@pytest.mark.parametrize("mode", QKVMode)
def test_an_attention_built_on_meta_is_complete_after_to_empty_and_loading(mode):
    tensors = shards(None)
    with torch.device("meta"):
        attention = build(mode, quant=None)
    assert all(parameter.is_meta for parameter in attention.parameters())
    load(attention.to_empty(device="cpu"), tensors)
    assert_bit_equal(attention(activation()), load(build(mode, None), tensors)(activation()))


# --- values -------------------------------------------------------------------------------------


def reference(x, tensors, attention, source=None):
    """The whole module in FP64, per-head norm and grouped heads written out."""
    source = x if source is None else source

    def project(name, y):
        t = tensors[name]
        return F.linear(y.double(), t["weight"].double(), t["bias"].double())

    def heads(y):
        return y.view(*y.shape[:2], -1, HEAD_DIM).transpose(1, 2)

    def norm(y, module):
        rms = (y.pow(2).mean(-1, keepdim=True) + module.eps).sqrt()
        return y / rms * module.weight.double()

    q, k, v = (heads(project(n, y)) for n, y in zip(QKV, (x, source, source), strict=True))
    if attention.norm_q is not None:
        q, k = norm(q, attention.norm_q), norm(k, attention.norm_k)
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (k, v))
    weights = (q @ k.transpose(-1, -2) / HEAD_DIM**0.5).softmax(-1)
    return project("to_out", (weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mode", QKVMode)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_forward_follows_the_formula_in_fp32(mode, qk_norm):
    tensors = shards(None, bias=True, dtype=torch.float32)
    config = config_of(None, dtype="float32")
    attention = load(build(mode, None, config=config, bias=True, qk_norm=qk_norm), tensors)
    x = activation(dtype=torch.float32)
    assert relative_error(attention(x), reference(x, tensors, attention)) < 1e-6


def test_keys_and_values_may_come_from_another_tensor():
    tensors = shards(None, bias=True, dtype=torch.float32)
    config = config_of(None, dtype="float32")
    attention = load(build(quant=None, config=config, bias=True), tensors)
    x = activation(dtype=torch.float32)
    source = activation(2, 9, HIDDEN, seed=8, dtype=torch.float32)
    expected = reference(x, tensors, attention, source)
    assert relative_error(attention(x, source), expected) < 1e-6


def test_fused_and_separate_projections_agree_in_bf16():
    tensors, x = shards(None), activation()
    fused = load(build(QKVMode.FUSE_QKV, None), tensors).get_qkv(x)
    separate = load(build(QKVMode.SEPARATE_QKV, None), tensors).get_qkv(x)
    for a, b in zip(fused, separate, strict=True):
        assert_bit_equal(a, b)


@pytest.mark.parametrize("bias", [False, True])
def test_static_fp8_projections_follow_the_formula(bias):
    tensors, x = shards(bias=bias), activation()
    attention = load(build(bias=bias), tensors)
    for name, found in zip(QKV, attention.get_qkv(x), strict=True):
        assert relative_error(found, w8a8(x, tensors[name])) < 1e-3
    with bound_w8a16(*members(attention)):
        for name, found in zip(QKV, attention.get_qkv(x), strict=True):
            assert_bit_equal(found, w8a16(x, tensors[name]))


@pytest.mark.parametrize("mode", QKVMode)
def test_get_kv_gives_the_keys_and_values_of_get_qkv(mode):
    attention = load(build(mode), shards())
    x = activation()
    for found, expected in zip(attention.get_kv(x), attention.get_qkv(x)[1:], strict=True):
        assert_bit_equal(found, expected)


def test_get_kv_computes_no_queries_in_separate_mode():
    attention = load(build(), shards())
    with seen_inputs(attention) as seen:
        attention.get_kv(activation())
    assert seen.dtypes() == {"to_k": FP8, "to_v": FP8}
    assert seen.one_storage("to_k", "to_v")


def test_rank_2_projections_equal_rank_3():
    attention = load(build(), shards())
    x = activation()
    for a, b in zip(attention.get_qkv(x), attention.get_qkv(x.flatten(0, 1)), strict=True):
        assert_bit_equal(a.flatten(0, 1), b)


@pytest.mark.parametrize("quant, step", [(None, 9), ("static", 9), ("static", 0)])
@pytest.mark.parametrize("mode", QKVMode)
def test_compiled_fullgraph_is_bit_equal_to_eager(mode, quant, step):
    attention = load(build(mode, quant), shards(quant))
    controller = StepPrecisionController(1, 0)
    install_step_precision(attention, controller)
    controller.set_step(step, num_steps=10)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    assert_bit_equal(compiled(activation()), attention(activation()))


# --- names and refusals -------------------------------------------------------------------------


def test_excluded_projections_are_high_precision():
    config = config_of(exclude=["blocks.0.attn.to_k", "*.to_out.0"])
    attention = build(config=config, module_name="blocks.0.attn")
    assert [linear.has_fp8_qdq for linear in members(attention)] == [True, False, True, False]
    assert attention._maybe_share_qkv_quantize is False
    assert all(linear.has_fp8_qdq for linear in members(build(config=config)))


def test_a_fused_projection_follows_the_exclusion_of_its_parts():
    name = {"module_name": "blocks.0.attn"}
    every_part = config_of(exclude=["*.to_q", "*.to_k", "*.to_v"])
    assert not build(QKVMode.FUSE_QKV, config=every_part, **name).qkv_proj.has_fp8_qdq
    own_name = config_of(exclude=["*.qkv_proj"])
    assert not build(QKVMode.FUSE_QKV, config=own_name, **name).qkv_proj.has_fp8_qdq
    some_part = config_of(exclude=["*.to_q"])
    with pytest.raises(ValueError, match="different precision"):
        build(QKVMode.FUSE_QKV, config=some_part, **name)


def test_sharing_needs_the_separate_mode():
    with pytest.raises(ValueError, match="SEPARATE_QKV"):
        build(QKVMode.FUSE_QKV, share=True)


def test_sharing_with_dynamic_quantisation_is_refused():
    with pytest.raises(ValueError, match="force_dynamic_quantization"):
        build(quant="dynamic", share=True)


def test_an_encoder_tensor_in_fused_mode_is_refused():
    attention = load(build(QKVMode.FUSE_QKV), shards())
    with pytest.raises(ValueError, match="FUSE_QKV takes no encoder_hidden_states"):
        attention(activation(), activation())


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 8},
        {"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5},
    ],
)
def test_head_counts_that_do_not_divide_are_refused(kwargs):
    options = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    with pytest.raises(ValueError, match="Head counts"):
        Attention(HIDDEN, **options | kwargs)


@pytest.mark.parametrize("axis", ["ulysses_size", "ring_size"])
def test_sequence_parallelism_over_several_gpus_is_refused(axis):
    config = config_of()
    config.parallel = ParallelConfig(**{axis: 2})
    with pytest.raises(NotImplementedError, match=axis):
        build(config=config)
    build(config=config, enable_sequence_parallel=False)


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="SPARGE"):
        build(config=config_of(attention=AttentionConfig(backend="SPARGE")))
