# SPDX-License-Identifier: Apache-2.0
"""Whatever combination of faults a checkpoint has, it loads exactly or is refused by name."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.checkpoint_dialects import (
    DIALECTS,
    Tensors,
    assert_loaded_exactly,
    bits,
    build_transformer,
    in_dialect,
    is_scale,
)
from tests.support.fp8_oracle import read_tensors

pytestmark = pytest.mark.cosmos3

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.int8, torch.uint8, torch.int32, torch.bool),
]
VALUES = [0.0, -0.0, -1.0, float("nan"), float("inf"), 1e-45, 1e38]


def drop(draw, tensors: Tensors, name: str) -> None:
    del tensors[name]


def rename(draw, tensors: Tensors, name: str) -> None:
    """To something new, to its name with the prefix, or onto another tensor."""
    new = draw(st.sampled_from([f"{name}2", f"model.{name}", f"visual.{name}", *list(tensors)]))
    tensors[new] = tensors.pop(name)


def swap(draw, tensors: Tensors, name: str) -> None:
    other = draw(st.sampled_from(list(tensors)))
    tensors[name], tensors[other] = tensors[other], tensors[name]


def duplicate(draw, tensors: Tensors, name: str) -> None:
    tensors[f"model.{name}"] = tensors[name]


def retype(draw, tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name].float().to(draw(st.sampled_from(DTYPES)))


def reshape(draw, tensors: Tensors, name: str) -> None:
    tensor = tensors[name]
    tensors[name] = draw(
        st.sampled_from(
            [
                tensor[None],
                tensor.reshape(-1),
                tensor.mT if tensor.ndim > 1 else tensor,
                tensor[:0] if tensor.ndim else tensor.expand(2),
            ]
        )
    )


def revalue(draw, tensors: Tensors, name: str) -> None:
    if is_scale(name):
        value = draw(st.sampled_from(VALUES) | st.floats(1e-6, 10.0))
        tensors[name] = torch.full_like(tensors[name], value)


FAULTS = [drop, rename, swap, duplicate, retype, reshape, revalue]


@pytest.fixture(scope="module")
def loaded(tiny_fp8_checkpoint):
    """The FP8 tensors, and a model that holds them."""
    tensors = read_tensors(tiny_fp8_checkpoint)
    transformer = build_transformer(tiny_fp8_checkpoint)
    transformer.load_weights(tensors)
    return tensors, transformer


def snapshot(transformer) -> dict[str, bytes]:
    return {name: bits(p) for name, p in transformer.named_parameters()}


@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_a_spoiled_fp8_checkpoint_loads_exactly_or_is_refused_by_name(loaded, data):
    good, transformer = loaded
    tensors = in_dialect(good, data.draw(st.sampled_from(list(DIALECTS))))
    # Half of the faults go to scales and to the linears of two groups, where they can conspire.
    often = [name for name in tensors if name.startswith(("layers.0.mlp.", "layers.1.self_attn."))]
    touched = []
    for _ in range(data.draw(st.integers(1, 4))):
        names = often if data.draw(st.booleans()) else list(tensors)
        name = data.draw(st.sampled_from([n for n in names if n in tensors]))
        was = dict(tensors)
        data.draw(st.sampled_from(FAULTS))(data.draw, tensors, name)
        touched += [n for n in {**was, **tensors} if tensors.get(n) is not was.get(n)]
    before = snapshot(transformer)
    try:
        transformer.load_weights(tensors)
    except ValueError as error:
        message = str(error)
        linears = {name.removeprefix("model.") for name in touched}
        assert any(name in message for name in linears), (touched, message)
        assert "Remedy: nothing was loaded" in message
        assert snapshot(transformer) == before
        return
    plain = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert len(plain) == len(tensors)
    assert_loaded_exactly(transformer, plain)
