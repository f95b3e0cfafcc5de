# SPDX-License-Identifier: Apache-2.0
import pytest

from tensorrt_llm.mapping import Mapping

AXES = ["world_size", "tp_size", "cfg_size", "ulysses_size", "ring_size", "parallel_vae_size"]


def test_one_process_is_the_default():
    mapping = Mapping()
    assert (mapping.world_size, mapping.rank, mapping.tp_size) == (1, 0, 1)


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_above_one_is_refused_by_name(axis):
    with pytest.raises(NotImplementedError, match=f"{axis}=2"):
        Mapping(**{axis: 2})


@pytest.mark.parametrize("size", [0, -1, True, 1.0])
def test_what_is_no_size_is_a_value_error(size):
    with pytest.raises(ValueError, match="tp_size"):
        Mapping(tp_size=size)


@pytest.mark.parametrize("rank", [1, -1])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ValueError, match="rank"):
        Mapping(rank=rank)
