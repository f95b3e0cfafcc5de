# SPDX-License-Identifier: Apache-2.0
"""One FP32 checkpoint in both implementations: the product's pipeline and diffusers'."""

import json
import shutil

import pytest
import torch
from diffusers import Cosmos3OmniPipeline

from tests.support.pipelines import load_pipeline


@pytest.fixture(scope="session")
def fp32_checkpoint(tiny_bf16_checkpoint, tmp_path_factory):
    """The BF16 checkpoint, declared FP32: the same weights, exactly, in both implementations."""
    path = shutil.copytree(tiny_bf16_checkpoint, tmp_path_factory.mktemp("parity") / "fp32")
    config_file = path / "transformer" / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(config | {"dtype": "float32"}))
    return path


@pytest.fixture(scope="session")
def fp32_pipeline(fp32_checkpoint):
    """Ours; tests leave it as it is."""
    return load_pipeline(fp32_checkpoint)


@pytest.fixture(scope="session")
def fp8_pipeline(tiny_fp8_checkpoint):
    """Ours on the static FP8 checkpoint; tests leave it as it is."""
    return load_pipeline(tiny_fp8_checkpoint)


@pytest.fixture(scope="session")
def oracle(fp32_checkpoint):
    """diffusers' pipeline; what tests replace in it they replace through monkeypatch."""
    pipeline = Cosmos3OmniPipeline.from_pretrained(
        fp32_checkpoint, torch_dtype=torch.float32, enable_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
