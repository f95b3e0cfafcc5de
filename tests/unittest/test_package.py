# SPDX-License-Identifier: Apache-2.0
"""Importing the package."""

import subprocess
import sys
from importlib import metadata

import pytest

import tensorrt_llm


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    return done.stdout.strip()


def test_importing_the_package_and_its_parameter_classes_costs_no_torch():
    code = (
        "import sys, tensorrt_llm\n"
        "from tensorrt_llm import VisualGen, VisualGenArgs, VisualGenParams, VisualGenResult\n"
        "from tensorrt_llm import VisualGenOutput, VisualGenMetrics, ExtraParamSchema\n"
        "from tensorrt_llm import QuantConfig\n"
        "VisualGenArgs(); VisualGenParams(height=720)\n"
        "print([m for m in ('torch', 'diffusers', 'transformers', 'triton') if m in sys.modules])"
    )
    assert run_python(code) == "[]"


def test_every_public_name_is_there_and_another_is_not():
    names = set(tensorrt_llm.__all__)
    assert {"VisualGen", "VisualGenArgs", "VisualGenParams", "VisualGenResult"} <= names
    assert {"VisualGenOutput", "VisualGenMetrics", "ExtraParamSchema", "QuantConfig"} <= names
    assert names <= set(dir(tensorrt_llm))
    for package in (tensorrt_llm, tensorrt_llm.visual_gen):
        for name in package.__all__:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="NoSuchName"):
            package.NoSuchName  # noqa: B018


def test_upstreams_distribution_in_the_environment_is_an_import_error(tmp_path, monkeypatch):
    info = tmp_path / "tensorrt_llm-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt-llm\nVersion: 1.2.3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert metadata.version("tensorrt_llm") == "1.2.3"
    with pytest.raises(ImportError, match="1.2.3.*environment of its own"):
        tensorrt_llm._refuse_upstream_distribution()


def test_our_own_distribution_is_no_import_error(tmp_path, monkeypatch):
    info = tmp_path / "tensorrt_llm_cosmos3-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: tensorrt-llm-cosmos3\nVersion: 1.2.3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tensorrt_llm._refuse_upstream_distribution()
