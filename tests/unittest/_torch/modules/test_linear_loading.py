# SPDX-License-Identifier: Apache-2.0
"""How a Linear is built and filled, and what is refused before anything is copied."""

import logging
from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.modules.linear import (
    Linear,
    W8A16FP8LinearMethod,
    WeightMode,
    WeightsLoadingConfig,
    linear_of,
)
from tensorrt_llm.logger import logger
from tensorrt_llm.models.modeling_utils import QuantConfig

FP8 = torch.float8_e4m3fn
STATIC = QuantConfig(quant_algo="FP8")
SHARD_ROWS = {
    WeightMode.VANILLA: [32],
    WeightMode.FUSED_QKV_LINEAR: [32, 16, 16],
    WeightMode.FUSED_GATE_UP_LINEAR: [32, 32],
}
K = 64


def shard(rows, scale=0.01, input_scale=0.02, bias=False, seed=0):
    torch.manual_seed(seed)
    tensors = {
        "weight": (torch.randn(rows, K) * 100).clamp(-448, 448).to(FP8),
        "weight_scale": torch.tensor(scale),
        "input_scale": torch.tensor(input_scale),
    }
    return tensors | ({"bias": torch.randn(rows)} if bias else {})


def fused(mode, quant_config=STATIC, bias=False, **options):
    config = WeightsLoadingConfig(weight_mode=mode)
    return Linear(
        K,
        sum(SHARD_ROWS[mode]),
        bias,
        torch.bfloat16,
        quant_config=quant_config,
        weights_loading_config=config,
        **options,
    )


def codes(tensor):
    return tensor.detach().view(torch.uint8)


def snapshot(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def unchanged(module, before):
    def raw(tensor):
        return tensor.detach().reshape(-1).view(torch.uint8)

    return all(torch.equal(raw(p), raw(before[name])) for name, p in module.named_parameters())


@pytest.fixture
def warnings(monkeypatch):
    messages = []
    monkeypatch.setattr(logger, "_seen", set())
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tensorrt_llm").addHandler(handler)
    yield messages
    logging.getLogger("tensorrt_llm").removeHandler(handler)


@pytest.mark.parametrize("bias", [False, True])
def test_fp8_parameters_have_the_documented_shapes_and_dtypes(bias):
    linear = Linear(K, 32, bias, torch.bfloat16, quant_config=STATIC)
    found = {name: (tuple(p.shape), p.dtype) for name, p in linear.named_parameters()}
    expected = {
        "weight": ((32, K), FP8),
        "weight_scale": ((), torch.float32),
        "input_scale": ((), torch.float32),
    } | ({"bias": ((32,), torch.bfloat16)} if bias else {})
    assert found == expected
    assert not any(p.requires_grad for p in linear.parameters())
    # A scale that was never loaded must not look like one.
    assert linear.weight_scale.isnan() and linear.input_scale.isnan()


def test_high_precision_parameters_take_the_dtype_and_by_default_torchs():
    assert {p.dtype for p in Linear(K, 32, dtype=torch.float16).parameters()} == {torch.float16}
    linear = Linear(K, 32)
    assert {p.dtype for p in linear.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in linear.parameters())


def test_a_dynamic_recipe_has_no_input_scale():
    linear = Linear(K, 32, quant_config=STATIC, force_dynamic_quantization=True)
    assert linear.input_scale is None
    assert "input_scale" not in dict(linear.named_parameters())


def test_weights_can_be_created_later_and_once():
    linear = Linear(K, 32, quant_config=STATIC, skip_create_weights_in_init=True)
    assert linear.quant_method is None and not list(linear.parameters())
    assert linear.has_fp8_qdq and not linear.requires_unquantized_activation
    with pytest.raises(RuntimeError, match="create_weights"):
        linear.load_weights([shard(32)])
    linear.create_weights()
    weight, method = linear.weight, linear.quant_method
    linear.create_weights()
    assert linear.weight is weight and linear.quant_method is method


@pytest.mark.parametrize("quant_config", [None, STATIC])
def test_a_linear_made_on_meta_is_filled_in_place_after_to_empty(quant_config):
    with torch.device("meta"):
        linear = Linear(K, 32, True, torch.bfloat16, quant_config=quant_config)
    tensors = shard(32, bias=True)
    if quant_config is None:
        tensors = {"weight": torch.randn(32, K), "bias": tensors["bias"]}
    with pytest.raises(ValueError, match="to_empty"):
        linear.load_weights([tensors])
    linear.to_empty(device="cpu")
    parameters = dict(linear.named_parameters())
    linear.load_weights([tensors])
    for name, parameter in linear.named_parameters():
        assert parameter is parameters[name]
        assert torch.equal(parameter.float(), tensors[name].to(parameter.dtype).float())


def test_scales_and_codes_are_the_files_bytes():
    tensors = shard(32, scale=0.012345678, input_scale=0.0234567)
    linear = fused(WeightMode.VANILLA)
    linear.load_weights([tensors])
    assert torch.equal(codes(linear.weight), codes(tensors["weight"]))
    assert torch.equal(linear.weight_scale, tensors["weight_scale"])
    assert torch.equal(linear.input_scale, tensors["input_scale"])


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_one_element_scales_load_as_0_d(shape):
    tensors = shard(32)
    for key in ("weight_scale", "input_scale"):
        tensors[key] = tensors[key].reshape(shape)
    linear = fused(WeightMode.VANILLA)
    linear.load_weights([tensors])
    assert linear.weight_scale.shape == linear.input_scale.shape == ()
    assert linear.weight_scale.item() == pytest.approx(0.01)


@pytest.mark.parametrize("mode", [WeightMode.FUSED_QKV_LINEAR, WeightMode.FUSED_GATE_UP_LINEAR])
@pytest.mark.parametrize("bias", [False, True])
def test_high_precision_shards_are_stacked_in_order(mode, bias):
    linear = fused(mode, None, bias)
    shards = [
        {"weight": torch.randn(rows, K).bfloat16()}
        | ({"bias": torch.randn(rows).bfloat16()} if bias else {})
        for rows in SHARD_ROWS[mode]
    ]
    linear.load_weights(shards)
    for name, parameter in linear.named_parameters():
        assert torch.equal(parameter, torch.cat([tensors[name] for tensors in shards]))


@pytest.mark.parametrize("mode", [WeightMode.FUSED_QKV_LINEAR, WeightMode.FUSED_GATE_UP_LINEAR])
def test_fp8_shards_of_one_scale_keep_their_bytes_and_warn_nobody(mode, warnings):
    linear = fused(mode)
    shards = [shard(rows, seed=i) for i, rows in enumerate(SHARD_ROWS[mode])]
    linear.load_weights(shards)
    assert torch.equal(codes(linear.weight), torch.cat([codes(s["weight"]) for s in shards]))
    assert warnings == []


def test_fp8_shards_of_other_scales_are_rounded_again_to_the_largest(warnings):
    mode = WeightMode.FUSED_QKV_LINEAR
    scales, input_scales = [0.01, 0.04, 0.02], [0.5, 0.25, 0.75]
    shards = [
        shard(rows, scale, input_scale, seed=i)
        for i, (rows, scale, input_scale) in enumerate(
            zip(SHARD_ROWS[mode], scales, input_scales, strict=True)
        )
    ]
    for _ in range(2):
        linear = fused(mode)
        linear.load_weights(shards)
    largest = torch.tensor(0.04)
    assert torch.equal(linear.weight_scale, largest)
    assert torch.equal(linear.input_scale, torch.tensor(0.75))
    q, k, v = codes(linear.weight).split(SHARD_ROWS[mode])
    assert torch.equal(k, codes(shards[1]["weight"]))
    for loaded, source in ((q, shards[0]), (v, shards[2])):
        again = source["weight"].float() * source["weight_scale"] / largest
        assert torch.equal(loaded, codes(again.clamp(-448, 448).to(FP8)))
        assert not torch.equal(loaded, codes(source["weight"]))
    assert len(warnings) == 1 and "second time" in warnings[0]


def test_a_dynamic_recipe_accepts_a_calibrated_scale_and_keeps_none():
    linear = fused(WeightMode.VANILLA, force_dynamic_quantization=True)
    linear.load_weights([shard(32)])
    assert linear.input_scale is None
    with pytest.raises(ValueError, match="input_scale"):
        linear.load_weights([shard(32, input_scale=float("nan"))])


def test_loading_reads_by_the_recipe_while_a_16_bit_method_is_bound():
    linear = fused(WeightMode.VANILLA)
    linear.quant_method = W8A16FP8LinearMethod()
    with pytest.raises(ValueError, match="finite and positive"):
        linear.load_weights([shard(32, scale=float("inf"))])
    linear.load_weights([shard(32)])
    assert isinstance(linear.quant_method, W8A16FP8LinearMethod)
    assert linear.weight_scale.item() == pytest.approx(0.01)


def without(key):
    return lambda tensors: {k: v for k, v in tensors.items() if k != key}


def replaced(key, value):
    return lambda tensors: tensors | {key: value}


BAD_SHARDS = [
    (without("weight_scale"), "without weight_scale"),
    (without("input_scale"), "without input_scale"),
    (without("weight"), r"missing \['weight'\]"),
    (replaced("bias", torch.zeros(32)), r"unknown \['bias'\]"),
    (replaced("weight_scale_2", torch.ones(())), r"unknown \['weight_scale_2'\]"),
    (replaced("weight", torch.zeros(32, K).bfloat16()), "expected torch.float8_e4m3fn"),
    (replaced("weight", torch.zeros(32, K + 1).to(FP8)), r"found shape \(32, 65\)"),
    (replaced("weight", torch.zeros(31, K).to(FP8)), r"\(32, 64\) \+ \(31, 64\)"),
    (replaced("weight", torch.zeros(32 * K).to(FP8)), r"shape \(2048,\)"),
    (replaced("weight_scale", torch.ones(2)), "one element.*weight_scale"),
    (replaced("weight_scale", torch.tensor(0.0)), "positive.*weight_scale"),
    (replaced("input_scale", torch.tensor(float("nan"))), "finite.*input_scale"),
    (replaced("input_scale", torch.ones(32, 1)), "one element.*input_scale"),
]


@pytest.mark.parametrize(("change", "message"), BAD_SHARDS)
def test_a_shard_that_does_not_fit_is_refused_before_anything_changes(change, message):
    linear = fused(WeightMode.FUSED_GATE_UP_LINEAR)
    good = [shard(32, seed=1), shard(32, seed=2)]
    linear.load_weights(good)
    before = snapshot(linear)
    with pytest.raises(ValueError, match=message):
        linear.load_weights([shard(32, seed=3), change(shard(32, seed=4))])
    assert unchanged(linear, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("weight", torch.zeros(32, K).to(FP8)), "expected torch.bfloat16"),
        (replaced("weight_scale", torch.ones(())), r"unknown \['weight_scale'\]"),
        (replaced("weight", torch.zeros(32, K, dtype=torch.int8)), "found torch.int8"),
        (without("bias"), r"missing \['bias'\]"),
        (replaced("bias", torch.zeros(31)), r"shape \(31,\)"),
        (replaced("bias", torch.zeros(32).to(FP8)), r"where: bias"),
    ],
)
def test_a_high_precision_linear_refuses_what_it_cannot_hold(change, message):
    linear = fused(WeightMode.VANILLA, None, bias=True)
    tensors = {"weight": torch.randn(32, K).bfloat16(), "bias": torch.randn(32).bfloat16()}
    linear.load_weights([tensors])
    before = snapshot(linear)
    with pytest.raises(ValueError, match=message):
        linear.load_weights([change(tensors)])
    assert unchanged(linear, before)


@pytest.mark.parametrize("mode", list(WeightMode))
def test_another_number_of_shards_is_refused(mode):
    with pytest.raises(ValueError, match=f"expected {len(SHARD_ROWS[mode])} "):
        fused(mode).load_weights([shard(8)] * 4)


def test_k_and_v_of_different_shape_are_refused_even_if_the_sum_fits():
    with pytest.raises(ValueError, match="k and v differ"):
        fused(WeightMode.FUSED_QKV_LINEAR).load_weights([shard(16), shard(32), shard(16)])


def test_tensor_parallelism_is_refused():
    with pytest.raises(NotImplementedError, match="tp_size=2"):
        Linear(K, 32, mapping=SimpleNamespace(tp_size=2))
    config = ModelConfig(mapping=SimpleNamespace(tp_size=2))
    with pytest.raises(NotImplementedError, match="tp_size"):
        linear_of(config, None, "to_q", K, 32, bias=False, dtype=torch.bfloat16)


def test_an_algorithm_of_another_layout_is_refused():
    with pytest.raises(NotImplementedError, match="not verified"):
        Linear(K, 32, quant_config=QuantConfig(quant_algo="W4A16_AWQ"))


@pytest.mark.gpu
@pytest.mark.parametrize(("in_features", "out_features"), [(40, 32), (32, 40)])
def test_on_cuda_features_that_are_no_multiples_of_16_are_refused(in_features, out_features):
    with pytest.raises(ValueError, match="multiples of 16"), torch.device("cuda"):
        Linear(in_features, out_features, quant_config=STATIC)
    with torch.device("meta"):
        linear = Linear(in_features, out_features, False, quant_config=STATIC)
    linear.to_empty(device="cuda")
    tensors = shard(out_features) | {"weight": torch.zeros(out_features, in_features).to(FP8)}
    with pytest.raises(ValueError, match=f"found {in_features} and {out_features}"):
        linear.load_weights([tensors])
    with pytest.raises(ValueError, match="multiples of 16"):
        linear.post_load_weights()


@pytest.mark.gpu
def test_shards_from_the_cpu_are_fused_on_cuda_with_the_same_codes():
    mode = WeightMode.FUSED_GATE_UP_LINEAR
    shards = [shard(32, 0.01, seed=1), shard(32, 0.03, seed=2)]
    on_cpu = fused(mode)
    on_cpu.load_weights(shards)
    with torch.device("cuda"):
        on_cuda = fused(mode)
    on_cuda.load_weights(shards)
    assert torch.equal(codes(on_cuda.weight).cpu(), codes(on_cpu.weight))
