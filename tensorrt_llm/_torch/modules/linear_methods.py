# SPDX-License-Identifier: Apache-2.0
"""What a Linear does with its weights: high precision, FP8 x FP8, or FP8 weights in 16 bits.

A method is stateless: the parameters live on the module, so that two methods can be exchanged on
one Linear between denoising steps without touching a tensor. Both FP8 methods create and read the
same parameters; they differ in `apply` alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm._torch.custom_ops.torch_custom_ops import scaled_mm_e4m3_unchecked
from tensorrt_llm._torch.modules.weight_copy import check_weight
from tensorrt_llm._utils import describe_error
from tensorrt_llm.logger import logger
from tensorrt_llm.quantization.scales import check_scale

if TYPE_CHECKING:
    from tensorrt_llm._torch.modules.linear import Linear

FP8 = torch.float8_e4m3fn
WeightDict = Mapping[str, torch.Tensor]

CUDA_FP8_MULTIPLE = 16
"""`torch._scaled_mm` on CUDA takes E4M3 matrices whose in and out features are multiples of 16."""


class LinearMethodBase(ABC):
    """One way to hold and apply the weights of a Linear."""

    requires_unquantized_activation: bool
    """Whether `apply` must be given a 16-bit (or FP32) activation: no sharing above the linear."""

    weight_keys: frozenset[str]
    """Keys that a weight dict of this method may have, beside ``bias``."""

    @abstractmethod
    def create_weights(self, module: "Linear") -> None:
        """Register the parameters of this method on the module, uninitialised."""

    @abstractmethod
    def plan_weights(
        self, module: "Linear", shards: Sequence[WeightDict]
    ) -> dict[str, list[torch.Tensor]]:
        """Check the shards and return, for each parameter, the tensors that fill it along dim 0.

        Nothing is changed; a shard that does not fit raises ValueError.
        """

    @abstractmethod
    def apply(
        self, module: "Linear", input: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``[..., out_features]`` for an input ``[..., in_features]``."""

    def check_placement(self, module: "Linear") -> None:  # noqa: B027 - optional for a method
        """Raise ValueError where the module's device cannot serve its shape."""


class UnquantizedLinearMethod(LinearMethodBase):
    """``F.linear`` with weights in the module's dtype."""

    requires_unquantized_activation = True
    weight_keys = frozenset({"weight"})

    def create_weights(self, module: "Linear") -> None:
        module.weight = _frozen((module.out_features, module.in_features), module.dtype)

    def plan_weights(
        self, module: "Linear", shards: Sequence[WeightDict]
    ) -> dict[str, list[torch.Tensor]]:
        for shard in shards:
            check_weight(shard["weight"], module.weight, "weight")
        return {"weight": [shard["weight"] for shard in shards]}

    def apply(
        self, module: "Linear", input: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return F.linear(input, module.weight, bias)


class _FP8WeightMethod(LinearMethodBase):
    """E4M3 weights with one scale, as both FP8 methods hold them.

    ``weight`` [out, in] float8_e4m3fn, ``weight_scale`` 0-d FP32, ``input_scale`` 0-d FP32 or, for
    a recipe with dynamic activations, None.
    """

    weight_keys = frozenset({"weight", "weight_scale", "input_scale"})

    def create_weights(self, module: "Linear") -> None:
        module.weight = _frozen((module.out_features, module.in_features), FP8)
        module.weight_scale = _frozen((), torch.float32)
        # NaN until loaded: a scale that was never read must not pass for one that happens to be 1.
        module.weight_scale.fill_(float("nan"))
        if module.force_dynamic_quantization:
            module.register_parameter("input_scale", None)
        else:
            module.input_scale = _frozen((), torch.float32)
            module.input_scale.fill_(float("nan"))

    def check_placement(self, module: "Linear") -> None:
        sizes = (module.in_features, module.out_features)
        if module.weight.is_cuda and any(size % CUDA_FP8_MULTIPLE for size in sizes):
            raise ValueError(
                describe_error(
                    "An FP8 Linear on CUDA has features that the FP8 GEMM does not take",
                    where=f"Linear(in_features={sizes[0]}, out_features={sizes[1]})",
                    expected=f"in_features and out_features multiples of {CUDA_FP8_MULTIPLE}",
                    found=f"{sizes[0]} and {sizes[1]}",
                    remedy="add this module to the recipe's ignore list, or load on the CPU",
                )
            )

    def plan_weights(
        self, module: "Linear", shards: Sequence[WeightDict]
    ) -> dict[str, list[torch.Tensor]]:
        weights = [shard["weight"] for shard in shards]
        for weight in weights:
            check_weight(weight, module.weight, "weight")
        scales = [_required_scale(shard, "weight_scale") for shard in shards]
        plan = {}
        if module.input_scale is not None:
            input_scales = [_required_scale(shard, "input_scale") for shard in shards]
            plan["input_scale"] = [torch.stack(input_scales).amax()]
        else:
            # Dynamic activations replace a calibrated scale; a file that has one is no error, a
            # malformed one is.
            for shard in shards:
                if "input_scale" in shard:
                    check_scale(shard["input_scale"], "input_scale")
        fused_scale = torch.stack(scales).amax()
        plan["weight_scale"] = [fused_scale]
        plan["weight"] = [
            _with_scale(weight, scale, fused_scale)
            for weight, scale in zip(weights, scales, strict=True)
        ]
        return plan


class FP8QDQLinearMethod(_FP8WeightMethod):
    """W8A8: E4M3 activations times E4M3 weights, FP32 accumulation, one rounding to module.dtype.

    A 16-bit or FP32 input is quantised with ``input_scale``, or with a scale of its own where the
    recipe is dynamic; an FP8 input is taken to be quantised with ``input_scale`` already.
    """

    requires_unquantized_activation = False

    def apply(
        self, module: "Linear", input: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        # The last dimension is kept as it is, so that a wrong in_features reaches the op's check.
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        scale = module.input_scale
        if rows.dtype == FP8:
            if scale is None:
                raise ValueError(
                    describe_error(
                        "An FP8 activation came without a scale",
                        where=repr(module),
                        expected="a 16-bit activation: this recipe quantises activations itself",
                        found="a float8_e4m3fn activation and no calibrated input_scale",
                        remedy="pass the 16-bit activation, or give the recipe a calibrated "
                        "input_scale",
                    )
                )
        elif scale is None:
            rows, scale = torch.ops.trtllm.quantize_e4m3_dynamic(rows)
        else:
            rows = torch.ops.trtllm.quantize_e4m3_static(rows, scale)
        # A loaded Linear has passed the op's checks already. They take host time, seven times a
        # layer, which a picture's short kernels can't hide.
        unchecked = rows.is_cuda and rows.shape[0] > 0
        multiply = scaled_mm_e4m3_unchecked if unchecked else _scaled_mm_op
        output = multiply(rows, module.weight, scale, module.weight_scale, module.dtype)
        if bias is not None:
            output = output + bias
        return output.reshape(*input.shape[:-1], module.out_features)


_scaled_mm_op = torch.ops.trtllm.scaled_mm_e4m3


class W8A16FP8LinearMethod(_FP8WeightMethod):
    """W8A16: the same E4M3 weights, dequantised to the activation's 16-bit dtype for each call."""

    requires_unquantized_activation = True

    def apply(
        self, module: "Linear", input: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``F.linear(input, q.to(dtype) * weight_scale.to(dtype), bias)`` in input.dtype.

        Raises:
            RuntimeError: the activation is not BF16 or FP16, or the weight is not E4M3.
        """
        if input.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError(
                describe_error(
                    "This step needs a 16-bit activation",
                    where=repr(module),
                    expected="bfloat16 or float16",
                    found=input.dtype,
                    remedy="hand the linear its activation unquantised on 16-bit steps",
                )
            )
        if module.weight.dtype != FP8:
            raise RuntimeError(
                describe_error(
                    "The W8A16 method needs float8_e4m3fn weights",
                    where=repr(module),
                    expected="float8_e4m3fn",
                    found=module.weight.dtype,
                    remedy="bind it to linears of a static FP8 recipe only",
                )
            )
        return torch.ops.trtllm.linear_w8a16(input, module.weight, module.weight_scale, bias)


def _frozen(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _required_scale(shard: WeightDict, key: str) -> torch.Tensor:
    if key not in shard:
        raise ValueError(
            describe_error(
                f"An FP8 weight came without {key}",
                where="Linear.load_weights",
                expected=f"{key} beside the float8_e4m3fn weight",
                found=f"keys {sorted(shard)}",
                remedy=(
                    "load a checkpoint with its scales, or (for input_scale) build the Linear "
                    "with force_dynamic_quantization=True"
                ),
            )
        )
    return check_scale(shard[key], key)


def _with_scale(
    weight: torch.Tensor, scale: torch.Tensor, fused_scale: torch.Tensor
) -> torch.Tensor:
    if keeps_codes(scale, fused_scale):
        return weight
    device = weight.device
    return rescale_e4m3(weight, scale.to(device), fused_scale.to(device))


def keeps_codes(scale: torch.Tensor, fused_scale: torch.Tensor) -> bool:
    """Whether a shard keeps its bytes in a fused Linear; logs once where one does not.

    Args:
        scale: The shard's own, 0-d FP32 on the CPU.
        fused_scale: The largest of its Linear.
    """
    if torch.equal(scale, fused_scale):
        return True
    logger.warning_once(
        "FP8 shards with different scales were fused into one Linear: the shards below the largest "
        "scale were rounded a second time. Load them into separate Linears to keep their bytes.",
        key="fused FP8 shards rounded twice",
    )
    return False


def rescale_e4m3(
    weight: torch.Tensor, scale: torch.Tensor, fused_scale: torch.Tensor
) -> torch.Tensor:
    """Return E4M3 codes that mean with ``fused_scale`` what these mean with ``scale``, rounded."""
    return torch.ops.trtllm.quantize_e4m3_static(weight.float() * scale, fused_scale)
