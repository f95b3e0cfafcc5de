# SPDX-License-Identifier: Apache-2.0
"""From a request to token ids: metadata, chat template, length check. Pure functions.

The wording is TensorRT-LLM's (cosmos3.md E.4): what the model was trained to see.
"""

import functools
import json
import math
from importlib import resources
from typing import Any

from tensorrt_llm._torch.visual_gen.models.cosmos3.resolved_request import ResolvedRequest
from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen.params import ParameterError

# "give" is how the training data spells it.
_SYSTEM_PROMPT = "You are a helpful assistant who will generate {} from a give prompt."
_ASPECT_RATIOS = ((1, 1), (4, 3), (3, 4), (16, 9), (9, 16))
_START_OF_GENERATION = "<|vision_start|>"


@functools.cache
def packaged_negative_prompt() -> str:
    """The video negative prompt of this package, serialised as the model was trained to see one."""
    file = resources.files("tensorrt_llm.visual_gen").joinpath("data", "negative_prompt.json")
    return json.dumps(json.loads(file.read_text(encoding="utf-8")))


def build_prompt(text: str, request: ResolvedRequest) -> str:
    """Add the request's length, rate and size: fields of a JSON caption, sentences after text.

    Without either template the text comes back unchanged, so that any wording can be given in full.
    """
    caption = _as_caption(text)
    if caption is None:
        return _with_sentences(text, request)
    if not (request.use_duration_template or request.use_resolution_template):
        return text
    return json.dumps(_with_fields(caption, request))


def build_negative_prompt(text: str, request: ResolvedRequest) -> str:
    """The same sentences as a prompt of plain text gets, also after a JSON object."""
    return _with_sentences(text, request)


def tokenize_request(
    tokenizer: Any, request: ResolvedRequest
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Token ids of the conditional branch and, for a guided request, of the unconditional one.

    Raises:
        ValueError: a branch has more than ``max_sequence_length`` tokens, both numbers named; or
            the checkpoint's tokenizer lacks a token that ends a prompt.
    """
    texts = {"prompt": build_prompt(request.prompt, request)}
    if request.is_guided:
        texts["negative_prompt"] = build_negative_prompt(request.negative_prompt, request)
    system_prompt = None
    if request.use_system_prompt:
        system_prompt = _SYSTEM_PROMPT.format("images" if request.is_image else "videos")
    ids = {name: _tokenize(tokenizer, text, system_prompt) for name, text in texts.items()}
    limit = request.max_sequence_length
    too_long = {
        name: f"{name}: expected at most max_sequence_length = {limit} tokens, found {len(tokens)}"
        for name, tokens in ids.items()
        if len(tokens) > limit
    }
    if too_long:
        raise ParameterError(
            f"Parameter validation failed: {'; '.join(too_long.values())}. "
            "Remedy: shorten the text or raise max_sequence_length.",
            too_long,
        )
    return ids["prompt"], ids.get("negative_prompt")


def _as_caption(text: str) -> dict[str, Any] | None:
    """The JSON object that ``text`` is, if it is one."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _with_fields(caption: dict[str, Any], request: ResolvedRequest) -> dict[str, Any]:
    fields = dict(caption)
    if request.use_duration_template and request.is_image:
        fields.pop("duration", None)
        fields.pop("fps", None)
    elif request.use_duration_template:
        fields["duration"] = f"{int(request.num_frames / request.frame_rate)}s"
        fields["fps"] = request.frame_rate
    if request.use_resolution_template:
        fields["resolution"] = {"H": request.height, "W": request.width}
        fields["aspect_ratio"] = _nearest_aspect_ratio(request.height, request.width)
    return fields


def _nearest_aspect_ratio(height: int, width: int) -> str:
    """ "W,H" of the trained ratio nearest to width / height on a logarithmic scale."""
    w, h = min(
        _ASPECT_RATIOS, key=lambda ratio: abs(math.log(width * ratio[1] / height / ratio[0]))
    )
    return f"{w},{h}"


def _with_sentences(text: str, request: ResolvedRequest) -> str:
    if request.use_duration_template and not request.is_image:
        seconds = request.num_frames / request.frame_rate
        text = _append(
            text, f"The video is {seconds:.1f} seconds long and is of {request.frame_rate:.0f} FPS."
        )
    if request.use_resolution_template:
        medium = "image" if request.is_image else "video"
        text = _append(text, f"This {medium} is of {request.height}x{request.width} resolution.")
    return text


def _append(text: str, sentence: str) -> str:
    stripped = text.rstrip(".")
    return f"{stripped}. {sentence}" if stripped else sentence


def _tokenize(tokenizer: Any, text: str, system_prompt: str | None) -> tuple[int, ...]:
    """Chat template with a generation prompt, then the end token and the start of generation."""
    messages = [{"role": "user", "content": text}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    end, start = tokenizer.eos_token_id, tokenizer.get_vocab().get(_START_OF_GENERATION)
    if end is None or start is None:
        raise ValueError(
            describe_error(
                "The checkpoint's tokenizer lacks a token that ends a prompt",
                where="text_tokenizer",
                expected=f"an end-of-text token and {_START_OF_GENERATION}",
                found=f"{end} and {start}",
                remedy="restore the checkpoint's text_tokenizer folder as it was published",
            )
        )
    return (*encoded["input_ids"], end, start)
