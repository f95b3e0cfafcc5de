# SPDX-License-Identifier: Apache-2.0
"""What fusing would cost: which shards, which scales, and the exact error."""

import math

import pytest
import torch

from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._torch.visual_gen.inspection import fidelity
from tensorrt_llm._torch.visual_gen.inspection.fidelity import (
    ALL_QKV,
    UPSTREAM,
    measure_groups,
    read_groups,
    relative_error,
    shards_of,
)
from tests.support.fp8_oracle import read_tensors
from tests.support.header_checkpoints import EQUAL, SMALL, write_header_checkpoint

FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def weights(tiny_fp8_checkpoint):
    return SafetensorsFolder(tiny_fp8_checkpoint / "transformer")


def cost_by_hand(tensors, names):
    """(squared error, squared norm) of each member, dequantised in full."""
    largest = max(tensors[f"{name}.weight_scale"] for name in names)
    costs = []
    for name in names:
        w = tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]
        again = (w / largest).clamp(-448, 448).to(FP8).float() * largest
        difference = again.double() - w.double()
        costs.append((difference.square().sum().item(), w.double().square().sum().item()))
    return costs


def ratio(costs):
    return math.sqrt(sum(error for error, _ in costs) / sum(norm for _, norm in costs))


def test_errors_per_shard_group_and_overall_equal_a_full_computation(weights, tiny_fp8_checkpoint):
    tensors = read_tensors(tiny_fp8_checkpoint)
    groups = measure_groups(read_groups(weights)[0], weights)
    overall = {UPSTREAM: [], ALL_QKV: []}
    for group in groups:
        costs = cost_by_hand(tensors, [shard.name for shard in group.shards])
        assert relative_error(group.shards) == pytest.approx(ratio(costs), rel=1e-12)
        for shard, cost in zip(group.shards, costs, strict=True):
            assert relative_error([shard]) == pytest.approx(ratio([cost]), rel=1e-12)
            assert (cost[0] > 0) == shard.rounded_twice
        for fusion in group.fusions:
            overall[fusion] += costs
    for fusion, costs in overall.items():
        found = relative_error(shards_of(groups, fusion))
        assert found == pytest.approx(ratio(costs), rel=1e-12)
        assert 1e-3 < found < 5e-2


def test_the_two_fusions_merge_7_and_10_shards_a_layer_under_the_checkpoints_names(weights):
    groups, left_out = read_groups(weights)
    upstream = {shard.name for shard in shards_of(groups, UPSTREAM)}
    every = {shard.name for shard in shards_of(groups, ALL_QKV)}
    gate_up = {f"layers.{i}.{m}.{p}_proj" for i in (0, 1) for m in ("mlp", "mlp_moe_gen")
               for p in ("gate", "up")}  # fmt: skip
    generation = {f"layers.{i}.self_attn.add_{p}_proj" for i in (0, 1) for p in "qkv"}
    assert upstream == gate_up | generation
    assert every - upstream == {f"layers.{i}.self_attn.to_{p}" for i in (0, 1) for p in "qkv"}
    assert not left_out


def test_scales_come_from_either_dialect_and_no_weight_is_read(weights, monkeypatch):
    read = []
    stored = SafetensorsFolder.__getitem__
    monkeypatch.setattr(
        SafetensorsFolder, "__getitem__", lambda self, name: read.append(name) or stored(self, name)
    )
    groups, _ = read_groups(weights)
    assert read and not [name for name in read if name.endswith(".weight")]
    unified = {shard.name: shard.scale for group in groups for shard in group.shards}
    only_modelopt = {name: weights[name] for name in weights if not name.endswith("weight_scale")}
    for name, scale in unified.items():
        assert fidelity.read_weight_scale(only_modelopt, name) == pytest.approx(scale, rel=1e-2)
        assert scale == weights[f"{name}.weight_scale"].item()


def test_equal_scales_round_nothing_and_cost_nothing(tmp_path, tiny_fp8_checkpoint):
    root = write_header_checkpoint(tmp_path / "equal", EQUAL, tiny_fp8_checkpoint)
    weights = SafetensorsFolder(root / "transformer")
    groups = measure_groups(read_groups(weights)[0], weights)
    shards = list(shards_of(groups, ALL_QKV))
    assert len(shards) == 10 * EQUAL.layers
    assert {group.spread for group in groups} == {1.0}
    assert not any(shard.rounded_twice for shard in shards)
    assert relative_error(shards) == 0


def test_a_group_that_no_engine_could_merge_is_left_out_with_the_reason(tmp_path):
    from safetensors.torch import save_file

    names = [f"layers.0.mlp.{part}_proj" for part in ("gate", "up")]
    mixed = [f"layers.0.mlp_moe_gen.{part}_proj" for part in ("gate", "up")]
    tensors = {f"{name}.weight": torch.ones(16, 16).to(FP8) for name in (*names, mixed[0])}
    tensors |= {f"{names[0]}.weight_scale": torch.tensor(1.0), f"{mixed[1]}.weight": torch.ones(1)}
    save_file(tensors, tmp_path / "diffusion_pytorch_model.safetensors")
    groups, left_out = read_groups(SafetensorsFolder(tmp_path))
    assert not groups
    assert "no scale" in left_out["layer 0, understanding gate, up"]
    assert "16-bit" in left_out["layer 0, generation gate, up"]


def test_nan_codes_are_refused_by_name(weights):
    groups, _ = read_groups(weights)
    name = groups[0].shards[1].name
    tensors = {f"{s.name}.weight": weights[f"{s.name}.weight"] for g in groups for s in g.shards}
    spoiled = tensors[f"{name}.weight"].clone()
    spoiled.view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(ValueError, match=rf"{name}.weight.*1 NaN codes"):
        measure_groups(groups, tensors | {f"{name}.weight": spoiled})


def test_weights_are_counted_block_by_block(weights, monkeypatch):
    groups, _ = read_groups(weights)
    whole = measure_groups(groups, weights)
    monkeypatch.setattr(fidelity, "_BLOCK", 100)  # ends in the middle of a row
    longest = []
    count = torch.bincount
    monkeypatch.setattr(
        torch, "bincount", lambda block, **kw: longest.append(len(block)) or count(block, **kw)
    )
    assert measure_groups(groups, weights) == whole
    assert max(longest) == 100


def test_other_patterns_are_read_as_they_were_written(tmp_path, tiny_fp8_checkpoint):
    root = write_header_checkpoint(tmp_path / "small", SMALL, tiny_fp8_checkpoint)
    groups, _ = read_groups(SafetensorsFolder(root / "transformer"))
    for group in groups:
        for shard in group.shards:
            _, layer, linear = shard.name.split(".", 2)
            expected = torch.tensor(SMALL.scale(int(layer), linear)).item()
            assert (shard.scale, group.layer) == (expected, int(layer))
