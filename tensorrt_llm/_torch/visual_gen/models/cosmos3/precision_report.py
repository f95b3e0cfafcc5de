# SPDX-License-Identifier: Apache-2.0
"""What the linears and the attention of a tower really run, read from what is bound to them."""

import torch
from torch import nn

from tensorrt_llm._torch.modules.linear import (
    FP8QDQLinearMethod,
    Linear,
    LinearMethodBase,
    W8A16FP8LinearMethod,
)
from tensorrt_llm._torch.visual_gen.modules.attention import Attention

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def count_fp8_linears(root: nn.Module) -> int:
    """Linears under ``root`` whose weight is stored in FP8."""
    return sum(linear.weight.dtype == torch.float8_e4m3fn for linear in _linears(root))


def bound_precision(root: nn.Module) -> str:
    """Name the precision of the linears under ``root`` from their bound methods.

    Returns:
        "w8a8", "w8a16", "fp8_dynamic", "bf16", "fp16" or "fp32"; several joined by "+" where a
        recipe excludes some linears.
    """
    return "+".join(sorted({_name(linear, linear.quant_method) for linear in _linears(root)}))


def attention_precision(root: nn.Module, dtype: torch.dtype) -> str:
    """Name what the attention modules under ``root`` attend over in this step.

    Args:
        root: The tower.
        dtype: Of the model's activations.

    Returns:
        "fp8", "bf16", "fp16" or "fp32"; two joined by "+" where layers differ.
    """
    attentions = [module for module in root.modules() if isinstance(module, Attention)]
    names = {"fp8" if m.attends_in_fp8() else _DTYPE_NAMES[dtype] for m in attentions}
    return "+".join(sorted(names))


def _linears(root: nn.Module) -> list[Linear]:
    return [module for module in root.modules() if isinstance(module, Linear)]


def _name(linear: Linear, method: LinearMethodBase) -> str:
    if isinstance(method, W8A16FP8LinearMethod):
        return "w8a16"
    if isinstance(method, FP8QDQLinearMethod):
        return "fp8_dynamic" if linear.input_scale is None else "w8a8"
    return _DTYPE_NAMES[linear.weight.dtype]
