# SPDX-License-Identifier: Apache-2.0
"""Attention backends, chosen by name once, when the modules are built."""

from tensorrt_llm._torch.visual_gen.attention_backend.interface import AttentionBackend
from tensorrt_llm._torch.visual_gen.attention_backend.vanilla import VanillaAttention
from tensorrt_llm._utils import describe_error

__all__ = ["AttentionBackend", "VanillaAttention", "create_attention_backend"]

_BACKENDS: dict[str, type[AttentionBackend]] = {VanillaAttention.name: VanillaAttention}


def create_attention_backend(name: str) -> AttentionBackend:
    """Return the backend of this name.

    Raises:
        NotImplementedError: no backend has this name; there is no fallback to another one.
    """
    if name not in _BACKENDS:
        raise NotImplementedError(
            describe_error(
                f"Attention backend {name!r} is not implemented",
                where="attention_config.backend",
                expected=f"one of {sorted(_BACKENDS)}",
                found=repr(name),
                remedy="choose one of these backends",
            )
        )
    return _BACKENDS[name]()
