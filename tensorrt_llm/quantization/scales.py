# SPDX-License-Identifier: Apache-2.0
"""The scales of an FP8 linear as checkpoints store them, in either of two dialects.

``weight_scale`` / ``input_scale`` is one, ModelOpt's own buffers the other (scale = amax / 448). A
file may carry both, which then have to agree. Importing this module imports torch.
"""

from collections.abc import Mapping

import torch

from tensorrt_llm._utils import describe_error

E4M3_MAX = 448.0
"""The largest finite float8_e4m3fn; a tensor's scale is its absolute maximum over this."""

SCALE_KEYS = ("weight_scale", "input_scale")
MODELOPT_KEYS = ("weight_quantizer._amax", "weight_quantizer._scale", "input_quantizer._amax")
"""ModelOpt's buffers of a per-tensor FP8 linear, relative to the linear's name."""

_SCALE_SHAPES = ((), (1,), (1, 1))


def check_scale(scale: torch.Tensor, name: str) -> torch.Tensor:
    """Return a checkpoint's per-tensor scale (or amax) as a 0-d FP32 tensor.

    Args:
        scale: Floating tensor of shape (), (1,) or (1, 1).
        name: Its key, for messages.

    Raises:
        ValueError: another shape (per-channel scales), another kind of dtype, or a value that is
            not finite and positive.
    """
    if tuple(scale.shape) not in _SCALE_SHAPES:
        raise ValueError(
            describe_error(
                "A per-tensor scale must have one element",
                where=name,
                expected="shape (), (1,) or (1, 1)",
                found=f"shape {tuple(scale.shape)}",
                remedy="per-channel and block scales are not supported; use per-tensor FP8",
            )
        )
    if scale.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            describe_error(
                "A scale has a dtype that scales don't have",
                where=name,
                expected="float32, bfloat16 or float16",
                found=scale.dtype,
            )
        )
    value = scale.detach().to(torch.float32).reshape(())
    if not (torch.isfinite(value) and value > 0):
        raise ValueError(
            describe_error(
                "A scale must be finite and positive",
                where=name,
                expected="a finite value above 0",
                found=value.item(),
                remedy="the file is damaged or was exported before calibration; export it again",
            )
        )
    return value


def resolve_fp8_scales(
    tensors: Mapping[str, torch.Tensor], name: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Read the two scales of one FP8 linear from either dialect.

    ``weight_scale`` / ``input_scale`` win; without them the scale is ``_amax.float() / 448``, and
    without an ``_amax`` it is ``_scale.float()``. All that are present must agree within one unit
    in the last place of the coarser dtype (ModelOpt's buffers are usually BF16).

    Args:
        tensors: Tensors of the linear by their key relative to its name; others than scales are
            ignored.
        name: The linear's name, for messages.

    Returns:
        ``(weight_scale, input_scale)``, each a 0-d FP32 tensor, or None where nothing tells it.

    Raises:
        ValueError: a scale is malformed (see `check_scale`), or two sources disagree.
    """
    return (
        _resolve(
            tensors, name, "weight_scale", "weight_quantizer._amax", "weight_quantizer._scale"
        ),
        _resolve(tensors, name, "input_scale", "input_quantizer._amax", None),
    )


def _resolve(
    tensors: Mapping[str, torch.Tensor], name: str, scale: str, amax: str, own_scale: str | None
) -> torch.Tensor | None:
    sources = {}  # key -> (the scale it tells, that scale's rounding step), best source first
    for key, divisor in ((scale, 1.0), (amax, E4M3_MAX), (own_scale, 1.0)):
        if key is not None and key in tensors:
            value = check_scale(tensors[key], f"{name}.{key}")
            dtype = torch.finfo(tensors[key].dtype)
            step = dtype.eps * max(value.item(), dtype.tiny)  # FP16 scales may be subnormal
            # A tensor as divisor: on CUDA, PyTorch divides by a number through its reciprocal.
            sources[key] = (value / torch.full_like(value, divisor), step / divisor)
    if not sources:
        return None
    (best_key, (best, best_step)), *others = sources.items()
    for key, (value, step) in others:
        if (value - best).abs() > max(step, best_step):
            raise ValueError(
                describe_error(
                    "Two scales of one tensor disagree",
                    where=f"{name}: {best_key} and {key}",
                    expected="the same scale (amax / 448) within the rounding of the coarser dtype",
                    found=f"{best.item():.9g} and {value.item():.9g}",
                    remedy="export the checkpoint again; one of its two dialects is stale",
                )
            )
    return best
