# SPDX-License-Identifier: Apache-2.0
"""Loads of the tiny checkpoints by recipe, once streamed from their files and once from memory."""

import threading
from pathlib import Path

import torch
from torch import nn

from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._torch.visual_gen.checkpoints.weight_apply import allocate, apply_plan
from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import plan_weights
from tensorrt_llm._torch.visual_gen.config import DiffusionPipelineConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer
from tensorrt_llm.visual_gen import VisualGenArgs
from tests.support.checkpoint_dialects import bits

DYNAMIC = {"quant_algo": "FP8"}
RECIPES = {
    "static FP8": ("fp8", None, None),
    "BF16, fused": ("bf16", None, None),
    "BF16 into FP32": ("bf16", None, "float32"),
    "BF16 quantised here": ("bf16", DYNAMIC, None),
    "FP8 fused with other scales": ("fp8", DYNAMIC, None),
}
"""Name -> (which tiny checkpoint, the caller's quant_config, dtype of the model)."""


def build(checkpoint: Path, recipe: str) -> Cosmos3VFMTransformer:
    """The recipe's model on meta, for the checkpoint of that recipe."""
    _, quant_config, dtype = RECIPES[recipe]
    args = VisualGenArgs(model=str(checkpoint), quant_config=quant_config)
    config = DiffusionPipelineConfig.from_pretrained(checkpoint, args).primary_model_config
    if dtype is not None:
        config.pretrained_config.dtype = dtype
    with torch.device("meta"):
        return Cosmos3VFMTransformer(config)


def load(checkpoint: Path, recipe: str, device: str = "cpu") -> Cosmos3VFMTransformer:
    """Stream the checkpoint's files into a model whose parameters are poisoned first."""
    transformer, folder = build(checkpoint, recipe), SafetensorsFolder(checkpoint / "transformer")
    plan = plan_weights(transformer, folder, torch.device(device))
    allocate(transformer, torch.device(device))
    poison(transformer)
    apply_plan(plan, folder)
    return transformer


def load_from_memory(checkpoint: Path, recipe: str) -> Cosmos3VFMTransformer:
    """The same on the CPU, module by module from tensors: no thread and no ring takes part."""
    transformer = build(checkpoint, recipe).to_empty(device="cpu")
    transformer.load_weights(dict(SafetensorsFolder(checkpoint / "transformer")))
    return transformer


def poison(model: nn.Module) -> None:
    """Give every byte a value that no later test of it would take for loaded."""
    for parameter in model.parameters():
        parameter.data.view(-1).view(torch.uint8).fill_(0x5A)


def assert_same_bits(found: nn.Module, expected: nn.Module) -> None:
    """Every parameter has the same dtype, shape and bytes in both models."""
    pairs = zip(found.named_parameters(), expected.named_parameters(), strict=True)
    for (name, parameter), (other, wanted) in pairs:
        assert name == other and parameter.dtype == wanted.dtype, name
        assert parameter.shape == wanted.shape and bits(parameter) == bits(wanted), name


def reader_threads() -> list[threading.Thread]:
    """The loader's threads that are alive."""
    return [t for t in threading.enumerate() if t.name.startswith("weight-reader")]
