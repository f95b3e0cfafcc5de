# SPDX-License-Identifier: Apache-2.0
"""Reading the caller's own recipe, ``VisualGenArgs.quant_config``: strictly, as every option is.

A checkpoint's recipe may have keys that nobody here knows, since its weights tell what they are. A
caller's recipe is a wish, and a key that is not understood would leave it unfulfilled in silence.
Importing this module does not import torch.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from tensorrt_llm._torch.visual_gen.quantization.recipe import (
    OTHER_NAMES_OF_IGNORE,
    UNSUPPORTED_KEYS,
    ParsedRecipe,
    parse_quant_recipe,
    says_nothing,
)
from tensorrt_llm._utils import describe_error
from tensorrt_llm.models.modeling_utils import QuantConfig

_OWNER = "VisualGenArgs.quant_config"

KNOWN_KEYS = {
    "quant_algo": "`FP8`; null runs in 16 bit, and has nothing but a description beside it",
    "ignore": "patterns of the modules that stay in 16 bit",
    "exclude_modules": "another name of `ignore`; the patterns of both count",
    "config_groups": "static or dynamic, for weights and activations; without it the weights are "
    "quantised while loading and the activations on every call",
    "dynamic": "true, without `config_groups`: what leaving both out means",
    "activation_scheme": "`static` or `dynamic`, as the rest of the recipe has it",
    "fmt": "`e4m3`, the format of FP8 here",
    "granularity": "`tensor`: one scale a tensor",
    "quant_type": "`FP8_FP8` or `FP8`: the format of weights and activations",
    "weight_only": "false",
    "quant_method": "`modelopt`, the style of the dictionary",
    "producer": "description of the export, without effect",
    "version": "description of the export, without effect",
    "modelopt_config": "beside static `config_groups`: description of the calibration, without "
    "effect",
    "runtime": "only as a copy of the checkpoint's own, which is dropped with a warning",
}
"""Key of a caller's recipe -> what it may say."""

# They say nothing about how tensors are quantised, so they may stand beside no algorithm.
_DESCRIPTIONS = ("quant_algo", "quant_method", "producer", "version", "runtime")


def parse_callers_recipe(recipe: Mapping[str, Any] | QuantConfig, own: object) -> ParsedRecipe:
    """Read a caller's recipe as `parse_quant_recipe` does, and refuse what would have no effect.

    Args:
        recipe: ``VisualGenArgs.quant_config``.
        own: The checkpoint's ``quantization_config``, which it replaces.

    Raises:
        ValueError: an unknown key; a step policy other than a copy of the checkpoint's; no
            algorithm, unless the recipe is empty or says so with ``quant_algo`` None; a
            ModelOpt configuration for weights that are quantised here; whatever
            `parse_quant_recipe` refuses.
    """
    if isinstance(recipe, QuantConfig):
        recipe = recipe.model_dump(mode="json", exclude_none=True)
    refuse_unknown_keys(recipe, own if isinstance(own, Mapping) else {})
    _refuse_step_policy(recipe, own)
    parsed = parse_quant_recipe(recipe, _OWNER)
    config, _, weights_dynamic, _ = parsed
    if recipe and config.quant_algo is None:
        _refuse_without_algorithm(recipe)
    if weights_dynamic:
        _refuse_calibration(recipe)
    return parsed


def refuse_unknown_keys(recipe: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
    """Refuse the keys of a caller's recipe that mean nothing here.

    Those of a faithful copy are left alone, as they are in the checkpoint's own recipe.

    Args:
        recipe: The caller's.
        own: The checkpoint's; None before a checkpoint is at hand, when what says ``quant_method``
            may be a copy.

    Raises:
        ValueError: such keys, all of them, with the known one that each resembles.
    """
    in_exporters_style = "quant_method" in recipe
    if own is None and in_exporters_style:
        return

    def is_harmless(key: Any, value: Any) -> bool:
        if key in KNOWN_KEYS or key in UNSUPPORTED_KEYS:
            return True  # judged later
        if in_exporters_style and says_nothing(value):
            return True  # exporters write all their options out
        return own is not None and key in own and own[key] == value

    unknown = sorted(str(key) for key, value in recipe.items() if not is_harmless(key, value))
    if unknown:
        raise ValueError(
            describe_error(
                "Unknown key of a quantisation recipe",
                where=_OWNER,
                expected=f"keys {sorted(KNOWN_KEYS)}",
                found=unknown,
                remedy="; ".join(map(_correction, unknown)),
            )
        )


def _correction(key: str) -> str:
    if key in OTHER_NAMES_OF_IGNORE:
        return f"write the names of {key!r} as patterns of 'ignore'"
    similar = get_close_matches(key, KNOWN_KEYS, n=1, cutoff=0.75)
    return f"write {similar[0]!r} instead of {key!r}" if similar else f"leave {key!r} out"


def _refuse_step_policy(recipe: Mapping[str, Any], own: object) -> None:
    """Refuse ``runtime``, but for a faithful copy: its loss is what the one warning tells."""
    runtime = recipe.get("runtime")
    copied = isinstance(own, Mapping) and runtime == own.get("runtime")
    if not says_nothing(runtime) and not copied:
        raise ValueError(
            describe_error(
                "The step policy belongs to the checkpoint: a caller's recipe can't bring one",
                where=f"{_OWNER}.runtime",
                expected="no runtime, or a copy of the one in transformer/config.json",
                found=repr(runtime),
                remedy="leave runtime out; for 16-bit steps load a checkpoint whose own "
                "transformer/config.json has the policy, without a quant_config",
            )
        )


def _refuse_without_algorithm(recipe: Mapping[str, Any]) -> None:
    if "quant_algo" not in recipe:
        raise ValueError(
            describe_error(
                "The recipe names no algorithm, so nothing would be quantised",
                where=_OWNER,
                expected='"quant_algo": "FP8", or an empty recipe',
                found=f"keys {list(recipe)}",
                remedy='add "quant_algo": "FP8"; to run a 16-bit checkpoint as it is, leave '
                "quant_config out or pass {}",
            )
        )
    idle = [k for k, v in recipe.items() if k not in _DESCRIPTIONS and not says_nothing(v)]
    if idle:
        raise ValueError(
            describe_error(
                "quant_algo is None, so these keys would have no effect",
                where=_OWNER,
                expected="no key that says how tensors are quantised",
                found=idle,
                remedy='leave them out, or set "quant_algo": "FP8"',
            )
        )


def _refuse_calibration(recipe: Mapping[str, Any]) -> None:
    """Refuse ModelOpt's own configuration where its weights, which followed it, are not read."""
    calibration = recipe.get("modelopt_config")
    if not says_nothing(calibration):
        raise ValueError(
            describe_error(
                "Quantising while loading doesn't follow a modelopt_config",
                where=f"{_OWNER}.modelopt_config",
                expected="no such key without static config_groups",
                found=repr(calibration),
                remedy="leave it out, and write the modules that stay in 16 bit as ignore",
            )
        )
