# SPDX-License-Identifier: Apache-2.0
"""VisualGenArgs and its YAML."""

import pytest

from tensorrt_llm import QuantConfig, VisualGenArgs
from tensorrt_llm.visual_gen import CompilationConfig


def test_yaml_fields_arrive_and_overrides_replace_them(tmp_path):
    file = tmp_path / "args.yaml"
    file.write_text(
        "model: some/model\nrevision: fp8\n"
        "compilation_config:\n  resolutions: [[192, 320]]\n  num_frames: [17]\n"
        "torch_compile_config: {enable: false}\n"
    )
    args = VisualGenArgs.from_yaml(file, revision="main")
    assert (args.model, args.revision) == ("some/model", "main")
    assert args.compilation_config.resolutions == [(192, 320)]
    assert args.compilation_config.num_frames == [17]
    assert args.torch_compile_config.enable is False


def test_an_empty_yaml_gives_the_defaults(tmp_path):
    (tmp_path / "args.yaml").write_text("# nothing\n")
    assert VisualGenArgs.from_yaml(tmp_path / "args.yaml") == VisualGenArgs()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("no_such_field: 1\n", "no_such_field"),
        ("compilation_config: {no_such_field: 1}\n", "no_such_field"),
        ("- a\n- b\n", "no mapping"),
        ("a: [1\n", "Can't read"),
        (None, "Can't read"),
    ],
)
def test_a_bad_yaml_is_a_value_error_that_names_it(tmp_path, content, named):
    file = tmp_path / "args.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=named):
        VisualGenArgs.from_yaml(file)


@pytest.mark.parametrize(
    "config",
    [
        {"resolutions": [[100, 320]]},
        {"resolutions": [[0, 320]]},
        {"resolutions": [[320]]},
        {"resolutions": []},
        {"resolutions": [[True, 320]]},
        {"num_frames": [16]},
        {"num_frames": [0]},
        {"num_frames": []},
        {"skip_warmup": "yes"},
    ],
)
def test_a_bad_warm_up_shape_is_refused(config):
    with pytest.raises(ValueError, match=next(iter(config))):
        CompilationConfig(**config)


def test_a_revision_needs_a_hub_repository(tmp_path):
    with pytest.raises(ValueError, match="revision"):
        VisualGenArgs(model=tmp_path, revision="fp8")
    assert VisualGenArgs(model="nvidia/Cosmos3-Nano", revision="fp8").revision == "fp8"


def test_quant_config_keeps_a_modelopt_dictionary_and_a_quant_config_apart():
    dictionary = {"quant_algo": "FP8"}
    assert VisualGenArgs(quant_config=dictionary).quant_config == dictionary
    config = QuantConfig(quant_algo="FP8")
    assert VisualGenArgs(quant_config=config).quant_config is config
    with pytest.raises(ValueError, match="quant_config"):
        VisualGenArgs(quant_config="FP8")


def test_there_is_no_step_precision_option():
    assert not [name for name in VisualGenArgs.model_fields if "step" in name or "policy" in name]
