# SPDX-License-Identifier: Apache-2.0
"""The backends "FA3" and "FA3_FP8": FlashAttention-3 from the PyPI package ``fa3-fwd``.

The package's operator is called directly, with the output as an argument: its Python function takes
three times the host's time a call, and can't write the branches into one tensor (fa3-fwd 0.0.3).
Where the host knows the lengths each branch is one call over its own keys; a captured graph, and a
short eager step, make one call over all branches that reads the lengths on the device. Both give
the same bits.
"""

import functools
import importlib
from types import ModuleType

import torch

from tensorrt_llm._torch.visual_gen.attention_backend.interface import (
    E4M3Operands,
    KeyLengths,
    check_causal,
)
from tensorrt_llm._utils import describe_error, get_sm_version

PACKAGE = "fa3-fwd"
_INTERFACE = "fa3_fwd_interface"
_HEAD_DIM_MULTIPLE = {False: 8, True: 16}  # by "FP8 operands"
_MAX_HEAD_DIM = 256
_NO_DESCALES = (None, None, None)
# Query rows up to which the branches share one call: a call costs the host 40 us, as long as the
# kernel of a picture's branch takes.
_ONE_CALL_ROWS = 4_096


class FA3Unavailable(Exception):
    """Why FlashAttention-3 can't serve here: ``what``, ``expected``, ``found``, ``remedy``."""

    def __init__(self, what: str, expected: object, found: object, remedy: str) -> None:
        super().__init__(f"{what} (found: {found})")
        self.what, self.expected, self.found, self.remedy = what, expected, found, remedy


def check_available(
    device: torch.device, dtype: torch.dtype, head_dim: int, quantizes: bool
) -> None:
    """Say whether FA3 serves this model on this device.

    Raises:
        FA3Unavailable: it does not.
    """
    if device.type != "cuda":
        raise FA3Unavailable(
            "FlashAttention-3 runs on CUDA alone",
            "a CUDA device",
            device.type,
            'use the backend "VANILLA"',
        )
    sm_version = get_sm_version(device.index)
    if sm_version != 90:
        raise FA3Unavailable(
            "FlashAttention-3 runs on Hopper GPUs alone",
            "compute capability 9.0 (sm_90)",
            f"sm_{sm_version}",
            'use the backend "VANILLA"',
        )
    if dtype != torch.bfloat16:
        # The wheel is built without FP16.
        raise FA3Unavailable(
            "FlashAttention-3 takes bfloat16 here",
            "a bfloat16 model",
            dtype,
            'use the backend "VANILLA"',
        )
    multiple = _HEAD_DIM_MULTIPLE[quantizes]
    if head_dim % multiple or head_dim > _MAX_HEAD_DIM:
        raise FA3Unavailable(
            "FlashAttention-3 does not take this head_dim",
            f"a multiple of {multiple} up to {_MAX_HEAD_DIM}",
            head_dim,
            'use the backend "VANILLA"',
        )
    try:
        _interface()
    except (ImportError, OSError) as error:
        raise FA3Unavailable(
            f"The package {PACKAGE} is not installed, or does not load",
            f"an importable {_INTERFACE}",
            f"{type(error).__name__}: {error}",
            'install the extra: pip install "tensorrt-llm-cosmos3[hopper]"',
        ) from error


@functools.cache
def _interface() -> ModuleType:
    return importlib.import_module(_INTERFACE)


class FA3Attention:
    """FlashAttention-3 on 16-bit operands. See ``AttentionBackend`` for the contract."""

    name = "FA3"
    reads_lengths_on_device = True
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
        """Attend; see ``AttentionBackend.forward``."""
        if is_causal:
            check_causal(self.name, q, k, lengths)
        return _attend(q, k, v, _NO_DESCALES, is_causal, lengths)


class FA3FP8Attention(FA3Attention):
    """FA3 that takes E4M3 operands on FP8 steps, and 16-bit ones on the others.

    Both products are FP8; the probabilities are rounded to E4M3 too. Sums of many values of one
    sign lose accuracy, so operands come without their mean. Error against BF16 attention:
    benchmarks/results/attention_error_h200.json.
    """

    name = "FA3_FP8"
    quantizes = True

    def forward_e4m3(
        self, operands: E4M3Operands, *, lengths: KeyLengths | None = None
    ) -> torch.Tensor:
        """Attend over codes; returns BF16 [batch, q_len, heads, head_dim] without v_mean."""
        descales = (operands.q_descale, operands.k_descale, operands.v_descale)
        return _attend(operands.q, operands.k, operands.v, descales, False, lengths)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: tuple,
    is_causal: bool,
    lengths: KeyLengths | None,
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    together = q.shape[0] > 1 and q.shape[0] * q.shape[1] <= _ONE_CALL_ROWS
    if lengths is None or lengths.host is None or together:
        used = None if lengths is None else lengths.device
        _call(q, k, v, out, used, descales, is_causal)
        return out
    for i, length in enumerate(lengths.host):
        row = slice(i, i + 1)
        row_descales = tuple(None if d is None else d[row] for d in descales)
        _call(q[row], k[row, :length], v[row, :length], out[row], None, row_descales, is_causal)
    return out


def _call(q, k, v, out, used, descales, is_causal) -> None:
    """One call of ``fa3_fwd::fwd`` with everything that generation does not use left out."""
    _interface().fa3_fwd_cuda.fwd(
        q,
        k,
        v,
        None,  # k_new
        None,  # v_new
        None,  # qv
        out,
        None,  # cu_seqlens_q
        None,  # cu_seqlens_k
        None,  # cu_seqlens_k_new
        None,  # seqused_q
        used,  # seqused_k
        None,  # max_seqlen_q
        None,  # max_seqlen_k
        None,  # page_table
        None,  # kv_batch_idx
        None,  # leftpad_k
        None,  # rotary_cos
        None,  # rotary_sin
        None,  # seqlens_rotary
        *descales,
        q.shape[-1] ** -0.5,
        is_causal,
        -1,  # window_size_left
        -1,  # window_size_right
        0,  # attention_chunk
        0.0,  # softcap
        True,  # rotary_interleaved
        None,  # scheduler_metadata
        1,  # num_splits
        None,  # pack_gqa: its own choice, which measures best or equal
        0,  # sm_margin
    )


def unavailable_message(name: str, reason: FA3Unavailable) -> str:
    """The error of a caller who asked for FA3 by name."""
    return describe_error(
        reason.what,
        where=f"attention_config.backend {name!r}",
        expected=reason.expected,
        found=reason.found,
        remedy=reason.remedy,
    )
