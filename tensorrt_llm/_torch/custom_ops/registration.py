# SPDX-License-Identifier: Apache-2.0
"""Registering an op of the namespace ``trtllm``.

Through ``torch.library.Library``: a call costs less there than through ``custom_op``.
"""

import contextlib
from collections.abc import Callable

import torch

_LIBRARY = torch.library.Library("trtllm", "FRAGMENT")


_NO_GUARD = contextlib.nullcontext()


def device_guard(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which the device of a CUDA tensor is the current one.

    Where it is already, which is nearly always, entering costs nothing; ``torch.cuda.device`` takes
    some 5 us of a launch's 40 (an H200's host, under a profiler).
    """
    if tensor.get_device() == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(tensor.device)


def register_op(schema: str, cpu: Callable, cuda: Callable, fake: Callable) -> None:
    """Define an op and its implementations.

    Args:
        schema: ``name(arguments) -> results`` in the schema language of ``torch.library``.
        cpu: Implementation for CPU tensors.
        cuda: Implementation for CUDA tensors.
        fake: Shapes and dtypes of the results, from metadata alone.
    """
    # needs_exact_strides: inductor must hand over the strides that eager would, since ops refuse
    # what is not contiguous.
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    name = schema.partition("(")[0]
    # no_grad: there is no backward, on the CPU neither, where autograd would record the steps
    # inside.
    _LIBRARY.impl(name, torch.no_grad()(cpu), "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"trtllm::{name}", fake, lib=_LIBRARY)
