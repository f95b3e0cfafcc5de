# SPDX-License-Identifier: Apache-2.0
"""The checks of single request values, and the collector that reports all violations at once."""

import math
import numbers
import reprlib
from typing import Any

from tensorrt_llm.visual_gen.params import ParameterError

# The VAE makes one latent row or column of 16 pixels (cosmos3.md B.2).
SPATIAL_FACTOR = 16
MAX_SIDE = 4096
# Text this long can't fit max_sequence_length; refusing it here spares the tokenizer megabytes.
MAX_PROMPT_CHARACTERS = 200_000
# Raw timesteps run from 0 to num_train_timesteps.
MAX_TIMESTEP = 1000.0
# Published settings use 7 at most (cosmos3.md E.1). Far beyond it nothing but saturated noise comes
# out, so a request is a mistake.
MAX_GUIDANCE_SCALE = 100.0
_IN_RANGE = "choose numbers inside their ranges, or leave the fields out for the defaults"


class Violations:
    """Collects what is wrong with a request; ``raise_if_any`` ends the collecting."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._names: list[str] = []
        self._remedies: dict[str, None] = {}  # in order, each once

    def add(self, name: str, expected: str, found: object, remedy: str) -> None:
        """Note one violation.

        Args:
            name: The field of the request.
            expected: What would have been right.
            found: What was there; shortened, it may be megabytes.
            remedy: What the caller can do about it.
        """
        self._names.append(name)
        self.found.append(f"{name}: expected {expected}, found {reprlib.repr(found)}")
        self._remedies[remedy] = None

    def refused(self, name: str) -> bool:
        """Whether a violation names this field, so that its value is a stand-in."""
        return any(name in found.replace(",", " ").split() for found in self._names)

    def raise_if_any(self) -> None:
        """Raises ParameterError with every violation, and then with what to do about them."""
        if self.found:
            raise ParameterError(
                f"Parameter validation failed: {'; '.join(self.found)}. "
                f"Remedy: {'; '.join(self._remedies)}.",
                self._names,
            )

    def integer(self, name: str, value: Any, low: int, high: int) -> int:
        """``value`` as an int within [low, high]; a bool is none."""
        is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if is_integer and low <= value <= high:
            return int(value)
        self.add(name, f"an integer from {low} to {high}", value, _IN_RANGE)
        return low

    def number(
        self, name: str, value: Any, low: float, high: float, remedy: str = _IN_RANGE
    ) -> float:
        """``value`` as a finite float within [low, high]; a bool is none."""
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if is_number and low <= value <= high and math.isfinite(as_float := _to_float(value)):
            return as_float
        self.add(name, f"a finite number from {low:g} to {high:g}", value, remedy)
        # The nearer bound, so that no other check complains about a value that nobody gave.
        return high if is_number and value > high else low

    def flag(self, name: str, value: Any) -> bool:
        """``value``, which must be True or False."""
        if not isinstance(value, bool):
            self.add(name, "True or False", value, "write switches as booleans, not as text or 0/1")
        return value is True

    def choice(self, name: str, value: Any, choices: tuple[str, ...]) -> str | None:
        """``value``, which must be one of ``choices``; None when it isn't."""
        if isinstance(value, str) and value in choices:
            return value
        expected = " or ".join(map(repr, choices))
        self.add(name, expected, value, "choose one of the words in quotes")
        return None

    def text(self, name: str, value: Any, allow_blank: bool = True) -> str:
        """``value`` as a str that UTF-8 can encode, of at most MAX_PROMPT_CHARACTERS."""
        if not isinstance(value, str) or not (allow_blank or value.strip()):
            remedy = "give a string" if allow_blank else "give a string that is not blank"
            self.add(name, "text", value, remedy)
        elif len(value) > MAX_PROMPT_CHARACTERS:
            expected = f"at most {MAX_PROMPT_CHARACTERS} characters"
            self.add(name, expected, f"{len(value)} characters", "shorten the text")
        elif any("\ud800" <= character <= "\udfff" for character in value):
            remedy = "decode the text from its bytes again, without surrogateescape"
            self.add(name, "valid Unicode", "a lone surrogate", remedy)
        else:
            return value
        return ""

    def side(self, name: str, value: Any) -> int:
        """A height or width in pixels."""
        side = self.integer(name, value, SPATIAL_FACTOR, MAX_SIDE)
        below = side // SPATIAL_FACTOR * SPATIAL_FACTOR
        if below != side:
            nearest = f"nearest: {below} and {below + SPATIAL_FACTOR}"
            expected = f"a multiple of {SPATIAL_FACTOR} ({nearest})"
            self.add(name, expected, value, "take the nearest multiple")
        return below

    def interval(self, name: str, value: Any) -> tuple[float, float] | None:
        """Two ascending raw timesteps."""
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            remedy = "give the interval as a list, [400, 1000] for instance"
            self.add(name, "two numbers [low, high]", value, remedy)
            return None
        low, high = (self.number(name, bound, 0.0, MAX_TIMESTEP) for bound in value)
        if low > high:
            self.add(name, "low <= high", value, "exchange the two bounds")
        return low, high

    def indexes(self, name: str, value: Any, count: int) -> tuple[int, ...]:
        """Different indexes below ``count``, at least one; ascending."""
        is_list = isinstance(value, (list, tuple)) and all(
            isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in value
        )
        if not is_list or not value or len(set(value)) != len(value):
            remedy = "list each latent frame once, [0, 1] for instance"
            self.add(name, "a list of different integers, at least one", value, remedy)
        elif not all(0 <= i < count for i in value):
            expected = f"integers from 0 to {count - 1}, the latent frames"
            self.add(name, expected, value, "leave later frames out, or raise num_frames")
        else:
            return tuple(sorted(int(i) for i in value))
        return (0,)


def _to_float(value: numbers.Real) -> float:
    """``value`` as a float; an int that is too large for one is as wrong as an infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
