# SPDX-License-Identifier: Apache-2.0
"""What merging separately calibrated FP8 projections into one linear would cost.

A fused linear has one weight scale. Engines that fuse keep the largest scale of the group and round
the codes of every shard with a smaller one a second time:
``w = q * scale``, ``q' = e4m3(clamp(w / max_scale, -448, 448))``, in FP32, to nearest even. The
cost is the relative L2 distance of ``q' * max_scale`` from ``q * scale``. This package merges
nothing of a static FP8 checkpoint, so for it the cost is zero.

Two fusions are modelled, since engines differ in what they merge: ``UPSTREAM`` and ``ALL_QKV``.

A shard has 256 different codes at most, so counting them is enough for an exact result: the weights
are read once, in blocks, and never dequantised. Sums are FP64.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from tensorrt_llm._torch.modules.linear_methods import rescale_e4m3
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._torch.visual_gen.models.cosmos3.weight_names import source_prefixes
from tensorrt_llm._utils import describe_error
from tensorrt_llm.quantization.scales import MODELOPT_KEYS, SCALE_KEYS, resolve_fp8_scales

UPSTREAM = "upstream"
"""TensorRT-LLM's fused topology: q, k, v of the generation tower, gate and up of both towers."""

ALL_QKV = "all_qkv"
"""The same with q, k, v of the understanding tower merged as well, as SGLang does."""

FUSIONS = {
    UPSTREAM: "TensorRT-LLM's fused topology: generation q, k, v and gate, up of both towers "
    "(7 shards a layer)",
    ALL_QKV: "the same and understanding q, k, v (10 shards a layer)",
}

_FP8 = torch.float8_e4m3fn
_BLOCK = 64 * 2**20
_LAYER = re.compile(r"layers\.(\d+)\.")

# (tower, kind, modules inside a layer whose sources are the shards, fusions that merge them).
_GROUPS = (
    ("generation", "q, k, v", ("gen_layers.{}.cross_attention.qkv_proj",), (UPSTREAM, ALL_QKV)),
    ("generation", "gate, up", ("gen_layers.{}.mlp.gate_up_proj",), (UPSTREAM, ALL_QKV)),
    ("understanding", "gate, up", ("language_model.layers.{}.mlp.gate_up_proj",), tuple(FUSIONS)),
    (
        "understanding",
        "q, k, v",
        tuple(f"language_model.layers.{{}}.self_attn.to_{part}" for part in "qkv"),
        (ALL_QKV,),
    ),
)


@dataclass(frozen=True)
class Shard:
    """One projection of a group.

    Attributes:
        name: Its name in the checkpoint.
        scale: Its weight scale.
        rounded_twice: Whether fusing rounds its codes again: the scale is not the group's largest.
        error: Squared L2 distance that the second rounding makes; None until measured.
        norm: Squared L2 norm of the weights as calibrated; None until measured.
    """

    name: str
    scale: float
    rounded_twice: bool
    error: float | None = None
    norm: float | None = None


@dataclass(frozen=True)
class Group:
    """Projections that a fused engine would merge.

    Attributes:
        layer: Index of the layer.
        tower: "generation" or "understanding".
        kind: "q, k, v" or "gate, up".
        fusions: Which of ``FUSIONS`` merge it.
        shards: Its projections, in fused order.
    """

    layer: int
    tower: str
    kind: str
    fusions: tuple[str, ...]
    shards: tuple[Shard, ...]

    @property
    def name(self) -> str:
        """For people: "layer 32, generation q, k, v"."""
        return f"layer {self.layer}, {self.tower} {self.kind}"

    @property
    def max_scale(self) -> float:
        """The scale that the merged linear would have."""
        return max(shard.scale for shard in self.shards)

    @property
    def spread(self) -> float:
        """Largest scale over smallest; 1 means that merging changes nothing."""
        return self.max_scale / min(shard.scale for shard in self.shards)


def read_groups(weights: SafetensorsFolder) -> tuple[tuple[Group, ...], dict[str, str]]:
    """Read the scales of every group; no weight is touched.

    Args:
        weights: The transformer's tensors.

    Returns:
        The groups whose members are all FP8 with usable scales, by layer; and for every other
        group with an FP8 member, its name and why it was left out.
    """
    groups, left_out = [], {}
    for layer in sorted({int(found[1]) for name in weights if (found := _LAYER.match(name))}):
        for tower, kind, modules, fusions in _GROUPS:
            names = [name for m in modules for name in source_prefixes(m.format(layer))]
            stored = [_is_fp8(weights, name) for name in names]
            if not any(stored):
                continue
            label = f"layer {layer}, {tower} {kind}"
            if not all(stored):
                left_out[label] = "FP8 and 16-bit members, which no engine merges"
                continue
            try:
                scales = [read_weight_scale(weights, name) for name in names]
            except ValueError as error:
                left_out[label] = str(error)
                continue
            largest = max(scales)
            shards = tuple(
                Shard(name, scale, rounded_twice=scale != largest)
                for name, scale in zip(names, scales, strict=True)
            )
            groups.append(Group(layer, tower, kind, fusions, shards))
    return tuple(groups), left_out


def read_weight_scale(weights: Mapping[str, torch.Tensor], name: str) -> float:
    """The FP32 weight scale of one linear, from whichever dialect the file has.

    Raises:
        ValueError: no scale, a malformed one, or two that disagree.
    """
    keys = [key for key in (*SCALE_KEYS, *MODELOPT_KEYS) if f"{name}.{key}" in weights]
    scale, _ = resolve_fp8_scales({key: weights[f"{name}.{key}"] for key in keys}, name)
    if scale is None:
        raise ValueError(
            describe_error(
                "An FP8 weight has no scale",
                where=name,
                expected="weight_scale, or ModelOpt's weight_quantizer._amax",
                found=f"scale keys {keys}",
                remedy=(
                    "export the checkpoint again with its scales, or download the shard that "
                    "holds them"
                ),
            )
        )
    return scale.item()


def measure_groups(
    groups: Iterable[Group], weights: Mapping[str, torch.Tensor], progress: bool = False
) -> tuple[Group, ...]:
    """Read the weights of every group and fill in each shard's ``error`` and ``norm``.

    Args:
        groups: From ``read_groups``.
        weights: The transformer's tensors; FP8 weights are views of the mapped file.
        progress: Show a bar in bytes on stderr.

    Raises:
        ValueError: a weight holds NaN codes, named.
    """
    groups = tuple(groups)
    total = sum(weights[f"{s.name}.weight"].numel() for group in groups for s in group.shards)
    hidden = None if progress else True  # None: no bar where stderr is no terminal
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="Reading", disable=hidden)
    with bar:
        return tuple(_measured(group, weights, bar) for group in groups)


def relative_error(shards: Iterable[Shard]) -> float | None:
    """Relative L2 error over shards: ||requantised - calibrated|| / ||calibrated||.

    None where a shard was not measured; 0 for weights that are all zero.
    """
    shards = list(shards)
    if any(shard.error is None for shard in shards):
        return None
    error = math.fsum(shard.error for shard in shards)
    return math.sqrt(error / math.fsum(shard.norm for shard in shards)) if error else 0.0


def shards_of(groups: Iterable[Group], fusion: str) -> Iterator[Shard]:
    """Every shard that a fusion merges."""
    for group in groups:
        if fusion in group.fusions:
            yield from group.shards


def _is_fp8(weights: SafetensorsFolder, name: str) -> bool:
    return f"{name}.weight" in weights and weights.spec(f"{name}.weight").dtype == _FP8


def _measured(group: Group, weights: Mapping[str, torch.Tensor], bar: tqdm) -> Group:
    shards = []
    for shard in group.shards:
        counts = _count_codes(weights[f"{shard.name}.weight"], bar)
        error, norm = _cost(counts, shard, group.max_scale)
        shards.append(replace(shard, error=error, norm=norm))
    return replace(group, shards=tuple(shards))


def _count_codes(weight: torch.Tensor, bar: tqdm) -> torch.Tensor:
    """How often each of the 256 codes occurs: int64 [256]."""
    counts = torch.zeros(256, dtype=torch.int64)
    for block in weight.view(torch.uint8).flatten().split(_BLOCK):
        counts += torch.bincount(block, minlength=256)
        bar.update(block.numel())
    return counts


def _cost(counts: torch.Tensor, shard: Shard, max_scale: float) -> tuple[float, float]:
    """Squared error and squared norm of a shard with these codes, under the group's scale."""
    codes = torch.arange(256, dtype=torch.uint8).view(_FP8)
    calibrated = codes.float() * torch.tensor(shard.scale)
    fused = torch.tensor(max_scale)
    again = rescale_e4m3(codes, torch.tensor(shard.scale), fused).float() * fused
    present = counts > 0
    if not bool(torch.isfinite(calibrated[present]).all()):
        raise ValueError(
            describe_error(
                "A weight holds NaN",
                where=f"{shard.name}.weight",
                expected="finite float8_e4m3fn codes",
                found=f"{int(counts[calibrated.isnan()].sum())} NaN codes",
                remedy=(
                    "download this shard again; if it was exported so, export it from weights "
                    "that are finite"
                ),
            )
        )
    times = counts[present].double()
    error = (again[present].double() - calibrated[present].double()).square()
    norm = calibrated[present].double().square()
    return (times * error).sum().item(), (times * norm).sum().item()
