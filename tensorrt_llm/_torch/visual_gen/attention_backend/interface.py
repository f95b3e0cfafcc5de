# SPDX-License-Identifier: Apache-2.0
"""What the attention modules ask of a backend."""

from dataclasses import dataclass
from typing import Protocol

import torch

from tensorrt_llm._utils import describe_error


@dataclass(frozen=True, eq=False)
class KeyLengths:
    """How many rows of a padded key tensor are valid, for each batch row.

    Attributes:
        device: int32 [batch] on the keys' device.
        host: The same numbers, or None where the call must serve any lengths without reading them,
            as in a captured CUDA graph.
    """

    device: torch.Tensor
    host: tuple[int, ...] | None

    def plus(self, rows: int) -> "KeyLengths":
        """The lengths with ``rows`` more valid rows each."""
        host = None if self.host is None else tuple(length + rows for length in self.host)
        return KeyLengths(self.device + rows, host)


@dataclass(frozen=True, eq=False)
class E4M3Operands:
    """Queries, keys and values as FP8 codes with one scale per batch row and key head.

    Attributes:
        q: float8_e4m3fn [batch, q_len, heads, head_dim].
        k: float8_e4m3fn [batch, capacity, kv_heads, head_dim].
        v: Like k.
        q_descale: FP32 [batch, kv_heads]; a query head takes that of its key head.
        k_descale: FP32 [batch, kv_heads].
        v_descale: FP32 [batch, kv_heads].
        v_mean: FP32 [batch, kv_heads, head_dim], subtracted from v before it was quantised; the
            caller adds it to the attention's output.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    v_mean: torch.Tensor


class AttentionBackend(Protocol):
    """Scaled dot-product attention, softmax scale 1 / sqrt(head_dim), without a mask or state.

    Attributes:
        name: By which the options choose it.
        reads_lengths_on_device: Takes ``KeyLengths`` without host numbers.
        quantizes: Has ``forward_e4m3``, and wants it used on FP8 steps.
    """

    name: str
    reads_lengths_on_device: bool
    quantizes: bool

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        is_causal: bool = False,
        lengths: KeyLengths | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            q: [batch, q_len, heads, head_dim].
            k: [batch, kv_len, kv_heads, head_dim]; heads is a multiple of kv_heads, and each key
                head serves that many neighbouring query heads.
            v: Like k. All three share one dtype and device.
            is_causal: Query i sees the keys 0..i alone; needs kv_len == q_len and no ``lengths``.
            lengths: Valid rows of k and v; rows behind them are finite. None: all.

        Returns:
            [batch, q_len, heads, head_dim], contiguous, in the dtype of q.

        Raises:
            ValueError: is_causal with sequences of different length or with ``lengths``.
        """
        ...


def check_causal(name: str, q: torch.Tensor, k: torch.Tensor, lengths: KeyLengths | None) -> None:
    """Refuse causal attention over sequences of different length.

    Raises:
        ValueError: it is.
    """
    # Libraries differ in where they align the mask then: top left, or bottom right for a cache.
    if q.shape[1] != k.shape[1] or lengths is not None:
        raise ValueError(
            describe_error(
                "Causal attention needs as many keys as queries",
                where=f"attention backend {name}",
                expected=f"{q.shape[1]} keys, all of them valid",
                found=f"{k.shape[1]} keys" + ("" if lengths is None else " with lengths"),
                remedy="pass one sequence as q, k and v, or is_causal=False",
            )
        )
