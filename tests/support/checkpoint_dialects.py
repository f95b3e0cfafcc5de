# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in every form that a published one could have, and what a load of them must give.

What a load must give is worked out here from the file's tensors once more, in plain torch.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.config import DiffusionPipelineConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer
from tensorrt_llm._torch.visual_gen.models.cosmos3.weight_names import source_prefixes

FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]

UNIFIED = ("weight_scale", "input_scale")
MODELOPT = ("weight_quantizer._amax", "weight_quantizer._scale", "input_quantizer._amax")
DIALECTS = {"unified": UNIFIED, "modelopt": MODELOPT, "both": UNIFIED + MODELOPT}
"""Name of a dialect -> the keys that each FP8 linear has beside its weight."""

SHARDINGS = ("single", "index", "scales apart")
_FILE = "diffusion_pytorch_model"


def in_dialect(tensors: Mapping[str, torch.Tensor], dialect: str) -> Tensors:
    """Leave the scales of one dialect in the tensors of a checkpoint that has both."""
    dropped = set(UNIFIED + MODELOPT) - set(DIALECTS[dialect])
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(tuple(f".{key}" for key in dropped))
    }


def is_scale(name: str) -> bool:
    """Whether a tensor's name is that of a scale in either dialect."""
    return name.endswith(tuple(f".{key}" for key in UNIFIED + MODELOPT))


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], sharding: str) -> None:
    """Replace the weights of a transformer's folder.

    Args:
        folder: Its old weights and index are removed; config.json stays.
        tensors: The new ones, by their names in the files.
        sharding: "single" file; "index" with three shards that names go around; or an index with
            the "scales apart" in a shard of their own.
    """
    for old in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        old.unlink()
    if sharding == "single":
        save_file(dict(tensors), folder / f"{_FILE}.safetensors")
        return
    shards: dict[int, Tensors] = {}
    for index, (name, tensor) in enumerate(sorted(tensors.items())):
        shard = index % 3 if sharding == "index" else int(is_scale(name))
        shards.setdefault(shard, {})[name] = tensor
    weight_map = {}
    for shard, content in shards.items():
        file = f"{_FILE}-{shard + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(content, folder / file)
        weight_map |= dict.fromkeys(content, file)
    index_file = folder / f"{_FILE}.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def build_transformer(
    checkpoint: Path, device: str = "cpu", quant_config: object | None = None
) -> Cosmos3VFMTransformer:
    """The model that a checkpoint's config.json describes, without its weights."""
    config = DiffusionPipelineConfig.from_pretrained(checkpoint).primary_model_config
    if quant_config is not None:
        config.quant_config = quant_config
    with torch.device("meta"):
        transformer = Cosmos3VFMTransformer(config)
    return transformer if device == "meta" else transformer.to_empty(device=device)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, since FP8 and NaN can't be compared."""
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def told_scale(tensors: Mapping[str, torch.Tensor], prefix: str, scale: str) -> torch.Tensor:
    """What a file says about one scale: its own key, else ModelOpt's amax / 448, else its scale."""
    kind = scale.removesuffix("_scale")
    if (own := tensors.get(f"{prefix}.{scale}")) is not None:
        return own.float().reshape(())
    if (amax := tensors.get(f"{prefix}.{kind}_quantizer._amax")) is not None:
        return (amax.float() / 448).reshape(())
    return tensors[f"{prefix}.{kind}_quantizer._scale"].float().reshape(())


def expected_parameters(
    transformer: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, found and expected value of every parameter of a model loaded without quantising."""
    for name, module in transformer.named_modules():
        for key, found in module.named_parameters(recurse=False):
            prefixes = source_prefixes(name)
            if isinstance(module, Linear) and key.endswith("_scale"):
                (prefix,) = prefixes
                expected = told_scale(tensors, prefix, key)
            else:
                parts = [tensors[f"{p}.{key}" if p else key] for p in prefixes]
                expected = torch.cat([part.view(torch.uint8) for part in parts]).view(
                    parts[0].dtype
                )
                if expected.dtype != FP8:
                    expected = expected.to(found.dtype)
            yield f"{name}.{key}", found, expected


def assert_loaded_exactly(transformer: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Every parameter has the bits that the file's tensors give it."""
    count = 0
    for name, found, expected in expected_parameters(transformer, tensors):
        assert found.dtype == expected.dtype and found.shape == expected.shape, name
        assert bits(found) == bits(expected), name
        count += 1
    assert count > 50
