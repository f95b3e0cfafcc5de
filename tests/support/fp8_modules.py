# SPDX-License-Identifier: Apache-2.0
"""Checkpoint tensors for single modules, the FP8 formulas in plain torch, and hooks on linears.

The formulas are those of interfaces.md, written again without the product's ops.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from tensorrt_llm._torch.modules.linear import Linear, W8A16FP8LinearMethod

FP8 = torch.float8_e4m3fn


def bits(x: torch.Tensor) -> torch.Tensor:
    """An integer view, since FP8 tensors can't be compared and NaN differs from NaN."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_bit_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    different = (bits(found) != bits(expected)).sum().item()
    assert different == 0, f"{different} of {found.numel()} elements differ in their bits"


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() / scale).clamp(-448, 448).to(FP8)


def shard(
    out_features: int,
    in_features: int,
    *,
    seed: int,
    gain: float = 1.0,
    input_scale: float | None = None,
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """The tensors of one projection: FP8 with ``input_scale``, else in ``dtype``."""
    generator = torch.Generator(device).manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator, device=device) * gain
    weight /= in_features**0.5
    tensors = {"weight": weight.to(dtype)}
    if input_scale is not None:
        scale = weight.abs().amax() / 448
        tensors["weight"] = quantize(weight, scale)
        tensors["weight_scale"] = scale
        tensors["input_scale"] = torch.tensor(input_scale, device=device)
    if bias:
        tensors["bias"] = torch.randn(out_features, generator=generator, device=device).to(dtype)
    return tensors


def w8a8(x: torch.Tensor, tensors: dict, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """x is FP8 already, or is quantised with the shard's own scale."""
    q = x if x.dtype == FP8 else quantize(x, tensors["input_scale"])
    y = F.linear(q.float(), tensors["weight"].float())
    y = (y * (tensors["input_scale"] * tensors["weight_scale"])).to(dtype)
    return y + tensors["bias"] if "bias" in tensors else y


def w8a16(x: torch.Tensor, tensors: dict) -> torch.Tensor:
    weight = tensors["weight"].to(x.dtype) * tensors["weight_scale"].to(x.dtype)
    return F.linear(x, weight, tensors.get("bias"))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error, in FP64; NaN stays NaN and fails every comparison."""
    found, expected = found.double(), expected.double()
    return ((found - expected).norm() / expected.norm()).item()


@contextmanager
def bound_w8a16(*members: Linear):
    """Put linears on a 16-bit step by hand, without a controller."""
    before = [linear.quant_method for linear in members]
    for linear in members:
        linear.quant_method = W8A16FP8LinearMethod()
    try:
        yield
    finally:
        for linear, method in zip(members, before, strict=True):
            linear.quant_method = method


@dataclass
class SeenInputs:
    """What entered each Linear: its name in the module, and the tensor (kept alive, so that two
    live tensors never show one address by accident)."""

    inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: x.dtype for name, x in self.inputs.items()}

    def one_storage(self, *names: str) -> bool:
        return len({self.inputs[name].data_ptr() for name in names}) == 1


@contextmanager
def seen_inputs(module: nn.Module):
    """Record the activation that enters every Linear under the module."""
    seen = SeenInputs()

    def hook_of(name):
        def hook(_, args):
            seen.inputs[name] = args[0]

        return hook

    handles = [
        linear.register_forward_pre_hook(hook_of(name))
        for name, linear in module.named_modules()
        if isinstance(linear, Linear)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
