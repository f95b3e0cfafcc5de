# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several test folders share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_fp8_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The static FP8 tiny checkpoint of seed 0; read-only for tests."""
    return _make_tiny_checkpoint(tmp_path_factory, "fp8")


@pytest.fixture(scope="session")
def tiny_bf16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The BF16 twin of ``tiny_fp8_checkpoint``; read-only for tests."""
    return _make_tiny_checkpoint(tmp_path_factory, "bf16")


def _make_tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, precision: str) -> Path:
    from tensorrt_llm.visual_gen.tiny_checkpoint import make_tiny_checkpoint

    out = tmp_path_factory.mktemp("tiny_checkpoints") / precision
    return make_tiny_checkpoint(out, precision=precision, seed=0)
