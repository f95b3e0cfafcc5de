# SPDX-License-Identifier: Apache-2.0
"""Small helpers that every part of the package shares: the error format and the device query."""

import functools

REMEDY_MARK = " Remedy: "
"""Stands before the last part of a described error; tells such an error from a foreign one."""


def describe_error(
    what: str,
    *,
    where: object,
    expected: object,
    found: object,
    remedy: str,
) -> str:
    """Compose the one error format of this package.

    Args:
        what: The problem in one clause, without a final dot.
        where: The module, file, key or request field concerned.
        expected: The value, shape, dtype or range that would have been right.
        found: What was there instead.
        remedy: What the caller can do about this very error, in a line.

    Returns:
        ``"what (where: ...): expected ..., found .... Remedy: ...."``.
    """
    facts = f"{what} (where: {where}): expected {expected}, found {found}."
    # An ellipsis is part of what it says, "1, 5, 9, ...", and ends the sentence too.
    end = remedy if remedy.endswith("...") else f"{remedy.rstrip('.')}."
    return f"{facts}{REMEDY_MARK}{end}"


@functools.cache
def get_sm_version(device_index: int | None = None) -> int:
    """Return the compute capability of a CUDA device as an int, 90 for sm_90.

    Args:
        device_index: CUDA device ordinal; the current device when None.

    Raises:
        RuntimeError: no CUDA device is visible.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            describe_error(
                "No CUDA device to read the SM version from",
                where="get_sm_version",
                expected="a visible CUDA device",
                found="torch.cuda.is_available() is False",
                remedy="run on a machine with an NVIDIA GPU, and check CUDA_VISIBLE_DEVICES",
            )
        )
    major, minor = torch.cuda.get_device_capability(device_index)
    return major * 10 + minor
