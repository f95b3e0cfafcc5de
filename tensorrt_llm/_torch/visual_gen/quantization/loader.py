# SPDX-License-Identifier: Apache-2.0
"""Filling one module from a checkpoint, with its precision decided by what it was built for."""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import nn

from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.modules.linear_methods import FP8, WeightDict
from tensorrt_llm._torch.modules.weight_copy import (
    HIGH_PRECISION,
    check_materialized,
    check_rows,
    check_weight,
    fill,
)
from tensorrt_llm._torch.visual_gen.quantization.ops import quantize_fp8_jointly
from tensorrt_llm._utils import describe_error
from tensorrt_llm.quantization.mode import QuantMode
from tensorrt_llm.quantization.scales import (
    MODELOPT_KEYS,
    SCALE_KEYS,
    resolve_fp8_scales,
)

_QUANT_KEYS = frozenset(SCALE_KEYS + MODELOPT_KEYS)


class DynamicLinearWeightLoader:
    """Loads linears, and the high-precision modules beside them, for a model's recipe.

    Args:
        model_config: The model's recipe; read at every call, so later changes count.
        params_map: For fused destinations, last name -> last names of its sources in shard order:
            ``{"qkv_proj": ["to_q", "to_k", "to_v"], "gate_up_proj": ["gate_proj", "up_proj"]}``.
            `source_names` reads it, and errors name the source. A destination that it does not
            list is its own source.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params_map: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.model_config = model_config
        self.params_map = dict(params_map or {})

    def source_names(self, name: str) -> list[str]:
        """Return the full names whose tensors fill the destination ``name``, in shard order."""
        parent, dot, last = name.rpartition(".")
        return [f"{parent}{dot}{source}" for source in self.params_map.get(last, [last])]

    def load_linear_weights(
        self, module: nn.Module, name: str, weight_dicts: Sequence[WeightDict]
    ) -> None:
        """Fill a module in place; nothing is changed if anything is refused.

        A Linear built for FP8 takes float8_e4m3fn weights with their scales as they are, in either
        dialect (see `resolve_fp8_scales`). With ``dynamic_weight_quant`` it also takes FP32, BF16
        and FP16 weights and quantises them here, each value once: the shards of a fused Linear get
        one scale from their joint maximum. A module built for high precision (another Linear,
        nn.Linear, an embedding, a norm) takes high-precision tensors alone.

        Args:
            module: The destination.
            name: Its full name, for messages.
            weight_dicts: One dict for each shard: ``weight``, ``bias`` if the module has one,
                ``weight_scale``, ``input_scale`` and ModelOpt's buffers.

        Raises:
            ValueError: an algorithm that "fails closed for unverified algos"; a high-precision
                weight that "appears to be unquantized" for a destination built for FP8 under a
                static recipe, or for an unknown destination; an FP8 weight for a high-precision
                destination or without ``weight_scale``; a static recipe without ``input_scale``;
                malformed or contradicting scales; quantisation tensors that nothing consumes;
                shapes or keys that do not fit.
        """
        self._refuse_unverified(name)
        labels = self._shard_labels(name, len(weight_dicts))
        for label, shard in zip(labels, weight_dicts, strict=True):
            if "weight" not in shard:
                remedy = "load the checkpoint's file that holds this weight beside the others"
                _refuse("A weight is missing", f"{label}.weight", "weight", sorted(shard), remedy)
        fp8 = _built_for_fp8(module)
        if fp8 is None:
            self._refuse_unknown_destination(module, labels, weight_dicts)
        if fp8:
            shards = self._fp8_shards(module, labels, weight_dicts)
        else:
            shards = _high_precision_shards(labels, weight_dicts)
        try:
            if hasattr(module, "load_weights"):
                module.load_weights(shards)
            else:
                _fill_plain_module(module, shards)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _refuse_unverified(self, name: str) -> None:
        quant_config = self.model_config.quant_config
        if QuantMode.UNVERIFIED in quant_config.quant_mode:
            _refuse(
                f"{quant_config.quant_algo} fails closed for unverified algos",
                name,
                "FP8, or no quantisation",
                quant_config.quant_algo,
                "use a ModelOpt FP8 checkpoint; other layouts have not been verified",
            )

    def _shard_labels(self, name: str, count: int) -> list[str]:
        sources = self.source_names(name)
        if len(sources) == count:
            return sources
        return [f"{name}[{index}]" for index in range(count)]

    def _is_static(self) -> bool:
        config = self.model_config
        return config.quant_config.quant_mode.has_fp8_qdq() and not config.dynamic_weight_quant

    def _refuse_unknown_destination(
        self, module: nn.Module, labels: Sequence[str], weight_dicts: Sequence[WeightDict]
    ) -> NoReturn:
        label, shard = labels[0], weight_dicts[0]
        if self._is_static() and shard["weight"].dtype in HIGH_PRECISION:
            _refuse_unquantized(label, shard["weight"])
        _refuse(
            "The destination of a weight is unknown",
            label,
            "a Linear, or a module with a floating-point parameter named weight",
            type(module).__name__,
            "pass the linear itself, not the module around it",
        )

    def _fp8_shards(
        self, module: nn.Module, labels: Sequence[str], weight_dicts: Sequence[WeightDict]
    ) -> list[WeightDict]:
        dtypes = [shard["weight"].dtype for shard in weight_dicts]
        if all(dtype == FP8 for dtype in dtypes):
            return [_stored_fp8(*pair) for pair in zip(labels, weight_dicts, strict=True)]
        for label, shard in zip(labels, weight_dicts, strict=True):
            dtype = shard["weight"].dtype
            if dtype in HIGH_PRECISION and not self.model_config.dynamic_weight_quant:
                _refuse_unquantized(label, shard["weight"])
            if dtype not in HIGH_PRECISION:
                expected = "float8_e4m3fn, or float32, bfloat16 or float16, for all shards alike"
                remedy = "store all shards of this linear in one of these dtypes"
                _refuse(
                    "A weight has a dtype that can't be loaded", label, expected, dtypes, remedy
                )
        return _quantized_here(module, labels, weight_dicts)


def _built_for_fp8(module: nn.Module) -> bool | None:
    """Whether a destination holds FP8 weights; None if it is no known kind of destination."""
    has_fp8_qdq = getattr(module, "has_fp8_qdq", None)
    if isinstance(has_fp8_qdq, bool):
        return has_fp8_qdq
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dtype in HIGH_PRECISION:
        return False
    return None


def _stored_fp8(label: str, shard: WeightDict) -> WeightDict:
    """Return an FP8 shard with its scales resolved to the keys that a Linear takes."""
    weight_scale, input_scale = resolve_fp8_scales(shard, label)
    if weight_scale is None:
        _refuse(
            "An FP8 weight came without weight_scale",
            f"{label}.weight_scale",
            "weight_scale, or ModelOpt's weight_quantizer._amax",
            f"keys {sorted(shard)}",
            "take the scale from the file that holds the weight; a rename has to cover both",
        )
    resolved = _without_scales(label, shard, consumed=_QUANT_KEYS)
    resolved["weight_scale"] = weight_scale
    if input_scale is not None:
        resolved["input_scale"] = input_scale
    return resolved


def _quantized_here(
    module: nn.Module, labels: Sequence[str], weight_dicts: Sequence[WeightDict]
) -> list[WeightDict]:
    """Quantise high-precision shards with one scale, on the destination's device."""
    consumed = {"input_scale", "input_quantizer._amax"}
    resolved = []
    for label, shard in zip(labels, weight_dicts, strict=True):
        rest = _without_scales(label, shard, consumed=consumed)
        _, input_scale = resolve_fp8_scales({k: shard[k] for k in consumed & shard.keys()}, label)
        if input_scale is not None:
            rest["input_scale"] = input_scale
        if not module.weight.is_meta:  # a meta module is refused when it is filled
            rest["weight"] = rest["weight"].to(module.weight.device)
        resolved.append(rest)
    codes, scale = quantize_fp8_jointly([shard["weight"] for shard in resolved])
    return [
        {**shard, "weight": weight, "weight_scale": scale}
        for shard, weight in zip(resolved, codes, strict=True)
    ]


def _high_precision_shards(
    labels: Sequence[str], weight_dicts: Sequence[WeightDict]
) -> list[WeightDict]:
    for label, shard in zip(labels, weight_dicts, strict=True):
        if shard["weight"].dtype not in HIGH_PRECISION:
            _refuse(
                "A quantised weight came for a module that was built in high precision",
                f"{label}.weight",
                "float32, bfloat16 or float16",
                shard["weight"].dtype,
                "load the checkpoint with its own quantization_config, whose ignore list has to "
                "leave this module out",
            )
    return [
        _without_scales(label, shard, consumed=frozenset())
        for label, shard in zip(labels, weight_dicts, strict=True)
    ]


def _without_scales(
    label: str, shard: WeightDict, consumed: frozenset[str] | set[str]
) -> dict[str, torch.Tensor]:
    """Return the weight and the bias; refuse what is neither and was not consumed as a scale."""
    unknown = shard.keys() - consumed - {"weight", "bias"}
    if unknown:
        _refuse(
            "Tensors that nothing consumes came with a weight",
            f"{label}: {', '.join(sorted(unknown))}",
            f"weight, bias{''.join(f', {key}' for key in sorted(consumed))}",
            f"a {shard['weight'].dtype} weight with keys {sorted(shard)}",
            "use the quantization_config of this checkpoint, or leave these tensors out",
        )
    return {key: tensor for key, tensor in shard.items() if key in ("weight", "bias")}


def _fill_plain_module(module: nn.Module, shards: Sequence[WeightDict]) -> None:
    parameters = dict(module.named_parameters(recurse=False))
    if len(shards) != 1 or shards[0].keys() != parameters.keys():
        _refuse(
            "The tensors are not those of the module",
            type(module).__name__,
            f"one dict with {sorted(parameters)}",
            [sorted(shard) for shard in shards],
            "pass the tensors that this module has, each under its own name",
        )
    for key, parameter in parameters.items():
        check_weight(shards[0][key], parameter, key)
        check_rows([shards[0][key]], parameter, key)
        check_materialized(parameter, key)
    for key, parameter in parameters.items():
        fill(parameter, [shards[0][key]])


def _refuse_unquantized(label: str, weight: torch.Tensor) -> NoReturn:
    _refuse(
        "A weight appears to be unquantized, and the recipe is static FP8",
        f"{label}.weight",
        "a float8_e4m3fn weight with weight_scale and input_scale",
        weight.dtype,
        "load the checkpoint's fp8 revision, or quantise while loading with "
        'quant_config={"quant_algo": "FP8"}',
    )


def _refuse(what: str, where: str, expected: object, found: object, remedy: str) -> NoReturn:
    raise ValueError(
        describe_error(what, where=where, expected=expected, found=found, remedy=remedy)
    )
