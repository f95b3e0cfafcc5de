# SPDX-License-Identifier: Apache-2.0
"""The whole report: on full-size headers, on faults, and against what a load says and reads."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._torch.visual_gen.checkpoints.source import resolve_source
from tensorrt_llm._torch.visual_gen.inspection import report as report_module
from tensorrt_llm._torch.visual_gen.inspection.render import render_text
from tensorrt_llm._torch.visual_gen.inspection.report import inspect_checkpoint
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs, VisualGenParams
from tensorrt_llm.visual_gen.args import CudaGraphConfig
from tests.support.header_checkpoints import EQUAL, NANO, SUPER, write_header_checkpoint

pytestmark = pytest.mark.cosmos3

GIB = 2**30


def inspect(path, **options):
    return inspect_checkpoint(resolve_source(str(path), None), device="cpu", **options)


def load_error(path):
    """What a real load raises, or None."""
    try:
        PipelineLoader(VisualGenArgs(model=str(path)), device="cpu").load(skip_warmup=True)
    except Exception as error:
        return error
    return None


@pytest.fixture
def checkpoint(tiny_fp8_checkpoint, tmp_path):
    """A copy of the FP8 checkpoint that a test may spoil."""
    return shutil.copytree(tiny_fp8_checkpoint, tmp_path / "checkpoint")


def edit_json(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def edit_tensors(folder, change):
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)


@pytest.mark.parametrize(
    ("pattern", "family", "linears", "shards", "twice", "by_rounded", "widest"),
    [
        pytest.param(
            *(NANO, "nano", 252, 252, 141, {"0": 2, "1": 71, "2": 35}),
            ("layer 32, generation q, k, v", 4.67),
            id="nano",
        ),
        pytest.param(
            *(SUPER, "super", 448, 448, 252, {"0": 3, "1": 126, "2": 63}),
            ("layer 7, generation gate, up", 6.10),
            id="super",
        ),
    ],
)
def test_full_size_headers_of_the_published_pattern(
    tmp_path, tiny_fp8_checkpoint, pattern, family, linears, shards, twice, by_rounded, widest
):
    root = write_header_checkpoint(tmp_path / family, pattern, tiny_fp8_checkpoint)
    report = inspect(root)
    assert report.refusal is None
    contents = report.contents
    assert (contents.family, contents.build) == (family, "base")
    assert contents.fp8_linears == {"understanding": linears, "generation": linears}
    upstream = report.to_json()["fidelity"]["fusions"]["upstream"]
    assert (upstream["shards"], upstream["rounded_twice"]) == (shards, twice)
    assert upstream["groups_by_rounded_shards"] == by_rounded
    assert upstream["widest_group"] == widest[0]
    assert upstream["widest_spread"] == pytest.approx(widest[1], rel=1e-6)
    every = report.to_json()["fidelity"]["fusions"]["all_qkv"]
    # Understanding q, k, v all differ: two of three more in every layer.
    assert every["shards"] == pattern.layers * 10
    assert every["rounded_twice"] == twice + 2 * pattern.layers
    fp8 = next(t for t in contents.tensors if t.dtype == "float8_e4m3fn")
    hidden, inner = pattern.hidden, pattern.intermediate
    query, key = pattern.heads * pattern.head_dim, pattern.kv_heads * pattern.head_dim
    per_tower = hidden * (2 * query + 2 * key + 3 * inner)
    assert (fp8.count, fp8.num_bytes) == (2 * linears, 2 * pattern.layers * per_tower)
    assert report.memory.need.transformer > fp8.num_bytes


def test_neither_the_report_nor_its_verdict_reads_a_weight(tiny_fp8_checkpoint, monkeypatch):
    read = []
    stored = SafetensorsFolder.__getitem__
    monkeypatch.setattr(
        SafetensorsFolder, "__getitem__", lambda self, name: read.append(name) or stored(self, name)
    )
    assert inspect(tiny_fp8_checkpoint).refusal is None
    assert read and all(name.endswith(("_scale", "_amax")) for name in read)
    inspect(tiny_fp8_checkpoint, measure=True)
    assert any(name.endswith(".weight") for name in read)


def test_what_the_tiny_checkpoint_is(tiny_fp8_checkpoint):
    contents = inspect(tiny_fp8_checkpoint).contents
    assert (contents.family, contents.build) == ("other", "base")
    assert (contents.quant_algo, contents.quant_static) == ("FP8", True)
    assert contents.step_policy == {"first_steps": 3, "last_steps": 3, "reasoner": "a16"}
    assert contents.fp8_linears == {"understanding": 14, "generation": 14}
    assert contents.scale_dialects == {"unified": 28, "modelopt": 28}
    stored = {}
    for file in (tiny_fp8_checkpoint / "transformer").glob("*.safetensors"):
        stored |= load_file(file)
    for total in contents.tensors:
        same = [t for t in stored.values() if str(t.dtype) == f"torch.{total.dtype}"]
        assert (total.count, total.num_bytes) == (len(same), sum(t.nbytes for t in same))
    assert sum(total.count for total in contents.tensors) == len(stored)
    transformer = next(c for c in contents.components if c.name == "transformer")
    assert (transformer.files, transformer.tensors) == (3, len(stored))


def test_what_a_16_bit_checkpoint_is_and_that_fusing_it_costs_nothing(tiny_bf16_checkpoint):
    report = inspect(tiny_bf16_checkpoint, measure=True)
    assert report.refusal is None
    assert (report.contents.quant_algo, report.contents.step_policy) == (None, None)
    assert report.contents.fp8_linears == {"understanding": 0, "generation": 0}
    assert report.groups == () and "nothing would be rounded twice" in render_text(report)


def test_equal_scales_are_told_to_lose_nothing(tmp_path, tiny_fp8_checkpoint):
    root = write_header_checkpoint(tmp_path / "equal", EQUAL, tiny_fp8_checkpoint)
    report = inspect(root)
    assert report.refusal is None
    for total in report.to_json()["fidelity"]["fusions"].values():
        assert (total["rounded_twice"], total["widest_spread"]) == (0, 1.0)
    assert render_text(report).count("nothing lost: the scales inside each of its") == 2


FAMILIES = {
    "edge by its activation": ({"hidden_act": "relu2"}, "edge"),
    "edge by its backbone": ({"backbone_type": "cosmos3_edge_nemotron_dense"}, "edge"),
    "none of them": ({}, "other"),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_families_are_told_by_content(checkpoint, case):
    changes, family = FAMILIES[case]
    edit_json(checkpoint / "transformer/config.json", **changes)
    assert inspect(checkpoint).contents.family == family


FOUR_STEPS = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "stochastic_sampling": True,
    "fixed_step_sampler_config": {"t_list": [1.0, 0.75, 0.5, 0.25], "sample_type": "sde"},
}


def test_builds_are_told_by_scheduler_policy_and_sizes(tmp_path, checkpoint, tiny_fp8_checkpoint):
    edit_json(checkpoint / "scheduler/scheduler_config.json", **FOUR_STEPS)
    report = inspect(checkpoint)
    assert report.contents.build == "distilled"
    assert report.contents.fixed_sigmas == (1.0, 0.75, 0.5, 0.25)
    assert not report.memory.request.is_guided
    with pytest.raises(ValueError, match="Guidance for a distilled build"):
        inspect(checkpoint, params=VisualGenParams(guidance_scale=6.0))
    root = write_header_checkpoint(tmp_path / "image", SUPER, tiny_fp8_checkpoint)
    config = root / "transformer/config.json"
    recipe = json.loads(config.read_text())["quantization_config"] | {"runtime": {}}
    edit_json(config, quantization_config=recipe)
    contents, _ = report_module.describe_contents(root)
    assert (contents.build, contents.step_policy) == ("image", None)
    assert "step policy" in contents.build_evidence


def drop(folder, name):
    return lambda root: edit_tensors(root / folder, lambda tensors: tensors.pop(name))


def double_input_scale(root):
    def change(tensors):
        for key in ("input_scale", "input_quantizer._amax"):
            name = f"layers.0.mlp_moe_gen.up_proj.{key}"
            if name in tensors:
                tensors[name] = tensors[name] * 2

    edit_tensors(root / "transformer", change)


FAULTS = {
    "none": lambda root: None,
    "another pipeline": lambda root: edit_json(root / "model_index.json", _class_name="Flux"),
    "another scheduler": lambda root: edit_json(
        root / "scheduler/scheduler_config.json", _class_name="DDIMScheduler"
    ),
    "another solver": lambda root: edit_json(
        root / "scheduler/scheduler_config.json", solver_type="bh1"
    ),
    "no recipe": lambda root: edit_json(root / "transformer/config.json", quantization_config=None),
    "malformed policy": lambda root: edit_json(
        root / "transformer/config.json",
        quantization_config=json.loads((root / "transformer/config.json").read_text())[
            "quantization_config"
        ]
        | {"runtime": {"diffusion_step_policy": {"schema_version": 2}}},
    ),
    "edge": lambda root: edit_json(root / "transformer/config.json", hidden_act="relu2"),
    "unequal input scales": double_input_scale,
    "no shard": lambda root: next((root / "transformer").glob("*2-of*")).unlink(),
    "VAE without a tensor": drop("vae", "decoder.conv_out.bias"),
    "sound tokenizer without a tensor": drop("sound_tokenizer", "decoder.conv1.bias"),
    "sound tokenizer without a file": lambda root: (root / "sound_tokenizer/config.json").unlink(),
    "VAE of another size": lambda root: edit_json(root / "vae/config.json", decoder_base_dim=16),
    "broken tokenizer": lambda root: (root / "text_tokenizer/tokenizer.json").write_text("{"),
    "no scheduler": lambda root: (root / "scheduler/scheduler_config.json").unlink(),
    "broken index": lambda root: (root / "model_index.json").write_text("{"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verdict_is_word_for_word_that_of_a_load(checkpoint, fault):
    FAULTS[fault](checkpoint)
    raised = load_error(checkpoint)
    assert (raised is None) == (fault == "none")
    verdict = inspect(checkpoint).to_json()["verdict"]
    assert verdict == {
        "loads": raised is None,
        "error": None if raised is None else type(raised).__name__,
        "message": None if raised is None else str(raised),
        "notices": [],
    }


def test_a_refused_checkpoint_is_described_as_far_as_its_files_go(checkpoint):
    edit_json(checkpoint / "model_index.json", _class_name="Flux")
    report = inspect(checkpoint)
    assert report.memory is not None and report.groups
    assert "refused: ValueError: Unknown pipeline class" in render_text(report)
    (checkpoint / "transformer/config.json").write_text("[]")
    for file in (checkpoint / "transformer").glob("*.safetensors"):
        file.write_bytes(b"")
    report = inspect(checkpoint)
    assert (report.memory, report.groups, report.contents.tensors) == (None, (), ())
    assert "MEMORY\n  unknown" in render_text(report)


def test_weights_larger_than_the_device_are_refused_and_set_against_it(
    tiny_fp8_checkpoint, monkeypatch
):
    def too_small(transformer, device):
        raise MemoryError("The weights don't fit the device")

    monkeypatch.setattr(report_module, "check_memory", too_small)
    monkeypatch.setattr(report_module, "device_memory", lambda device: ("GPU", 2**20, GIB))
    report = inspect(tiny_fp8_checkpoint)
    assert isinstance(report.refusal, MemoryError)
    memory = report.to_json()["memory"]
    assert memory["device"] == {"name": "GPU", "free": 2**20, "total": GIB}
    assert memory["fits"] is False
    text = render_text(report)
    assert "does not fit: GPU has 1.00 MiB free of 1.00 GiB; no number of frames" in text


def test_a_request_is_set_against_the_device(tiny_fp8_checkpoint, monkeypatch):
    params = VisualGenParams(height=256, width=256, num_frames=189, guidance_scale=1.0)
    need = inspect(tiny_fp8_checkpoint, params=params).memory.need.total
    for free, fits in ((need, True), (need - 1, False)):
        has = ("GPU", free, 2 * need)
        monkeypatch.setattr(report_module, "device_memory", lambda device, has=has: has)
        report = inspect(tiny_fp8_checkpoint, params=params)
        memory = report.to_json()["memory"]
        assert (memory["fits"], memory["request"]["branches"]) == (fits, 1)
        assert memory["largest_num_frames_that_fits"] == (189 if fits else 185)
        told = "fits: GPU has" if fits else "185 frames of this size would"
        assert told in render_text(report)


@pytest.mark.parametrize("enable", [None, True])
def test_cuda_graphs_are_named_where_they_apply(tiny_fp8_checkpoint, monkeypatch, enable):
    config = CudaGraphConfig(enable=enable)
    monkeypatch.setattr(
        report_module,
        "VisualGenArgs",
        lambda **given: VisualGenArgs(**given, cuda_graph_config=config),
    )
    report = inspect(tiny_fp8_checkpoint)
    graphs = report.to_json()["memory"]["bytes"]["graphs"]
    assert (graphs > 0) == bool(enable)
    assert ("\n  CUDA graphs " in render_text(report)) == bool(enable)


def test_nan_codes_found_while_measuring_are_a_refusal(checkpoint):
    name = "layers.1.self_attn.add_k_proj.weight"

    def spoil(tensors):
        if name in tensors:
            tensors[name].view(torch.uint8).view(-1)[5] = 0xFF

    edit_tensors(checkpoint / "transformer", spoil)
    assert inspect(checkpoint).refusal is None
    report = inspect(checkpoint, measure=True)
    assert name in str(report.refusal) and not report.measured


def test_the_json_form_has_the_documented_keys_and_is_plain(tiny_fp8_checkpoint):
    document = inspect(tiny_fp8_checkpoint, measure=True).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(json.dumps(document))
    assert list(document) == [
        *("schema_version", "model", "revision", "commit", "path", "verdict", "contents"),
        *("memory", "fidelity"),
    ]
    assert document["schema_version"] == 1
    page = report_module.__file__.partition("tensorrt_llm")[0] + "docs/source/inspect.md"
    with open(page, encoding="utf-8") as file:
        text = file.read()

    def keys(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                yield key
                yield from keys(inner)
        elif isinstance(value, list) and value:
            yield from keys(value[0])

    data = {*document["contents"]["sizes"], *document["contents"]["index_flags"], "0", "1", "2"}
    undocumented = {key for key in keys(document) if f"`{key}`" not in text} - data
    assert not undocumented
