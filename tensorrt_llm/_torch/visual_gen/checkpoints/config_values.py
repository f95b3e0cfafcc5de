# SPDX-License-Identifier: Apache-2.0
"""Values of a checkpoint's configuration files, judged before anything is built from them.

A number in quotes, a negative size or a NaN would else show as another library's error, or in the
pictures alone. Importing this module does not import torch.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tensorrt_llm._utils import describe_error


class Rule(NamedTuple):
    """What a value has to be.

    Attributes:
        expected: In words.
        holds: Whether a value of any JSON type is so.
    """

    expected: str
    holds: Callable[[Any], bool]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    # JSON has no NaN and no infinity, but Python reads and writes both.
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


POSITIVE_INTEGER = Rule("an integer, 1 or more", lambda v: _is_integer(v) and v >= 1)
NATURAL_NUMBER = Rule("an integer, 0 or more", lambda v: _is_integer(v) and v >= 0)
POSITIVE_NUMBER = Rule("a finite number above 0", lambda v: _is_number(v) and v > 0)
NUMBER = Rule("a finite number", _is_number)
FLAG = Rule("true or false", lambda v: isinstance(v, bool))


def or_null(rule: Rule) -> Rule:
    """The rule, or null."""
    return Rule(f"{rule.expected}, or null", lambda v: v is None or rule.holds(v))


def list_of(rule: Rule, length: int | None = None) -> Rule:
    """A list of such values: of this length, or of at least one."""
    size = f"{length} values" if length else "values"
    return Rule(
        f"a list of {size}, each {rule.expected}",
        lambda v: (
            isinstance(v, (list, tuple))
            and (len(v) == length if length else len(v) > 0)
            and all(map(rule.holds, v))
        ),
    )


def check_values(values: Mapping[str, Any], rules: Mapping[str, Rule], where: object) -> None:
    """Judge the values that are there; a name without a value is left to its reader's default.

    Args:
        values: Of a configuration file, by name.
        rules: By name; values without a rule are not looked at.
        where: The file, for the message.

    Raises:
        ValueError: names all values that break their rule.
    """
    bad = [name for name, rule in rules.items() if name in values and not rule.holds(values[name])]
    if bad:
        raise ValueError(
            describe_error(
                "A configuration has values that make no sense",
                where=f"{where}, {', '.join(bad)}",
                expected="; ".join(f"{name}: {rules[name].expected}" for name in bad),
                found="; ".join(f"{name}: {reprlib.repr(values[name])}" for name in bad),
                remedy="restore this file from the published checkpoint",
            )
        )
