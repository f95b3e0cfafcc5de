# SPDX-License-Identifier: Apache-2.0
"""Linear: a linear layer in high precision or FP8, loaded from one or several checkpoint shards."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.modules.linear_methods import (
    FP8QDQLinearMethod,
    LinearMethodBase,
    UnquantizedLinearMethod,
    W8A16FP8LinearMethod,
    WeightDict,
)
from tensorrt_llm._torch.modules.weight_copy import (
    check_materialized,
    check_rows,
    check_weight,
    fill,
)
from tensorrt_llm._utils import describe_error
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization.mode import QuantMode

__all__ = [
    "FP8QDQLinearMethod",
    "Linear",
    "LinearMethodBase",
    "UnquantizedLinearMethod",
    "W8A16FP8LinearMethod",
    "WeightMode",
    "WeightsLoadingConfig",
    "linear_of",
]


class WeightMode(enum.StrEnum):
    """How many checkpoint tensors fill a Linear, and which: itself; q, k, v; or gate, up."""

    VANILLA = "vanilla"
    FUSED_QKV_LINEAR = "fused_qkv_linear"
    FUSED_GATE_UP_LINEAR = "fused_gate_up_linear"

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the shards in the order in which `Linear.load_weights` takes them."""
        return _SHARD_NAMES[self]


_SHARD_NAMES = {
    WeightMode.VANILLA: ("weight",),
    WeightMode.FUSED_QKV_LINEAR: ("q", "k", "v"),
    WeightMode.FUSED_GATE_UP_LINEAR: ("gate", "up"),
}


@dataclass(frozen=True)
class WeightsLoadingConfig:
    """How `Linear.load_weights` reads its list: one dict, or one for each shard."""

    weight_mode: WeightMode = WeightMode.VANILLA


class Linear(nn.Module):
    """``y = x W^T + b`` with the weights that a quantisation recipe asks for.

    Parameters (all with ``requires_grad`` False, uninitialised until loaded): ``weight``
    [out_features, in_features] in ``dtype``; for FP8 ``weight`` in float8_e4m3fn with
    ``weight_scale`` and ``input_scale``, 0-d FP32 (``input_scale`` is None where activations are
    quantised dynamically); ``bias`` [out_features] in ``dtype``, or None.

    Args:
        in_features: Size of the input's last dimension.
        out_features: Size of the output's last dimension.
        bias: Whether there is a bias.
        dtype: Dtype of high-precision parameters and of the output; torch's default when None.
        mapping: Parallelism; only one process is built.
        quant_config: The recipe of this layer; None is high precision.
        weights_loading_config: Which shards fill the weight; one when None.
        skip_create_weights_in_init: Leave `create_weights` to the caller.
        force_dynamic_quantization: FP8 activations take their scale from each input.

    Raises:
        NotImplementedError: tensor parallelism, or an algorithm other than FP8.
        ValueError: FP8 on CUDA with features that are not multiples of 16.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        mapping: Mapping | None = None,
        quant_config: QuantConfig | None = None,
        weights_loading_config: WeightsLoadingConfig | None = None,
        skip_create_weights_in_init: bool = False,
        force_dynamic_quantization: bool = False,
    ) -> None:
        super().__init__()
        if mapping is not None and mapping.tp_size != 1:
            raise NotImplementedError(
                describe_error(
                    "A Linear split over GPUs is not built yet",
                    where="Linear(mapping=)",
                    expected="tp_size=1",
                    found=f"tp_size={mapping.tp_size}",
                    remedy="pass mapping=None, and run the model on one GPU",
                )
            )
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype or torch.get_default_dtype()
        self.quant_config = quant_config or QuantConfig()
        self.weights_loading_config = weights_loading_config or WeightsLoadingConfig()
        self.force_dynamic_quantization = force_dynamic_quantization
        self.quant_method: LinearMethodBase | None = None
        self._has_bias = bias
        self._recipe_method = _method_of(self.quant_config.quant_mode)
        if not skip_create_weights_in_init:
            self.create_weights()

    def create_weights(self) -> None:
        """Register the parameters and bind `quant_method`; a second call does nothing."""
        if self.quant_method is not None:
            return
        self._recipe_method.create_weights(self)
        if self._has_bias:
            self.bias = nn.Parameter(
                torch.empty(self.out_features, dtype=self.dtype), requires_grad=False
            )
        else:
            self.register_parameter("bias", None)
        self._recipe_method.check_placement(self)
        self.quant_method = self._recipe_method

    @property
    def has_fp8_qdq(self) -> bool:
        """Whether the recipe is FP8; also while a 16-bit step has bound another method."""
        return self.quant_config.quant_mode.has_fp8_qdq()

    @property
    def requires_unquantized_activation(self) -> bool:
        """Whether the bound method must be given an activation that nobody quantised."""
        return (self.quant_method or self._recipe_method).requires_unquantized_activation

    @property
    def inv_input_scale(self) -> torch.Tensor | None:
        """``1 / input_scale``, 0-d FP32; None where there is no calibrated scale."""
        input_scale = getattr(self, "input_scale", None)
        return None if input_scale is None else input_scale.reciprocal()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out_features]`` for an input ``[..., in_features]`` of any rank.

        The output has the module's dtype; on a 16-bit step, the input's.
        """
        return self.quant_method.apply(self, input, self.bias)

    def load_weights(self, weights: Sequence[WeightDict]) -> None:
        """Fill the parameters in place. Everything is checked before the first byte is changed.

        FP8 shards of a fused Linear with different ``weight_scale`` keep the largest: the other
        shards are rounded a second time, which is logged once. ``input_scale`` is the largest too.

        Args:
            weights: One dict, or for a fused Linear one for each of q, k, v or gate, up. Keys:
                ``weight``, ``bias`` if the module has one, and for FP8 ``weight_scale`` and
                ``input_scale`` (which a dynamic recipe checks and does not use).

        Raises:
            ValueError: missing or unknown keys, another number of dicts, a shape or dtype that does
                not fit, scales that are missing, not finite, not positive or not of one element, or
                a module still on the meta device.
            RuntimeError: the module has no weights yet.
        """
        if self.quant_method is None:
            raise RuntimeError(
                describe_error(
                    "Weights were loaded into a Linear that has no parameters yet",
                    where="Linear.load_weights",
                    expected="the parameters of create_weights()",
                    found="none, since skip_create_weights_in_init was set",
                    remedy="call create_weights() before load_weights()",
                )
            )
        self._check_keys(weights)
        # The recipe reads the weights, whichever method a denoising step has bound meanwhile.
        plan = self._recipe_method.plan_weights(self, weights)
        if self.bias is not None:
            for shard in weights:
                check_weight(shard["bias"], self.bias, "bias")
            plan["bias"] = [shard["bias"] for shard in weights]
        self._check_shard_rows(plan)
        self.post_load_weights()
        for name, tensors in plan.items():
            fill(getattr(self, name), tensors)

    def post_load_weights(self) -> None:
        """Check that the parameters stand on a device that can serve them.

        Raises:
            ValueError: a parameter is on the meta device, or FP8 weights are on CUDA with features
                that are not multiples of 16.
        """
        for name, parameter in self.named_parameters():
            check_materialized(parameter, name)
        self._recipe_method.check_placement(self)

    def extra_repr(self) -> str:
        """Return the facts that `repr` and error messages show."""
        algo = self.quant_config.quant_algo
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self._has_bias}, dtype={self.dtype}, quant_algo={algo and algo.value}"
        )

    def _check_keys(self, weights: Sequence[WeightDict]) -> None:
        names = self.weights_loading_config.weight_mode.shard_names
        if len(weights) != len(names):
            raise ValueError(
                describe_error(
                    "A Linear takes one weight dict for each of its shards",
                    where="Linear.load_weights",
                    expected=f"{len(names)} ({', '.join(names)})",
                    found=len(weights),
                    remedy=(
                        "pass one dict for each name, or build the Linear with the weight_mode "
                        "of these shards"
                    ),
                )
            )
        required = {"weight"} | ({"bias"} if self._has_bias else set())
        known = self._recipe_method.weight_keys | required
        for name, shard in zip(names, weights, strict=True):
            missing, unknown = required - shard.keys(), shard.keys() - known
            if missing or unknown:
                raise ValueError(
                    describe_error(
                        f"The {name} dict does not fit this Linear",
                        where="Linear.load_weights",
                        expected=f"keys {sorted(known)}",
                        found=f"missing {sorted(missing)}, unknown {sorted(unknown)}",
                        remedy="build the Linear with the recipe and bias that the checkpoint has",
                    )
                )

    def _check_shard_rows(self, plan: dict[str, list[torch.Tensor]]) -> None:
        for name in ("weight", "bias"):
            if name in plan:
                check_rows(plan[name], getattr(self, name), name)
        # k and v, or gate and up, have one shape; a sum that fits by accident is no proof of order.
        *_, second_last, last = (None, *plan["weight"])
        if second_last is not None and second_last.shape != last.shape:
            names = self.weights_loading_config.weight_mode.shard_names[-2:]
            raise ValueError(
                describe_error(
                    f"{' and '.join(names)} differ in shape",
                    where="Linear.load_weights",
                    expected="equal shapes",
                    found=f"{tuple(second_last.shape)} and {tuple(last.shape)}",
                    remedy=(
                        "pass the dicts in the order of the weight mode, from one layer of one "
                        "checkpoint"
                    ),
                )
            )


def linear_of(
    config: ModelConfig,
    owner: str | None,
    name: str,
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    dtype: torch.dtype | None,
    weight_mode: WeightMode = WeightMode.VANILLA,
    parts: Sequence[str] = (),
) -> Linear:
    """A Linear of a model, with the recipe that its configuration has for a module of this name.

    Args:
        config: Recipe, runtime flags and parallelism.
        owner: Full name of the module that it belongs to; None takes the recipe as it is, without
            its exclusions.
        name: Its name within the owner.
        in_features: As in Linear, like out_features, bias and dtype.
        weight_mode: Which shards fill the weight.
        parts: For a fused Linear, the names in the checkpoint of what it merges: a recipe excludes
            it by these.

    Raises:
        ValueError: a recipe that excludes some of the parts and not all.
        NotImplementedError: as Linear.
    """
    if owner is None:
        recipe = config.get_quant_config()
    elif parts:
        recipe = config.get_fused_quant_config(f"{owner}.{name}", parts)
    else:
        recipe = config.get_quant_config(f"{owner}.{name}")
    return Linear(
        in_features,
        out_features,
        bias=bias,
        dtype=dtype,
        mapping=config.mapping,
        quant_config=recipe,
        weights_loading_config=WeightsLoadingConfig(weight_mode=weight_mode),
        skip_create_weights_in_init=config.skip_create_weights_in_init,
        force_dynamic_quantization=config.force_dynamic_quantization,
    )


def _method_of(mode: QuantMode) -> LinearMethodBase:
    if mode.has_fp8_qdq():
        return FP8QDQLinearMethod()
    if mode.has_any_quant():
        raise NotImplementedError(
            describe_error(
                "A Linear of this quantisation algorithm is not built",
                where="Linear(quant_config=)",
                expected="FP8 or none",
                found="an algorithm whose weight layout is not verified",
                remedy="use an FP8 checkpoint with per-tensor scales, or a 16-bit one",
            )
        )
    return UnquantizedLinearMethod()
