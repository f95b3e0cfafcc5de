# SPDX-License-Identifier: Apache-2.0
"""A recipe's ignore list keeps linears in 16 bit, by the checkpoint's names or by our own."""

import json
import logging
import shutil
from fnmatch import fnmatch

import pytest
import torch

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._torch.visual_gen.checkpoints.weight_apply import apply_plan
from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import plan_weights
from tensorrt_llm._torch.visual_gen.config import DiffusionPipelineConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer
from tensorrt_llm._torch.visual_gen.models.cosmos3.weight_names import (
    source_prefixes,
    unmatched_patterns,
)
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.visual_gen import VisualGenArgs
from tests.support.checkpoint_dialects import FP8, bits, is_scale, write_weights
from tests.support.fp8_oracle import read_tensors

pytestmark = pytest.mark.cosmos3


def load(checkpoint, quant_config):
    """The transformer of a checkpoint under a caller's recipe, with its weights."""
    args = VisualGenArgs(model=str(checkpoint), quant_config=quant_config)
    config = DiffusionPipelineConfig.from_pretrained(checkpoint, args=args).primary_model_config
    with torch.device("meta"):
        transformer = Cosmos3VFMTransformer(config)
    weights = SafetensorsFolder(checkpoint / "transformer")
    plan = plan_weights(transformer, weights)
    transformer.to_empty(device="cpu")
    apply_plan(plan, weights)
    transformer.post_load_weights()
    return transformer


def linears(transformer) -> dict[str, Linear]:
    return {name: m for name, m in transformer.named_modules() if isinstance(m, Linear)}


def as_dict(patterns):
    return {"quant_algo": "FP8", "ignore": patterns}


def as_config(patterns):
    return QuantConfig(quant_algo="FP8", exclude_modules=patterns)


# Ignore list -> patterns (fnmatch) of exactly those of our linears that stay in 16 bit.
EXCLUSIONS = [
    (["layers.0.mlp_moe_gen.down_proj"], ["gen_layers.0.mlp.down_proj"]),
    (["gen_layers.0.mlp.down_proj"], ["gen_layers.0.mlp.down_proj"]),
    (["model.layers.1.self_attn.to_add_out"], ["gen_layers.1.cross_attention.to_out.0"]),
    (["gen_layers.1.cross_attention.to_out"], ["gen_layers.1.cross_attention.to_out.0"]),
    (["layers.1.mlp*"], ["*_layers.1.mlp.*", "language_model.layers.1.mlp.*"]),
    (["layers.1.mlp"], ["language_model.layers.1.mlp.*"]),
    (["layers.*.self_attn.add_?_proj"], ["gen_layers.*.cross_attention.qkv_proj"]),
    (["gen_layers.*.cross_attention.qkv_proj"], ["gen_layers.*.cross_attention.qkv_proj"]),
    (["gen_layers.0.cross_attention.to_[qkv]"], ["gen_layers.0.cross_attention.qkv_proj"]),
    (["layers.0.self_attn.to_k"], ["language_model.layers.0.self_attn.to_k"]),
    (["layers.0.mlp_moe_gen.[gu]*_proj"], ["gen_layers.0.mlp.gate_up_proj"]),
    (["language_model"], ["language_model.*"]),
    (["gen_layers.*"], ["gen_layers.*"]),
    # In the checkpoint's names the understanding tower alone, in ours both: the union.
    (["*.mlp.down_proj"], ["*.mlp.down_proj"]),
    (["proj_in", "lm_head", "model.visual*"], []),
]


@pytest.mark.parametrize(("patterns", "expected"), EXCLUSIONS, ids=[str(p) for p, _ in EXCLUSIONS])
@pytest.mark.parametrize("recipe", [as_dict, as_config])
def test_a_load_time_recipe_leaves_exactly_the_ignored_linears_in_16_bit(
    tiny_bf16_checkpoint, recipe, patterns, expected
):
    found = linears(load(tiny_bf16_checkpoint, recipe(patterns)))
    excluded = {name for name, linear in found.items() if not linear.has_fp8_qdq}
    assert excluded == {name for name in found if any(fnmatch(name, e) for e in expected)}
    assert bool(excluded) == bool(expected)
    stored = read_tensors(tiny_bf16_checkpoint)
    for name, linear in found.items():
        weight = torch.cat([stored[f"{prefix}.weight"] for prefix in source_prefixes(name)])
        if name not in excluded:
            scale = weight.float().abs().amax() / 448
            assert torch.equal(linear.weight_scale, scale)
            weight = (weight.float() / scale).clamp(-448, 448).to(FP8)
        assert linear.weight.dtype == weight.dtype
        assert bits(linear.weight) == bits(weight), name


@pytest.mark.parametrize(
    "pattern",
    [
        "layers.0.mlp_moe_gen.gate_proj",
        "gen_layers.0.mlp.up_proj",
        "layers.1.self_attn.add_k_proj",
        "gen_layers.*.cross_attention.to_[qk]",
    ],
)
@pytest.mark.parametrize("recipe", [as_dict, as_config])
def test_some_parts_of_a_fused_projection_cannot_be_ignored(tiny_bf16_checkpoint, recipe, pattern):
    with pytest.raises(ValueError, match="parts of different precision") as caught:
        load(tiny_bf16_checkpoint, recipe([pattern]))
    assert "gen_layers." in str(caught.value) and "excluded" in str(caught.value)


def test_an_ignored_linear_that_is_stored_in_fp8_is_refused(tiny_fp8_checkpoint):
    with pytest.raises(ValueError, match="leaves in high precision: layers.0.self_attn.to_q"):
        load(tiny_fp8_checkpoint, as_dict(["language_model"]))


@pytest.mark.parametrize("name", ["layers.0.mlp_moe_gen.gate_proj", "gen_layers.0.mlp.gate_proj"])
def test_a_static_checkpoint_may_keep_any_linear_in_16_bit_and_runs(
    tiny_fp8_checkpoint, tiny_bf16_checkpoint, tmp_path, name
):
    """Separate projections need not agree: gate is BF16 here, and up keeps its calibrated FP8."""
    root = shutil.copytree(tiny_fp8_checkpoint, tmp_path / "fp8")
    gate = "layers.0.mlp_moe_gen.gate_proj"
    tensors = {n: t for n, t in read_tensors(root).items() if not n.startswith(gate)}
    tensors[f"{gate}.weight"] = read_tensors(tiny_bf16_checkpoint)[f"{gate}.weight"]
    write_weights(root / "transformer", tensors, "index")
    assert any(map(is_scale, tensors))
    config = json.loads((root / "transformer" / "config.json").read_text())
    config["quantization_config"]["ignore"].append(name)
    (root / "transformer" / "config.json").write_text(json.dumps(config))

    args = VisualGenArgs(model=str(root))
    transformer = PipelineLoader(args, device="cpu").load(skip_warmup=True).transformer
    mlp = transformer.gen_layers[0].mlp
    assert bits(mlp.gate_proj.weight) == bits(tensors[f"{gate}.weight"])
    up = gate.replace("gate_proj", "up_proj")
    assert bits(mlp.up_proj.weight) == bits(tensors[f"{up}.weight"])
    assert torch.equal(mlp.up_proj.weight_scale, tensors[f"{up}.weight_scale"])
    assert mlp._maybe_share_gate_up_quantize is False
    assert transformer.fp8_linear_counts() == {"understanding": 14, "generation": 13}
    assert transformer.gen_precision == "bf16+w8a8"


def test_a_pattern_that_matches_nothing_is_reported(tiny_bf16_checkpoint, caplog):
    with caplog.at_level(logging.WARNING, logger="tensorrt_llm"):
        load(tiny_bf16_checkpoint, as_dict(["layers.7.*", "gen_layer.0", "lm_head", "visual*"]))
    assert "match: layers.7.*, gen_layer.0" in caplog.text


def test_names_of_either_side_and_of_parts_that_are_not_built_are_known():
    patterns = ["model.layers.0.mlp", "vae2llm", "model.visual*", "action_proj_in", "lm_head", "x*"]
    recipe = QuantConfig(quant_algo="FP8", exclude_modules=patterns)
    assert unmatched_patterns(recipe, ["layers.0.mlp.up_proj", "vae2llm"]) == ["x*"]
    assert unmatched_patterns(QuantConfig(), ["a"]) == []
