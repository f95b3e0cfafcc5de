# SPDX-License-Identifier: Apache-2.0
"""What would fail at the first request is refused by the plan: a load and an inspection agree."""

import json
import shutil
import socket

import pytest
import torch

from tensorrt_llm._torch.visual_gen.checkpoints.source import resolve_source
from tensorrt_llm._torch.visual_gen.inspection.report import inspect_checkpoint
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs
from tests.support.checkpoint_dialects import write_weights
from tests.support.fp8_oracle import policy, read_tensors
from tests.support.spoiled_checkpoints import config, json_changed, step_policy

pytestmark = pytest.mark.cosmos3

TEMPLATE = "text_tokenizer/chat_template.jinja"
EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


@pytest.fixture
def checkpoint(tiny_fp8_checkpoint, tmp_path):
    return shutil.copytree(tiny_fp8_checkpoint, tmp_path / "checkpoint")


def load(root):
    args = VisualGenArgs(model=str(root))
    return PipelineLoader(args, device="cpu").load(skip_warmup=True)


def refused(root) -> str:
    """The message that a load and an inspection agree on."""
    with pytest.raises(ValueError) as caught:
        load(root)
    report = inspect_checkpoint(resolve_source(str(root), None), device="cpu")
    assert isinstance(report.refusal, ValueError)
    message = str(caught.value)
    assert str(report.refusal) == message
    for part in ("expected ", "found ", "Remedy: "):
        assert part in message, message
    return message


def with_embedding_of(root, rows: int) -> None:
    """Cut, or pad, the embedding and its configuration alike."""
    tensors = read_tensors(root)
    for name in set(EMBEDDINGS) & set(tensors):
        old = tensors[name]
        tensors[name] = torch.zeros(rows, old.shape[1], dtype=old.dtype)
        tensors[name][: len(old)] = old[:rows]
    write_weights(root / "transformer", tensors, "index")
    config("vocab_size", value=rows)(root)


@pytest.fixture
def asked_hosts(monkeypatch):
    """Names of hosts that anything looked up or connected to; none is reached."""
    hosts = []

    def refuse(*args, **kwargs):
        hosts.append(args)
        raise OSError("a test has no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return hosts


# ---- prompts ----


def test_a_tokenizer_without_a_chat_template_is_refused(checkpoint):
    (checkpoint / TEMPLATE).unlink()
    message = refused(checkpoint)
    assert "no chat template" in message
    assert "chat_template.jinja, or chat_template in tokenizer_config.json" in message


def test_a_chat_template_in_the_tokenizers_configuration_serves(checkpoint):
    template = (checkpoint / TEMPLATE).read_text()
    (checkpoint / TEMPLATE).unlink()
    json_changed(
        "text_tokenizer/tokenizer_config.json", lambda c: c.update(chat_template=template)
    )(checkpoint)
    load(checkpoint)


@pytest.mark.parametrize("template", ["{% for", "{{ raise_exception('no user here') }}"])
def test_a_chat_template_that_renders_no_prompt_is_refused(checkpoint, template):
    (checkpoint / TEMPLATE).write_text(template)
    assert "text_tokenizer): expected a chat template that renders" in refused(checkpoint)


def test_a_template_without_system_messages_is_refused_where_the_checkpoint_sends_them(checkpoint):
    (checkpoint / TEMPLATE).write_text(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    load(checkpoint)
    json_changed("model_index.json", lambda c: c.update(default_use_system_prompt=True))(checkpoint)
    assert "no system" in refused(checkpoint)


def test_a_tokenizer_without_the_token_that_ends_a_prompt_is_refused(checkpoint):
    json_changed("text_tokenizer/tokenizer_config.json", lambda c: c.pop("eos_token"))(checkpoint)
    assert "lacks a token that ends a prompt" in refused(checkpoint)


@pytest.mark.parametrize("missing", [1, 5877])
def test_tokens_without_a_row_of_the_embedding_are_refused(checkpoint, missing):
    vocab_size = json.loads((checkpoint / "transformer/config.json").read_text())["vocab_size"]
    with_embedding_of(checkpoint, vocab_size - missing)
    message = refused(checkpoint)
    assert "transformer/config.json, vocab_size): expected 5977 or more" in message
    assert f"found {vocab_size - missing}." in message


def test_added_tokens_count(checkpoint):
    def add(content):
        token = {"id": 6000, "content": "<|far|>", "special": True}
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append(token | plain)

    json_changed("text_tokenizer/tokenizer.json", add)(checkpoint)
    assert "vocab_size): expected " in refused(checkpoint)


def test_an_embedding_with_more_rows_than_tokens_is_usual(checkpoint):
    with_embedding_of(checkpoint, 6144)
    load(checkpoint)


# ---- dtype ----


@pytest.mark.parametrize(
    "windows", [policy(3, 3), policy(0, 1, "native"), policy(1, 0, "native"), policy(0, 0)]
)
def test_16_bit_steps_in_an_fp32_model_are_refused(checkpoint, windows):
    step_policy(windows)(checkpoint)
    config("dtype", value="float32")(checkpoint)
    message = refused(checkpoint)
    assert "diffusion_step_policy can't be served in this dtype" in message
    assert "expected dtype bfloat16 or float16" in message and "found float32" in message


def test_an_fp32_model_whose_steps_are_all_fp8_loads(checkpoint):
    step_policy(policy(0, 0, "native"))(checkpoint)
    config("dtype", value="float32")(checkpoint)
    load(checkpoint)


# ---- files that are no objects, and the network ----


@pytest.mark.parametrize(
    "file",
    [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "transformer/config.json",
        "vae/config.json",
        "sound_tokenizer/config.json",
        "text_tokenizer/tokenizer_config.json",
        "text_tokenizer/special_tokens_map.json",
        "text_tokenizer/config.json",
    ],
)
@pytest.mark.parametrize(
    "content", [[1], "some/repository", 3, None], ids=["list", "string", "number", "null"]
)
def test_a_configuration_that_is_no_object_is_refused_and_nobody_is_asked_about_it(
    checkpoint, file, content, asked_hosts
):
    (checkpoint / file).write_text(json.dumps(content))
    message = refused(checkpoint)
    assert file in message and "object" in message
    assert asked_hosts == []


@pytest.mark.parametrize("name", [["Cosmos3OmniPipeline"], {}, 3])
def test_a_class_of_the_pipeline_that_is_no_name_is_refused(checkpoint, name):
    json_changed("model_index.json", lambda c: c.update(_class_name=name))(checkpoint)
    assert "model_index.json, _class_name" in refused(checkpoint)


@pytest.mark.parametrize(
    "flag", ["enable_safety_checker", "default_use_system_prompt", "use_native_flow_schedule"]
)
@pytest.mark.parametrize("value", ["false", None, 0])
def test_a_flag_of_the_index_that_is_no_boolean_is_refused(checkpoint, flag, value):
    json_changed("model_index.json", lambda c: c.update({flag: value}))(checkpoint)
    assert f"{flag}: true or false" in refused(checkpoint)


def test_a_folder_loads_without_asking_anybody(checkpoint, asked_hosts):
    load(checkpoint)
    assert asked_hosts == []
