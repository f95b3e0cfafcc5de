# SPDX-License-Identifier: Apache-2.0
"""What the attention modules ask of a backend."""

from typing import Protocol

import torch


class AttentionBackend(Protocol):
    """Scaled dot-product attention over whole sequences, without a mask and without state."""

    name: str

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
    ) -> torch.Tensor:
        """Attend, with the softmax scale 1 / sqrt(head_dim).

        Args:
            q: [batch, heads, q_len, head_dim].
            k: [batch, kv_heads, kv_len, head_dim]; heads is a multiple of kv_heads, and each key
                head serves that many neighbouring query heads.
            v: Like k. All three share one dtype and device.
            is_causal: Query i sees the keys 0..i alone; needs kv_len == q_len.

        Returns:
            [batch, heads, q_len, head_dim] in the dtype of q.

        Raises:
            ValueError: is_causal with sequences of different length.
        """
        ...
