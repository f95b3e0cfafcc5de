# SPDX-License-Identifier: Apache-2.0
"""Every form of a checkpoint loads bit for bit; one fault in any of them is refused by name."""

import shutil
from pathlib import Path

import pytest
import torch

from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._torch.visual_gen.checkpoints.weight_apply import apply_plan
from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import plan_weights
from tensorrt_llm._torch.visual_gen.models.cosmos3.weight_names import is_unused
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs
from tests.support.checkpoint_dialects import (
    DIALECTS,
    FP8,
    SHARDINGS,
    Tensors,
    assert_loaded_exactly,
    bits,
    build_transformer,
    in_dialect,
    is_scale,
    write_weights,
)
from tests.support.fp8_oracle import read_tensors

pytestmark = pytest.mark.cosmos3

# One linear of each kind: both towers, in a group and alone.
LINEARS = (
    "layers.1.self_attn.to_q",
    "layers.0.self_attn.to_out",
    "layers.0.self_attn.add_v_proj",
    "layers.1.mlp.down_proj",
    "layers.0.mlp_moe_gen.gate_proj",
)


@pytest.fixture(scope="module")
def fp8_tensors(tiny_fp8_checkpoint) -> Tensors:
    return read_tensors(tiny_fp8_checkpoint)


@pytest.fixture(scope="module")
def bf16_tensors(tiny_bf16_checkpoint) -> Tensors:
    return read_tensors(tiny_bf16_checkpoint)


@pytest.fixture
def folder(tiny_fp8_checkpoint, tmp_path) -> Path:
    """A copy of the FP8 transformer's folder alone, inside a checkpoint's root."""
    shutil.copytree(tiny_fp8_checkpoint / "transformer", tmp_path / "transformer")
    return tmp_path / "transformer"


def load_folder(folder: Path):
    transformer = build_transformer(folder.parent)
    weights = SafetensorsFolder(folder)
    apply_plan(plan_weights(transformer, weights), weights)
    transformer.post_load_weights()
    return transformer


# ---- every form loads ----


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_fp8_dialect_loads_bit_for_bit_in_each_sharding(
    folder, fp8_tensors, dialect, sharding, prefix
):
    tensors = in_dialect(fp8_tensors, dialect)
    if sharding == "scales apart":
        assert any(map(is_scale, tensors)) and not all(map(is_scale, tensors))
    write_weights(folder, {f"{prefix}{name}": t for name, t in tensors.items()}, sharding)
    transformer = load_folder(folder)
    assert_loaded_exactly(transformer, tensors)
    assert transformer.fp8_linear_counts() == {"understanding": 14, "generation": 14}


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_scales_of_one_element_load_in_any_shape(folder, fp8_tensors, dialect, shape):
    tensors = {
        name: tensor.reshape(shape) if is_scale(name) else tensor
        for name, tensor in in_dialect(fp8_tensors, dialect).items()
    }
    write_weights(folder, tensors, "index")
    transformer = load_folder(folder)
    assert_loaded_exactly(transformer, tensors)
    assert transformer.gen_layers[0].mlp.up_proj.weight_scale.shape == ()


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("sharding", ["single", "index"])
def test_bf16_loads_bit_for_bit_in_each_sharding(
    tiny_bf16_checkpoint, bf16_tensors, tmp_path, sharding, prefix
):
    folder = shutil.copytree(tiny_bf16_checkpoint / "transformer", tmp_path / "transformer")
    write_weights(folder, {f"{prefix}{name}": t for name, t in bf16_tensors.items()}, sharding)
    assert_loaded_exactly(load_folder(folder), bf16_tensors)


def test_the_three_dialects_give_the_same_model(folder, fp8_tensors):
    """ModelOpt's amax is BF16 and weight_scale is made of it, so nothing may differ."""
    models = []
    for dialect in DIALECTS:
        write_weights(folder, in_dialect(fp8_tensors, dialect), "index")
        models.append({name: bits(p) for name, p in load_folder(folder).named_parameters()})
    assert models[0] == models[1] == models[2]


@pytest.mark.parametrize("prefix", ["", "model."])
def test_tensors_in_memory_load_like_those_in_files(tiny_fp8_checkpoint, fp8_tensors, prefix):
    transformer = build_transformer(tiny_fp8_checkpoint)
    transformer.load_weights({f"{prefix}{name}": t for name, t in fp8_tensors.items()})
    assert_loaded_exactly(transformer, fp8_tensors)


def test_a_pipeline_loads_from_modelopts_buffers_alone(tiny_fp8_checkpoint, fp8_tensors, tmp_path):
    root = shutil.copytree(tiny_fp8_checkpoint, tmp_path / "any name at all, bf16")
    tensors = in_dialect(fp8_tensors, "modelopt")
    write_weights(root / "transformer", tensors, "single")
    # What ModelOpt leaves beside its weights. To open it would fail: it is a folder.
    (root / "transformer" / "modelopt_state.pth").mkdir()
    pipeline = PipelineLoader(VisualGenArgs(model=str(root)), device="cpu").load(skip_warmup=True)
    assert_loaded_exactly(pipeline.transformer, tensors)


# ---- one fault at a time ----


def renamed(tensors: Tensors, name: str) -> None:
    tensors[f"{name}_"] = tensors.pop(name)


def duplicated(tensors: Tensors, name: str) -> None:
    tensors[f"model.{name}"] = tensors[name].clone()


def retyped(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].float().to(torch.int32)


def rounded(tensors: Tensors, name: str) -> None:
    """Another float dtype, to which the values would have to be rounded or from which they were."""
    tensor = tensors[name]
    tensors[name] = tensor.float() if tensor.dtype != torch.float32 else tensor.to(torch.float64)


def reshaped(tensors: Tensors, name: str) -> None:
    tensor = tensors[name]
    tensors[name] = torch.cat([tensor.reshape(1, -1)] * 2, dim=1) if is_scale(name) else tensor[:-1]


def poisoned(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.full_like(tensors[name], torch.nan)


def stale(tensors: Tensors, name: str) -> None:
    """A scale of some other weights; where nothing else tells it, no one could notice."""
    tensors[name] = tensors[name] * 2


FAULTS = {
    "drop": lambda tensors, name: tensors.pop(name),
    "rename": renamed,
    "duplicate": duplicated,
    "wrong dtype": retyped,
    "rounded dtype": rounded,
    "wrong shape": reshaped,
    "wrong value": poisoned,
    "stale value": stale,
}


def is_harmless(dialect: str, name: str, fault: str) -> bool:
    """Faults after which the file still says everything, exactly."""
    buffer = name.endswith(tuple(f".{key}" for key in DIALECTS["modelopt"]))
    rounded_scale = name.endswith(".weight_quantizer._scale")
    if fault == "rounded dtype":  # a BF16 buffer in FP32 says the same
        return buffer
    if fault == "drop":  # weight_scale and input_scale, or _amax alone, tell all
        return (buffer and dialect == "both") or rounded_scale
    return False


def names_to_spoil(tensors: Tensors, fault: str) -> list[str]:
    names = [
        name
        for name in tensors
        if not is_unused(name) and (name.startswith(LINEARS) or not name.startswith("layers."))
    ]
    if fault == "rounded dtype" and f"{LINEARS[0]}.weight_scale" in tensors:
        # In FP32, ModelOpt's rounded scale agrees with weight_scale or not, as its rounding fell.
        names = [name for name in names if not name.endswith("._scale")]
    if fault == "wrong value":  # of weights, no header and no scale tells a wrong value
        names = [name for name in names if is_scale(name)]
    if fault == "stale value":
        names = [name for name in names if is_scale(name) and name.startswith(LINEARS)]
    return names


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "stale value"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_fault_in_any_tensor_is_refused_with_its_name(
    tiny_fp8_checkpoint, fp8_tensors, dialect, fault
):
    good = in_dialect(fp8_tensors, dialect)
    transformer = build_transformer(tiny_fp8_checkpoint, "meta")
    names = names_to_spoil(good, fault)
    assert len(names) >= 2 * len(LINEARS)
    refused = 0
    for name in names:
        tensors = dict(good)
        FAULTS[fault](tensors, name)
        if is_harmless(dialect, name, fault):
            plan_weights(transformer, tensors)
            continue
        with pytest.raises(ValueError) as caught:
            plan_weights(transformer, tensors)
        assert name in str(caught.value), name
        refused += 1
    assert refused >= len(LINEARS)


@pytest.mark.parametrize("fault", ["drop", "rename", "duplicate", "rounded dtype", "wrong shape"])
def test_one_fault_in_any_tensor_of_a_bf16_checkpoint_is_refused_with_its_name(
    tiny_bf16_checkpoint, bf16_tensors, fault
):
    transformer = build_transformer(tiny_bf16_checkpoint, "meta")
    for name in names_to_spoil(bf16_tensors, fault):
        tensors = dict(bf16_tensors)
        FAULTS[fault](tensors, name)
        with pytest.raises(ValueError) as caught:
            plan_weights(transformer, tensors)
        assert name in str(caught.value), name


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_scale_that_contradicts_its_tensors_other_sources_or_its_group_is_refused(
    tiny_fp8_checkpoint, fp8_tensors, dialect
):
    transformer = build_transformer(tiny_fp8_checkpoint, "meta")
    good = in_dialect(fp8_tensors, dialect)
    refused = set()
    for name in names_to_spoil(good, "stale value"):
        tensors = dict(good)
        stale(tensors, name)
        try:
            plan_weights(transformer, tensors)
        except ValueError as error:
            assert name in str(error)
            refused.add(name)
    inputs = {n for n in good if "input" in n and n.startswith(LINEARS)}
    alone = {n for n in inputs if n.startswith((LINEARS[1], LINEARS[3]))}
    if dialect == "unified":
        assert refused == inputs - alone
    if dialect == "modelopt":  # weights have two sources here
        weights = {n for n in good if "weight_quantizer" in n and n.startswith(LINEARS)}
        assert refused == weights | (inputs - alone)
    if dialect == "both":
        assert refused == {n for n in good if is_scale(n) and n.startswith(LINEARS)}


def test_a_linear_that_lost_the_better_source_of_a_scale_is_refused(
    tiny_fp8_checkpoint, fp8_tensors
):
    """ModelOpt's rounded buffer would be read in its place, and no one would notice."""
    transformer = build_transformer(tiny_fp8_checkpoint, "meta")
    lost = f"{LINEARS[0]}.weight_scale"
    tensors = {name: t for name, t in fp8_tensors.items() if name != lost}
    with pytest.raises(ValueError, match=f"missing tensors: {lost}"):
        plan_weights(transformer, tensors)
    # Where none of them has it, the buffer is what the checkpoint was made with.
    without = {n: t for n, t in fp8_tensors.items() if not n.endswith(".weight_scale")}
    plan = plan_weights(transformer, without)
    told = plan.scales[f"{LINEARS[0]}.weight"][0]
    assert torch.equal(told, without[f"{LINEARS[0]}.weight_quantizer._amax"].float() / 448)


def test_the_plan_keeps_the_scales_that_it_read(tiny_fp8_checkpoint, fp8_tensors):
    transformer = build_transformer(tiny_fp8_checkpoint, "meta")
    stored = {f"model.{name}": tensor for name, tensor in fp8_tensors.items()}
    plan = plan_weights(transformer, stored)
    weights = {f"model.{name}" for name, t in fp8_tensors.items() if t.dtype == FP8}
    assert set(plan.scales) == weights
    for name, scales in plan.scales.items():
        prefix = name.removesuffix(".weight")
        for key, scale in zip(("weight_scale", "input_scale"), scales, strict=True):
            assert scale.shape == () and torch.equal(scale, stored[f"{prefix}.{key}"])
    names = {name for d in plan.destinations for shard in d.shards for name in shard.values()}
    assert names <= set(stored)
    assert plan.num_bytes == sum(stored[name].numel() * stored[name].itemsize for name in names)
