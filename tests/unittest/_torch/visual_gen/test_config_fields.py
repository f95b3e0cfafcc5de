# SPDX-License-Identifier: Apache-2.0
import pytest

from tensorrt_llm._torch.visual_gen.config_fields import (
    AttentionConfig,
    CudaGraphConfig,
    ParallelConfig,
    TorchCompileConfig,
    refuse_unbuilt_options,
)
from tensorrt_llm.visual_gen.args import VisualGenArgs

AXES = ["cfg_size", "ulysses_size", "ring_size", "tp_size", "parallel_vae_size"]


def test_the_defaults():
    assert AttentionConfig().backend == "AUTO"
    assert TorchCompileConfig().enable is None and not TorchCompileConfig().enable_fullgraph
    assert CudaGraphConfig().enable is None
    assert ParallelConfig().model_dump() == dict.fromkeys(AXES, 1)
    refuse_unbuilt_options(ParallelConfig())


@pytest.mark.parametrize(
    "group", [AttentionConfig, TorchCompileConfig, CudaGraphConfig, ParallelConfig]
)
def test_unknown_fields_are_refused_by_name(group):
    with pytest.raises(ValueError, match="surprise"):
        group(surprise=1)


@pytest.mark.parametrize("axis", AXES)
def test_each_parallel_axis_above_one_is_refused_by_name(axis):
    with pytest.raises(NotImplementedError, match=f"{axis}=2"):
        refuse_unbuilt_options(ParallelConfig(**{axis: 2}))


def test_a_size_below_one_is_a_value_error():
    with pytest.raises(ValueError, match="ring_size"):
        ParallelConfig(ring_size=0)


SWITCHES = [
    (TorchCompileConfig, "enable"),
    (TorchCompileConfig, "enable_fullgraph"),
    (CudaGraphConfig, "enable"),
]
SIZES = [(ParallelConfig, axis) for axis in AXES]


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [
        *((*switch, value) for switch in SWITCHES for value in ("yes", "true", 1, 0, 1.0, [True])),
        *((*size, value) for size in SIZES for value in (True, "1", 1.0, None)),
        (AttentionConfig, "backend", b"VANILLA"),
    ],
)
def test_a_value_of_another_type_is_refused_and_not_converted(group, field, value):
    with pytest.raises(ValueError, match=field):
        group(**{field: value})
    options = group()
    before = getattr(options, field)
    with pytest.raises(ValueError, match=field):
        setattr(options, field, value)
    assert getattr(options, field) == before


@pytest.mark.parametrize("name", ["parallel_config", "torch_compile_config", "cuda_graph_config"])
def test_a_group_may_come_as_a_dictionary_or_as_itself_and_is_strict_either_way(name):
    good = {"tp_size": 1} if name == "parallel_config" else {"enable": False}
    bad = {"tp_size": True} if name == "parallel_config" else {"enable": "no"}
    group = type(getattr(VisualGenArgs(), name))
    assert getattr(VisualGenArgs(**{name: good}), name) == group(**good)
    assert getattr(VisualGenArgs(**{name: group(**good)}), name) == group(**good)
    with pytest.raises(ValueError, match=f"{name}.{next(iter(bad))}"):
        VisualGenArgs(**{name: bad})


def test_numbers_and_switches_of_yaml_are_what_they_look_like(tmp_path):
    path = tmp_path / "args.yaml"
    path.write_text(
        "parallel_config: {tp_size: 1, cfg_size: 1}\n"
        "torch_compile_config: {enable: yes, enable_fullgraph: true}\n"
        "cuda_graph_config: {enable: null}\n"
    )
    args = VisualGenArgs.from_yaml(path)
    assert args.parallel_config == ParallelConfig()
    assert args.torch_compile_config == TorchCompileConfig(enable=True, enable_fullgraph=True)
    assert args.cuda_graph_config.enable is None
    path.write_text('torch_compile_config: {enable: "yes"}\n')
    with pytest.raises(ValueError, match="torch_compile_config.enable"):
        VisualGenArgs.from_yaml(path)
