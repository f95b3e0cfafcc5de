# SPDX-License-Identifier: Apache-2.0
"""Static FP8 quantisation of the tiny checkpoint, with torch alone, as ModelOpt does it.

The result matches the published FP8 checkpoints (cosmos3.md D): ModelOpt's own buffers (BF16) and
the derived FP32 scales stand side by side.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

import torch
from diffusers import Cosmos3OmniPipeline
from safetensors.torch import load_file

from tensorrt_llm._utils import describe_error
from tensorrt_llm.quantization.scales import E4M3_MAX
from tensorrt_llm.visual_gen.tiny_components import (
    TRANSFORMER_SHARDS,
    quiet_libraries,
    write_json,
    write_sharded,
)

# The seven linears of each layer and tower (cosmos3.md D.3).
_QUANTIZED_LINEAR = re.compile(
    r"layers\.\d+\.(self_attn\.(to_(q|k|v|out)|add_(q|k|v)_proj|to_add_out)"
    r"|mlp(_moe_gen)?\.(gate|up|down)_proj)"
)
# Projections that read one activation, and a name for the group.
_SHARED_INPUT = (
    (re.compile(r"self_attn\.to_[qkv]$"), "self_attn.to_qkv"),
    (re.compile(r"self_attn\.add_[qkv]_proj$"), "self_attn.add_qkv_proj"),
    (re.compile(r"(gate|up)_proj$"), "gate_up_proj"),
)

_IGNORE = [
    *("proj_in", "proj_out", "time_embedder*", "audio_proj_in", "audio_proj_out"),
    *("action_proj_in", "action_proj_out", "lm_head", "model.visual*", "visual*"),
]

# Published verbatim by all three video builds (cosmos3.md D.2).
STEP_POLICY = {
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

# What ``modelopt.torch.quantization.quantize`` would be given for this checkpoint.
MODELOPT_CONFIG = {
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": [4, 3], "axis": None}},
        {"quantizer_name": "*input_quantizer", "cfg": {"num_bits": [4, 3], "axis": None}},
        {"quantizer_name": "*proj_in*", "enable": False},
        {"quantizer_name": "*proj_out*", "enable": False},
        {"quantizer_name": "*time_embedder*", "enable": False},
        {"quantizer_name": "*lm_head*", "enable": False},
    ],
    "algorithm": "max",
}

_QUANTIZATION_CONFIG = {
    "quant_method": "modelopt",
    "quant_type": "FP8_FP8",
    "quant_algo": "FP8",
    "weight_only": False,
    "config_groups": {
        "group_0": {
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "ignore": _IGNORE,
    "producer": {"name": "modelopt", "version": "0.44.0"},
    "modelopt_config": MODELOPT_CONFIG,
    "runtime": {"diffusion_step_policy": STEP_POLICY},
}


def quantize_checkpoint(folder: Path) -> None:
    """Turn the BF16 tiny checkpoint in a folder into the static FP8 one, in place.

    Args:
        folder: A complete BF16 checkpoint as ``write_bf16_checkpoint`` writes it.

    Raises:
        RuntimeError: projections that share an activation were calibrated to different inputs.
    """
    input_amax = _measure_input_amax(folder)
    _check_shared_inputs(input_amax)

    transformer = folder / "transformer"
    bf16_files = sorted(transformer.glob("*.safetensors"))
    state = {}
    for file in bf16_files:
        state |= load_file(file)
        file.unlink()
    buffers, scales = {}, {}
    for name in sorted(input_amax):
        codes, weight_amax, modelopt_scale = _quantize_weight(state[f"{name}.weight"])
        state[f"{name}.weight"] = codes
        buffers[f"{name}.weight_quantizer._amax"] = weight_amax
        buffers[f"{name}.weight_quantizer._scale"] = modelopt_scale
        buffers[f"{name}.input_quantizer._amax"] = input_amax[name]
        scales[f"{name}.weight_scale"] = weight_amax.float() / E4M3_MAX
        scales[f"{name}.input_scale"] = input_amax[name].float() / E4M3_MAX
    write_sharded(transformer, state | buffers | scales, TRANSFORMER_SHARDS)

    config_file = transformer / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    write_json(config_file, config | {"quantization_config": _QUANTIZATION_CONFIG})


def run_calibration(pipeline: Cosmos3OmniPipeline) -> None:
    """Run the calibration request: a short guided clip with sound, so both towers and branches."""
    with quiet_libraries():
        pipeline.set_progress_bar_config(disable=True)
        pipeline(
            prompt="A red tram climbs a narrow street while rain runs over the stones.",
            negative_prompt="Blurred and flickering, with smeared edges.",
            num_frames=5,
            height=64,
            width=96,
            num_inference_steps=3,
            guidance_scale=6.0,
            enable_sound=True,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        )


def quantized_linear_names(module: torch.nn.Module) -> list[str]:
    """Names of the linears that a published FP8 checkpoint quantises, in the module's order."""
    return [name for name, _ in module.named_modules() if _QUANTIZED_LINEAR.fullmatch(name)]


def _measure_input_amax(folder: Path) -> dict[str, torch.Tensor]:
    with quiet_libraries():
        pipeline = Cosmos3OmniPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    amax: dict[str, torch.Tensor] = {}

    def record(name: str):
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen = args[0].abs().amax()
            amax[name] = torch.maximum(amax[name], seen) if name in amax else seen

        return hook

    for name in quantized_linear_names(pipeline.transformer):
        pipeline.transformer.get_submodule(name).register_forward_pre_hook(record(name))
    run_calibration(pipeline)
    return amax


def _check_shared_inputs(input_amax: dict[str, torch.Tensor]) -> None:
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for name, amax in input_amax.items():
        for pattern, group in _SHARED_INPUT:
            if pattern.search(name):
                groups[pattern.sub(group, name)][name] = amax.item()
    for group, members in groups.items():
        if len(set(members.values())) > 1:
            raise RuntimeError(
                describe_error(
                    "Projections that share an activation were calibrated to different inputs",
                    where=group,
                    expected="one input amax",
                    found=members,
                    remedy="report this with the versions of torch and diffusers",
                )
            )


def _quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise as ModelOpt 0.44 compresses a BF16 weight: amax, scale and quotient all in BF16."""
    amax = weight.abs().amax()
    scale = amax / E4M3_MAX
    codes = (weight / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, amax, scale
