# SPDX-License-Identifier: Apache-2.0
"""References for static FP8: diffusers' transformer whose linears follow the written formulas.

The formulas stand here once more, in plain torch, from interfaces.md (Arithmetic) and cosmos3.md
G.4; nothing of the product is used.
"""

import json
import re
import shutil
from pathlib import Path
from types import MethodType

import torch
from diffusers import Cosmos3OmniTransformer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn
# Understanding tower: to_* and mlp. (The other names of a layer are the generation tower's.)
_UNDERSTANDING = re.compile(r"layers\.\d+\.(self_attn\.to_(q|k|v|out)|mlp\.\w+)")

POLICY = {
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


def policy(first: int, last: int, reasoner: str = "a16") -> dict:
    """The published policy with other windows."""
    windows = {
        "first_steps": {"count": first, "mode": "a16"},
        "last_steps": {"count": last, "mode": "a16"},
    }
    return POLICY | windows | {"reasoner": reasoner}


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's transformer."""
    tensors = {}
    for file in sorted((checkpoint / "transformer").glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return tensors


def copy_checkpoint(
    source: Path,
    target: Path,
    step_policy: dict | None,
    input_scale_divisor: float = 1.0,
    uniform_schedule: bool = False,
) -> Path:
    """Copy an FP8 checkpoint with another policy, activation scales and schedule.

    Dividing the activation scales by 16 makes W8A8 saturate: the contrast recipe of cosmos3.md G.4,
    under which the precision modes lie far further apart than two correct implementations do.
    """
    shutil.copytree(source, target)
    config_file = target / "transformer" / "config.json"
    config = json.loads(config_file.read_text())
    runtime = {} if step_policy is None else {"diffusion_step_policy": step_policy}
    config["quantization_config"]["runtime"] = runtime
    config_file.write_text(json.dumps(config))
    for file in (target / "transformer").glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith((".input_scale", ".input_quantizer._amax")):
                tensors[name] = tensors[name] / input_scale_divisor
        save_file(tensors, file)
    if uniform_schedule:
        scheduler_file = target / "scheduler" / "scheduler_config.json"
        scheduler = json.loads(scheduler_file.read_text()) | {"use_karras_sigmas": False}
        scheduler_file.write_text(json.dumps(scheduler))
    return target


class OracleLinear(nn.Module):
    """One FP8 linear of the reference; ``high_precision`` selects W8A16, else W8A8."""

    def __init__(self, q: torch.Tensor, weight_scale: torch.Tensor, input_scale: torch.Tensor):
        super().__init__()
        self.q, self.weight_scale, self.input_scale = q, weight_scale, input_scale
        self.high_precision = False

    def quantise(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() / self.input_scale).clamp(-448, 448).to(FP8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x in BF16, or in FP32 where an unrounded activation is quantised."""
        if self.high_precision:
            x = x.bfloat16()
            return F.linear(x, self.q.to(x.dtype) * self.weight_scale.to(x.dtype))
        product = F.linear(self.quantise(x).float(), self.q.float())
        return (product * (self.input_scale * self.weight_scale)).bfloat16()


class FP8Reference:
    """diffusers' transformer with every quantised linear replaced by an OracleLinear.

    Args:
        bf16_checkpoint: The BF16 twin; gives the model and all unquantised tensors.
        fp8_checkpoint: Gives codes and scales.
    """

    def __init__(self, bf16_checkpoint: Path, fp8_checkpoint: Path) -> None:
        self.model = Cosmos3OmniTransformer.from_pretrained(
            bf16_checkpoint / "transformer", torch_dtype=torch.bfloat16
        ).eval()
        tensors = read_tensors(fp8_checkpoint)
        self.linears: dict[str, OracleLinear] = {}
        for name in [n.removesuffix(".weight") for n, t in tensors.items() if t.dtype == FP8]:
            scales = (tensors[f"{name}.{key}"] for key in ("weight_scale", "input_scale"))
            linear = OracleLinear(tensors[f"{name}.weight"], *scales)
            parent, _, last = name.rpartition(".")
            setattr(self.model.get_submodule(parent), last, linear)
            self.linears[name] = linear
        for layer in self.model.layers:
            for mlp in (layer.mlp, layer.mlp_moe_gen):
                mlp.forward = MethodType(_gated_mlp, mlp)

    def set_modes(self, understanding_high: bool, generation_high: bool) -> None:
        """Select W8A16 or W8A8 for each tower."""
        for name, linear in self.linears.items():
            und = _UNDERSTANDING.fullmatch(name) is not None
            linear.high_precision = understanding_high if und else generation_high


def _gated_mlp(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """SwiGLU in FP32; W8A8 quantises that value itself, W8A16 rounds it to BF16 first."""
    gate, up = mlp.gate_proj(x).float(), mlp.up_proj(x).float()
    return mlp.down_proj(gate * torch.sigmoid(gate) * up)


def dequantised_transformer(bf16_checkpoint: Path, fp8_checkpoint: Path) -> Cosmos3OmniTransformer:
    """Plain diffusers in BF16 whose weights are the dequantised ones: the W8A16 reference."""
    model = Cosmos3OmniTransformer.from_pretrained(
        bf16_checkpoint / "transformer", torch_dtype=torch.bfloat16
    ).eval()
    tensors = read_tensors(fp8_checkpoint)
    for name, tensor in tensors.items():
        if tensor.dtype == FP8:
            scale = tensors[f"{name.removesuffix('.weight')}.weight_scale"]
            model.get_parameter(name).data.copy_(tensor.bfloat16() * scale.bfloat16())
    return model
