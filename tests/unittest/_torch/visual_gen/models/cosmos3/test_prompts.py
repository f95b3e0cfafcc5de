# SPDX-License-Identifier: Apache-2.0
"""Prompt construction."""

import json
from dataclasses import replace

import pytest

from tensorrt_llm._torch.visual_gen.models.cosmos3.prompts import (
    build_negative_prompt,
    build_prompt,
    packaged_negative_prompt,
    tokenize_request,
)
from tensorrt_llm.visual_gen.params import ParameterError
from tests.support.cosmos3_requests import resolve


def request_of(prompt="A robot", *, duration=True, resolution=True, **params):
    templates = {"use_duration_template": duration, "use_resolution_template": resolution}
    extra = templates | params.pop("extra_params", {})
    return resolve(prompt, **params, extra_params=extra)


VIDEO = {"height": 720, "width": 1280, "num_frames": 189}
LENGTH = "The video is 7.9 seconds long and is of 24 FPS."
SIZE = "This video is of 720x1280 resolution."


@pytest.mark.parametrize(
    ("text", "duration", "resolution", "expected"),
    [
        ("A robot", True, True, f"A robot. {LENGTH} {SIZE}"),
        ("A robot.", True, True, f"A robot. {LENGTH} {SIZE}"),
        ("A robot...", True, False, f"A robot. {LENGTH}"),
        ("A robot!", False, True, f"A robot!. {SIZE}"),
        ("A robot. ", False, True, f"A robot. . {SIZE}"),
        ("A robot.", False, False, "A robot."),
        ("...", True, True, f"{LENGTH} {SIZE}"),
    ],
)
def test_sentences_follow_text(text, duration, resolution, expected):
    request = request_of(text, duration=duration, resolution=resolution, **VIDEO)
    assert build_prompt(text, request) == expected


@pytest.mark.parametrize(
    ("frames", "rate", "sentence"),
    [
        (17, 10, "The video is 1.7 seconds long and is of 10 FPS."),
        (93, 29.97, "The video is 3.1 seconds long and is of 30 FPS."),
        (93, 23.976, "The video is 3.9 seconds long and is of 24 FPS."),
    ],
)
def test_the_sentence_names_the_resolved_length_and_the_rounded_rate(frames, rate, sentence):
    request = request_of(num_frames=frames, frame_rate=rate, resolution=False)
    assert build_prompt("A robot", request) == f"A robot. {sentence}"


def test_an_image_has_a_size_and_no_length():
    request = request_of(num_frames=1, height=256, width=320)
    assert build_prompt("A robot", request) == "A robot. This image is of 256x320 resolution."


CAPTION = {"subjects": [{"description": "a café"}], "fps": 99, "duration": "1s", "style": "x"}


def test_a_json_caption_gets_fields_in_place_of_sentences():
    request = request_of(json.dumps(CAPTION, indent=2), **VIDEO)
    text = build_prompt(request.prompt, request)
    expected = CAPTION | {
        "fps": 24.0,
        "duration": "7s",
        "resolution": {"H": 720, "W": 1280},
        "aspect_ratio": "16,9",
    }
    assert text == json.dumps(expected)
    assert "\\u00e9" in text and "\n" not in text


def test_an_image_caption_loses_length_and_rate():
    request = request_of(json.dumps(CAPTION), num_frames=1)
    fields = json.loads(build_prompt(request.prompt, request))
    assert "fps" not in fields and "duration" not in fields
    assert fields["resolution"] == {"H": 1024, "W": 1024} and fields["aspect_ratio"] == "1,1"


def test_each_template_switches_its_own_fields():
    text = json.dumps(CAPTION, indent=2)
    only_size = request_of(text, duration=False, **VIDEO)
    fields = json.loads(build_prompt(text, only_size))
    assert (fields["fps"], fields["duration"]) == (99, "1s") and "resolution" in fields
    only_length = request_of(text, resolution=False, **VIDEO)
    fields = json.loads(build_prompt(text, only_length))
    assert (fields["fps"], fields["duration"]) == (24.0, "7s") and "resolution" not in fields
    neither = request_of(text, duration=False, resolution=False, **VIDEO)
    assert build_prompt(text, neither) == text


@pytest.mark.parametrize(
    ("height", "width", "ratio"),
    [
        (720, 1280, "16,9"),
        (704, 1280, "16,9"),
        (1280, 720, "9,16"),
        (544, 736, "4,3"),
        (736, 544, "3,4"),
        (960, 960, "1,1"),
        (960, 1104, "1,1"),  # 1.150; the border to 4:3 is sqrt(4/3) = 1.155
        (960, 1120, "4,3"),  # 1.167
        (256, 2048, "16,9"),
    ],
)
def test_the_aspect_ratio_is_the_nearest_on_a_logarithmic_scale(height, width, ratio):
    request = request_of("{}", height=height, width=width, num_frames=1)
    assert json.loads(build_prompt("{}", request))["aspect_ratio"] == ratio


@pytest.mark.parametrize("text", ["{not json", "[1, 2]", '"text"', "12", "{1: 2}"])
def test_what_is_no_json_object_is_text(text):
    request = request_of(text, **VIDEO)
    assert build_prompt(text, request) == f"{text}. {LENGTH} {SIZE}"


@pytest.mark.parametrize("text", ["blurry", '{"style": "blurry"}'])
def test_a_negative_prompt_gets_the_positive_sentences_even_if_it_is_json(text):
    request = request_of(**VIDEO)
    assert build_negative_prompt(text, request) == f"{text}. {LENGTH} {SIZE}"


def test_an_empty_negative_prompt_is_the_sentences_alone():
    assert build_negative_prompt("", request_of(**VIDEO)) == f"{LENGTH} {SIZE}"
    assert build_negative_prompt("", request_of(num_frames=1, resolution=False)) == ""


def test_the_packaged_negative_prompt_is_one_serialised_object():
    text = packaged_negative_prompt()
    assert json.dumps(json.loads(text)) == text and len(text) > 1000


class WordTokenizer:
    """One id per word of the rendered chat; records the messages."""

    eos_token_id = 7

    def __init__(self, vocab=("<|vision_start|>",)):
        self.vocab, self.messages = vocab, []

    def get_vocab(self):
        return dict.fromkeys(self.vocab, 8)

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, return_dict):
        assert tokenize and add_generation_prompt and return_dict
        self.messages.append(messages)
        words = " ".join(message["content"] for message in messages).split()
        return {"input_ids": [100 + i for i in range(len(words))]}


def test_both_branches_end_with_the_two_special_tokens():
    tokenizer, request = (
        WordTokenizer(),
        request_of(duration=False, resolution=False, negative_prompt="bad"),
    )
    assert tokenize_request(tokenizer, request) == ((100, 101, 7, 8), (100, 7, 8))
    assert [m[0]["content"] for m in tokenizer.messages] == ["A robot", "bad"]


def test_an_unguided_request_has_no_negative_branch():
    tokenizer = WordTokenizer()
    _, negative = tokenize_request(tokenizer, request_of(guidance_scale=1.0))
    assert negative is None and len(tokenizer.messages) == 1


@pytest.mark.parametrize(("frames", "medium"), [(1, "images"), (17, "videos")])
def test_the_system_prompt_names_the_medium(frames, medium):
    tokenizer = WordTokenizer()
    request = request_of(num_frames=frames, extra_params={"use_system_prompt": True})
    tokenize_request(tokenizer, request)
    expected = {
        "role": "system",
        "content": f"You are a helpful assistant who will generate {medium} from a give prompt.",
    }
    assert [messages[0] for messages in tokenizer.messages] == [expected] * 2
    assert [messages[1]["role"] for messages in tokenizer.messages] == ["user"] * 2


def test_a_prompt_too_long_is_refused_with_both_numbers_and_never_cut():
    plain = {"duration": False, "resolution": False, "negative_prompt": "a b"}
    request = request_of("w " * 20, max_sequence_length=22, **plain)
    ids, _ = tokenize_request(WordTokenizer(), request)
    assert len(ids) == 22
    with pytest.raises(ValueError, match="validation failed: prompt: .* 21 tokens, found 22") as e:
        tokenize_request(WordTokenizer(), replace(request, max_sequence_length=21))
    assert "negative_prompt" not in str(e.value)
    with pytest.raises(ValueError, match="found 22; negative_prompt: .* 3 tokens, found 4"):
        tokenize_request(WordTokenizer(), replace(request, max_sequence_length=3))


PLAIN = {"duration": False, "resolution": False}
WAY_OUT = 'pass negative_prompt="" to do without the default one'


def refused(request, **kwargs):
    with pytest.raises(ParameterError) as error:
        tokenize_request(WordTokenizer(), request, **kwargs)
    return str(error.value), error.value.names


def test_a_default_negative_prompt_that_is_too_long_is_told_as_the_default():
    request = request_of("a b", max_sequence_length=5, negative_prompt="w " * 20, **PLAIN)
    message, names = refused(request, default_negative=True)
    words = "negative_prompt, the default one,: expected at most max_sequence_length = 5 tokens"
    assert message.startswith(f"Parameter validation failed: {words}, found 22.")
    assert message.endswith(f"Remedy: raise max_sequence_length, or {WAY_OUT}.")
    # A server names the field that the client gave, and the negative prompt it didn't.
    assert names == ("negative_prompt", "max_sequence_length")
    message, _ = refused(request)
    assert "default" not in message and "shorten the text" in message


def test_a_default_negative_prompt_is_only_to_be_left_out_where_that_helps():
    request = request_of("a b", max_sequence_length=1, negative_prompt="w " * 20, **PLAIN)
    message, names = refused(request, default_negative=True)
    assert "prompt: expected at most max_sequence_length = 1 tokens, found 4; " in message
    assert "negative_prompt, the default one,: expected" in message and WAY_OUT not in message
    assert message.endswith("Remedy: shorten the text or raise max_sequence_length.")
    assert names[0] == "prompt"


def test_each_text_that_is_too_long_has_its_remedy():
    request = request_of("a b", max_sequence_length=3, negative_prompt="w " * 20, **PLAIN)
    message, _ = refused(request, default_negative=True)
    assert f"Remedy: shorten the text or raise max_sequence_length, and {WAY_OUT}." in message


def test_a_tokenizer_without_the_special_tokens_is_refused():
    with pytest.raises(ValueError, match=r"<\|vision_start\|>"):
        tokenize_request(WordTokenizer(vocab=()), request_of())


@pytest.mark.cosmos3
def test_the_shared_prompts_fit_the_default_length(shared_dir, tiny_bf16_checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_bf16_checkpoint / "text_tokenizer")
    for path in sorted((shared_dir / "data" / "prompts").glob("*.json")):
        request = request_of(json.dumps(json.loads(path.read_text())))
        ids, _ = tokenize_request(tokenizer, request)
        assert 100 < len(ids) <= 4096, path.name
