# SPDX-License-Identifier: Apache-2.0
"""Checks and copies that every module shares when checkpoint tensors fill its parameters."""

from collections.abc import Sequence

import torch

from tensorrt_llm._utils import describe_error

HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


def check_weight(tensor: torch.Tensor, parameter: torch.Tensor, name: str) -> None:
    """Check that a checkpoint tensor may fill (a row block of) a parameter.

    The dtypes must be equal, or both among FP32, BF16 and FP16: a checkpoint's BF16 weights may
    fill an FP32 module. The shapes must be equal after dim 0; rows are checked by `check_rows`.

    Raises:
        ValueError: dtype, rank or a trailing dimension differs.
    """
    both_high = tensor.dtype in HIGH_PRECISION and parameter.dtype in HIGH_PRECISION
    if tensor.dtype != parameter.dtype and not both_high:
        raise ValueError(
            describe_error(
                "A weight has another dtype than its module was built for",
                where=name,
                expected=parameter.dtype,
                found=tensor.dtype,
                remedy=(
                    "build the model with the checkpoint's own quantization_config, or load a "
                    "checkpoint of that precision"
                ),
            )
        )
    if tensor.dim() != parameter.dim() or tensor.shape[1:] != parameter.shape[1:]:
        _refuse_shape(tuple(tensor.shape), parameter, name)


def check_rows(tensors: Sequence[torch.Tensor], parameter: torch.Tensor, name: str) -> None:
    """Check that the tensors together have as many rows as the parameter they fill."""
    if sum(tensor.shape[0] for tensor in tensors) != parameter.shape[0]:
        _refuse_shape(" + ".join(str(tuple(t.shape)) for t in tensors), parameter, name)


def check_materialized(parameter: torch.Tensor, name: str) -> None:
    """Refuse to fill a parameter on the meta device, where a copy would be lost without a word."""
    if parameter.is_meta:
        raise ValueError(
            describe_error(
                "Weights were loaded into a module on the meta device",
                where=name,
                expected="a parameter on CPU or CUDA",
                found="a meta parameter",
                remedy="call module.to_empty(device=...) before loading",
            )
        )


@torch.no_grad()
def fill(parameter: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy checked tensors into a parameter in place, one after another along dim 0."""
    if parameter.dim() == 0:
        parameter.copy_(tensors[0])
        return
    start = 0
    for tensor in tensors:
        parameter[start : start + tensor.shape[0]].copy_(tensor)
        start += tensor.shape[0]


def _refuse_shape(found: object, parameter: torch.Tensor, name: str) -> None:
    raise ValueError(
        describe_error(
            "A weight has another shape than its module",
            where=name,
            expected=f"shape {tuple(parameter.shape)}",
            found=f"shape {found}",
            remedy="take weights and config.json from one checkpoint and one revision",
        )
    )
