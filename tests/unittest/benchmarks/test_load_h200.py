# SPDX-License-Identifier: Apache-2.0
"""The load benchmark at its small size on the CPU: it measures what it says and finds a wrong byte.

Its figures mean something on a GPU alone (``benchmarks/results``).
"""

import importlib
import json
from pathlib import Path

import pytest
import torch

from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = ("load_h200", "load_reference", "random_checkpoint")
    return {name: importlib.import_module(name) for name in names}


@pytest.fixture
def checkpoint(modules, tmp_path):
    modules["random_checkpoint"].write_checkpoint(tmp_path, "small", CPU)
    return tmp_path


def test_it_runs_in_short_form_and_writes_all_samples(
    modules, checkpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(modules["load_h200"], "TRIED", [(2, 1)])
    out = tmp_path / "results" / "load.json"
    arguments = ["--out", str(out), "--size", "small", "--rounds", "2"]
    stamps = {f: f.stat().st_mtime_ns for f in (checkpoint / "transformer").iterdir()}
    modules["load_h200"].main([*arguments, "--folder", str(checkpoint)])
    # A folder that is there is used, not written over.
    assert stamps == {f: f.stat().st_mtime_ns for f in (checkpoint / "transformer").iterdir()}

    record = json.loads(out.read_text())
    summary, ours = record["summary"], record["load"]["rounds_s"]
    assert record["device"] == "cpu" and record["size"] == "small"
    assert len(ours) == len(record["reference"]["rounds_s"]) == 2
    for sample in ours:
        phases = {name: seconds for name, seconds in sample.items() if name != "total"}
        assert set(phases) == set(summary["phases_s"])
        assert sample["total"] == pytest.approx(sum(phases.values()))
    assert summary["ratio"] == pytest.approx(summary["load_s"] / summary["reference_s"])
    assert f"ratio                {summary['ratio']:.3f}" in capsys.readouterr().out
    assert record["bit_for_bit"] == {"tensors": 165, "different": 0}
    assert record["memory"]["anonymous_peak"] >= record["memory"]["anonymous_before"] > 0
    # All that is loaded, and not the head, the final norm of the text tower and action.
    weights = SafetensorsFolder(checkpoint / "transformer")
    unused = [n for n in weights if n.startswith(("lm_head", "action_")) or n == "norm.weight"]
    total = sum(weights.spec(name).num_bytes for name in weights)
    assert record["num_bytes"] == total - sum(weights.spec(name).num_bytes for name in unused)
    assert len(unused) == 7


def test_a_folder_of_its_own_is_written_and_removed(modules, tmp_path, monkeypatch):
    seen = []

    def measure(root, device, rounds):
        seen.append(root)
        assert (root / "transformer" / "config.json").is_file()
        raise LookupError("stop here")

    monkeypatch.setattr(modules["load_h200"], "measure", measure)
    arguments = ["--out", str(tmp_path / "x.json"), "--size", "small"]
    with pytest.raises(LookupError):
        modules["load_h200"].main(arguments)
    assert not seen[0].exists()
    with pytest.raises(LookupError):
        modules["load_h200"].main([*arguments, "--folder", str(tmp_path / "kept")])
    assert (tmp_path / "kept" / "transformer" / "config.json").is_file()


def test_a_tensor_that_differs_from_its_file_is_counted(modules, checkpoint):
    transformer, plan, _ = modules["load_h200"].load(checkpoint, CPU)
    transformer.gen_layers[1].mlp.down_proj.weight.data.view(torch.uint8)[3, 4] += 1
    transformer.language_model.layers[0].self_attn.to_q.input_scale.data.mul_(2)
    differences = modules["load_h200"].count_differences(plan, checkpoint)
    assert differences["different"] == 2


def test_the_checkpoint_has_the_published_form(modules, checkpoint):
    weights = SafetensorsFolder(checkpoint / "transformer")
    assert len(list((checkpoint / "transformer").glob("*-of-00003.safetensors"))) == 3
    limit = modules["random_checkpoint"].MAX_SHARD_BYTES["small"]
    held: dict[str, int] = {}
    for name in weights:
        spec = weights.spec(name)
        held[spec.file] = held.get(spec.file, 0) + spec.num_bytes
    assert max(held.values()) <= limit
    linear = "layers.2.self_attn.add_k_proj"
    keys = {name.removeprefix(f"{linear}.") for name in weights if name.startswith(f"{linear}.")}
    assert keys == {
        *("weight", "weight_scale", "input_scale"),
        *("weight_quantizer._amax", "weight_quantizer._scale", "input_quantizer._amax"),
    }
    values = weights[f"{linear}.weight"].float()
    assert bool(values.isfinite().all()) and len(values.unique()) > 200


@pytest.mark.parametrize("chunk", [1000, 2**20])
def test_the_reference_moves_exactly_the_planned_bytes(modules, checkpoint, chunk):
    ranges = modules["load_h200"].planned_ranges(checkpoint)
    buffer, _ = modules["load_reference"].read_and_copy(ranges, CPU, threads=3, chunk=chunk)
    stored = [r.path.read_bytes()[r.offset : r.offset + r.size] for r in ranges]
    assert buffer.numpy().tobytes() == b"".join(stored)


def test_the_reference_raises_what_a_thread_raised(modules, checkpoint):
    Range = modules["load_reference"].Range
    file = next((checkpoint / "transformer").glob("*.safetensors"))
    beyond = [Range(file, file.stat().st_size - 10, 20)]
    with pytest.raises(EOFError):
        modules["load_reference"].read_and_copy(beyond, CPU, threads=2, chunk=64)


def test_the_full_size_wants_a_gpu(modules, tmp_path, capsys):
    with pytest.raises(SystemExit):
        modules["load_h200"].main(["--out", str(tmp_path / "x.json")])
    assert "needs a CUDA device" in capsys.readouterr().err
