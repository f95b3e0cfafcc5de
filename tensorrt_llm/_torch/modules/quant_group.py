# SPDX-License-Identifier: Apache-2.0
"""Linears that read one activation quantise it once: q, k, v of attention and gate, up of an MLP.

Contract, the same for every group:

* ``calibrated`` is the static half: the recipe of every member is static FP8. It is decided when
  the owner is built, confirmed after loading by ``confirm_calibrated``, and kept by the owner.
* ``confirm_calibrated`` also makes sharing exact: one quantisation serves all members only if they
  were calibrated with one scale.
* ``accept_fp8`` is the per-call half. It looks only at what can change between two calls: the bound
  method of every member (a 16-bit step binds W8A16) and the presence of its scale.
* ``quantize_once`` is the quantisation. The members get one storage, and the result is bit-equal to
  each member quantising for itself.

The functions hold no state: the owner passes its members by name on every call, so a member that
was replaced or rebound is never missed. A group of one serves where an operation emits FP8 for a
single Linear (SwiGLU for the down projection).
"""

from collections.abc import Mapping

import torch

import tensorrt_llm._torch.custom_ops  # noqa: F401  (registers torch.ops.trtllm)
from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.modules.weight_copy import check_materialized
from tensorrt_llm._utils import describe_error

Group = Mapping[str, Linear]


def calibrated(members: Group) -> bool:
    """Whether every member's recipe is FP8 with calibrated, static activation scales."""
    return all(
        linear.has_fp8_qdq and not linear.force_dynamic_quantization for linear in members.values()
    )


def accept_fp8(members: Group) -> bool:
    """Whether every member of a calibrated group takes an FP8 activation in this very call."""
    return all(
        not linear.requires_unquantized_activation and linear.input_scale is not None
        for linear in members.values()
    )


def shared_scale(members: Group) -> torch.Tensor | None:
    """The input scale that the members of a confirmed group have in common, 0-d FP32.

    None where a member must have a 16-bit activation in this call.
    """
    return next(iter(members.values())).input_scale if accept_fp8(members) else None


def quantize_once(members: Group, x: torch.Tensor) -> torch.Tensor:
    """Quantise the activation for the whole group, with the scale that its members have in common.

    Args:
        members: A group for which ``calibrated`` and ``accept_fp8`` hold.
        x: The activation, any rank, 16 bit or FP32.

    Returns:
        float8_e4m3fn of the same shape.
    """
    first = next(iter(members.values()))
    return torch.ops.trtllm.quantize_e4m3_static(x, first.input_scale)


def confirm_calibrated(members: Group, where: str) -> bool:
    """Confirm the static half after loading, and refuse members with different activation scales.

    Reads one scalar a member from the device, so it belongs after loading, not into a forward. It
    looks at the scales alone: a 16-bit method bound at the moment changes nothing.

    Args:
        members: The group, with its weights loaded.
        where: Names the owner in the error.

    Returns:
        True if the members are ``calibrated``, have their scales, and these are equal. False if the
        recipe has no calibrated scales, or no member carries one.

    Raises:
        ValueError: "same calibrated input_scale", with every member's name and value.
    """
    if not calibrated(members):
        return False
    values = {}
    for name, linear in members.items():
        if linear.input_scale is not None:
            check_materialized(linear.input_scale, f"{where}, {name}.input_scale")
        values[name] = None if linear.input_scale is None else linear.input_scale.item()
    first, *others = values.values()
    if any(value != first for value in others):  # NaN, a scale never loaded, differs from itself
        raise ValueError(
            describe_error(
                "Projections that share one quantised activation need the same calibrated "
                "input_scale",
                where=where,
                expected="one loaded value for " + ", ".join(values),
                found=", ".join(f"{name}.input_scale = {value}" for name, value in values.items()),
                remedy="export the checkpoint with the input quantizers of the group tied",
            )
        )
    return first is not None
