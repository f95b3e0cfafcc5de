# SPDX-License-Identifier: Apache-2.0
"""Attention backends, chosen by name once, before the modules are built.

========= ====================================================================================
AUTO      FA3 where it is there and serves the model (sm_90, bfloat16), else VANILLA; logged
VANILLA   PyTorch's scaled_dot_product_attention, everywhere
FA3       FlashAttention-3 (package ``fa3-fwd``), Hopper
FA3_FP8   FA3 with E4M3 q, k and v on FP8 steps; a static FP8 checkpoint; never chosen by AUTO
========= ====================================================================================
"""

import torch

from tensorrt_llm._torch.visual_gen.attention_backend import fa3
from tensorrt_llm._torch.visual_gen.attention_backend.interface import (
    AttentionBackend,
    E4M3Operands,
    KeyLengths,
)
from tensorrt_llm._torch.visual_gen.attention_backend.vanilla import VanillaAttention
from tensorrt_llm._utils import describe_error
from tensorrt_llm.logger import logger

__all__ = [
    "AttentionBackend",
    "E4M3Operands",
    "KeyLengths",
    "VanillaAttention",
    "create_attention_backend",
    "resolve_attention_backend",
]

AUTO = "AUTO"
_BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend for backend in (VanillaAttention, fa3.FA3Attention, fa3.FA3FP8Attention)
}


def create_attention_backend(name: str) -> AttentionBackend:
    """Return the backend of this name; "AUTO" is VANILLA here, where no device is known.

    Raises:
        NotImplementedError: no backend has this name; there is no fallback to another one.
    """
    _check_name(name)
    return _BACKENDS[VanillaAttention.name if name == AUTO else name]()


def resolve_attention_backend(
    name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, static_fp8: bool
) -> str:
    """Decide at load which backend serves a model, and refuse what can't.

    Args:
        name: ``attention_config.backend``.
        device: Where the model will run.
        dtype: Dtype of its activations.
        head_dim: Width of its heads.
        static_fp8: Whether it is served as static FP8.

    Returns:
        A name other than "AUTO".

    Raises:
        NotImplementedError: an unknown name, or FP8 attention for a model without FP8 steps.
        ValueError: FA3 by name where it is missing or can't serve.
    """
    _check_name(name)
    if name == VanillaAttention.name:
        return name
    if name == fa3.FA3FP8Attention.name and not static_fp8:
        raise NotImplementedError(
            describe_error(
                "FP8 attention follows the FP8 steps of a static FP8 checkpoint",
                where=f"attention_config.backend {name!r}",
                expected="a checkpoint served as static FP8",
                found="one without calibrated FP8 weights",
                remedy='use the checkpoint\'s fp8 revision, or the backend "FA3"',
            )
        )
    try:
        fa3.check_available(device, dtype, head_dim, name == fa3.FA3FP8Attention.name)
    except fa3.FA3Unavailable as reason:
        if name != AUTO:
            raise ValueError(fa3.unavailable_message(name, reason)) from reason
        logger.info("Attention backend: VANILLA (AUTO; %s).", reason)
        return VanillaAttention.name
    if name == AUTO:
        logger.info("Attention backend: FA3 (AUTO).")
        return fa3.FA3Attention.name
    return name


def _check_name(name: str) -> None:
    names = sorted({AUTO, *_BACKENDS})
    if name not in names:
        raise NotImplementedError(
            describe_error(
                f"Attention backend {name!r} is not implemented",
                where="attention_config.backend",
                expected=f"one of {names}",
                found=repr(name),
                remedy='choose one of these, or leave it out for "AUTO"',
            )
        )
