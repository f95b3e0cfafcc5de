# SPDX-License-Identifier: Apache-2.0
"""RMSNorm as the models of the silu family round it."""

import torch
from torch import nn

from tensorrt_llm._torch.custom_ops.norm_ops import rms_norm_formula


class RMSNorm(nn.Module):
    """``(x * rsqrt(mean(x^2) + eps))`` in FP32, cast to the weight's dtype, times the weight.

    The cast comes before the product with the weight: the order in which the checkpoints were
    trained, and bit-equal on CPU to diffusers' RMSNorm.

    Args:
        hidden_size: Size of the normalised last dimension.
        eps: Added to the mean square.
        dtype: Dtype of the parameter ``weight`` [hidden_size] and of the output; torch's default
            when None.
        device: Device of the parameter; torch's default when None.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(hidden_size, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., hidden_size]``; the result has the weight's dtype."""
        return rms_norm_formula(hidden_states, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Return the facts that `repr` shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}, dtype={self.weight.dtype}"
