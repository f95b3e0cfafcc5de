# SPDX-License-Identifier: Apache-2.0
"""A folder of shards is one mapping; whatever is wrong with its files is told at once."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder

INDEX = "diffusion_pytorch_model.safetensors.index.json"
SINGLE = "diffusion_pytorch_model.safetensors"
FIRST = {f"layers.{i}.weight": torch.randn(2, i + 1).bfloat16() for i in range(7)}
SECOND = {"model.norm.weight": torch.ones(3), "proj.bias": torch.arange(4).float()}
SHARDS = {"a.safetensors": FIRST, "b.safetensors": SECOND}


@pytest.fixture
def sharded(tmp_path):
    for file, tensors in SHARDS.items():
        save_file(tensors, tmp_path / file)
    write_index(tmp_path, {name: file for file, tensors in SHARDS.items() for name in tensors})
    return tmp_path


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def read_index(folder):
    return json.loads((folder / INDEX).read_text())["weight_map"]


def refusal(folder) -> str:
    with pytest.raises(ValueError) as caught:
        SafetensorsFolder(folder)
    assert str(folder) in str(caught.value) and "Remedy" in str(caught.value)
    return str(caught.value)


def test_tensors_of_all_shards_are_read_under_their_names_without_the_prefix(sharded):
    folder = SafetensorsFolder(sharded)
    expected = {name.removeprefix("model."): t for name, t in (FIRST | SECOND).items()}
    assert set(folder) == set(expected) and len(folder) == 9
    for name, tensor in expected.items():
        assert torch.equal(folder[name], tensor)


def test_a_spec_says_where_the_bytes_of_a_tensor_are(sharded):
    folder = SafetensorsFolder(sharded)
    for name in folder:
        spec = folder.spec(name)
        content = (folder.folder / spec.file).read_bytes()
        data = content[spec.offset : spec.offset + spec.num_bytes]
        stored = torch.frombuffer(bytearray(data), dtype=spec.dtype).reshape(spec.shape)
        assert torch.equal(stored, folder[name])


def test_a_single_file_needs_no_index_and_an_index_wins_over_it(tmp_path, sharded):
    save_file({"stale": torch.ones(1)}, sharded / SINGLE)
    save_file({"stray": torch.ones(1)}, sharded / "left_from_another_download.safetensors")
    assert "stale" not in SafetensorsFolder(sharded)
    (sharded / INDEX).unlink()
    assert list(SafetensorsFolder(sharded)) == ["stale"]


def test_a_missing_shard_is_refused_with_the_tensors_that_are_missing_with_it(sharded):
    (sharded / "a.safetensors").unlink()
    message = refusal(sharded)
    assert "missing files: a.safetensors (with layers.0.weight, layers.1.weight," in message
    assert "7 in all" in message


def test_a_shard_cut_short_is_refused_with_both_sizes_and_its_tensors(sharded):
    shard = sharded / "b.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    message = refusal(sharded)
    assert (
        "b.safetensors: it is cut short: its header promises 28 bytes of data, and it has 23"
        in (message)
    )


def test_all_that_is_wrong_with_the_files_is_listed_at_once(sharded):
    (sharded / "b.safetensors").unlink()
    weight_map = read_index(sharded)
    del weight_map["layers.0.weight"]
    weight_map |= {"ghost.weight": "a.safetensors", "other": "c.safetensors"}
    write_index(sharded, weight_map)
    (sharded / "c.safetensors").write_bytes(b"")
    message = refusal(sharded)
    assert "found 3 problems" in message
    assert "files that can't be read: c.safetensors: its 0 bytes" in message
    assert "missing files: b.safetensors" in message
    assert "a.safetensors lacks ghost.weight and has beside them layers.0.weight" in message


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("{", "no usable weight_map"),
        ("[]", "no usable weight_map"),
        ('{"weight_map": ["a.safetensors"]}', "no usable weight_map"),
        ('{"weight_map": {}}', "it is empty"),
        ('{"weight_map": {"x": 3}}', "no usable weight_map"),
        ('{"weight_map": {"x": "../secret.safetensors"}}', "places x in '../secret.safetensors'"),
        ('{"weight_map": {"x": "/etc/passwd"}}', "places x in '/etc/passwd'"),
        ('{"weight_map": {"x": ".."}}', "places x in '..'"),
        ('{"weight_map": {"x": ""}}', "places x in ''"),
    ],
)
def test_an_index_that_cannot_be_used_is_refused(sharded, content, found):
    (sharded / INDEX).write_text(content)
    message = refusal(sharded)
    assert INDEX in message and found in message


def test_a_tensor_in_two_files_or_under_two_names_is_refused(sharded):
    save_file(SECOND | {"model.layers.0.weight": torch.ones(1)}, sharded / "b.safetensors")
    write_index(sharded, read_index(sharded) | {"model.layers.0.weight": "b.safetensors"})
    message = refusal(sharded)
    assert "tensors stored twice: layers.0.weight: in a.safetensors as layers.0.weight" in message
    assert "in b.safetensors as model.layers.0.weight" in message


@pytest.mark.parametrize("there", [[], ["diffusion_pytorch_model.bin", "config.json"]])
def test_a_folder_without_weights_is_refused_with_what_it_has(tmp_path, there):
    folder = tmp_path / "transformer"
    folder.mkdir()
    for name in there:
        (folder / name).write_text("{}")
    message = refusal(folder)
    assert SINGLE in message
    assert all(name in message for name in there)
    assert there or "empty or missing" in message
