# SPDX-License-Identifier: Apache-2.0
"""Embedding: the token table of a tower, always in high precision."""

import torch
import torch.nn.functional as F
from torch import nn


class Embedding(nn.Module):
    """A table of vectors; parameter ``weight`` [num_embeddings, embedding_dim], uninitialised.

    Args:
        num_embeddings: Number of rows (the vocabulary).
        embedding_dim: Length of a vector.
        dtype: Dtype of the table; torch's default when None.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.weight = nn.Parameter(
            torch.empty(num_embeddings, embedding_dim, dtype=dtype), requires_grad=False
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[..., embedding_dim]`` for token ids ``[...]`` (int64 or int32)."""
        return F.embedding(input, self.weight)

    def extra_repr(self) -> str:
        """Return the facts that `repr` shows."""
        return f"{self.num_embeddings}, {self.embedding_dim}, dtype={self.weight.dtype}"
