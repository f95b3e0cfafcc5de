# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoint's tokenizer and the package's own negative prompt."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tensorrt_llm.visual_gen.tiny_tokenizer import SPECIAL_TOKENS, write_tokenizer

pytestmark = pytest.mark.cosmos3

PROMPTS = Path(__file__).parents[4] / "shared" / "data" / "prompts"
SYSTEM_PROMPT = "You are a helpful assistant who will generate videos from a give prompt."


@pytest.fixture(scope="module")
def tokenizer(tiny_bf16_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_bf16_checkpoint / "text_tokenizer")


@pytest.fixture(scope="module")
def negative_prompt():
    return json.loads((files("tensorrt_llm.visual_gen.data") / "negative_prompt.json").read_text())


def count_request_tokens(tokenizer, text: str) -> int:
    """Tokens of a video request: chat template, system prompt, and the two that follow."""
    conversation = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": text},
    ]
    ids = tokenizer.apply_chat_template(
        conversation, tokenize=True, add_generation_prompt=True, return_dict=True
    ).input_ids
    return len(ids) + 2


def test_every_id_has_an_embedding_row(tokenizer, tiny_bf16_checkpoint):
    config = json.loads((tiny_bf16_checkpoint / "transformer" / "config.json").read_text())
    assert len(tokenizer) == config["vocab_size"]
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert 2000 < len(tokenizer) < 8000


def test_the_special_tokens_are_single_ids(tokenizer):
    for token in SPECIAL_TOKENS:
        ids = tokenizer(f"a{token}b").input_ids
        assert ids[1] == tokenizer.convert_tokens_to_ids(token)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize(
    "text", ["A red tram, 0:00-0:03.", "  two  spaces\n\nand\tlines\r\n", "Größe 写 🤖 \x00 é", ""]
)
def test_any_text_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_merges_make_words_of_bytes(tokenizer):
    ids = tokenizer("The camera follows the robot through the kitchen.").input_ids
    assert len(ids) <= 10


def test_the_chat_template_is_chatml(tokenizer):
    conversation = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "U"}]},
    ]
    text = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_training_twice_writes_the_same_bytes(tmp_path, tiny_bf16_checkpoint):
    write_tokenizer(tmp_path / "again")
    for file in (tiny_bf16_checkpoint / "text_tokenizer").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.skipif(not PROMPTS.is_dir(), reason="shared/data/prompts is not beside this checkout")
def test_every_real_prompt_fits_the_default_length(tokenizer):
    prompts = sorted(PROMPTS.glob("*.json"))
    assert len(prompts) >= 7
    for file in prompts:
        text = json.dumps(json.loads(file.read_text()))
        assert count_request_tokens(tokenizer, text) <= 3900, file.name


def test_the_negative_prompt_has_the_structure_of_a_caption(negative_prompt, tokenizer):
    for key in (
        "subjects",
        "background_setting",
        "lighting",
        "aesthetics",
        "cinematography",
        "style_medium",
        "artistic_style",
        "context",
        "actions",
        "text_and_signage_elements",
        "segments",
        "transitions",
        "temporal_caption",
    ):
        assert negative_prompt[key], key
    text = json.dumps(negative_prompt)
    assert 2000 < len(text) < 10000
    assert count_request_tokens(tokenizer, text) < 2500


@pytest.mark.skipif(not PROMPTS.is_dir(), reason="shared/data/prompts is not beside this checkout")
def test_no_text_of_ours_repeats_a_run_of_words_of_the_shared_prompts(negative_prompt):
    def runs(text: str, length: int = 7) -> set[tuple[str, ...]]:
        words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
        return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}

    def texts(node) -> list[str]:
        if isinstance(node, str):
            return [node]
        children = node.values() if isinstance(node, dict) else node
        return [t for c in children if isinstance(c, str | dict | list) for t in texts(c)]

    theirs = set()
    for file in PROMPTS.glob("*.json"):
        for text in texts(json.loads(file.read_text())):
            theirs |= runs(text)
    corpus = (files("tensorrt_llm.visual_gen.data") / "tokenizer_corpus.txt").read_text()
    for text in [*texts(negative_prompt), *corpus.splitlines()]:
        assert not runs(text) & theirs
