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
    tokenizer: Any, request: ResolvedRequest, *, default_negative: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Token ids of the conditional branch and, for a guided request, of the unconditional one.

    Args:
        tokenizer: The checkpoint's.
        request: Its texts, and how they are completed.
        default_negative: Whether the negative prompt is the default one, so that an error says so
            and doesn't ask the caller to shorten it.

    Raises:
        ValueError: a branch has more than ``max_sequence_length`` tokens, both numbers named; or
            the checkpoint's tokenizer lacks a token that ends a prompt.
    """
    system_prompt = None
    if request.use_system_prompt:
        system_prompt = _SYSTEM_PROMPT.format("images" if request.is_image else "videos")

    def negative_ids(text: str) -> tuple[int, ...]:
        return _tokenize(tokenizer, build_negative_prompt(text, request), system_prompt)

    ids = {"prompt": _tokenize(tokenizer, build_prompt(request.prompt, request), system_prompt)}
    if request.is_guided:
        ids["negative_prompt"] = negative_ids(request.negative_prompt)
    limit = request.max_sequence_length
    too_long = [name for name, tokens in ids.items() if len(tokens) > limit]
    if too_long:
        of_default = default_negative and "negative_prompt" in too_long
        shorter = of_default and len(negative_ids("")) <= limit
        found = []
        for name in too_long:
            where = f"{name}, the default one," if of_default and name != "prompt" else name
            expected = f"expected at most max_sequence_length = {limit} tokens"
            found.append(f"{where}: {expected}, found {len(ids[name])}")
        raise ParameterError(
            f"Parameter validation failed: {'; '.join(found)}. "
            f"Remedy: {_length_remedy(too_long == ['negative_prompt'] and of_default, shorter)}.",
            (*too_long, "max_sequence_length"),
        )
    return ids["prompt"], ids.get("negative_prompt")


def _length_remedy(default_alone: bool, shorter: bool) -> str:
    """What helps against texts that are too long.

    Args:
        default_alone: The default negative prompt is the only one.
        shorter: The default negative prompt is one, and an empty one would fit.
    """
    way_out = 'pass negative_prompt="" to do without the default one' if shorter else None
    if default_alone:
        return "raise max_sequence_length" + (f", or {way_out}" if way_out else "")
    return "shorten the text or raise max_sequence_length" + (f", and {way_out}" if way_out else "")


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
