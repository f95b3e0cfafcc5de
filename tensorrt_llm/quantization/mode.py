# SPDX-License-Identifier: Apache-2.0
"""Names of quantisation algorithms and the layouts that they imply."""

import enum


class QuantAlgo(enum.StrEnum):
    """Algorithms by their ModelOpt names.

    Only ``FP8`` (E4M3, one scale a tensor, weights and activations) is served. The others can be
    named in a QuantConfig, and everything that would have to read their layout refuses them.
    """

    FP8 = "FP8"
    W4A16_AWQ = "W4A16_AWQ"
    W4A8_AWQ = "W4A8_AWQ"
    W8A8_SQ_PER_CHANNEL = "W8A8_SQ_PER_CHANNEL"


class QuantMode(enum.IntFlag):
    """What a recipe does to a Linear, as flags."""

    NONE = 0
    FP8_QDQ = enum.auto()
    """E4M3 weights and activations, each with one FP32 scale a tensor."""
    UNVERIFIED = enum.auto()
    """A named algorithm whose tensor layout this package has not verified."""

    @classmethod
    def from_quant_algo(cls, quant_algo: QuantAlgo | None) -> "QuantMode":
        """Return the flags of an algorithm; ``NONE`` for None."""
        if quant_algo is None:
            return cls.NONE
        return cls.FP8_QDQ if quant_algo is QuantAlgo.FP8 else cls.UNVERIFIED

    def has_fp8_qdq(self) -> bool:
        """Whether weights and activations are E4M3 with one scale a tensor."""
        return bool(self & QuantMode.FP8_QDQ)

    def has_any_quant(self) -> bool:
        """Whether the recipe quantises anything at all."""
        return self is not QuantMode.NONE
