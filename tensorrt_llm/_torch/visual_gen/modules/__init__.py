# SPDX-License-Identifier: Apache-2.0
"""Modules that the diffusion models share."""

from tensorrt_llm._torch.visual_gen.modules.attention import Attention, QKVMode

__all__ = ["Attention", "QKVMode"]
