# SPDX-License-Identifier: Apache-2.0
"""Counts the tensor bytes that are alive while code runs, on any device, meta included."""

import weakref
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """``peak`` is the most bytes of storage that the block's own results held at one time.

    Args:
        known: Tensors that exist already, such as parameters, and are not counted.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._seen: dict[int, object] = {}
        for tensor in known:
            storage = tensor.untyped_storage()
            self._seen[id(storage)] = storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._seen:
            return

        def forget(_: object) -> None:
            del self._seen[key]
            self._now -= size

        self._seen[key] = weakref.ref(storage, forget)
        self._now += size
        self.peak = max(self.peak, self._now)
