# SPDX-License-Identifier: Apache-2.0
"""Loading a pipeline folder: what arrives, and what is refused by name before anything is built."""

import json
import shutil

import pytest
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen import pipeline_loader
from tensorrt_llm._torch.visual_gen.checkpoints.source import resolve_source
from tensorrt_llm._torch.visual_gen.config import DiffusionPipelineConfig
from tensorrt_llm._torch.visual_gen.config_fields import TorchCompileConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.weight_names import source_prefixes
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs
from tests.support.fp8_oracle import copy_checkpoint, policy, read_tensors

pytestmark = pytest.mark.cosmos3


def load(path, **args):
    args = VisualGenArgs(model=str(path), **args)
    return PipelineLoader(args, device="cpu").load(skip_warmup=True)


@pytest.fixture
def checkpoint(tiny_fp8_checkpoint, tmp_path):
    """A copy of the FP8 checkpoint that a test may spoil."""
    return shutil.copytree(tiny_fp8_checkpoint, tmp_path / "checkpoint")


def edit_json(path, **changes):
    content = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content))


def edit_tensors(checkpoint, change):
    for file in (checkpoint / "transformer").glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)


def test_every_fp8_weight_and_both_scales_equal_the_files_bits(tiny_fp8_checkpoint):
    stored = read_tensors(tiny_fp8_checkpoint)
    transformer = load(tiny_fp8_checkpoint).transformer
    linears = {n: m for n, m in transformer.named_modules() if isinstance(m, Linear)}
    assert len(linears) == 2 * 2 * 7
    for name, linear in linears.items():
        (prefix,) = source_prefixes(name)
        weight = stored[f"{prefix}.weight"]
        assert linear.weight.dtype == weight.dtype == torch.float8_e4m3fn
        assert torch.equal(linear.weight.view(torch.uint8), weight.view(torch.uint8)), name
        for key in ("weight_scale", "input_scale"):
            loaded, expected = getattr(linear, key), stored[f"{prefix}.{key}"]
            assert loaded.dtype == expected.dtype == torch.float32
            assert torch.equal(loaded.view(torch.int32), expected.view(torch.int32)), name


def test_boundary_layers_stay_in_16_bit_and_the_time_embedder_in_fp32(tiny_fp8_checkpoint):
    transformer = load(tiny_fp8_checkpoint).transformer
    assert transformer.vae2llm.weight.dtype == torch.bfloat16
    assert transformer.language_model.embed_tokens.weight.dtype == torch.bfloat16
    assert {p.dtype for p in transformer.time_embedder.parameters()} == {torch.float32}
    assert not any(p.is_meta for p in transformer.parameters())


def test_bf16_checkpoint_fuses_and_has_no_step_precision(tiny_bf16_checkpoint):
    transformer = load(tiny_bf16_checkpoint).transformer
    assert hasattr(transformer.gen_layers[0].cross_attention, "qkv_proj")
    assert transformer.gen_layers[0].mlp.gate_up_proj is not None
    assert transformer.step_precision_controller is None
    assert transformer.gen_precision == "bf16"


def test_dynamic_fp8_of_a_bf16_checkpoint_quantises_at_load_and_stays_fused(tiny_bf16_checkpoint):
    transformer = load(tiny_bf16_checkpoint, quant_config={"quant_algo": "FP8"}).transformer
    assert hasattr(transformer.gen_layers[0].cross_attention, "qkv_proj")
    assert transformer.gen_precision == transformer.und_precision == "fp8_dynamic"


def test_a_callers_recipe_drops_the_policy_with_a_warning(tiny_fp8_checkpoint, caplog):
    transformer = load(tiny_fp8_checkpoint, quant_config={"quant_algo": "FP8"}).transformer
    assert transformer.step_precision_controller is None
    assert caplog.text.count("diffusion_step_policy is dropped") == 1


@pytest.mark.parametrize(
    ("file", "changes", "error", "message"),
    [
        ("model_index.json", {"_class_name": "FluxPipeline"}, ValueError, "FluxPipeline"),
        (
            "model_index.json",
            {"use_native_flow_schedule": True},
            NotImplementedError,
            "use_native_flow_schedule",
        ),
        (
            "scheduler/scheduler_config.json",
            {"_class_name": "DDIMScheduler"},
            ValueError,
            "DDIMScheduler",
        ),
        ("transformer/config.json", {"hidden_act": "relu2"}, NotImplementedError, "hidden_act"),
        ("transformer/config.json", {"head_dim": 32}, ValueError, "rope_axes_dim"),
        (
            "transformer/config.json",
            {"quantization_config": None},
            ValueError,
            "FP8 weights for a module that its configuration leaves in high precision",
        ),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_by_name(
    checkpoint, file, changes, error, message
):
    edit_json(checkpoint / file, **changes)
    with pytest.raises(error, match=message):
        load(checkpoint)


def test_a_refused_checkpoint_allocates_no_weights(checkpoint, monkeypatch):
    edit_tensors(checkpoint, lambda tensors: tensors.pop("norm_moe_gen.weight", None))
    index = checkpoint / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map.pop("norm_moe_gen.weight")
    edit_json(index, weight_map=weight_map)
    allocated = []
    monkeypatch.setattr(
        pipeline_loader.Cosmos3VFMTransformer,
        "to_empty",
        lambda self, **kwargs: allocated.append(kwargs),
    )
    with pytest.raises(ValueError, match="missing tensors: norm_moe_gen.weight"):
        load(checkpoint)
    assert not allocated


def test_static_recipe_on_bf16_weights_is_refused(
    tiny_fp8_checkpoint, tiny_bf16_checkpoint, tmp_path
):
    mixed = shutil.copytree(tiny_bf16_checkpoint, tmp_path / "mixed")
    recipe = json.loads((tiny_fp8_checkpoint / "transformer/config.json").read_text())
    edit_json(mixed / "transformer/config.json", quantization_config=recipe["quantization_config"])
    with pytest.raises(ValueError, match="appears to be unquantized"):
        load(mixed)


def test_a_policy_on_bf16_weights_is_refused(tiny_bf16_checkpoint, tmp_path):
    target = shutil.copytree(tiny_bf16_checkpoint, tmp_path / "bf16")
    edit_json(
        target / "transformer/config.json",
        quantization_config={"runtime": {"diffusion_step_policy": policy(3, 3)}},
    )
    with pytest.raises(ValueError, match="diffusion_step_policy can't be served"):
        load(target)


def test_unequal_input_scales_in_a_group_are_refused(checkpoint):
    def spoil(tensors):
        for key in ("input_scale", "input_quantizer._amax"):
            name = f"layers.0.mlp_moe_gen.up_proj.{key}"
            if name in tensors:
                tensors[name] = tensors[name] * 2

    edit_tensors(checkpoint, spoil)
    with pytest.raises(ValueError, match="same calibrated input_scale"):
        load(checkpoint)


def test_a_missing_or_truncated_shard_is_refused_with_its_name(checkpoint):
    shard = sorted((checkpoint / "transformer").glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=shard.name):
        load(checkpoint)
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        load(checkpoint)


def test_a_vae_of_another_model_is_refused_with_both_numbers(checkpoint, monkeypatch):
    vae = AutoencoderKLWan.from_pretrained(checkpoint / "vae", low_cpu_mem_usage=False)
    statistics = {"latents_mean": [0.0] * 8, "latents_std": [1.0] * 8}
    AutoencoderKLWan.from_config({**vae.config, "z_dim": 8, **statistics}).save_pretrained(
        checkpoint / "vae"
    )
    monkeypatch.setattr(pipeline_loader, "allocate", lambda *args: pytest.fail("allocated"))
    with pytest.raises(ValueError, match=r"vae/config.json, z_dim.*expected 48,.*found 8"):
        load(checkpoint)


def test_a_folder_with_a_revision_and_a_component_folder_are_refused(tiny_fp8_checkpoint):
    with pytest.raises(ValueError, match="revision for a local checkpoint"):
        load(tiny_fp8_checkpoint, revision="fp8")
    with pytest.raises(ValueError, match="model_index.json"):
        load(tiny_fp8_checkpoint / "transformer")


def test_weights_larger_than_the_device_are_refused_with_both_numbers(
    tiny_fp8_checkpoint, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2**30))
    model = load(tiny_fp8_checkpoint).transformer
    with pytest.raises(MemoryError, match="fp8 revision"):
        pipeline_loader.check_memory(model, torch.device("cuda"))


def test_every_precision_mode_is_tried_at_load(tiny_fp8_checkpoint, tmp_path, monkeypatch):
    """A GEMM that is missing fails at load, not at the first native step of a request."""
    checkpoint = copy_checkpoint(tiny_fp8_checkpoint, tmp_path / "fp8", policy(3, 3))

    def broken(*args):
        raise RuntimeError("no FP8 GEMM here")

    from tensorrt_llm._torch.modules.linear import FP8QDQLinearMethod

    monkeypatch.setattr(FP8QDQLinearMethod, "apply", broken)
    with pytest.raises(RuntimeError, match="no FP8 GEMM here"):
        load(checkpoint)


@pytest.mark.parametrize(("enable", "compiled"), [(True, True), (False, False), (None, False)])
def test_torch_compile_is_applied_when_asked_for_and_off_by_default_on_cpu(
    tiny_fp8_checkpoint, enable, compiled
):
    transformer = load(tiny_fp8_checkpoint, torch_compile_config={"enable": enable}).transformer
    for layer in transformer.gen_layers:
        assert hasattr(layer.project, "_torchdynamo_orig_callable") == compiled
        assert hasattr(layer.finish, "_torchdynamo_orig_callable") == compiled


def test_every_variant_of_a_full_graph_fits_what_torch_keeps(
    tiny_fp8_checkpoint, tiny_bf16_checkpoint
):
    torch._dynamo.reset()
    options = {"enable": True, "enable_fullgraph": True}
    for checkpoint in (tiny_fp8_checkpoint, tiny_bf16_checkpoint):
        # Beyond the limit a full graph is an error.
        pipeline = load(checkpoint, torch_compile_config=options)
        pipeline.warmup(resolutions=[(64, 96), (32, 32)], num_frames=[1, 5])


def test_the_model_configuration_says_whether_to_compile(tiny_fp8_checkpoint, monkeypatch):
    read = DiffusionPipelineConfig.from_pretrained

    def read_and_ask(path, args):
        config = read(path, args)
        assert config.primary_model_config.torch_compile.enable is None
        config.primary_model_config.torch_compile = TorchCompileConfig(enable=True)
        return config

    monkeypatch.setattr(DiffusionPipelineConfig, "from_pretrained", read_and_ask)
    layer = load(tiny_fp8_checkpoint).transformer.gen_layers[0]
    assert hasattr(layer.project, "_torchdynamo_orig_callable")


@pytest.mark.parametrize(
    "option",
    [{"torch_compile_config": {"enable_fullgraph": True}}, {"cuda_graph_config": {"enable": True}}],
    ids=["fullgraph alone", "graphs on the CPU"],
)
def test_options_that_cannot_be_served_are_refused_before_a_checkpoint_is_fetched(
    monkeypatch, option
):
    monkeypatch.setattr(pipeline_loader, "resolve_source", lambda *args: pytest.fail("fetched"))
    with pytest.raises(ValueError, match=next(iter(option))):
        load("org/model", **option)


def test_options_that_are_not_built_are_refused_by_name(tiny_fp8_checkpoint):
    with pytest.raises(NotImplementedError, match="ulysses_size"):
        load(tiny_fp8_checkpoint, parallel_config={"ulysses_size": 2})


def test_cuda_graphs_without_a_cuda_device_are_refused_by_name(tiny_fp8_checkpoint):
    with pytest.raises(ValueError, match="cuda_graph_config.enable"):
        load(tiny_fp8_checkpoint, cuda_graph_config={"enable": True})


@pytest.mark.parametrize("backend", ["FA3", "FA3_FP8"])
def test_an_attention_backend_that_the_device_lacks_is_refused_by_name(
    tiny_fp8_checkpoint, backend
):
    with pytest.raises(ValueError, match=f"{backend}'.*CUDA"):
        load(tiny_fp8_checkpoint, attention_config={"backend": backend})


def test_fp8_attention_for_a_checkpoint_without_fp8_steps_is_refused(tiny_bf16_checkpoint):
    with pytest.raises(NotImplementedError, match="FA3_FP8"):
        load(tiny_bf16_checkpoint, attention_config={"backend": "FA3_FP8"})


def test_a_head_that_the_cuda_kernels_do_not_take_is_refused_before_any_weight_is_read(
    tiny_fp8_checkpoint, tmp_path
):
    checkpoint = shutil.copytree(tiny_fp8_checkpoint, tmp_path / "odd")
    config_file = checkpoint / "transformer" / "config.json"
    config = json.loads(config_file.read_text())
    config |= {"head_dim": 24, "rope_axes_dim": [6, 3, 3]}
    config_file.write_text(json.dumps(config))
    args = VisualGenArgs(model=str(checkpoint))
    source = resolve_source(args.model, None)
    with pytest.raises(ValueError, match=r"config.json, head_dim\).*power of two.*found 24"):
        PipelineLoader(args, device="cuda").plan(source)


@pytest.mark.parametrize(
    ("given", "resolved"), [(None, "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0")]
)
def test_cuda_without_an_index_is_the_device_of_the_thread_that_loads(monkeypatch, given, resolved):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert PipelineLoader(VisualGenArgs(model="m"), given).device == torch.device(resolved)


@pytest.mark.parametrize("backend", ["AUTO", "VANILLA"])
def test_every_layer_attends_with_the_backend_that_was_resolved(tiny_fp8_checkpoint, backend):
    transformer = load(tiny_fp8_checkpoint, attention_config={"backend": backend}).transformer
    layers = [*transformer.gen_layers, *transformer.language_model.layers]
    assert {layer.attention.backend.name for layer in layers} == {"VANILLA"}


def test_fullgraph_without_compile_is_refused(tiny_fp8_checkpoint):
    with pytest.raises(ValueError, match="enable_fullgraph has no effect"):
        load(tiny_fp8_checkpoint, torch_compile_config={"enable_fullgraph": True})
