# SPDX-License-Identifier: Apache-2.0
"""Loading a transformer in three steps: plan from headers, validate everything, then copy.

``plan_weights`` reads names, dtypes and shapes, and the scalar scales, but no weight. Every problem
of a checkpoint is found there and reported in one error; nothing of the model has changed then.
``apply_plan`` copies, and has no decision left to take.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import (
    SafetensorsFolder,
    TensorSpec,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.weight_names import is_unused, source_prefixes
from tensorrt_llm._torch.visual_gen.quantization.loader import DynamicLinearWeightLoader
from tensorrt_llm._utils import describe_error
from tensorrt_llm.quantization.scales import MODELOPT_KEYS, SCALE_KEYS, resolve_fp8_scales

_SHOWN_PER_KIND = 5
_HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Destination:
    """One module and the checkpoint tensors that fill it.

    Attributes:
        name: The module's name inside the transformer.
        module: The module; for the transformer itself its directly held parameters are meant.
        shards: Per source, in fused order: key inside the module -> checkpoint name.
    """

    name: str
    module: nn.Module
    shards: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class WeightPlan:
    """Everything that a load will do; made by ``plan_weights``, carried out by ``apply_plan``."""

    destinations: tuple[Destination, ...]
    loader: DynamicLinearWeightLoader
    num_bytes: int


def plan_weights(transformer: nn.Module, weights: Mapping[str, torch.Tensor]) -> WeightPlan:
    """Match every tensor of a checkpoint with its destination.

    Args:
        transformer: A Cosmos3VFMTransformer, on any device, meta included.
        weights: Tensors by checkpoint name; a SafetensorsFolder is judged by its headers.

    Raises:
        ValueError: listing, kind by kind, the first few and the count of: missing tensors, tensors
            that nothing consumes, wrong shapes, wrong dtypes, unusable scales.
    """
    planner = _Planner(weights, transformer.model_config.dynamic_weight_quant)
    destinations = [
        planner.destination(name, module)
        for name, module in transformer.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    planner.check_leftovers()
    planner.raise_problems()
    loader = DynamicLinearWeightLoader(transformer.model_config)
    return WeightPlan(tuple(destinations), loader, planner.num_bytes)


class _Planner:
    """Walks the destinations, takes their tensors and collects every problem."""

    def __init__(self, weights: Mapping[str, torch.Tensor], quantize_here: bool) -> None:
        self._weights = weights
        self._quantize_here = quantize_here
        self._problems: dict[str, list[str]] = defaultdict(list)
        self._left = set(weights)
        self.num_bytes = 0

    def destination(self, name: str, module: nn.Module) -> Destination:
        """Match one module; problems are kept, the destination is usable when there are none."""
        prefixes = source_prefixes(name)
        if not isinstance(module, Linear):
            return Destination(name, module, (self._plain_shard(module, prefixes[0]),))
        shards = tuple(self._linear_shard(module, prefix) for prefix in prefixes)
        specs = [self._spec(shard["weight"]) for shard in shards if "weight" in shard]
        found = [spec.shape for spec in specs]
        fits = sum(s[0] for s in found if s) == module.out_features and all(
            len(s) == 2 and s[1] == module.in_features for s in found
        )
        if len(specs) == len(shards) and not fits:
            expected = (module.out_features, module.in_features)
            self._problem("wrong shapes", f"{' + '.join(prefixes)}: {expected} expected, {found}")
        return Destination(name, module, shards)

    def check_leftovers(self) -> None:
        """Every tensor has a destination or is on the list of unused ones."""
        for name in sorted(self._left):
            if not is_unused(name):
                self._problem("tensors that nothing consumes", name)

    def raise_problems(self) -> None:
        """Raise the one error that lists all problems, if there are any."""
        if not self._problems:
            return
        parts = []
        for kind, found in self._problems.items():
            more = f" ... ({len(found)} in all)" if len(found) > _SHOWN_PER_KIND else ""
            parts.append(f"{kind}: {'; '.join(found[:_SHOWN_PER_KIND])}{more}")
        raise ValueError(
            describe_error(
                "The checkpoint doesn't fit the model that its config.json describes",
                where="transformer weights",
                expected="a source for every module and a module for every tensor",
                found=". ".join(parts),
                remedy="nothing was loaded; use weights and a config.json that belong together "
                "(an FP8 checkpoint keeps its quantization_config; BF16 weights have none)",
            )
        )

    def _linear_shard(self, linear: Linear, prefix: str) -> dict[str, str]:
        keys = ["weight"] if linear.bias is None else ["weight", "bias"]
        shard = {key: name for key in keys if (name := self._take(f"{prefix}.{key}"))}
        present = [key for key in (*SCALE_KEYS, *MODELOPT_KEYS) if f"{prefix}.{key}" in self._left]
        shard |= {key: self._take(f"{prefix}.{key}") for key in present}
        if "weight" not in shard:
            return shard
        dtype = self._spec(shard["weight"]).dtype
        stored_fp8 = dtype == torch.float8_e4m3fn
        needs_fp8 = linear.has_fp8_qdq and not self._quantize_here
        if not stored_fp8 and (needs_fp8 or dtype not in _HIGH_PRECISION):
            expected = "float8_e4m3fn" if linear.has_fp8_qdq else "a 16 or 32 bit float"
            reason = ", appears to be unquantized" if dtype in _HIGH_PRECISION else ""
            self._problem("wrong dtypes", f"{prefix}.weight: {expected} expected, {dtype}{reason}")
        elif stored_fp8 and not linear.has_fp8_qdq:
            self._problem(
                "FP8 weights for a module that its configuration leaves in high precision",
                f"{prefix}.weight",
            )
        elif stored_fp8:
            self._check_scales(prefix, present, not linear.force_dynamic_quantization)
        elif present:
            self._problem("scales without an FP8 weight", f"{prefix}: {', '.join(present)}")
        return shard

    def _check_scales(self, prefix: str, present: list[str], static: bool) -> None:
        try:
            scales = {key: self._weights[f"{prefix}.{key}"] for key in present}
            weight_scale, input_scale = resolve_fp8_scales(scales, prefix)
        except ValueError as error:
            self._problem("unusable scales", str(error))
            return
        if weight_scale is None:
            self._problem("missing tensors", f"{prefix}.weight_scale")
        if input_scale is None and static:
            self._problem("missing tensors", f"{prefix}.input_scale")

    def _plain_shard(self, module: nn.Module, prefix: str) -> dict[str, str]:
        shard = {}
        for key, parameter in module.named_parameters(recurse=False):
            name = self._take(f"{prefix}.{key}" if prefix else key)
            if name is None:
                continue
            shard[key] = name
            spec = self._spec(name)
            if spec.shape != tuple(parameter.shape):
                expected = tuple(parameter.shape)
                self._problem("wrong shapes", f"{name}: {expected} expected, {spec.shape}")
            if spec.dtype not in _HIGH_PRECISION:
                self._problem("wrong dtypes", f"{name}: a 16 or 32 bit float, {spec.dtype}")
        return shard

    def _take(self, name: str) -> str | None:
        """Claim a tensor for a destination; None, and a problem, when the checkpoint lacks it."""
        if name not in self._left:
            self._problem("missing tensors", name)
            return None
        self._left.remove(name)
        self.num_bytes += self._spec(name).num_bytes
        return name

    def _spec(self, name: str) -> TensorSpec:
        if isinstance(self._weights, SafetensorsFolder):
            return self._weights.spec(name)
        tensor = self._weights[name]
        return TensorSpec(tensor.dtype, tuple(tensor.shape), "")

    def _problem(self, kind: str, text: str) -> None:
        self._problems[kind].append(text)
