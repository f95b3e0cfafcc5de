# SPDX-License-Identifier: Apache-2.0
"""Reading a ModelOpt-style quantisation dict: one FP8 recipe of per-tensor scales, or none.

Everything that could mean another layout of the weights is refused by name. Keys that describe the
export and not the layout (``producer``, ``quant_type``, ``modelopt_config``, ``runtime`` and
whatever else a later exporter adds at the top level) are left alone. Importing this module does not
import torch.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from tensorrt_llm._utils import describe_error
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization.mode import QuantAlgo

# Top-level keys that change what the tensors mean and that nothing here implements.
_UNSUPPORTED_KEYS = (
    "quantization",  # the wrapper of hf_quant_config.json: its content belongs at the top level
    "quantized_layers",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "group_size",
    "has_zero_point",
    "pre_quant_scale",
)

_OTHER_CHECKPOINT = "use a ModelOpt FP8 checkpoint with per-tensor scales, or a 16-bit one"
_NO_BOOLEAN = "write true or false without quotes"

Flags = tuple[bool, bool]
"""(weights are quantised while loading, activations take their scale from each input)."""


def parse_quant_recipe(
    recipe: Mapping[str, Any] | None,
) -> tuple[QuantConfig, dict[str, QuantConfig] | None, bool, bool]:
    """See `DiffusionPipelineConfig.load_diffusion_quant_config`, which this implements."""
    if recipe is None:
        return QuantConfig(), None, False, False
    if not isinstance(recipe, Mapping):
        _refuse(
            "The quantisation recipe is no mapping",
            None,
            "a mapping",
            type(recipe).__name__,
            'pass a dict such as {"quant_algo": "FP8"}, or None',
        )
    _refuse_unsupported_keys(recipe)
    excluded = _excluded_modules(recipe)
    groups = recipe.get("config_groups")
    if recipe.get("quant_algo") is None:
        if groups is not None:
            remedy = "add quant_algo FP8 beside config_groups"
            _refuse("The recipe has groups and no algorithm", "quant_algo", "FP8", None, remedy)
        # ModelOpt writes such a config, without an algorithm, when nothing was quantised.
        return QuantConfig(), None, False, False
    config = QuantConfig(quant_algo=_algorithm(recipe["quant_algo"]), exclude_modules=excluded)
    if groups is None:
        if not recipe.get("dynamic", True):
            remedy = "restore config_groups, or set dynamic true to quantise while loading"
            _refuse("A static recipe needs its groups", "dynamic", "config_groups", recipe, remedy)
        # No groups, so no calibrated input scale either: activations are dynamic too.
        return config, None, True, True
    if recipe.get("dynamic"):
        remedy = "remove dynamic: each quantiser of a group has its own"
        _refuse("dynamic contradicts config_groups", "dynamic", "one of the two", recipe, remedy)
    weights_dynamic, activations_dynamic = _group_flags(groups)
    return config, None, weights_dynamic, activations_dynamic


def _refuse_unsupported_keys(recipe: Mapping[str, Any]) -> None:
    method = recipe.get("quant_method")
    if method is not None and method != "modelopt":
        _refuse(f"Unknown quant_method {method!r}", "quant_method", "'modelopt'", repr(method))
    weight_only = recipe.get("weight_only", False)
    if weight_only is not False:
        _refuse(
            "Weight-only quantisation is not supported", "weight_only", False, repr(weight_only)
        )
    for key in _UNSUPPORTED_KEYS:
        if not _says_nothing(recipe.get(key)):
            _refuse(f"{key} is not supported", key, "no such key", repr(recipe[key]))
    if not isinstance(recipe.get("dynamic", False), bool):
        found = repr(recipe["dynamic"])
        _refuse("dynamic is no boolean", "dynamic", "true or false", found, _NO_BOOLEAN)


def _algorithm(name: object) -> QuantAlgo:
    if name == QuantAlgo.FP8:
        return QuantAlgo.FP8
    known = [algo.value for algo in QuantAlgo]
    if name in known:
        _refuse(
            f"Quantisation algorithm {name} fails closed for unverified algos: its layout has not "
            "been verified",
            "quant_algo",
            "FP8",
            repr(name),
        )
    _refuse(f"Unknown quantisation algorithm {name!r}", "quant_algo", "FP8", repr(name))


def _excluded_modules(recipe: Mapping[str, Any]) -> list[str] | None:
    patterns: list[str] = []
    for key in ("ignore", "exclude_modules"):
        value = recipe.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            remedy = "write the names as a list of strings, or leave the key out"
            _refuse(f"{key} is no list of names", key, "a list of strings", repr(value), remedy)
        patterns += value
    return patterns or None


def _group_flags(groups: object) -> Flags:
    if not isinstance(groups, Mapping) or not groups:
        _refuse(
            "config_groups names no group",
            "config_groups",
            "a mapping of groups",
            repr(groups),
            "restore config_groups, or remove it to quantise while loading",
        )
    flags = {name: _flags_of_group(name, group) for name, group in groups.items()}
    if len(set(flags.values())) > 1:
        _refuse(
            "Mixed config groups are not supported",
            "config_groups",
            "the same (dynamic weights, dynamic activations) in every group",
            flags,
        )
    return next(iter(flags.values()))


def _flags_of_group(name: str, group: object) -> Flags:
    where = f"config_groups.{name}"
    if not isinstance(group, Mapping):
        remedy = "restore the group as ModelOpt exported it"
        _refuse("A config group is no mapping", where, "a mapping", repr(group), remedy)
    for key, value in group.items():
        if key not in ("weights", "input_activations", "targets") and not _says_nothing(value):
            _refuse(f"{key} of a config group is not supported", where, "no such key", repr(value))
    targets = group.get("targets", ["Linear"])
    if targets != ["Linear"]:
        _refuse(
            "Mixed config groups are not supported: a group has targets of its own",
            f"{where}.targets",
            ["Linear"],
            targets,
        )
    return (
        _is_dynamic(group.get("weights"), f"{where}.weights"),
        _is_dynamic(group.get("input_activations"), f"{where}.input_activations"),
    )


def _is_dynamic(spec: object, where: str) -> bool:
    """Return ``dynamic`` of a quantiser; refuse one that is not 8-bit float with one scale."""
    if not isinstance(spec, Mapping):
        _refuse(
            "FP8 needs quantised weights and activations",
            where,
            "{dynamic, num_bits: 8, type: float}",
            repr(spec),
        )
    if spec.get("num_bits") != 8 or spec.get("type") != "float":
        _refuse(
            "A quantiser is not FP8",
            where,
            "num_bits 8 and type 'float'",
            f"num_bits {spec.get('num_bits')!r} and type {spec.get('type')!r}",
        )
    dynamic = spec.get("dynamic", False)
    if not isinstance(dynamic, bool):
        where = f"{where}.dynamic"
        _refuse("dynamic is no boolean", where, "true or false", repr(dynamic), _NO_BOOLEAN)
    harmless = {"num_bits": (8,), "type": ("float",), "dynamic": (True, False)}
    harmless |= {"strategy": ("tensor",), "symmetric": (True,)}
    for key, value in spec.items():
        if key in ("observer", "observer_kwargs"):  # how the scale was found, not what it means
            continue
        if not _says_nothing(value) and value not in harmless.get(key, ()):
            _refuse(
                f"Only one scale a tensor is supported: {key}",
                f"{where}.{key}",
                "per-tensor scales, without per-channel or block options",
                repr(value),
            )
        if key == "symmetric" and value is False:
            _refuse("Zero points are not supported", f"{where}.{key}", True, False)
    return dynamic


def _says_nothing(value: object) -> bool:
    """Whether an option is written out without being used: None, False, {} or []."""
    return value is None or value is False or value == {} or value == []


def _refuse(
    what: str, key: str | None, expected: object, found: object, remedy: str = _OTHER_CHECKPOINT
) -> NoReturn:
    raise ValueError(
        describe_error(
            what,
            where="quantization_config" if key is None else f"quantization_config.{key}",
            expected=expected,
            found=found,
            remedy=remedy,
        )
    )
