# SPDX-License-Identifier: Apache-2.0
"""The backend "VANILLA": PyTorch's own scaled_dot_product_attention."""

import torch
from torch.nn import functional as F

from tensorrt_llm._torch.visual_gen.attention_backend.interface import KeyLengths, check_causal
from tensorrt_llm._utils import describe_error


class VanillaAttention:
    """``F.scaled_dot_product_attention``, which picks its kernel (flash, cuDNN, math) by itself.

    See ``AttentionBackend`` for the contract.
    """

    name = "VANILLA"
    reads_lengths_on_device = False
    quantizes = False

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        is_causal: bool = False,
        lengths: KeyLengths | None = None,
    ) -> torch.Tensor:
        """Attend; see ``AttentionBackend.forward``. Takes lengths that the host knows.

        Raises:
            ValueError: as there, or lengths without host numbers.
        """
        if is_causal:
            check_causal(self.name, q, k, lengths)
        if lengths is None:
            return _attend(q, k, v, is_causal)
        if lengths.host is None:
            raise ValueError(
                describe_error(
                    "PyTorch's attention takes key lengths from the host alone",
                    where=f"attention backend {self.name}",
                    expected="KeyLengths with host numbers",
                    found="lengths on the device alone",
                    remedy="pass the lengths, or choose the backend FA3",
                )
            )
        # One batch row at a time, so that padding never enters attention.
        rows = [
            _attend(q[i : i + 1], k[i : i + 1, :length], v[i : i + 1, :length], False)
            for i, length in enumerate(lengths.host)
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return attended.transpose(1, 2).contiguous()
