# SPDX-License-Identifier: Apache-2.0
"""What a request fixes once: each prompt branch's understanding K/V and its position tables.

The understanding tower depends neither on the step nor on the latents, so a branch is computed
once. A call is recognised by the identity of its tensors, which costs no device read; tensors not
seen before are read once (one synchronisation) and their rows are looked up by content, so that a
conditional branch alone still finds what the guided pair has computed.

Branches are a function of the weights and the tokens alone, so the last few outlive their request:
the next request with the same negative prompt does not compute it again. Everything else goes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tensorrt_llm._torch.visual_gen.attention_backend import KeyLengths
from tensorrt_llm._utils import describe_error

# A request uses at most two calls (both branches, the conditional one alone). Some room is left for
# callers that pass each branch on its own; older calls fall out and only cost a read again.
_MAX_CALLS = 8

KEPT_BRANCHES = 4
"""Branches kept between requests: those of two guided requests, so that requests which take turns
with two negative prompts (a picture's and a clip's) compute neither again. A branch of 4,096 tokens
of Nano is 0.6 GB."""


def _version(tensor: torch.Tensor) -> int:
    """In-place writes seen by ``tensor``; inference tensors don't count them, so 0 for those."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class TextBranch:
    """One prompt branch: its tokens and, per layer, keys and values [1, L, kv_heads, head_dim]."""

    tokens: tuple[int, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @property
    def length(self) -> int:
        """Text tokens, padding not counted."""
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class TextKeys:
    """The text of B branches as a generation layer reads it.

    Attributes:
        keys: Per layer [B, L, kv_heads, head_dim], padded with zeros to the longest branch.
        values: Like keys.
        lengths: Valid rows of each branch.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    lengths: KeyLengths

    @classmethod
    def of(cls, branches: Sequence[TextBranch]) -> "TextKeys":
        """Lay branches side by side."""
        lengths = tuple(branch.length for branch in branches)
        like = branches[0].keys[0]
        device = torch.tensor(lengths, dtype=torch.int32, device=like.device)
        stacks = []
        for name in ("keys", "values"):
            layers = zip(*(getattr(branch, name) for branch in branches), strict=True)
            stacks.append(tuple(_pad(rows, max(lengths)) for rows in layers))
        return cls(*stacks, KeyLengths(device, lengths))


def _pad(rows: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    if len(rows) == 1:
        return rows[0]
    stacked = rows[0].new_zeros((len(rows), length, *rows[0].shape[2:]))
    for i, row in enumerate(rows):
        stacked[i, : row.shape[1]] = row[0]
    return stacked


@dataclass(eq=False)
class _Call:
    """One recognised pair of text tensors, held so that their identity stays theirs."""

    text_ids: torch.Tensor
    text_mask: torch.Tensor
    versions: tuple[int, int]
    text: TextKeys

    def matches(self, text_ids: torch.Tensor, text_mask: torch.Tensor) -> bool:
        return (
            self.text_ids is text_ids
            and self.text_mask is text_mask
            and self.versions == (_version(text_ids), _version(text_mask))
        )


class BranchCache:
    """Branches and tables of the running request, and the last branches of earlier ones.

    Args:
        encode: Computes a branch from the ids [1, L] of its tokens without padding.
    """

    def __init__(self, encode: Callable[[torch.Tensor], tuple[list, list]]) -> None:
        self._encode = encode
        self._calls: list[_Call] = []
        # In the order of their last use.
        self._branches: dict[tuple[int, ...], TextBranch] = {}
        self._tables: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def end_request(self) -> None:
        """Drop tables and remembered tensors, and all branches but the last ``KEPT_BRANCHES``."""
        self._calls.clear()
        self._tables.clear()
        for tokens in list(self._branches)[:-KEPT_BRANCHES]:
            del self._branches[tokens]

    def clear(self) -> None:
        """Drop everything: for other weights, or another precision of the understanding tower."""
        self._calls.clear()
        self._branches.clear()
        self._tables.clear()

    def text(self, text_ids: torch.Tensor, text_mask: torch.Tensor) -> TextKeys:
        """Return the text of text_ids [B, L] int64 under text_mask [B, L] (nonzero = token).

        Raises:
            ValueError: shapes that differ, or a row without a token.
        """
        for call in self._calls:
            if call.matches(text_ids, text_mask):
                return call.text
        if text_ids.ndim != 2 or text_ids.shape != text_mask.shape:
            raise ValueError(
                describe_error(
                    "text_ids and text_mask don't describe the same tokens",
                    where="Cosmos3VFMTransformer.forward",
                    expected="two tensors of one shape [batch, length]",
                    found=f"{tuple(text_ids.shape)} and {tuple(text_mask.shape)}",
                    remedy="pad ids and mask of one tokenizer call to one length, a row for each "
                    "branch",
                )
            )
        rows = zip(text_ids.tolist(), text_mask.tolist(), strict=True)
        branches = tuple(
            self._branch(tuple(t for t, kept in zip(ids, mask, strict=True) if kept), text_ids)
            for ids, mask in rows
        )
        versions = (_version(text_ids), _version(text_mask))
        self._calls.append(_Call(text_ids, text_mask, versions, TextKeys.of(branches)))
        del self._calls[:-_MAX_CALLS]
        return self._calls[-1].text

    def table(
        self, key: tuple, build: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotary tables under ``key``, building them the first time."""
        if key not in self._tables:
            self._tables[key] = build()
        return self._tables[key]

    def _branch(self, tokens: tuple[int, ...], like: torch.Tensor) -> TextBranch:
        if not tokens:
            raise ValueError(
                describe_error(
                    "A prompt branch has no token",
                    where="Cosmos3VFMTransformer.forward, text_mask",
                    expected="at least one nonzero entry a row",
                    found="a row of zeros",
                    remedy="give every row a token, for an empty prompt that of its template",
                )
            )
        branch = self._branches.pop(tokens, None)
        if branch is None:
            ids = torch.tensor([tokens], dtype=torch.int64, device=like.device)
            keys, values = self._encode(ids)
            branch = TextBranch(tokens, tuple(keys), tuple(values))
        self._branches[tokens] = branch
        return branch
