# SPDX-License-Identifier: Apache-2.0
import pytest

from tensorrt_llm._torch.visual_gen.config_fields import (
    AttentionConfig,
    CudaGraphConfig,
    ParallelConfig,
    TorchCompileConfig,
    refuse_unbuilt_options,
)

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
