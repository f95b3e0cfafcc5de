# SPDX-License-Identifier: Apache-2.0
"""Streamed loads onto a GPU: the same bytes, little memory beside the model, nothing left."""

import gc
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import Cosmos3OmniTransformer
from safetensors.torch import save_file

from tensorrt_llm._torch.visual_gen.checkpoints import byte_stream, staging, weight_targets
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._torch.visual_gen.checkpoints.weight_apply import allocate, apply_plan
from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import plan_weights
from tests.support.checkpoint_dialects import assert_loaded_exactly, bits
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

pytestmark = [pytest.mark.gpu, pytest.mark.cosmos3]

CUDA = torch.device("cuda")
MIB = 2**20


@pytest.fixture
def checkpoints(tiny_fp8_checkpoint, tiny_bf16_checkpoint):
    return {"fp8": tiny_fp8_checkpoint, "bf16": tiny_bf16_checkpoint}


@pytest.fixture(params=[1008, byte_stream.SLOT_BYTES], ids=["small slots", "own slots"])
def slots(request, monkeypatch):
    monkeypatch.setattr(byte_stream, "SLOT_BYTES", request.param)


@pytest.fixture
def locked(monkeypatch):
    """Addresses of staging memory that is page-locked right now."""
    addresses = set()
    lock, unlock = staging._page_lock, staging._page_unlock

    def noting_lock(address, size):
        lock(address, size)
        addresses.add(address)

    def noting_unlock(address):
        unlock(address)
        addresses.remove(address)

    monkeypatch.setattr(staging, "_page_lock", noting_lock)
    monkeypatch.setattr(staging, "_page_unlock", noting_unlock)
    return addresses


def allocated() -> int:
    """Bytes that live tensors hold on the device."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_streamed_load_on_cuda_gives_the_bits_of_the_cpu(checkpoints, slots, locked, recipe):
    checkpoint = checkpoints[RECIPES[recipe][0]]
    found = load(checkpoint, recipe, "cuda")
    assert {p.device.type for p in found.parameters()} == {"cuda"}
    assert_same_bits(found, load_from_memory(checkpoint, recipe))
    assert not locked and not reader_threads()


@pytest.mark.parametrize("recipe", ["static FP8", "BF16, fused", "BF16 into FP32"])
def test_the_files_bytes_arrive_on_cuda_bit_for_bit(checkpoints, slots, recipe):
    checkpoint = checkpoints[RECIPES[recipe][0]]
    assert_loaded_exactly(load(checkpoint, recipe, "cuda"), read_tensors(checkpoint))


def test_staging_memory_is_page_locked_while_it_is_used(checkpoints, locked, monkeypatch):
    seen = []
    original = weight_targets.StoredBytes.put

    def put(self, start, data):
        seen.append((len(locked), data.is_pinned()))
        original(self, start, data)

    monkeypatch.setattr(weight_targets.StoredBytes, "put", put)
    load(checkpoints["fp8"], "static FP8", "cuda")
    assert set(seen) == {(1, True)} and not locked


def test_a_load_waits_for_what_the_callers_stream_still_does_to_the_parameters(checkpoints):
    """A kernel that was queued before the load must not write over what the load has copied."""
    transformer = build(checkpoints["fp8"], "static FP8")
    folder = SafetensorsFolder(checkpoints["fp8"] / "transformer")
    plan = plan_weights(transformer, folder, CUDA)
    allocate(transformer, CUDA)
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    poison(transformer)
    apply_plan(plan, folder)
    assert_loaded_exactly(transformer, read_tensors(checkpoints["fp8"]))


@pytest.mark.parametrize("recipe", ["static FP8", "BF16 quantised here"])
def test_an_exception_in_the_middle_leaves_no_thread_no_pinned_buffer_and_no_device_memory(
    checkpoints, locked, monkeypatch, recipe
):
    monkeypatch.setattr(byte_stream, "SLOT_BYTES", 1008)
    checkpoint = checkpoints[RECIPES[recipe][0]]
    load(checkpoint, recipe, "cuda")  # kernels and handles exist from here on
    before = allocated()
    error, calls = RuntimeError("device lost"), []
    original = os.preadv

    def preadv(*arguments):
        calls.append(arguments)
        if len(calls) == 40:
            assert locked
            raise error
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        with pytest.raises(RuntimeError) as caught:
            load(checkpoint, recipe, "cuda")
    assert caught.value is error
    assert not reader_threads() and not locked
    del caught
    error.__traceback__ = None
    calls.clear()
    assert allocated() == before
    assert_same_bits(load(checkpoint, recipe, "cuda"), load_from_memory(checkpoint, recipe))


def wide_checkpoint(source: Path, target: Path, hidden: int, intermediate: int) -> Path:
    """A BF16 checkpoint of a hundred MiB, two layers, drawn here: only its sizes matter."""
    shutil.copytree(source, target)
    folder = target / "transformer"
    for old in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        old.unlink()
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": 512}
    config |= sizes
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = Cosmos3OmniTransformer.from_config(config)
    torch.manual_seed(0)
    tensors = {}
    for name, like in model.state_dict().items():
        dtype = torch.float32 if name.startswith("time_embedder") else torch.bfloat16
        tensors[name] = torch.empty(like.shape, device="cuda").normal_(std=0.02).to(dtype).cpu()
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    return target


def test_device_memory_stays_within_the_model_and_one_linear(tiny_bf16_checkpoint, tmp_path):
    """Dynamic FP8: beside the FP8 model, the 16-bit form of a linear or two, never of all."""
    checkpoint = wide_checkpoint(tiny_bf16_checkpoint, tmp_path / "wide", 2048, 4096)
    load(checkpoint, "BF16 quantised here", "cuda")
    before = allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved = torch.cuda.memory_reserved()
    transformer = load(checkpoint, "BF16 quantised here", "cuda")
    model = sum(p.numel() * p.itemsize for p in transformer.parameters())
    peak = torch.cuda.max_memory_allocated() - before
    largest = 2 * (2 * 4096 * 2048)  # bytes of a 16-bit gate_up_proj
    sixteen_bit = 2 * sum(p.numel() for p in transformer.parameters())
    # Eight readers of 8 MiB each reach over several linears of this small case at a time.
    assert model < peak < model + 5 * largest < model + sixteen_bit
    # What gathering took is back with the driver, and the model is a model.
    assert torch.cuda.memory_reserved() - reserved < model + 40 * MIB
    assert_same_bits(transformer, load_from_memory(checkpoint, "BF16 quantised here"))


def test_static_weights_take_no_device_memory_beside_the_model(checkpoints):
    load(checkpoints["fp8"], "static FP8", "cuda")
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    transformer = load(checkpoints["fp8"], "static FP8", "cuda")
    parameters = list(transformer.parameters())
    model = sum(-(-p.numel() * p.itemsize // 512) * 512 for p in parameters)
    # The scales of all linears once more, for as long as they are being spread.
    assert torch.cuda.max_memory_allocated() - before <= model + 2 * MIB


def test_allocating_asks_the_driver_once_for_all_large_parameters():
    torch.zeros(1, device=CUDA)  # the statistics begin with the first use of the device
    torch.cuda.empty_cache()
    shapes = [(3, MIB), (5, MIB + 1), (1, 11 * MIB + 513), (7, 10)]
    with torch.device("meta"):
        model = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)
            for shape in shapes
        )
    before = torch.cuda.memory_stats()["num_device_alloc"]
    allocate(model, CUDA)
    # One more for the small parameters, which share a segment of the allocator's own.
    assert torch.cuda.memory_stats()["num_device_alloc"] - before <= 2
    assert [tuple(p.shape) for p in model] == shapes
    for value, parameter in enumerate(model, 1):
        parameter.data.fill_(value)
    assert [set(bits(p)) for p in model] == [{1}, {2}, {3}, {4}]
