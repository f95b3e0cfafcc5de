# SPDX-License-Identifier: Apache-2.0
"""Reading a ModelOpt-style quantisation dict: one FP8 recipe of per-tensor scales, or none.

Everything that could mean another layout of the weights, or other arithmetic, is refused by name.
Keys that describe the export (``producer``, ``modelopt_config``, ``runtime`` and whatever else a
later exporter adds at the top level) are left alone: this is how a checkpoint's own recipe is read,
whose weights are there to tell. `caller_recipe` judges a caller's, which nothing else corrects.
Importing this module does not import torch.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from tensorrt_llm._utils import describe_error
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization.mode import QuantAlgo

_OTHER_CHECKPOINT = "use a ModelOpt FP8 checkpoint with per-tensor scales, or a 16-bit one"
_NO_BOOLEAN = "write true or false without quotes"

UNSUPPORTED_KEYS = {
    "quantization": "write what it holds without it: it is the wrapper of hf_quant_config.json",
    "quantized_layers": _OTHER_CHECKPOINT,
    "kv_cache_quant_algo": _OTHER_CHECKPOINT,
    "kv_cache_scheme": _OTHER_CHECKPOINT,
    "group_size": _OTHER_CHECKPOINT,
    "weight_block_size": _OTHER_CHECKPOINT,
    "per_channel": _OTHER_CHECKPOINT,
    "has_zero_point": _OTHER_CHECKPOINT,
    "pre_quant_scale": _OTHER_CHECKPOINT,
}
"""Top-level keys that change what the tensors mean and that nothing here implements -> remedy. They
may be there without saying anything: null, false or empty."""

OTHER_NAMES_OF_IGNORE = ("modules_to_not_convert", "ignored_layers")
"""What other exporters call it. diffusers writes one beside ModelOpt's FP8; stored weights say the
same themselves."""

# Other spellings of what the algorithm FP8 means here, in lower case and with underscores: they
# agree with it or contradict it.
_SERVED_VALUES = {
    "fmt": ("e4m3", "e4m3fn", "float8_e4m3fn", "float8", "fp8"),
    "granularity": ("tensor", "per_tensor"),
    "quant_type": ("fp8_fp8", "fp8"),
}

Flags = tuple[bool, bool]
"""(weights are quantised while loading, activations take their scale from each input)."""

ParsedRecipe = tuple[QuantConfig, dict[str, QuantConfig] | None, bool, bool]
"""What `DiffusionPipelineConfig.load_diffusion_quant_config` returns."""


def parse_quant_recipe(
    recipe: Mapping[str, Any] | None, owner: str = "quantization_config"
) -> ParsedRecipe:
    """See `DiffusionPipelineConfig.load_diffusion_quant_config`, which this implements.

    Args:
        recipe: The dict.
        owner: What the messages call it.
    """
    if recipe is None:
        return QuantConfig(), None, False, False
    if not isinstance(recipe, Mapping):
        _refuse(
            "The quantisation recipe is no mapping",
            owner,
            "a mapping",
            type(recipe).__name__,
            'pass a dict such as {"quant_algo": "FP8"}, or None',
        )
    _refuse_unsupported_keys(recipe, owner)
    excluded = _excluded_modules(recipe, owner)
    groups = recipe.get("config_groups")
    if recipe.get("quant_algo") is None:
        _refuse_parts_of_a_recipe(recipe, owner)
        # ModelOpt writes such a config, without an algorithm, when nothing was quantised.
        return QuantConfig(), None, False, False
    algorithm = _algorithm(recipe["quant_algo"], f"{owner}.quant_algo")
    config = QuantConfig(quant_algo=algorithm, exclude_modules=excluded)
    where = f"{owner}.dynamic"
    if groups is None:
        if not recipe.get("dynamic", True):
            remedy = "restore config_groups, or set dynamic true to quantise while loading"
            _refuse("A static recipe needs its groups", where, "config_groups", recipe, remedy)
        # No groups, so no calibrated input scale either: activations are dynamic too.
        flags = (True, True)
    else:
        flags = _group_flags(groups, f"{owner}.config_groups")
        says = recipe.get("dynamic")
        if says or (says is False and any(flags)):
            remedy = "remove dynamic: each quantiser of a group has its own"
            _refuse("dynamic contradicts config_groups", where, "one of the two", recipe, remedy)
    if flags[0]:
        _refuse_other_names_of_ignore(recipe, owner)
    _check_activation_scheme(recipe, owner, "dynamic" if flags[1] else "static")
    return config, None, *flags


def says_nothing(value: object) -> bool:
    """Whether an option is written out without being used: None, False, {} or []."""
    return value is None or value is False or value == {} or value == []


def _refuse_unsupported_keys(recipe: Mapping[str, Any], owner: str) -> None:
    method = recipe.get("quant_method")
    if method is not None and method != "modelopt":
        where = f"{owner}.quant_method"
        _refuse(f"Unknown quant_method {method!r}", where, "'modelopt'", repr(method))
    weight_only = recipe.get("weight_only", False)
    if weight_only is not False:
        where = f"{owner}.weight_only"
        _refuse("Weight-only quantisation is not supported", where, False, repr(weight_only))
    for key, remedy in UNSUPPORTED_KEYS.items():
        value = recipe.get(key)
        if not says_nothing(value):
            where = f"{owner}.{key}"
            _refuse(f"{key} is not supported", where, "no such key", repr(value), remedy)
    for key, served in _SERVED_VALUES.items():
        value = recipe.get(key)
        if value is not None and str(value).lower().replace("-", "_") not in served:
            where = f"{owner}.{key}"
            _refuse(f"This {key} is not supported", where, f"one of {served}", repr(value))
    if not isinstance(recipe.get("dynamic", False), bool):
        where, found = f"{owner}.dynamic", repr(recipe["dynamic"])
        _refuse("dynamic is no boolean", where, "true or false", found, _NO_BOOLEAN)


def _refuse_parts_of_a_recipe(recipe: Mapping[str, Any], owner: str) -> None:
    """Refuse what says how tensors are quantised where nothing says that they are."""
    if recipe.get("config_groups") is not None:
        where, remedy = f"{owner}.quant_algo", "add quant_algo FP8 beside config_groups"
        _refuse("The recipe has groups and no algorithm", where, "FP8", None, remedy)
    if recipe.get("activation_scheme") is not None:
        _refuse(
            "activation_scheme without an algorithm",
            f"{owner}.activation_scheme",
            "quant_algo FP8 beside it",
            repr(recipe["activation_scheme"]),
            "add quant_algo FP8, or leave activation_scheme out",
        )


def _refuse_other_names_of_ignore(recipe: Mapping[str, Any], owner: str) -> None:
    for key in OTHER_NAMES_OF_IGNORE:
        value = recipe.get(key)
        if not says_nothing(value):
            _refuse(
                f"{key} is not followed where weights are quantised while loading",
                f"{owner}.{key}",
                "ignore",
                repr(value),
                "write the names as patterns of ignore",
            )


def _check_activation_scheme(recipe: Mapping[str, Any], owner: str, scheme: str) -> None:
    said = recipe.get("activation_scheme")
    if said is not None and said != scheme:
        _refuse(
            "activation_scheme contradicts the rest of the recipe",
            f"{owner}.activation_scheme",
            f"{scheme!r}, as the rest of the recipe says",
            repr(said),
            "leave activation_scheme out; input_activations of config_groups says static or "
            "dynamic, and without config_groups activations are dynamic",
        )


def _algorithm(name: object, where: str) -> QuantAlgo:
    if name == QuantAlgo.FP8:
        return QuantAlgo.FP8
    known = [algo.value for algo in QuantAlgo]
    if name in known:
        _refuse(
            f"Quantisation algorithm {name} fails closed for unverified algos: its layout has not "
            "been verified",
            where,
            "FP8",
            repr(name),
        )
    _refuse(f"Unknown quantisation algorithm {name!r}", where, "FP8", repr(name))


def _excluded_modules(recipe: Mapping[str, Any], owner: str) -> list[str] | None:
    patterns: list[str] = []
    for key in ("ignore", "exclude_modules"):
        value = recipe.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            remedy = "write the names as a list of strings, or leave the key out"
            where = f"{owner}.{key}"
            _refuse(f"{key} is no list of names", where, "a list of strings", repr(value), remedy)
        patterns += value
    return patterns or None


def _group_flags(groups: object, where: str) -> Flags:
    if not isinstance(groups, Mapping) or not groups:
        _refuse(
            "config_groups names no group",
            where,
            "a mapping of groups",
            repr(groups),
            "restore config_groups, or remove it to quantise while loading",
        )
    flags = {name: _flags_of_group(group, f"{where}.{name}") for name, group in groups.items()}
    if len(set(flags.values())) > 1:
        _refuse(
            "Mixed config groups are not supported",
            where,
            "the same (dynamic weights, dynamic activations) in every group",
            flags,
        )
    return next(iter(flags.values()))


def _flags_of_group(group: object, where: str) -> Flags:
    if not isinstance(group, Mapping):
        remedy = "restore the group as ModelOpt exported it"
        _refuse("A config group is no mapping", where, "a mapping", repr(group), remedy)
    for key, value in group.items():
        if key not in ("weights", "input_activations", "targets") and not says_nothing(value):
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
        if not says_nothing(value) and value not in harmless.get(key, ()):
            _refuse(
                f"Only one scale a tensor is supported: {key}",
                f"{where}.{key}",
                "per-tensor scales, without per-channel or block options",
                repr(value),
            )
        if key == "symmetric" and value is False:
            _refuse("Zero points are not supported", f"{where}.{key}", True, False)
    return dynamic


def _refuse(
    what: str, where: str, expected: object, found: object, remedy: str = _OTHER_CHECKPOINT
) -> NoReturn:
    raise ValueError(
        describe_error(
            what,
            where=where,
            expected=expected,
            found=found,
            remedy=remedy,
        )
    )
