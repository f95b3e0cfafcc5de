# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint while it is judged: what they are, and which are still unclaimed."""

from collections.abc import Mapping

import torch

from tensorrt_llm._torch.visual_gen.checkpoints.problems import MISSING, STORED_TWICE, Problems
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import (
    NAME_PREFIX,
    SafetensorsFolder,
    TensorSpec,
)


class TensorTable:
    """Names, headers and claims. Names are the checkpoint's without the ``model.`` prefix.

    Args:
        weights: Tensors by name, with or without the prefix; a SafetensorsFolder is asked for its
            headers.
        problems: Takes names that stand there twice, and what `take` misses.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], problems: Problems) -> None:
        self._weights = weights
        self._problems = problems
        self._stored: dict[str, str] = {}
        for stored in weights:
            name = stored.removeprefix(NAME_PREFIX)
            if name in self._stored:
                problems.add(STORED_TWICE, f"{name}: as {self._stored[name]} and as {stored}")
            self._stored[name] = stored
        self._unclaimed = dict.fromkeys(self._stored)
        self.num_bytes = 0

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor."""
        return name in self._stored

    def take(self, name: str) -> str | None:
        """Claim a tensor for a destination.

        Returns:
            Its name as stored; None, and a problem, when the checkpoint lacks it.
        """
        if name not in self._unclaimed:
            self._problems.add(MISSING, name)
            return None
        del self._unclaimed[name]
        self.num_bytes += self.spec(name).num_bytes
        return self._stored[name]

    def unclaimed(self) -> list[str]:
        """Names of the tensors that no destination has claimed."""
        return sorted(self._unclaimed)

    def stored_name(self, name: str) -> str:
        """A tensor's name in the weights, with the prefix if they have it."""
        return self._stored[name]

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._stored)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor, from the header where there is one."""
        stored = self._stored[name]
        if isinstance(self._weights, SafetensorsFolder):
            return self._weights.spec(stored)
        tensor = self._weights[stored]
        return TensorSpec(tensor.dtype, tuple(tensor.shape), "")

    def read(self, name: str) -> torch.Tensor:
        """The tensor itself; planning asks for scales alone."""
        return self._weights[self._stored[name]]
