# SPDX-License-Identifier: Apache-2.0
"""A static FP8 transformer folder with random weights, in the form that is published.

Names, dtypes and shapes are those of the published Cosmos3-Nano: FP8 linears with both dialects of
scales, 16-bit boundary layers, embeddings and head, an FP32 time embedder, sound and action. Values
are random bits of finite numbers, drawn on the device; the members of a group share one
input_scale, as calibration leaves them.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.config import DiffusionPipelineConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer
from tensorrt_llm._torch.visual_gen.models.cosmos3.weight_names import source_prefixes
from tensorrt_llm.visual_gen.tiny_fp8 import STEP_POLICY

STEM = "diffusion_pytorch_model"
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16

_SIZES = {
    "nano": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "sound_dim": 64,
        "action_dim": 64,
        "rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
    },
    "small": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1024,
        "sound_dim": 16,
        "action_dim": 16,
        "rope_scaling": {"mrope_section": [8, 4, 4], "mrope_interleaved": True},
    },
}
SIZES = tuple(_SIZES)
MAX_SHARD_BYTES = {"nano": 5 * 10**9, "small": 10**6}
_EMBODIMENTS = 32
_QUANTIZATION = {
    "quant_method": "modelopt",
    "quant_type": "FP8_FP8",
    "quant_algo": "FP8",
    "weight_only": False,
    "config_groups": {
        "group_0": {
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "ignore": [
        *("proj_in", "proj_out", "time_embedder*", "audio_proj_in", "audio_proj_out"),
        *("action_proj_in", "action_proj_out", "lm_head", "model.visual*", "visual*"),
    ],
    "producer": {"name": "modelopt", "version": "0.44.0"},
    "runtime": {"diffusion_step_policy": STEP_POLICY},
}


def write_checkpoint(root: Path, size: str, device: torch.device) -> None:
    """Write ``root/transformer`` and push it to the disk, so that no write-back runs later.

    Args:
        root: Existing folder.
        size: One of ``SIZES``.
        device: Draws the values.
    """
    folder = root / "transformer"
    folder.mkdir()
    values = _SIZES[size]
    config = values | {
        "dtype": "bfloat16",
        "action_gen": True,
        "sound_gen": True,
        "num_embodiment_domains": _EMBODIMENTS,
        "quantization_config": _QUANTIZATION,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    model_config = DiffusionPipelineConfig.from_pretrained(root).primary_model_config
    with torch.device("meta"):
        transformer = Cosmos3VFMTransformer(model_config)

    torch.manual_seed(0)
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in _tensors(transformer, values, device):
        num_bytes = tensor.numel() * tensor.itemsize
        if pending and held + num_bytes > MAX_SHARD_BYTES[size]:
            shards.append(_write_shard(folder, len(shards), pending))
            pending, held = {}, 0
        pending[name] = tensor.cpu()
        held += num_bytes
    shards.append(_write_shard(folder, len(shards), pending))
    weight_map = {}
    for index, names in enumerate(shards):
        file = f"{STEM}-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        _partial(folder, index).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index_file = folder / f"{STEM}.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def _partial(folder: Path, index: int) -> Path:
    return folder / f"{index}.partial"


def _write_shard(folder: Path, index: int, tensors: dict[str, torch.Tensor]) -> list[str]:
    path = _partial(folder, index)
    save_file(tensors, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return list(tensors)


def _tensors(
    transformer: Cosmos3VFMTransformer, values: dict, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything of a published folder, in the order in which the model holds it."""
    for name, module in transformer.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        if isinstance(module, Linear):
            (prefix,) = source_prefixes(name)
            yield f"{prefix}.weight", _codes(tuple(module.weight.shape), device)
            yield from _scales(prefix, device)
            continue
        for key, parameter in parameters.items():
            (prefix,) = source_prefixes(name)
            full = f"{prefix}.{key}" if prefix else key
            yield full, _normal(tuple(parameter.shape), parameter.dtype, device)
    hidden, action = values["hidden_size"], values["action_dim"]
    for name, shape in (
        ("norm.weight", (hidden,)),
        ("lm_head.weight", (values["vocab_size"], hidden)),
        ("action_proj_in.fc.weight", (_EMBODIMENTS, hidden * action)),
        ("action_proj_in.bias.weight", (_EMBODIMENTS, hidden)),
        ("action_proj_out.fc.weight", (_EMBODIMENTS, action * hidden)),
        ("action_proj_out.bias.weight", (_EMBODIMENTS, action)),
        ("action_modality_embed", (hidden,)),
    ):
        yield name, _normal(shape, BF16, device)


def _codes(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Random E4M3 codes; 0x7F and 0xFF would be NaN."""
    magnitude = torch.randint(0, 0x7F, shape, dtype=torch.uint8, device=device)
    sign = torch.randint(0, 2, shape, dtype=torch.uint8, device=device) << 7
    return (magnitude | sign).view(FP8)


def _scales(prefix: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    amax = (torch.rand((), device=device) + 0.1).to(BF16)
    # The same for q, k, v and for gate, up: a function of what they read.
    group = re.sub(r"(to_|add_)[qkv]", r"\1qkv", prefix)
    group = re.sub(r"(gate|up)_proj", "gate_up_proj", group)
    input_amax = torch.tensor(8.0 + sum(group.encode()) % 97, dtype=BF16)
    yield f"{prefix}.weight_scale", amax.float() / 448
    yield f"{prefix}.input_scale", input_amax.float() / 448
    yield f"{prefix}.weight_quantizer._amax", amax
    yield f"{prefix}.weight_quantizer._scale", amax / 448
    yield f"{prefix}.input_quantizer._amax", input_amax


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02)
