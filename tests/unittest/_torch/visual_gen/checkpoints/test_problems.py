# SPDX-License-Identifier: Apache-2.0
"""One error lists everything: kinds in one order, the first few of each, what to do about each."""

import pytest

from tensorrt_llm._torch.visual_gen.checkpoints.problems import (
    KINDS,
    MISSING,
    SCALE,
    SHAPE,
    SURPLUS,
    ProblemKind,
    Problems,
)


def refusal(problems: Problems) -> str:
    with pytest.raises(ValueError) as caught:
        problems.raise_if_any("It can't be loaded", "a/folder", "all of it")
    return str(caught.value)


def test_no_problem_raises_nothing():
    Problems().raise_if_any("It can't be loaded", "a/folder", "all of it")


def test_one_problem_reads_like_any_other_error():
    problems = Problems()
    problems.add(SHAPE, "x.weight: (1,) expected, (2,) found")
    assert refusal(problems) == (
        "It can't be loaded (where: a/folder): expected all of it, found 1 problem\n"
        "- wrong shapes: x.weight: (1,) expected, (2,) found. "
        f"Remedy: nothing was loaded; {SHAPE.remedy}."
    )


def test_kinds_keep_their_order_and_long_lists_are_cut_with_their_count():
    problems = Problems()
    problems.add(SCALE, "s")
    for index in range(6):
        problems.add(MISSING, f"m{index}")
    for index in range(5):
        problems.add(SURPLUS, f"t{index}")
    message = refusal(problems)
    lines = message.splitlines()
    assert "found 12 problems" in lines[0]
    assert lines[1] == "- missing tensors: m0; m1; m2; m3; m4 ... (6 in all)"
    assert lines[2] == "- tensors that nothing consumes: t0; t1; t2; t3; t4"
    assert lines[3].startswith("- unusable scales: s. Remedy: ")


def test_a_remedy_that_two_kinds_share_is_given_once():
    problems = Problems()
    assert SHAPE.remedy == SURPLUS.remedy
    problems.add(SHAPE, "a")
    problems.add(SURPLUS, "b")
    assert refusal(problems).count(SHAPE.remedy) == 1


def test_every_kind_is_listed_and_says_when_it_is_found_and_what_to_do():
    from tensorrt_llm._torch.visual_gen.checkpoints import problems

    defined = [value for value in vars(problems).values() if isinstance(value, ProblemKind)]
    assert set(KINDS) == set(defined) and len(KINDS) == len(defined)
    assert all(kind.heading and kind.cause and kind.remedy for kind in KINDS)
    assert len({kind.heading for kind in KINDS}) == len(KINDS)
