# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is, read from its configurations and file headers.

Nothing here decides whether it loads: a file that can't be read leaves its part of the description
out, and the loader's own plan says why it is refused. Everything is told from the content, never
from a folder's or repository's name.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tensorrt_llm._torch.visual_gen.checkpoints.json_files import read_json
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._torch.visual_gen.config import DiffusionPipelineConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import (
    parse_diffusion_step_policy,
)
from tensorrt_llm.quantization.scales import MODELOPT_KEYS, SCALE_KEYS

COMPONENTS = ("transformer", "vae", "sound_tokenizer")

# (hidden size, layers, query heads) of the published families (cosmos3.md A.2).
_FAMILIES = {(4096, 36, 32): "nano", (5120, 64, 64): "super", (2048, 28, 16): "edge"}
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size"),
)
_INDEX_FLAGS = ("default_use_system_prompt", "use_native_flow_schedule", "enable_safety_checker")
# The linears of a layer that ModelOpt quantises, by tower (cosmos3.md D.3 and I.1).
_TOWERS = {
    "understanding": re.compile(
        r"layers\.\d+\.(self_attn\.to_(q|k|v|out)|mlp\.(gate|up|down)_proj)\.weight"
    ),
    "generation": re.compile(
        r"layers\.\d+\.(self_attn\.(add_[qkv]_proj|to_add_out)"
        r"|mlp_moe_gen\.(gate|up|down)_proj)\.weight"
    ),
}


@dataclass(frozen=True)
class TensorTotal:
    """All tensors of one dtype of the transformer: how many, and their bytes on disk."""

    dtype: str
    count: int
    num_bytes: int


@dataclass(frozen=True)
class Component:
    """A folder with weights: its files, tensors, and their bytes on disk."""

    name: str
    files: int
    tensors: int
    num_bytes: int


@dataclass(frozen=True)
class Contents:
    """The description of a checkpoint; None, or empty, where its files don't tell.

    Attributes:
        family: "nano", "super" or "edge" by the transformer's sizes, else "other".
        build: "base", "image" or "distilled".
        build_evidence: What that is concluded from.
        fixed_sigmas: Noise levels of a distilled build.
        pipeline_class: ``_class_name`` of model_index.json.
        scheduler_class: That of the scheduler's configuration.
        index_flags: The flags that model_index.json sets.
        sizes: The transformer's sizes, as config.json has them.
        modalities: "vision", and "sound", "action" where config.json says so.
        quant_algo: Algorithm of the recipe.
        quant_static: Whether its activation scales are calibrated.
        quant_producer: Who exported it: name and version.
        step_policy: ``first_steps``, ``last_steps``, ``reasoner``.
        fp8_linears: FP8 linears of each tower.
        scale_dialects: FP8 linears whose scales are told by ``weight_scale`` and the like
            ("unified"), by ModelOpt's buffers ("modelopt"); one linear may count in both.
        tensors: The transformer's tensors by dtype, largest first.
        components: The folders with weights.
    """

    family: str | None
    build: str | None
    build_evidence: str | None
    fixed_sigmas: tuple[float, ...] | None
    pipeline_class: str | None
    scheduler_class: str | None
    index_flags: dict[str, Any]
    sizes: dict[str, int]
    modalities: tuple[str, ...]
    quant_algo: str | None
    quant_static: bool | None
    quant_producer: str | None
    step_policy: dict[str, Any] | None
    fp8_linears: dict[str, int]
    scale_dialects: dict[str, int]
    tensors: tuple[TensorTotal, ...]
    components: tuple[Component, ...]


def describe_contents(root: Path) -> tuple[Contents, SafetensorsFolder | None]:
    """Describe the checkpoint in a folder.

    Returns:
        The description; and the transformer's tensors, None where its files can't be read.
    """
    index, config = _mapping(root / "model_index.json"), _mapping(root / "transformer/config.json")
    scheduler = _mapping(root / "scheduler/scheduler_config.json")
    folders = {name: _open(root / name) for name in COMPONENTS}
    weights = folders["transformer"]
    fp8 = _fp8_names(weights) if weights is not None else []
    recipe = config.get("quantization_config")
    policy = _step_policy(recipe)
    quant_algo, quant_static = _recipe(recipe)
    family = _family(config)
    build, evidence = _build(scheduler, family, bool(fp8 and quant_static), policy is not None)
    return (
        Contents(
            family=family,
            build=build,
            build_evidence=evidence,
            fixed_sigmas=_fixed_sigmas(scheduler),
            pipeline_class=index.get("_class_name"),
            scheduler_class=scheduler.get("_class_name"),
            index_flags={flag: index[flag] for flag in _INDEX_FLAGS if flag in index},
            sizes={name: config[name] for name in _SIZES if name in config},
            modalities=_modalities(config),
            quant_algo=quant_algo,
            quant_static=quant_static,
            quant_producer=_producer(recipe),
            step_policy=policy,
            fp8_linears={
                tower: sum(pattern.fullmatch(name) is not None for name in fp8)
                for tower, pattern in _TOWERS.items()
            },
            scale_dialects=_dialects(weights, fp8),
            tensors=_totals(weights),
            components=tuple(
                _component(name, folder) for name, folder in folders.items() if folder is not None
            ),
        ),
        weights,
    )


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _open(folder: Path) -> SafetensorsFolder | None:
    try:
        return SafetensorsFolder(folder)
    except ValueError:
        return None


def _family(config: Mapping[str, Any]) -> str | None:
    if not config:
        return None
    if config.get("hidden_act") == "relu2" or "edge" in str(config.get("backbone_type")):
        return "edge"
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    return _FAMILIES.get(tuple(config.get(name) for name in sizes), "other")


def _build(
    scheduler: Mapping[str, Any], family: str | None, static_fp8: bool, has_policy: bool
) -> tuple[str | None, str | None]:
    # Where an older file names no class, it is UniPC, as in the loader.
    name = scheduler.get("_class_name") or ("UniPCMultistepScheduler" if scheduler else None)
    if name == "FlowMatchEulerDiscreteScheduler":
        sigmas = _fixed_sigmas(scheduler)
        if not sigmas:
            return None, "a FlowMatchEuler scheduler without fixed sigmas, which no build has"
        return "distilled", f"a FlowMatchEuler scheduler with {len(sigmas)} fixed sigmas"
    if name != "UniPCMultistepScheduler":
        return None, None
    if family == "super" and static_fp8 and not has_policy:
        return "image", (
            "a Super in static FP8 without a step policy: of the published builds with a UniPC "
            "scheduler, the image build is the one that leaves it out"
        )
    if has_policy:
        return "base", "a UniPC scheduler and a step policy"
    return "base", "a UniPC scheduler; a 16-bit image build has the same files"


def _fixed_sigmas(scheduler: Mapping[str, Any]) -> tuple[float, ...] | None:
    sampler = scheduler.get("fixed_step_sampler_config")
    sigmas = sampler.get("t_list") if isinstance(sampler, Mapping) else None
    return tuple(sigmas) if isinstance(sigmas, list) and sigmas else None


def _modalities(config: Mapping[str, Any]) -> tuple[str, ...]:
    extra = [name for name in ("sound", "action") if config.get(f"{name}_gen")]
    return ("vision", *extra) if config else ()


def _recipe(recipe: object) -> tuple[str | None, bool | None]:
    if not isinstance(recipe, Mapping):
        return None, None
    try:
        quant_config, _, dynamic_weight, dynamic_input = (
            DiffusionPipelineConfig.load_diffusion_quant_config(recipe)
        )
    except (ValueError, TypeError):
        return str(recipe.get("quant_algo")), None
    if quant_config.quant_algo is None:
        return None, None
    return str(quant_config.quant_algo), not (dynamic_weight or dynamic_input)


def _producer(recipe: object) -> str | None:
    producer = recipe.get("producer") if isinstance(recipe, Mapping) else None
    if not isinstance(producer, Mapping):
        return None
    return " ".join(str(producer[key]) for key in ("name", "version") if key in producer) or None


def _step_policy(recipe: object) -> dict[str, Any] | None:
    try:
        policy = parse_diffusion_step_policy(recipe)
    except (ValueError, TypeError):
        return None
    if policy is None:
        return None
    return {
        "first_steps": policy.first_steps,
        "last_steps": policy.last_steps,
        "reasoner": "a16" if policy.reasoner_high_precision else "native",
    }


def _fp8_names(weights: SafetensorsFolder) -> list[str]:
    return [name for name in weights if weights.spec(name).dtype == torch.float8_e4m3fn]


def _dialects(weights: SafetensorsFolder | None, fp8: list[str]) -> dict[str, int]:
    keys = {"unified": SCALE_KEYS, "modelopt": MODELOPT_KEYS}
    prefixes = [name.removesuffix("weight") for name in fp8]
    return {
        dialect: sum(any(f"{prefix}{key}" in weights for key in keys) for prefix in prefixes)
        for dialect, keys in keys.items()
    }


def _totals(weights: SafetensorsFolder | None) -> tuple[TensorTotal, ...]:
    counts, sizes = Counter(), Counter()
    for name in weights or ():
        spec = weights.spec(name)
        dtype = str(spec.dtype).removeprefix("torch.")
        counts[dtype] += 1
        sizes[dtype] += spec.num_bytes
    return tuple(TensorTotal(dtype, counts[dtype], size) for dtype, size in sizes.most_common())


def _component(name: str, folder: SafetensorsFolder) -> Component:
    specs = [folder.spec(tensor) for tensor in folder]
    files = len({spec.file for spec in specs})
    return Component(name, files, len(specs), sum(spec.num_bytes for spec in specs))
