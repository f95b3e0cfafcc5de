# SPDX-License-Identifier: Apache-2.0
"""Every error of the package says what, where, expected, found and what to do about it.

The rules are read off the source: a message that lacks a part, or a remedy that would fit any
error, fails here and not in front of a user.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tensorrt_llm._torch.visual_gen.models.cosmos3.violations import Violations
from tensorrt_llm._utils import describe_error

ROOT = Path(__file__).resolve().parents[2]
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("tensorrt_llm", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
# What composes a message of five parts, and the parts that have to be named in a call.
COMPOSERS = ("describe_error", "bad_media")
PARTS = {"describe_error": {"where", "expected", "found", "remedy"}}
PARTS["bad_media"] = PARTS["describe_error"] - {"where"}  # its label, by position
ERRORS = {
    *("ValueError", "TypeError", "IndexError", "MemoryError", "RuntimeError"),
    *("NotImplementedError", "ImportError", "PermissionError", "ConnectionError"),
    *("ParameterError", "MediaError", "RequestBlockedError", "StorageFullError"),
}
# Used more often than this, a text can't be about the very error.
MOST_USES = 6
# Texts that say no more than "do it right".
GENERIC = (
    *("as expected", "expected kind", "expected shape", "expected value", "what is expected"),
    *("one of the expected", "one of these backends", "correct the field", "correct the argument"),
    *("correct the value", "correct the configuration", "that the output has", "fix the"),
    *("choose another value", "use a valid", "pass a valid", "check the input", "check your"),
)
_COSMOS3 = "tensorrt_llm/_torch/visual_gen/models/cosmos3"
# (file, function) -> why an error there needs no description of its own.
UNDESCRIBED = {
    (
        "tensorrt_llm/_torch/visual_gen/checkpoints/safetensors_folder.py",
        "_files_of_index",
    ): "caught there and listed, with the file, among the problems of a checkpoint",
    (
        "tensorrt_llm/_torch/visual_gen/quantization/loader.py",
        "load_linear_weights",
    ): "puts a name before an error that is described",
    ("tensorrt_llm/_torch/visual_gen/executor.py", "map_error"): (
        "gives an error that is described another type"
    ),
    (f"{_COSMOS3}/violations.py", "raise_if_any"): "a list of its own form, tested below",
    (f"{_COSMOS3}/prompts.py", "tokenize_request"): "the same form",
    (f"{_COSMOS3}/guardrails.py", "check_text"): "_blocked describes it",
    (f"{_COSMOS3}/guardrails.py", "check_frames"): "_blocked describes it",
    **{
        ("tensorrt_llm/serve/requests.py", name): "pydantic adds the field, the server lists all"
        for name in (
            *("_check_size", "_check_unicode", "_check_reference", "_no_flag"),
            *("_check_one_size", "_check_one_format", "_check_alternatives"),
        )
    },
}


def _name(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def _place(file: str, node: ast.AST) -> str:
    return f"{file}:{node.lineno}"


def _owner(tree: ast.AST, node: ast.AST) -> str:
    """Name of the innermost function around a node; "" at the top of a module."""
    around = [f for f in _functions(tree) if f.lineno <= node.lineno <= f.end_lineno]
    return max(around, key=lambda f: f.lineno).name if around else ""


@cache
def _remedy_places() -> dict[str, int]:
    """Function or class -> the position of its argument ``remedy`` (``self`` not counted)."""
    places = {}
    for tree in TREES.values():
        for function in _functions(tree):
            names = [a.arg for a in function.args.posonlyargs + function.args.args]
            if "remedy" in names:
                places[function.name] = names.index("remedy") - (names[0] == "self")
        for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            fields = [n.target.id for n in kind.body if isinstance(n, ast.AnnAssign)]
            if "remedy" in fields:
                places[kind.name] = fields.index("remedy")
            if "__init__" in places:
                places[kind.name] = places.pop("__init__")
    return places


def _describing() -> set[str]:
    """Names of the composers and of what returns their messages, directly or through another."""
    returning = [
        (function.name, {_name(call) for call in _calls(node.value)})
        for tree in TREES.values()
        for function in _functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
    ]
    known = set(COMPOSERS)
    while more := {name for name, called in returning if called & known} - known:
        known |= more
    return known


def _texts(value: ast.AST) -> Iterator[str]:
    """The literal texts that an expression may give; gaps of an f-string are left empty."""
    if isinstance(value, ast.JoinedStr):
        yield "".join(str(v.value) for v in value.values if isinstance(v, ast.Constant))
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        yield value.value
    elif isinstance(value, ast.IfExp):
        yield from _texts(value.body)
        yield from _texts(value.orelse)


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int, str]]:
    """(name, line, text) of every text that is given a name."""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield from ((node.targets[0].id, node.lineno, text) for text in _texts(node.value))


def _remedies() -> Iterator[tuple[str, str]]:
    """(file:line, text) of every remedy that stands in the source.

    A text in a call counts there, and that of a constant at each call; a local variable's text
    counts once, where it is assigned.
    """
    places = _remedy_places()
    for file, tree in TREES.items():
        constants = [(name, text) for name, _, text in _assigned(tree.body)]
        module_wide = {name for name, _ in constants}
        for call in _calls(tree):
            given = [k.value for k in call.keywords if k.arg == "remedy"]
            place = places.get(_name(call))
            if place is not None:
                given += call.args[place : place + 1]
            for value in given:
                texts = list(_texts(value))
                if isinstance(value, ast.Name):
                    texts = [text for name, text in constants if name == value.id]
                yield from ((f"{file}:{call.lineno}", text) for text in texts)
        for name, line, text in _assigned(ast.walk(tree)):
            if "remedy" in name and name not in module_wide:
                yield f"{file}:{line}", text


def test_the_walk_finds_the_messages_of_the_package():
    places = [text for _, text in _remedies()]
    assert len(places) > 200
    assert "take the nearest multiple" in places  # Violations.add, by position
    assert "download the files again" in places  # ProblemKind, by the name of a text
    assert "export the checkpoint again with per-tensor FP8 scales" in places  # ScaleError


def test_every_message_names_all_five_parts():
    lacking = [
        f"{_place(file, call)}: {sorted(parts)}"
        for file, tree in TREES.items()
        for call in _calls(tree)
        if _name(call) in COMPOSERS
        and (parts := PARTS[_name(call)] - {keyword.arg for keyword in call.keywords})
    ]
    assert not lacking


def test_a_message_with_a_part_missing_cannot_be_composed():
    with pytest.raises(TypeError, match="remedy"):
        describe_error("Wrong", where="here", expected=1, found=2)
    text = describe_error("Wrong", where="here", expected=None, found=None, remedy="do this.")
    assert text == "Wrong (where: here): expected None, found None. Remedy: do this."


@pytest.mark.parametrize(
    ("remedy", "end"),
    [
        ("take 1, 5, 9, 13, ...", " Remedy: take 1, 5, 9, 13, ..."),
        ("take 1, 5, ... or 13", " Remedy: take 1, 5, ... or 13."),
        ("take 1.", " Remedy: take 1."),
        ("take 1..", " Remedy: take 1."),
    ],
)
def test_a_message_ends_with_one_dot_or_the_ellipsis_of_its_remedy(remedy, end):
    assert describe_error("Wrong", where="", expected=1, found=2, remedy=remedy).endswith(end)


def test_no_remedy_is_empty_or_fits_any_error():
    generic = {
        (place.rpartition(":")[0], text)
        for place, text in _remedies()
        if len(text.split()) < 2 or any(phrase in text for phrase in GENERIC)
    }
    assert not generic


def test_no_remedy_serves_more_errors_than_it_can_be_about():
    uses = Counter(text for _, text in _remedies())
    assert not {text: count for text, count in uses.items() if count > MOST_USES}


def test_remedies_are_one_line_and_end_without_a_dot():
    bad = [(place, text) for place, text in _remedies() if "\n" in text or text.endswith(".")]
    assert not [found for found in bad if not found[1].endswith("...")]


def test_every_error_is_described():
    describing = _describing()
    bare = {
        (file, _owner(tree, call))
        for file, tree in TREES.items()
        for call in _calls(tree)
        if _name(call) in ERRORS
        and call.args
        and not any(_name(inner) in describing for inner in _calls(call) if inner is not call)
    }
    assert not bare - set(UNDESCRIBED)
    assert not set(UNDESCRIBED) - bare, "these need no exception any more"


def test_violations_of_a_request_are_listed_with_a_remedy_for_each_kind():
    check = Violations()
    check.side("height", 100)
    check.side("width", 10**9)
    check.integer("seed", -1, 0, 9)
    check.flag("extra_params.use_system_prompt", "yes")
    with pytest.raises(ValueError) as refusal:
        check.raise_if_any()
    violations, remedy = str(refusal.value).split(" Remedy: ")
    assert violations.startswith("Parameter validation failed: height: expected a multiple of 16")
    assert [part.split(":")[0] for part in violations.split("; ")[1:]] == [
        *("width", "seed", "extra_params.use_system_prompt")
    ]
    # Two numbers outside their ranges share one remedy.
    assert remedy.count("inside their ranges") == 1
    assert remedy.split("; ") == [
        "take the nearest multiple",
        "choose numbers inside their ranges, or leave the fields out for the defaults",
        "write switches as booleans, not as text or 0/1.",
    ]
