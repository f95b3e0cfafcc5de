# SPDX-License-Identifier: Apache-2.0
"""What really enters every linear of both towers, seen by hooks during calls of the whole model."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_report import bound_precision
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import (
    Cosmos3VFMTransformer,
)
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs
from tests.support.fp8_oracle import copy_checkpoint, policy

pytestmark = pytest.mark.cosmos3

FP8 = torch.float8_e4m3fn
STEPS = 10


@dataclass
class Seen:
    """Inputs per linear name: dtype, and the storage while it was alive."""

    dtypes: dict[str, list[torch.dtype]] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # kept, so storages stay unique


@pytest.fixture(scope="module", params=["a16", "native"])
def reasoner(request):
    return request.param


@pytest.fixture(scope="module")
def transformer(tiny_fp8_checkpoint, tmp_path_factory, reasoner):
    target = tmp_path_factory.mktemp(reasoner) / "fp8"
    checkpoint = copy_checkpoint(tiny_fp8_checkpoint, target, policy(3, 3, reasoner))
    args = VisualGenArgs(model=str(checkpoint))
    return PipelineLoader(args, device="cpu").load(skip_warmup=True).transformer


@torch.no_grad()
def inputs_of_step(transformer, step: int) -> Seen:
    seen = Seen()

    def record(name):
        def hook(module, args):
            seen.dtypes.setdefault(name, []).append(args[0].dtype)
            seen.tensors[name] = args[0]

        return hook

    handles = [
        module.register_forward_pre_hook(record(name))
        for name, module in transformer.named_modules()
        if isinstance(module, Linear)
    ]
    raw = torch.tensor([500.0, 500.0])
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    transformer.reset_cache()
    transformer.set_denoising_step(step, STEPS)
    try:
        transformer(torch.randn(2, 48, 2, 4, 6), raw / 1000, ids, mask, (2, 4, 6), raw, fps=24.0)
    finally:
        transformer.reset_denoising_step()
        transformer.reset_cache()
        for handle in handles:
            handle.remove()
    return seen


def tower(seen: Seen, prefix: str) -> dict[str, list[torch.dtype]]:
    return {name: dtypes for name, dtypes in seen.dtypes.items() if name.startswith(prefix)}


@pytest.mark.parametrize("step", [0, 2, 7, 9])
def test_no_fp8_tensor_enters_a_generation_linear_on_a_16_bit_step(transformer, step):
    generation = tower(inputs_of_step(transformer, step), "gen_layers")
    assert len(generation) == 2 * 7
    assert {d for dtypes in generation.values() for d in dtypes} == {torch.bfloat16}


@pytest.mark.parametrize("step", [3, 6])
def test_on_an_fp8_step_each_group_receives_one_fp8_storage(transformer, step):
    seen = inputs_of_step(transformer, step)
    for layer in range(2):
        attention = f"gen_layers.{layer}.cross_attention"
        mlp = f"gen_layers.{layer}.mlp"
        qkv = [seen.tensors[f"{attention}.{n}"] for n in ("to_q", "to_k", "to_v")]
        gate_up = [seen.tensors[f"{mlp}.{n}"] for n in ("gate_proj", "up_proj")]
        for group in (qkv, gate_up):
            assert {t.dtype for t in group} == {FP8}
            assert len({t.data_ptr() for t in group}) == 1
        assert seen.tensors[f"{mlp}.down_proj"].dtype == FP8  # SwiGLU emits it


@pytest.mark.parametrize("step", [0, 5])
def test_the_understanding_tower_follows_its_policy_and_not_the_step(transformer, reasoner, step):
    seen = inputs_of_step(transformer, step)
    understanding = tower(seen, "language_model")
    # The last layer computes keys and values alone.
    assert len(understanding) == 7 + 2
    dtypes = {d for found in understanding.values() for d in found}
    if reasoner == "a16":
        assert dtypes == {torch.bfloat16}
        return
    group = [seen.tensors[f"language_model.layers.0.self_attn.{n}"] for n in ("to_q", "to_k")]
    assert {t.dtype for t in group} == {FP8} and len({t.data_ptr() for t in group}) == 1
    last = [seen.tensors[f"language_model.layers.1.self_attn.{n}"] for n in ("to_k", "to_v")]
    assert {t.dtype for t in last} == {FP8} and len({t.data_ptr() for t in last}) == 1


def test_reset_returns_to_fp8_after_a_16_bit_step(transformer):
    transformer.set_denoising_step(0, STEPS)
    assert transformer.gen_precision == "w8a16"
    transformer.reset_denoising_step()
    assert transformer.gen_precision == "w8a8"


def test_installing_the_policy_uses_no_more_than_the_interface_names(
    tiny_fp8_checkpoint, tmp_path, reasoner
):
    args = VisualGenArgs(
        model=str(copy_checkpoint(tiny_fp8_checkpoint, tmp_path / "fp8", policy(3, 3, reasoner)))
    )
    whole = PipelineLoader(args, device="cpu").load(skip_warmup=True).transformer
    parts = SimpleNamespace(
        model_config=whole.model_config,
        gen_layers=whole.gen_layers,
        language_model=SimpleNamespace(layers=whole.language_model.layers),
        step_precision_controller=None,
    )
    Cosmos3VFMTransformer._maybe_install_step_precision(parts)
    parts.step_precision_controller.set_step(0, num_steps=STEPS)
    assert bound_precision(parts.gen_layers) == "w8a16"
    understanding = {"a16": "w8a16", "native": "w8a8"}[reasoner]
    assert bound_precision(parts.language_model.layers) == understanding
    parts.model_config.pretrained_config.quantization_config["runtime"] = {}
    Cosmos3VFMTransformer._maybe_install_step_precision(parts)
    assert parts.step_precision_controller is None
    assert bound_precision(parts.gen_layers) == "w8a8"
    assert bound_precision(parts.language_model.layers) == "w8a8"
