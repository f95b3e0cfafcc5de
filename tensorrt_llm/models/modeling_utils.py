# SPDX-License-Identifier: Apache-2.0
"""QuantConfig: the quantisation recipe of a model. Importing this module does not import torch."""

import re
from collections.abc import Iterator
from fnmatch import translate
from functools import lru_cache

from pydantic import BaseModel, ConfigDict, field_validator

from tensorrt_llm._utils import describe_error
from tensorrt_llm.quantization.mode import QuantAlgo, QuantMode


class QuantConfig(BaseModel):
    """A quantisation recipe: one algorithm, and the modules that it leaves alone.

    Attributes:
        quant_algo: The algorithm, or None for a high-precision model.
        exclude_modules: Shell-style patterns (``*``, ``?``, ``[...]``; ``*`` crosses dots) of
            module names that stay in high precision; ModelOpt's ``ignore`` list.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    quant_algo: QuantAlgo | None = None
    exclude_modules: list[str] | None = None

    @field_validator("quant_algo", mode="before")
    @classmethod
    def _known_algorithm(cls, value: object) -> object:
        known = [algo.value for algo in QuantAlgo]
        if value is not None and value not in known:
            raise ValueError(
                describe_error(
                    f"Unknown quantisation algorithm {value!r}",
                    where="quant_algo",
                    expected=f"one of {known} or None",
                    found=repr(value),
                    remedy=(
                        "use FP8, the algorithm that this version runs, or None for a 16-bit model"
                    ),
                )
            )
        return value

    @property
    def quant_mode(self) -> QuantMode:
        """The algorithm as flags; ask it ``has_fp8_qdq()``."""
        return QuantMode.from_quant_algo(self.quant_algo)

    def is_module_excluded_from_quantization(self, name: str) -> bool:
        """Whether a pattern of ``exclude_modules`` covers a module.

        A pattern covers a module when it matches the module's dotted name or the name of a module
        around it: ``time_embedder`` covers ``time_embedder.linear_1``. A ``model.`` in front of the
        name or of the pattern does not count, since some checkpoints wrap all names in it.

        Args:
            name: Dotted module name, a checkpoint's or this package's: the patterns are compared
                with what is given, so that a caller who renames modules asks for both names.
        """
        if not self.exclude_modules:
            return False
        excluded = _any_of(tuple(self.exclude_modules))
        return any(map(excluded.match, _name_and_ancestors(name.removeprefix("model."))))


@lru_cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """All patterns in one: a model asks for a thousand names, each with its ancestors."""
    return re.compile("|".join(translate(pattern.removeprefix("model.")) for pattern in patterns))


def _name_and_ancestors(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
