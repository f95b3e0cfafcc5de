# SPDX-License-Identifier: Apache-2.0
"""The scales of an FP8 linear as checkpoints store them, in either of two dialects.

``weight_scale`` / ``input_scale`` is one, ModelOpt's own buffers the other (scale = amax / 448). A
file may carry both, which then have to agree. Importing this module imports torch.
"""

import math
from collections.abc import Mapping

import torch

from tensorrt_llm._utils import describe_error

E4M3_MAX = 448.0
"""The largest finite float8_e4m3fn; a tensor's scale is its absolute maximum over this."""

SCALE_SOURCES = {
    "weight_scale": ("weight_scale", "weight_quantizer._amax", "weight_quantizer._scale"),
    "input_scale": ("input_scale", "input_quantizer._amax"),
}
"""Each scale's keys in a file, relative to the linear's name; the first that is there is read."""

SCALE_KEYS = tuple(SCALE_SOURCES)
MODELOPT_KEYS = tuple(key for keys in SCALE_SOURCES.values() for key in keys[1:])
"""ModelOpt's buffers of a per-tensor FP8 linear, relative to the linear's name."""

_SCALE_SHAPES = ((), (1,), (1, 1))
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ScaleError(ValueError):
    """A scale that can't be used.

    Attributes:
        name: The key or keys concerned.
        fault: What is wrong with it in one clause, for messages that list many.
    """

    def __init__(self, what: str, name: str, expected: str, found: object, remedy: str) -> None:
        message = describe_error(what, where=name, expected=expected, found=found, remedy=remedy)
        super().__init__(message)
        self.name = name
        self.fault = f"{what}, {expected} expected, {found} found"


def check_scale(scale: torch.Tensor, name: str) -> torch.Tensor:
    """Return a checkpoint's per-tensor scale (or amax) as a 0-d FP32 tensor.

    Args:
        scale: FP32, BF16 or FP16 tensor of shape (), (1,) or (1, 1).
        name: Its key, for messages.

    Raises:
        ScaleError: another shape (per-channel or block scales), another dtype, or a value that is
            not finite and positive.
    """
    shape = tuple(scale.shape)
    if shape not in _SCALE_SHAPES:
        raise ScaleError(
            "A per-tensor scale must have one element",
            name,
            "shape (), (1,) or (1, 1)",
            f"shape {shape}{_layout(shape)}",
            "per-channel and block scales are not supported; use per-tensor FP8",
        )
    if scale.dtype not in _SCALE_DTYPES:
        raise ScaleError(
            "A scale has a dtype that scales don't have",
            name,
            "float32, bfloat16 or float16",
            scale.dtype,
            "export the checkpoint again with per-tensor FP8 scales",
        )
    return _positive(scale.detach().to(torch.float32).reshape(()), name)


def resolve_fp8_scale(
    tensors: Mapping[str, torch.Tensor], name: str, scale: str
) -> torch.Tensor | None:
    """Read one scale of one FP8 linear from whatever tells it.

    ``weight_scale`` / ``input_scale`` wins; without it the scale is ``_amax.float() / 448``, and
    without an ``_amax`` it is ``_scale.float()``. All that are present must agree within one unit
    in the last place of the coarser dtype (ModelOpt's buffers are usually BF16).

    Args:
        tensors: Tensors of the linear by their key relative to its name; others than the scale's
            are ignored.
        name: The linear's name, for messages.
        scale: "weight_scale" or "input_scale".

    Returns:
        A 0-d FP32 tensor, or None where nothing tells it.

    Raises:
        ScaleError: a source is malformed (see `check_scale`), or two sources disagree.
    """
    sources = {}  # key -> (the scale it tells, that scale's rounding step), best source first
    for key in SCALE_SOURCES[scale]:
        if key not in tensors:
            continue
        where = f"{name}.{key}"
        value = check_scale(tensors[key], where)
        dtype = torch.finfo(tensors[key].dtype)
        step = dtype.eps * max(value.item(), dtype.tiny)  # FP16 scales may be subnormal
        divisor = E4M3_MAX if key.endswith("_amax") else 1.0
        # A tensor as divisor: on CUDA, PyTorch divides by a number through its reciprocal.
        told = _positive(value / torch.full_like(value, divisor), where)
        sources[key] = (told, step / divisor)
    if not sources:
        return None
    (best_key, (best, best_step)), *others = sources.items()
    for key, (value, step) in others:
        if (value - best).abs() > max(step, best_step):
            raise ScaleError(
                "Two scales of one tensor disagree",
                f"{name}.{best_key} and {name}.{key}",
                "the same scale (amax / 448) within the rounding of the coarser dtype",
                f"{best.item():.9g} and {value.item():.9g}",
                "export the checkpoint again; one of its two dialects is stale",
            )
    return best


def resolve_fp8_scales(
    tensors: Mapping[str, torch.Tensor], name: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Read both scales of one FP8 linear: `resolve_fp8_scale` for each.

    Returns:
        ``(weight_scale, input_scale)``.
    """
    weight_scale, input_scale = (resolve_fp8_scale(tensors, name, scale) for scale in SCALE_KEYS)
    return weight_scale, input_scale


def _positive(value: torch.Tensor, name: str) -> torch.Tensor:
    number = value.item()  # once: a load asks 7,560 times, and on CUDA each answer is waited for
    if not (math.isfinite(number) and number > 0):
        raise ScaleError(
            "A scale must be finite and positive",
            name,
            "a finite value above 0",
            number,
            "the file is damaged or was exported before calibration; export it again",
        )
    return value


def _layout(shape: tuple[int, ...]) -> str:
    """Say what scales of several elements probably are."""
    long_axes = sum(size > 1 for size in shape)
    if long_axes == 0 or 0 in shape:
        return ""
    return ", per-channel scales" if long_axes == 1 else ", block scales"
