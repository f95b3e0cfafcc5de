# SPDX-License-Identifier: Apache-2.0
"""The backend "VANILLA": PyTorch's own scaled_dot_product_attention."""

import torch
from torch.nn import functional as F

from tensorrt_llm._utils import describe_error


class VanillaAttention:
    """``F.scaled_dot_product_attention``, which picks its kernel (flash, cuDNN, math) by itself.

    See ``AttentionBackend`` for the contract.
    """

    name = "VANILLA"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
    ) -> torch.Tensor:
        """Attend; see ``AttentionBackend.forward``."""
        if is_causal and q.shape[-2] != k.shape[-2]:
            # PyTorch would align the mask at the top left, a decoder's cache at the bottom right.
            raise ValueError(
                describe_error(
                    "Causal attention needs as many keys as queries",
                    where="attention backend VANILLA",
                    expected=f"{q.shape[-2]} keys",
                    found=f"{k.shape[-2]} keys",
                    remedy="pass one sequence as q, k and v, or is_causal=False",
                )
            )
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
