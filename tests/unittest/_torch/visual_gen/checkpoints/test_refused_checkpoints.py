# SPDX-License-Identifier: Apache-2.0
"""A spoiled checkpoint is refused by name before anything is allocated, and leaves nothing."""

import gc
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensorrt_llm._torch.visual_gen import pipeline_loader
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs
from tests.support.checkpoint_dialects import (
    Tensors,
    assert_loaded_exactly,
    in_dialect,
    write_weights,
)
from tests.support.fp8_oracle import read_tensors
from tests.support.spoiled_checkpoints import (
    CASES,
    DOWN,
    INDEX,
    config,
    dropped,
    json_changed,
    recipe,
    tensors_changed,
)

pytestmark = pytest.mark.cosmos3


@pytest.fixture
def root(tiny_fp8_checkpoint, tiny_bf16_checkpoint, tmp_path) -> Callable[[str], Path]:
    sources = {"fp8": tiny_fp8_checkpoint, "bf16": tiny_bf16_checkpoint}
    return lambda source: shutil.copytree(sources[source], tmp_path / source)


def load(root: Path, **args):
    args = VisualGenArgs(model=str(root), **args)
    return PipelineLoader(args, device="cpu").load(skip_warmup=True)


@pytest.mark.parametrize("name", CASES)
def test_a_spoiled_checkpoint_is_refused_by_name_before_anything_is_allocated(
    root, name, monkeypatch
):
    case = CASES[name]
    folder = root(case.source)
    case.spoil(folder)
    allocated = []
    monkeypatch.setattr(
        pipeline_loader.Cosmos3VFMTransformer, "to_empty", lambda *a, **k: allocated.append(a)
    )
    with pytest.raises(case.error) as caught:
        load(folder, **case.args)
    message = str(caught.value)
    for part in (*case.found, "expected ", "found ", "Remedy: "):
        assert part in message, message
    assert not allocated


def test_every_problem_is_listed_at_once_the_first_few_of_each_kind(root):
    folder = root("fp8")

    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.endswith("proj.weight") and ".mlp." in n]:
            del tensors[name]
        tensors[f"{DOWN}.weight_scale"] = torch.tensor(torch.nan)
        tensors[f"{DOWN}.input_scale"] = torch.tensor(-1.0)
        tensors["proj_out.bias"] = torch.zeros(3)
        tensors["stray"] = torch.zeros(3)

    tensors_changed(change)(folder)
    with pytest.raises(ValueError) as caught:
        load(folder)
    message = str(caught.value)
    assert "found 11 problems" in message
    assert "layers.1.mlp.up_proj.weight ... (6 in all)" in message
    assert "layers.1.mlp.down_proj.weight" not in message
    for part in (
        "tensors that nothing consumes: stray",
        "wrong shapes: proj_out.bias: (192,) expected, (3,) found",
        "wrong dtypes: proj_out.bias: bfloat16 expected, float32 found",
        f"unusable scales: {DOWN}.weight_scale: A scale must be finite and positive",
        f"; {DOWN}.input_scale: A scale must be finite and positive",
    ):
        assert part in message, message


def test_fields_without_meaning_for_the_load_do_no_harm(root):
    folder = root("fp8")
    for change in (
        config("_diffusers_version", value="9.9.9"),
        config("a_field_of_next_year", value={"nested": [1, 2]}),
        recipe("producer", value={"name": "modelopt", "version": "9.0"}),
        recipe("quant_type", value="FP8_FP8"),
        recipe("quantization_status", value="compressed"),
        recipe("runtime", "another_engine", value={"threads": 3}),
        recipe("config_groups", "group_0", "weights", "observer", value="minmax"),
        json_changed("model_index.json", lambda content: content.update(new_flag=True)),
        json_changed(
            f"transformer/{INDEX}", lambda index: index.update(metadata={"total_size": 1})
        ),
    ):
        change(folder)
    assert_loaded_exactly(load(folder).transformer, read_tensors(folder))


def test_fields_that_newer_conversions_leave_out_have_defaults(root):
    folder = root("fp8")
    for name in ("position_embedding_type", "joint_attn_implementation", "max_position_embeddings"):
        config(name, value=None)(folder)
    config("temporal_compression_factor_sound", value=None)(folder)
    config("rope_scaling", value={"mrope_section": [4, 2, 2]})(folder)
    assert_loaded_exactly(load(folder).transformer, read_tensors(folder))


# ---- nothing is left behind ----


class _Allocations(TorchDispatchMode):
    """Counts the bytes of host tensors that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self.num_bytes += leaf.numel() * leaf.element_size()
        return result


def mapped_files(root: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(root) in line]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux' /proc/self/maps")
def test_a_refused_load_leaves_no_model_no_memory_and_no_mapped_file(root, monkeypatch):
    folder = root("fp8")
    good = {name: tensor.clone() for name, tensor in read_tensors(folder).items()}
    dropped("norm_moe_gen.weight")(folder)
    models = []
    build = pipeline_loader.Cosmos3VFMTransformer.__init__

    def remember(self, *args, **kwargs):
        models.append(weakref.ref(self))
        build(self, *args, **kwargs)

    monkeypatch.setattr(pipeline_loader.Cosmos3VFMTransformer, "__init__", remember)
    with _Allocations() as allocations:
        with pytest.raises(ValueError, match="norm_moe_gen.weight") as caught:
            load(folder)
        refused = allocations.num_bytes
        del caught
        gc.collect()
        assert len(models) == 1 and models[0]() is None
        assert mapped_files(folder) == []
        write_weights(folder / "transformer", good, "index")
        transformer = load(folder).transformer
    weights = sum(p.numel() * p.element_size() for p in transformer.parameters())
    assert allocations.num_bytes - refused > weights, "the count has to see the good load"
    assert refused < weights / 10  # the scheduler's tables, and the scales
    assert_loaded_exactly(transformer, good)


def test_a_refused_load_into_a_model_changes_none_of_its_bytes(root):
    folder = root("fp8")
    transformer = load(folder).transformer
    good = read_tensors(folder)
    for dialect in ("unified", "modelopt"):
        tensors = in_dialect(good, dialect)
        tensors[f"{DOWN}.weight"] = torch.zeros_like(tensors[f"{DOWN}.weight"])
        tensors["norm_moe_gen.weight"] = tensors["norm_moe_gen.weight"][:-1]
        with pytest.raises(ValueError, match="norm_moe_gen.weight"):
            transformer.load_weights(tensors)
        assert_loaded_exactly(transformer, good)
    transformer.load_weights(in_dialect(good, "modelopt"))
    assert_loaded_exactly(transformer, good)
