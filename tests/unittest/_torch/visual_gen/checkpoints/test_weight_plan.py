# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is judged whole before anything is changed; good ones arrive byte for byte."""

from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import plan_weights
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer
from tensorrt_llm._torch.visual_gen.models.cosmos3.weight_names import source_prefixes
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization.mode import QuantAlgo
from tests.support.diffusers_oracle import TINY, random_transformer

FP8 = torch.float8_e4m3fn
DOWN = "layers.1.mlp_moe_gen.down_proj"


def model_for(quant_algo: QuantAlgo | None, **options) -> Cosmos3VFMTransformer:
    pretrained = SimpleNamespace(**TINY, dtype="bfloat16")
    recipe = QuantConfig(quant_algo=quant_algo, exclude_modules=options.pop("exclude", None))
    config = DiffusionModelConfig(pretrained_config=pretrained, quant_config=recipe, **options)
    model = Cosmos3VFMTransformer(config)
    for parameter in model.parameters():  # a marker that survives only where nothing is copied
        parameter.data.fill_(0.5)
    return model


def bf16_state() -> dict[str, torch.Tensor]:
    return {
        name: tensor if name.startswith("time_embedder") else tensor.bfloat16()
        for name, tensor in random_transformer().state_dict().items()
    }


def fp8_state() -> dict[str, torch.Tensor]:
    state = {}
    for index, (name, tensor) in enumerate(bf16_state().items()):
        if not (name.startswith("layers.") and tensor.ndim == 2):
            state[name] = tensor
            continue
        prefix = name.removesuffix(".weight")
        tensor = tensor * (1 + index % 7)  # so that the members of a group differ in scale
        scale = tensor.abs().max().float() / 448
        state[name] = (tensor.float() / scale).clamp(-448, 448).to(FP8)
        state[f"{prefix}.weight_scale"] = scale
        state[f"{prefix}.input_scale"] = torch.tensor(0.02)
    return state


def untouched(model: Cosmos3VFMTransformer) -> bool:
    return all(bool((p.float() == 0.5).all()) for p in model.parameters())


def test_every_fp8_weight_and_scale_arrives_bit_for_bit():
    state, model = fp8_state(), model_for(QuantAlgo.FP8)
    scales = [state[f"layers.0.self_attn.{p}.weight_scale"] for p in ("to_q", "to_k", "to_v")]
    assert len({s.item() for s in scales}) == 3, "the case needs members that differ"

    model.load_weights(state)

    checked = 0
    for name, module in model.named_modules():
        if getattr(module, "has_fp8_qdq", False):
            (prefix,) = source_prefixes(name)
            stored = state[f"{prefix}.weight"]
            assert module.weight.dtype == stored.dtype == FP8
            assert torch.equal(module.weight.view(torch.uint8), stored.view(torch.uint8)), name
            for scale in ("weight_scale", "input_scale"):
                loaded, expected = getattr(module, scale), state[f"{prefix}.{scale}"]
                assert loaded.dtype == torch.float32
                assert torch.equal(loaded.view(torch.int32), expected.view(torch.int32)), name
            checked += 1
    assert checked == 2 * 2 * 7


def test_bf16_checkpoint_arrives_bit_for_bit_in_fused_order():
    state, model = bf16_state(), model_for(None)
    model.load_weights(state)
    names = ("add_q_proj", "add_k_proj", "add_v_proj")
    expected = torch.cat([state[f"layers.1.self_attn.{n}.weight"] for n in names])
    found = model.gen_layers[1].cross_attention.qkv_proj.weight
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert model.time_embedder.mlp.linear_1.weight.dtype == torch.float32


def drop(key):
    return lambda state: state.pop(key)


def put(key, value):
    return lambda state: state.__setitem__(key, value)


REFUSALS = {
    "missing weight": (drop(f"{DOWN}.weight"), "missing tensors: .*down_proj.weight"),
    "missing weight scale": (drop(f"{DOWN}.weight_scale"), "down_proj.weight_scale"),
    "missing input scale": (drop(f"{DOWN}.input_scale"), "down_proj.input_scale"),
    "missing norm": (drop("norm_moe_gen.weight"), "missing tensors: norm_moe_gen.weight"),
    "surplus tensor": (
        put("layers.0.mlp.extra.weight", torch.ones(2)),
        "tensors that nothing consumes: layers.0.mlp.extra.weight",
    ),
    "surplus scale": (
        put("proj_in.weight_scale", torch.tensor(1.0)),
        "nothing consumes: proj_in.weight_scale",
    ),
    "unquantised weight": (
        put(f"{DOWN}.weight", torch.ones(64, 128, dtype=torch.bfloat16)),
        "appears to be unquantized",
    ),
    "wrong shape": (put("proj_out.bias", torch.ones(5)), "wrong shapes: proj_out.bias"),
    "wrong linear shape": (
        put(f"{DOWN}.weight", torch.ones(64, 64).to(FP8)),
        r"wrong shapes: .*down_proj.weight: \(64, 128\) expected, \(64, 64\) found",
    ),
    "FP8 in a boundary layer": (
        put("proj_in.weight", torch.ones(64, 192).to(FP8)),
        "wrong dtypes: proj_in.weight",
    ),
    "scale of two elements": (put(f"{DOWN}.weight_scale", torch.ones(2)), "one element"),
    "scale of zero": (put(f"{DOWN}.input_scale", torch.tensor(0.0)), "finite and positive"),
    "scale of NaN": (put(f"{DOWN}.weight_scale", torch.tensor(torch.nan)), "finite and positive"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_is_changed(case):
    spoil, message = REFUSALS[case]
    state, model = fp8_state(), model_for(QuantAlgo.FP8)
    spoil(state)
    with pytest.raises(ValueError, match=message):
        model.load_weights(state)
    assert untouched(model)


def test_fp8_weights_without_their_recipe_are_refused_by_name():
    model = model_for(None)
    with pytest.raises(ValueError, match="FP8 weights for a module .*high precision"):
        model.load_weights(fp8_state())
    assert untouched(model)


def test_all_problems_are_listed_at_once_with_counts():
    state, model = fp8_state(), model_for(QuantAlgo.FP8)
    for index in range(2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            del state[f"layers.{index}.mlp.{name}.weight"]
    state["stray"] = torch.ones(1)
    with pytest.raises(ValueError) as caught:
        model.load_weights(state)
    assert "(6 in all)" in str(caught.value)
    assert "nothing consumes" in str(caught.value) and "stray" in str(caught.value)
    assert "Remedy" in str(caught.value)


def test_parts_of_a_fused_projection_have_the_rows_that_the_model_gives_each():
    """Sums that fit by accident are no proof: here k has taken rows from q."""
    state, model = bf16_state(), model_for(None)
    for name, rows in (("add_q_proj", 32), ("add_k_proj", 64)):
        state[f"layers.0.self_attn.{name}.weight"] = torch.ones(rows, 64).bfloat16()
    with pytest.raises(ValueError) as caught:
        model.load_weights(state)
    message = str(caught.value)
    assert "add_q_proj.weight: (64, 64) expected, (32, 64) found" in message
    assert "add_k_proj.weight: (32, 64) expected, (64, 64) found" in message
    assert untouched(model)


def test_the_time_embedder_may_be_stored_in_16_bit():
    state, model = bf16_state(), model_for(None)
    name = "time_embedder.linear_1.weight"
    state[name] = state[name].bfloat16()
    model.load_weights(state)
    assert torch.equal(model.time_embedder.mlp.linear_1.weight, state[name].float())


def test_a_missing_weight_does_not_hide_what_is_wrong_with_its_scales():
    state, model = fp8_state(), model_for(QuantAlgo.FP8)
    query = "layers.0.self_attn.to_q"
    del state[f"{query}.weight"]
    state[f"{query}.input_scale"] = torch.tensor(0.5)
    state[f"{query}.weight_scale"] = torch.tensor(0.0)
    with pytest.raises(ValueError) as caught:
        model.load_weights(state)
    message = str(caught.value)
    assert f"missing tensors: {query}.weight" in message
    assert f"unusable scales: {query}.weight_scale" in message
    assert f"same calibrated input_scale: 0.5 by {query}.input_scale" in message


def test_every_bad_source_of_a_scale_is_listed():
    state, model = fp8_state(), model_for(QuantAlgo.FP8)
    state[f"{DOWN}.weight_scale"] = torch.tensor(torch.nan)
    state[f"{DOWN}.weight_quantizer._amax"] = torch.ones(2)
    with pytest.raises(ValueError) as caught:
        model.load_weights(state)
    message = str(caught.value)
    assert "found 2 problems" in message
    assert f"{DOWN}.weight_scale: " in message and f"{DOWN}.weight_quantizer._amax: " in message


@pytest.mark.parametrize(("device", "refused"), [(None, False), ("cpu", False), ("cuda", True)])
def test_features_that_the_cuda_gemm_does_not_take_are_refused_before_the_device_is_touched(
    device, refused
):
    pretrained = SimpleNamespace(**TINY | {"intermediate_size": 72}, dtype="bfloat16")
    config = DiffusionModelConfig(
        pretrained_config=pretrained, quant_config=QuantConfig(quant_algo=QuantAlgo.FP8)
    )
    state = {name: t for name, t in fp8_state().items() if ".mlp" not in name}
    for index in range(2):
        for mlp in ("mlp", "mlp_moe_gen"):
            shapes = {"gate_proj": (72, 64), "up_proj": (72, 64), "down_proj": (64, 72)}
            for name, shape in shapes.items():
                prefix = f"layers.{index}.{mlp}.{name}"
                state[f"{prefix}.weight"] = torch.ones(shape).to(FP8)
                state[f"{prefix}.weight_scale"] = state[f"{prefix}.input_scale"] = torch.tensor(0.1)
    with torch.device("meta"):
        model = Cosmos3VFMTransformer(config)
    device = None if device is None else torch.device(device)
    if not refused:
        plan_weights(model, state, device)
        return
    with pytest.raises(ValueError) as caught:
        plan_weights(model, state, device)
    message = str(caught.value)
    assert "layers.0.mlp.gate_proj: multiples of 16 expected, (64, 72) found" in message
    assert "(12 in all)" in message


@pytest.mark.parametrize("key", ["weight_scale", "input_scale", "weight_quantizer._amax"])
def test_scales_of_16_bit_weights_are_refused_by_name(key):
    state, model = bf16_state(), model_for(None)
    state[f"{DOWN}.{key}"] = torch.tensor(0.5)
    with pytest.raises(ValueError, match=f"scales without an FP8 weight: {DOWN}.{key}"):
        model.load_weights(state)
    assert untouched(model)


# ---- recipes that quantise while loading ----

DYNAMIC = {"dynamic_weight_quant": True, "force_dynamic_quantization": True}


def test_parts_of_a_fused_projection_are_all_stored_in_fp8_or_none():
    state, model = bf16_state(), model_for(QuantAlgo.FP8, **DYNAMIC)
    up = "layers.0.mlp.up_proj"
    state |= {name: t for name, t in fp8_state().items() if name.startswith(up)}
    with pytest.raises(ValueError) as caught:
        model.load_weights(state)
    gate = up.replace("up_proj", "gate_proj")
    assert f"parts of different precision: {gate} + {up}: bfloat16, float8_e4m3fn" in str(
        caught.value
    )
    assert untouched(model)


def test_a_weight_that_is_quantised_here_has_no_scale_of_its_own():
    state, model = bf16_state(), model_for(QuantAlgo.FP8, **DYNAMIC)
    state[f"{DOWN}.weight_scale"] = torch.tensor(0.5)
    with pytest.raises(ValueError, match=f"scales without an FP8 weight: {DOWN}.weight_scale"):
        model.load_weights(state)
    assert untouched(model)


def test_static_activations_need_their_scale_also_where_weights_are_quantised_here():
    state, model = bf16_state(), model_for(QuantAlgo.FP8, dynamic_weight_quant=True)
    linears = [name.removesuffix(".weight") for name, t in fp8_state().items() if t.dtype == FP8]
    state |= {f"{name}.input_scale": torch.tensor(0.25) for name in linears}
    model.load_weights(state)
    assert model.gen_layers[0].mlp.down_proj.input_scale.item() == 0.25
    del state[f"{DOWN}.input_scale"]
    with pytest.raises(ValueError, match=f"missing tensors: {DOWN}.input_scale"):
        model.load_weights(state)


def test_projections_that_do_not_share_their_activation_may_differ_in_input_scale():
    """With q left out of FP8, k and v each quantise for themselves."""
    state = fp8_state()
    model = model_for(QuantAlgo.FP8, exclude=["layers.0.self_attn.to_q"])
    for key in ("weight", "weight_scale", "input_scale"):
        del state[f"layers.0.self_attn.to_q.{key}"]
    state["layers.0.self_attn.to_q.weight"] = bf16_state()["layers.0.self_attn.to_q.weight"]
    state["layers.0.self_attn.to_k.input_scale"] = torch.tensor(0.5)
    model.load_weights(state)
    model.post_load_weights()
    attention = model.language_model.layers[0].self_attn
    assert attention.to_k.input_scale != attention.to_v.input_scale
    assert attention._maybe_share_qkv_quantize is False
