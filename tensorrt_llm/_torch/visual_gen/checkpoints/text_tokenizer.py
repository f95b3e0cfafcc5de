# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's text tokenizer, judged by what the first request will ask of it.

A tokenizer without a chat template is read without a complaint, and a token that the embedding
has no row for shows in the first forward pass alone, on CUDA as a device-side assert.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorrt_llm._torch.visual_gen.checkpoints.json_files import read_json_object, unreadable
from tensorrt_llm._torch.visual_gen.models.cosmos3.checkpoint_traits import CheckpointTraits
from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import resolve_request
from tensorrt_llm._torch.visual_gen.models.cosmos3.prompts import tokenize_request
from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen.params import VisualGenParams

_FOLDER = "text_tokenizer"
# What transformers takes for objects; any of them may be missing but the first (layout).
_OBJECTS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)


def read_tokenizer(root: Path) -> Any:
    """The checkpoint's text tokenizer, read from its files alone.

    Raises:
        ValueError: it can't be read, or has no chat template.
    """
    from transformers import AutoTokenizer

    folder = root / _FOLDER
    for name in _OBJECTS:
        if (folder / name).is_file():
            read_json_object(folder / name)
    try:
        # A checkpoint's own code is not run, and transformers is not to ask whether it may.
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises nearly everything here
        raise unreadable(folder, "a tokenizer that transformers reads", error) from error
    if not tokenizer.chat_template:
        raise ValueError(
            describe_error(
                "The tokenizer has no chat template, so it can't make a prompt",
                where=folder,
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                found="neither",
                remedy="restore the checkpoint's text_tokenizer folder as it was published",
            )
        )
    return tokenizer


def check_prompts(tokenizer: Any, root: Path, index: Mapping[str, Any], vocab_size: int) -> None:
    """Refuse a tokenizer that makes no prompt, or tokens that the transformer does not embed.

    Args:
        tokenizer: From ``read_tokenizer``.
        root: The checkpoint.
        index: Its ``model_index.json``.
        vocab_size: Rows of the embedding. More than there are tokens is usual.

    Raises:
        ValueError: the chat template can't render a prompt, or a token that ends one is missing; an
            id is beyond the embedding.
    """
    folder = root / _FOLDER
    traits = CheckpointTraits(
        family="nano",
        build="base",
        has_sound=False,
        default_use_system_prompt=bool(index.get("default_use_system_prompt", False)),
        requires_guardrails=False,
        video_negative_prompt="",
        fixed_sigmas=None,
    )
    try:
        tokenize_request(tokenizer, resolve_request("A trial.", VisualGenParams(), traits))
    except Exception as error:  # a template is a program, and may raise what it likes
        raise ValueError(
            describe_error(
                "The tokenizer can't make a prompt",
                where=folder,
                expected="a chat template that renders a user's message, and the tokens of its end",
                found=f"{type(error).__name__}: {error}",
                remedy="restore the checkpoint's text_tokenizer folder as it was published",
            )
        ) from error
    # With added and special tokens; ids may have gaps, so their number says less than the largest.
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise ValueError(
            describe_error(
                "The tokenizer makes tokens that the transformer does not embed",
                where="transformer/config.json, vocab_size",
                expected=f"{largest + 1} or more, since {_FOLDER} has {token!r} as token {largest}",
                found=vocab_size,
                remedy="take text_tokenizer and transformer from one revision of the checkpoint",
            )
        )
