# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoint: complete, consistent, reproducible, quantised as by ModelOpt."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from diffusers import (
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    UniPCMultistepScheduler,
)
from safetensors import safe_open
from safetensors.torch import load_file

from tensorrt_llm.visual_gen import tiny_fp8
from tensorrt_llm.visual_gen.tiny_checkpoint import make_tiny_checkpoint
from tensorrt_llm.visual_gen.tiny_components import quiet_libraries

pytestmark = pytest.mark.cosmos3

INDEX = "diffusion_pytorch_model.safetensors.index.json"
BUFFERS = (
    "weight_scale",
    "input_scale",
    "weight_quantizer._amax",
    "weight_quantizer._scale",
    "input_quantizer._amax",
)
GROUPS = (
    ("self_attn.to_q", "self_attn.to_k", "self_attn.to_v"),
    ("self_attn.add_q_proj", "self_attn.add_k_proj", "self_attn.add_v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp_moe_gen.gate_proj", "mlp_moe_gen.up_proj"),
)


def read_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    state = {}
    for file in sorted((checkpoint / "transformer").glob("*.safetensors")):
        state |= load_file(file)
    return state


def read_config(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "transformer" / "config.json").read_text())


def hashes(checkpoint: Path) -> dict[str, str]:
    return {
        str(file.relative_to(checkpoint)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file()
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(bits), b.view(bits))


@pytest.fixture(scope="module")
def fp8_state(tiny_fp8_checkpoint):
    return read_state(tiny_fp8_checkpoint)


@pytest.fixture(scope="module")
def bf16_state(tiny_bf16_checkpoint):
    return read_state(tiny_bf16_checkpoint)


@pytest.fixture(scope="module")
def linears(tiny_bf16_checkpoint):
    """Names of the 7 quantised linears of each of 2 layers and 2 towers."""
    config = read_config(tiny_bf16_checkpoint)
    with quiet_libraries(), torch.device("meta"):
        module = Cosmos3OmniTransformer.from_config(config)
    return tiny_fp8.quantized_linear_names(module)


class TestStructure:
    def test_bf16_tensors_have_the_names_and_shapes_of_the_diffusers_class(
        self, tiny_bf16_checkpoint, bf16_state
    ):
        with quiet_libraries(), torch.device("meta"):
            module = Cosmos3OmniTransformer.from_config(read_config(tiny_bf16_checkpoint))
        expected = {name: tensor.shape for name, tensor in module.state_dict().items()}
        assert {name: tensor.shape for name, tensor in bf16_state.items()} == expected
        for family in ("audio_proj_in", "audio_modality_embed", "action_proj_out", "lm_head"):
            assert any(name.startswith(family) for name in expected), family
        for name, tensor in bf16_state.items():
            fp32 = name.startswith("time_embedder.")
            assert tensor.dtype == (torch.float32 if fp32 else torch.bfloat16), name

    def test_fp8_adds_exactly_five_scalars_to_each_of_28_linears(
        self, fp8_state, bf16_state, linears
    ):
        assert len(linears) == 28
        added = {f"{linear}.{buffer}" for linear in linears for buffer in BUFFERS}
        assert set(fp8_state) == set(bf16_state) | added
        for linear in linears:
            assert fp8_state[f"{linear}.weight"].dtype == torch.float8_e4m3fn
            for buffer in BUFFERS:
                scalar = fp8_state[f"{linear}.{buffer}"]
                fp32 = buffer.endswith("put_scale") or buffer == "weight_scale"
                assert scalar.dtype == (torch.float32 if fp32 else torch.bfloat16)
                assert scalar.shape == ()
                assert scalar.isfinite() and scalar > 0

    def test_everything_but_the_quantised_weights_equals_the_twin(
        self, fp8_state, bf16_state, linears
    ):
        quantised = {f"{linear}.weight" for linear in linears}
        for name in set(bf16_state) - quantised:
            assert same_bits(fp8_state[name], bf16_state[name]), name

    def test_no_tensor_keeps_a_default_initialisation(self, bf16_state, tiny_bf16_checkpoint):
        tensors = dict(
            bf16_state
        )  # defaults to find: norms of ones, biases and embeddings of zeros
        for part in ("vae", "sound_tokenizer"):
            file = tiny_bf16_checkpoint / part / "diffusion_pytorch_model.safetensors"
            tensors |= {f"{part}.{name}": tensor for name, tensor in load_file(file).items()}
        for name, tensor in tensors.items():
            assert tensor.unique().numel() > 1, name

    @pytest.mark.parametrize("precision", ["fp8", "bf16"])
    def test_the_index_names_the_shard_of_every_tensor(self, precision, request):
        folder = request.getfixturevalue(f"tiny_{precision}_checkpoint") / "transformer"
        index = json.loads((folder / INDEX).read_text())
        found, size = {}, 0
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as shard:
                assert shard.metadata() == {"format": "pt"}
                for name in shard.keys():  # noqa: SIM118
                    assert name not in found
                    found[name] = file.name
                    size += shard.get_tensor(name).nbytes
        assert found == index["weight_map"]
        assert size == index["metadata"]["total_size"]
        assert set(found.values()) == {
            f"diffusion_pytorch_model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)
        }
        layers = {file for name, file in found.items() if name.startswith("layers.")}
        assert len(layers) > 1
        if precision == "fp8":
            scale = {n: f for n, f in found.items() if n.endswith(".weight_scale")}
            assert any(found[n.replace("_scale", "")] != file for n, file in scale.items())

    def test_the_configs_hold_the_published_values(self, tiny_fp8_checkpoint, tiny_bf16_checkpoint):
        config = read_config(tiny_fp8_checkpoint)
        quantization = config.pop("quantization_config")
        assert config == read_config(tiny_bf16_checkpoint)
        assert config["rope_scaling"]["mrope_section"] == [4, 2, 2]
        assert config["position_embedding_type"] == "unified_3d_mrope"
        assert config["dtype"] == "bfloat16"
        assert quantization["quant_method"] == "modelopt"
        assert quantization["quant_algo"] == "FP8"
        assert quantization["quant_type"] == "FP8_FP8"
        assert quantization["weight_only"] is False
        static = {"dynamic": False, "num_bits": 8, "type": "float"}
        assert quantization["config_groups"] == {
            "group_0": {"weights": static, "input_activations": static, "targets": ["Linear"]}
        }
        assert "time_embedder*" in quantization["ignore"] and len(quantization["ignore"]) == 10
        assert quantization["modelopt_config"]["quant_cfg"]
        assert quantization["runtime"]["diffusion_step_policy"] == {
            "schema_version": 1,
            "type": "first_last_n",
            "index_space": "denoising_loop_iteration",
            "scope": ["transformer"],
            "default_mode": "native",
            "first_steps": {"count": 3, "mode": "a16"},
            "last_steps": {"count": 3, "mode": "a16"},
            "overlap": "a16",
            "reasoner": "a16",
        }
        scheduler = UniPCMultistepScheduler.from_pretrained(tiny_fp8_checkpoint / "scheduler")
        assert scheduler.config.use_karras_sigmas and scheduler.config.flow_shift == 1.0
        scheduler.set_timesteps(35)
        assert scheduler.timesteps[:5].tolist() == [995, 994, 993, 992, 991]
        assert scheduler.timesteps[-4:].tolist() == [292, 229, 174, 128]
        index = json.loads((tiny_fp8_checkpoint / "model_index.json").read_text())
        assert index["enable_safety_checker"] is False
        assert index["default_use_system_prompt"] is False
        assert index["use_native_flow_schedule"] is False


class TestFp8:
    def test_weight_scales_differ_and_input_scales_agree_within_each_group(self, fp8_state):
        for layer in range(2):
            for group in GROUPS:
                scales = {
                    kind: [fp8_state[f"layers.{layer}.{m}.{kind}"].item() for m in group]
                    for kind in ("weight_scale", "input_scale")
                }
                assert len(set(scales["weight_scale"])) == len(group), (layer, group)
                spread = max(scales["weight_scale"]) / min(scales["weight_scale"])
                assert 2.0 < spread < 6.0, (layer, group, spread)
                assert len(set(scales["input_scale"])) == 1, (layer, group)

    def test_both_dialects_agree(self, fp8_state, linears):
        for linear in linears:
            for side in ("weight", "input"):
                amax = fp8_state[f"{linear}.{side}_quantizer._amax"]
                scale = fp8_state[f"{linear}.{side}_scale"]
                assert same_bits(scale, amax.float() / 448.0)
            modelopt_scale = fp8_state[f"{linear}.weight_quantizer._scale"]
            assert same_bits(modelopt_scale, fp8_state[f"{linear}.weight_scale"].bfloat16())

    def test_dequantised_codes_come_back_to_the_twins_weights(self, fp8_state, bf16_state, linears):
        for linear in linears:
            weight = bf16_state[f"{linear}.weight"].float()
            codes = fp8_state[f"{linear}.weight"].float()
            assert codes.abs().max() == 448.0
            assert same_bits(
                weight.abs().max().bfloat16(), fp8_state[f"{linear}.weight_quantizer._amax"]
            )
            error = codes * fp8_state[f"{linear}.weight_scale"] - weight
            relative = (error.norm() / weight.norm()).item()
            assert 1e-3 < relative < 3e-2, (linear, relative)  # e4m3 rounding: about 2.6e-2

    def test_modelopt_finds_the_same_scales_and_codes(self, tiny_bf16_checkpoint, fp8_state):
        mtq = pytest.importorskip("modelopt.torch.quantization")
        with quiet_libraries():
            pipeline = Cosmos3OmniPipeline.from_pretrained(
                tiny_bf16_checkpoint, dtype=torch.bfloat16
            )
        config = json.loads(json.dumps(tiny_fp8.MODELOPT_CONFIG))
        mtq.quantize(pipeline.transformer, config, lambda _: tiny_fp8.run_calibration(pipeline))
        mtq.compress(pipeline.transformer)
        modelopt = pipeline.transformer.state_dict()
        checked = Counter()
        for name, ours in fp8_state.items():
            kind = name.rpartition("_quantizer.")[2]
            if ours.dtype == torch.float8_e4m3fn:
                kind = "codes"
            if kind in ("codes", "_amax", "_scale"):
                assert same_bits(ours, modelopt[name]), name
                checked[kind] += 1
        assert checked == {"codes": 28, "_amax": 56, "_scale": 28}

    def test_a_group_calibrated_to_two_inputs_is_refused(self):
        amax = {
            "layers.1.mlp.gate_proj": torch.tensor(2.0),
            "layers.1.mlp.up_proj": torch.tensor(3.0),
            "layers.1.mlp_moe_gen.up_proj": torch.tensor(5.0),
        }
        with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.gate_up_proj.*up_proj': 3\.0"):
            tiny_fp8._check_shared_inputs(amax)


class TestReproducibility:
    def test_the_command_in_another_process_writes_the_same_bytes(
        self, tmp_path, tiny_fp8_checkpoint
    ):
        out = tmp_path / "new" / "fp8"
        command = [sys.executable, "-m", "tensorrt_llm.visual_gen.tiny_checkpoint", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert hashes(out) == hashes(tiny_fp8_checkpoint)
        assert done.stdout.count("\n") == 1 and "fp8, seed 0" in done.stdout
        assert done.stderr == ""

    def test_the_seed_decides_every_weight_and_an_empty_folder_may_exist(
        self, tmp_path, tiny_bf16_checkpoint, bf16_state
    ):
        out = make_tiny_checkpoint(tmp_path, precision="bf16", seed=1)
        assert out == tmp_path
        other = read_state(out)
        for name, tensor in bf16_state.items():
            assert not same_bits(tensor, other[name]), name
        changed = {n for n, h in hashes(out).items() if hashes(tiny_bf16_checkpoint)[n] != h}
        assert all(name.endswith(".safetensors") for name in changed) and len(changed) == 5

    def test_the_callers_random_state_and_log_levels_stay(self, tmp_path):
        import diffusers

        state, level = torch.get_rng_state(), diffusers.utils.logging.get_verbosity()
        make_tiny_checkpoint(tmp_path / "fp8", precision="fp8", seed=2)
        assert torch.equal(torch.get_rng_state(), state)
        assert diffusers.utils.logging.get_verbosity() == level
        assert diffusers.utils.logging.is_progress_bar_enabled()


class TestRefusals:
    def test_a_bad_precision_or_seed_is_named_and_nothing_is_written(self, tmp_path):
        with pytest.raises(ValueError, match=r"precision.*expected one of fp8, bf16, found 'int8'"):
            make_tiny_checkpoint(tmp_path / "a", precision="int8")
        for seed in (-1, 1.5, True):
            with pytest.raises(ValueError, match=f"seed.*0 or more, found {seed}"):
                make_tiny_checkpoint(tmp_path / "a", seed=seed)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("kind", ["folder", "file", "link"])
    def test_an_output_path_in_use_is_left_alone(self, tmp_path, kind):
        out = tmp_path / "out"
        if kind == "folder":
            out.mkdir()
            (out / "note.txt").write_text("mine")
        elif kind == "file":
            out.write_text("mine")
        else:
            (tmp_path / "target").mkdir()
            out.symlink_to(tmp_path / "target")
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ValueError, match=rf"not free .where: {re.escape(str(out))}"):
            make_tiny_checkpoint(out)
        assert sorted(tmp_path.rglob("*")) == before

    def test_a_failure_half_way_leaves_nothing_behind(self, tmp_path, monkeypatch):
        def fail(folder):
            assert (folder / "model_index.json").is_file()
            raise KeyboardInterrupt

        monkeypatch.setattr(tiny_fp8, "quantize_checkpoint", fail)
        with pytest.raises(KeyboardInterrupt):
            make_tiny_checkpoint(tmp_path / "out")
        assert os.listdir(tmp_path) == []
