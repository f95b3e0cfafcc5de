# SPDX-License-Identifier: Apache-2.0
"""A streamed load puts the file's bytes in their place, or ends with the error and nothing else."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from tensorrt_llm._torch.visual_gen.checkpoints import byte_stream, weight_apply, weight_targets
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._torch.visual_gen.checkpoints.weight_apply import allocate, apply_plan
from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import plan_weights
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs
from tests.support.checkpoint_dialects import assert_loaded_exactly, bits, write_weights
from tests.support.fp8_oracle import read_tensors
from tests.support.streamed_loads import (
    RECIPES,
    assert_same_bits,
    build,
    load,
    load_from_memory,
    poison,
    reader_threads,
)

pytestmark = pytest.mark.cosmos3

CPU = torch.device("cpu")


@pytest.fixture
def checkpoints(tiny_fp8_checkpoint, tiny_bf16_checkpoint):
    return {"fp8": tiny_fp8_checkpoint, "bf16": tiny_bf16_checkpoint}


@pytest.fixture
def small_slots(monkeypatch):
    """Pieces far smaller than a matrix, and more threads than this machine may have."""
    monkeypatch.setattr(byte_stream, "SLOT_BYTES", 1008)
    monkeypatch.setattr(byte_stream, "READERS", 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))


@pytest.fixture
def staged(monkeypatch):
    """Send every byte through the ring, as on CUDA."""
    original = weight_targets.StoredBytes.__init__

    def without_memory(self, tensor):
        original(self, tensor)
        self.memory = None

    monkeypatch.setattr(weight_targets.StoredBytes, "__init__", without_memory)


def planned(checkpoint, recipe):
    transformer, folder = build(checkpoint, recipe), SafetensorsFolder(checkpoint / "transformer")
    plan = plan_weights(transformer, folder)
    allocate(transformer, CPU)
    return transformer, folder, plan


@pytest.fixture
def own_copy(tiny_fp8_checkpoint, tmp_path):
    return shutil.copytree(tiny_fp8_checkpoint, tmp_path / "checkpoint")


# ---- What arrives ----


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("through_the_ring", [False, True])
def test_streaming_gives_what_loading_from_memory_gives(
    checkpoints, small_slots, recipe, through_the_ring, request
):
    if through_the_ring:
        request.getfixturevalue("staged")
    checkpoint = checkpoints[RECIPES[recipe][0]]
    assert_same_bits(load(checkpoint, recipe), load_from_memory(checkpoint, recipe))


@pytest.mark.parametrize("recipe", ["static FP8", "BF16, fused", "BF16 into FP32"])
@pytest.mark.parametrize("through_the_ring", [False, True])
def test_the_files_bytes_arrive_bit_for_bit(checkpoints, recipe, through_the_ring, request):
    if through_the_ring:
        request.getfixturevalue("staged")
    checkpoint = checkpoints[RECIPES[recipe][0]]
    assert_loaded_exactly(load(checkpoint, recipe), read_tensors(checkpoint))


def test_fused_shards_keep_their_codes_only_at_the_largest_scale(checkpoints):
    tensors = read_tensors(checkpoints["fp8"])
    model = load(checkpoints["fp8"], "FP8 fused with other scales")
    names = [f"layers.0.self_attn.add_{p}_proj" for p in "qkv"]
    scales = [tensors[f"{name}.weight_scale"].float() for name in names]
    assert len({scale.item() for scale in scales}) == 3, "the case needs members that differ"
    linear = model.gen_layers[0].cross_attention.qkv_proj
    assert linear.weight_scale.item() == max(scales).item()
    blocks = linear.weight.split([len(tensors[f"{name}.weight"]) for name in names])
    for name, scale, block in zip(names, scales, blocks, strict=True):
        same = bits(block) == bits(tensors[f"{name}.weight"])
        assert same == (scale.item() == linear.weight_scale.item())


def test_a_load_fills_what_an_earlier_one_left(checkpoints):
    transformer, folder, plan = planned(checkpoints["fp8"], "static FP8")
    for _ in range(2):
        poison(transformer)
        apply_plan(plan, folder)
        assert_loaded_exactly(transformer, read_tensors(checkpoints["fp8"]))


def test_loading_works_in_inference_mode(checkpoints):
    with torch.inference_mode():
        transformer = load(checkpoints["fp8"], "static FP8")
    assert_loaded_exactly(transformer, read_tensors(checkpoints["fp8"]))


def test_the_progress_bar_counts_every_byte_of_the_plan(checkpoints, monkeypatch, small_slots):
    bars = []

    class Bar:
        def __init__(self, **options):
            self.options, self.count = options, 0
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, num_bytes):
            self.count += num_bytes

    monkeypatch.setattr(weight_apply, "tqdm", Bar)
    _, folder, plan = planned(checkpoints["fp8"], "static FP8")
    for weights in (folder, dict(folder)):
        apply_plan(plan, weights, progress=True)
    apply_plan(plan, folder)
    assert [bar.count for bar in bars] == [bar.options["total"] for bar in bars]
    assert {bar.options["total"] for bar in bars} == {plan.num_bytes}
    # None: shown where stderr is a terminal.
    assert [bar.options["disable"] for bar in bars] == [None, None, True]


# ---- The file and the model are two things ----


def test_a_write_to_the_model_never_reaches_the_file_nor_the_other_way_round(own_copy):
    files = sorted((own_copy / "transformer").glob("*.safetensors"))
    before = [file.read_bytes() for file in files]
    transformer = load(own_copy, "static FP8")
    loaded = [bits(parameter) for parameter in transformer.parameters()]
    for file, content in zip(files, before, strict=True):  # in place: the same inode
        with file.open("r+b") as handle:
            handle.write(bytes(len(content)))
    assert [bits(parameter) for parameter in transformer.parameters()] == loaded
    for file, content in zip(files, before, strict=True):
        with file.open("r+b") as handle:
            handle.write(content)
    poison(transformer)
    assert [file.read_bytes() for file in files] == before


# ---- How much at once ----


@pytest.mark.parametrize("readers", [1, 4])
def test_about_one_linear_at_a_time_is_gathered_however_the_file_is_ordered(
    tiny_bf16_checkpoint, tmp_path, monkeypatch, small_slots, readers
):
    monkeypatch.setattr(byte_stream, "READERS", readers)
    checkpoint = shutil.copytree(tiny_bf16_checkpoint, tmp_path / "checkpoint")
    tensors = read_tensors(checkpoint)
    folder = checkpoint / "transformer"
    write_weights(folder, {}, "single")
    # The members of a group as far apart as can be: a shard for each kind of projection.
    kinds: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault(name.rpartition(".")[0].rpartition(".")[2], {})[name] = tensor
    weight_map = {}
    for kind, content in kinds.items():
        save_file(content, folder / f"{kind}.safetensors")
        weight_map |= dict.fromkeys(content, f"{kind}.safetensors")
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))

    alive, seen, largest = [], [], []
    original = weight_targets.JointQuantization._put

    def noting(self, *call):
        if self not in alive:
            alive.append(self)
            largest.append(sum(spec.num_bytes for spec in self._specs))
        original(self, *call)
        held = [sum(b.numel() for b in joint._gathered) for joint in alive]
        seen.append(sum(held))

    monkeypatch.setattr(weight_targets.JointQuantization, "_put", noting)
    load(checkpoint, "BF16 quantised here")
    # Each reader may be at a linear of its own for a moment; one alone holds one linear.
    assert 0 < max(seen) <= max(largest) * (1 if readers == 1 else 3)
    assert len(largest) == 2 * (4 + 6) and max(seen) < sum(largest) / 2


def test_static_weights_are_not_held_anywhere_but_in_the_model(checkpoints, monkeypatch):
    """A CPU load reads straight into the parameters: no tensor of a weight's size is made."""
    transformer, folder, plan = planned(checkpoints["fp8"], "static FP8")
    monkeypatch.setattr(SafetensorsFolder, "__getitem__", lambda *_: pytest.fail("mapped"))
    monkeypatch.setattr(weight_targets.StoredBytes, "put", lambda *_: pytest.fail("staged"))
    apply_plan(plan, folder)


# ---- Errors ----


def test_an_error_in_the_middle_is_raised_as_it_is_and_leaves_no_thread(
    checkpoints, monkeypatch, small_slots, staged
):
    transformer, folder, plan = planned(checkpoints["fp8"], "static FP8")
    error, calls = RuntimeError("device lost"), []

    def put(self, start, data):
        calls.append(start)
        if len(calls) == 30:
            raise error

    monkeypatch.setattr(weight_targets.StoredBytes, "put", put)
    with pytest.raises(RuntimeError) as caught:
        apply_plan(plan, folder)
    assert caught.value is error
    assert not reader_threads()
    monkeypatch.undo()
    apply_plan(plan, folder)  # the same process, the same plan
    assert_loaded_exactly(transformer, read_tensors(checkpoints["fp8"]))


def test_an_error_of_the_progress_bar_stops_the_load(checkpoints, monkeypatch, small_slots):
    _, folder, plan = planned(checkpoints["fp8"], "static FP8")

    class Bar(weight_apply.tqdm):
        def update(self, n=1):
            raise KeyboardInterrupt

    monkeypatch.setattr(weight_apply, "tqdm", Bar)
    with pytest.raises(KeyboardInterrupt):
        apply_plan(plan, folder)
    assert not reader_threads()


def test_a_file_that_is_cut_after_planning_is_refused_by_name(own_copy):
    _, folder, plan = planned(own_copy, "static FP8")
    spec = folder.spec("layers.1.mlp.down_proj.weight")
    os.truncate(folder.folder / spec.file, spec.offset + spec.num_bytes - 1)
    with pytest.raises(ValueError, match=f"ended before its last tensor .*{spec.file}"):
        apply_plan(plan, folder)
    assert not reader_threads()


def test_parameters_on_meta_are_refused_before_anything_is_read(checkpoints, monkeypatch):
    transformer = build(checkpoints["fp8"], "static FP8")
    folder = SafetensorsFolder(checkpoints["fp8"] / "transformer")
    plan = plan_weights(transformer, folder)
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("read"))
    with pytest.raises(ValueError, match="meta device"):
        apply_plan(plan, folder)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_quantised_here_has_to_be_finite(tiny_bf16_checkpoint, tmp_path, value):
    checkpoint = shutil.copytree(tiny_bf16_checkpoint, tmp_path / "checkpoint")
    tensors = read_tensors(checkpoint)
    name = "layers.1.mlp_moe_gen.down_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][3, 4] = value
    write_weights(checkpoint / "transformer", tensors, "index")
    with pytest.raises(ValueError, match=r"finite .*gen_layers\.1\.mlp\.down_proj\.weight_scale"):
        load(checkpoint, "BF16 quantised here")


def test_the_pipeline_loader_streams(checkpoints, monkeypatch):
    monkeypatch.setattr(weight_apply, "_copy", lambda *_: pytest.fail("loaded from memory"))
    args = VisualGenArgs(model=str(checkpoints["fp8"]), torch_compile_config={"enable": False})
    transformer = PipelineLoader(args, device="cpu").load(skip_warmup=True).transformer
    assert_loaded_exactly(transformer, read_tensors(checkpoints["fp8"]))
