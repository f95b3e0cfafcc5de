# SPDX-License-Identifier: Apache-2.0
"""Full-size static FP8 transformers with random weights, and variants of one on the same weights.

Speed does not depend on the values of weights, so random ones stand in for the published. A variant
is built on the meta device and then given the parameters of the first model; only what its topology
fuses is made anew, by joining the first model's codes, so that both compute the same.
"""

import re
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch

from benchmarks.common import BF16, FP8, Case, Family
from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.config_fields import AttentionConfig, CudaGraphConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3 import towers
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer
from tensorrt_llm._torch.visual_gen.pipeline_loader import compile_generation_layers
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization.mode import QuantAlgo
from tensorrt_llm.visual_gen.tiny_fp8 import STEP_POLICY

STEPS = 35
MODES = {"w8a8": STEPS // 2, "w8a16": 0}
"""A step of the schedule that runs in this mode."""

FPS = 24.0
_TRAIN_TIMESTEPS = 1000
# What a fused linear is made of, by its last name.
_PARTS = {"qkv_proj": ("to_q", "to_k", "to_v"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Variant:
    """One way to run the transformer.

    Attributes:
        name: In tables.
        attention: Attention backend.
        topology: "split" (as the checkpoint has it) or "fused".
        sharing: Whether projections that read one activation share its quantisation.
        compiled: torch.compile of the generation layers.
        graphs: CUDA graphs of the generation layers.
    """

    name: str
    attention: str
    topology: str = "split"
    sharing: bool = True
    compiled: bool = False
    graphs: bool = False


def model_config(family: Family, attention: str, graphs: bool = False) -> DiffusionModelConfig:
    """The configuration that the loader makes of a published static FP8 checkpoint."""
    pretrained = {
        "dtype": "bfloat16",
        "hidden_size": family.hidden,
        "num_hidden_layers": family.layers,
        "num_attention_heads": family.heads,
        "num_key_value_heads": family.kv_heads,
        "head_dim": family.head_dim,
        "intermediate_size": family.intermediate,
        "vocab_size": family.vocab,
        "rope_scaling": {"mrope_section": list(family.rope_sections)},
        "quantization_config": {"runtime": {"diffusion_step_policy": STEP_POLICY}},
    }
    return DiffusionModelConfig(
        pretrained_config=SimpleNamespace(**pretrained),
        quant_config=QuantConfig(quant_algo=QuantAlgo.FP8),
        attention=AttentionConfig(backend=attention),
        cuda_graph=CudaGraphConfig(enable=graphs),
    )


def random_transformer(
    family: Family, device: torch.device, variant: Variant
) -> Cosmos3VFMTransformer:
    """A static FP8 transformer with random codes, activations of order one inside."""
    with torch.device("meta"):
        model = Cosmos3VFMTransformer(model_config(family, variant.attention, variant.graphs))
    model.to_empty(device=device)
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, Linear):
            codes = torch.randn(module.weight.shape, device=device, dtype=BF16) * 64
            module.weight.data.copy_(codes.to(FP8))
            module.weight_scale.data.fill_(module.in_features**-0.5 / 64)
            module.input_scale.data.fill_(4.0 / 448)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                if "norm" in type(module).__name__.lower():
                    parameter.data.uniform_(0.9, 1.1)
                else:
                    parameter.data.normal_(std=0.02 if name == "weight" else 0.01)
    return _finish(model, variant)


def variant_of(
    base: Cosmos3VFMTransformer, family: Family, variant: Variant
) -> Cosmos3VFMTransformer:
    """Another model on the parameters of a split one.

    Raises:
        RuntimeError: the fused topology could not be built.
    """
    config = model_config(family, variant.attention, variant.graphs)
    if variant.topology == "fused":
        # The one predicate of the topology; loading goes on as for any static checkpoint.
        with mock.patch.object(towers, "uses_static_fp8", lambda _: False):
            model = on_parameters_of(base, config)
        if not any("qkv_proj" in name for name, _ in model.named_parameters()):
            raise RuntimeError("uses_static_fp8 no longer decides the topology of the model")
    else:
        model = on_parameters_of(base, config)
    return _finish(model, variant)


def on_parameters_of(
    base: Cosmos3VFMTransformer, config: DiffusionModelConfig
) -> Cosmos3VFMTransformer:
    """A model of another configuration with the tensors of ``base``, fused where it is fused."""
    with torch.device("meta"):
        model = Cosmos3VFMTransformer(config)
    parameters, buffers = dict(base.named_parameters()), dict(base.named_buffers())
    for name, _ in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        tensor = parameters[name] if name in parameters else _fused(name, parameters)
        model.get_submodule(owner)._parameters[leaf] = tensor
    for name, _ in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffers[name]
    return model


def _fused(name: str, stored: dict[str, torch.Tensor]) -> torch.nn.Parameter:
    """A parameter of a fused linear: its parts, which have equal scales, behind each other."""
    prefix, fused, leaf = re.fullmatch(r"(.+\.)(\w+)\.(\w+)", name).groups()
    parts = [stored[f"{prefix}{part}.{leaf}"] for part in _PARTS[fused]]
    if leaf != "weight":
        return parts[0]
    joined = torch.cat([part.data.view(torch.uint8) for part in parts]).view(FP8)
    return torch.nn.Parameter(joined, requires_grad=False)


def _finish(model: Cosmos3VFMTransformer, variant: Variant) -> Cosmos3VFMTransformer:
    model.post_load_weights()
    model.eval()
    if not variant.sharing:
        for module in model.modules():
            for flag in ("_maybe_share_qkv_quantize", "_maybe_share_gate_up_quantize"):
                if hasattr(module, flag):
                    setattr(module, flag, False)
    if variant.compiled:
        compile_generation_layers(model, fullgraph=True)
    return model


def parameter_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


class Inputs:
    """What one denoising step reads, made once, as the pipeline does: both guidance branches."""

    def __init__(self, family: Family, case: Case, device: torch.device) -> None:
        self.case = case
        generator = torch.Generator(device).manual_seed(1)
        self.latents = torch.randn((2, 48, *case.latent_shape), generator=generator, device=device)
        self.raw = torch.full((2,), 500.0, device=device)
        shape = (2, max(case.text))
        self.ids = torch.randint(0, family.vocab, shape, generator=generator, device=device)
        self.mask = torch.zeros_like(self.ids)
        for row, tokens in enumerate(case.text):
            self.mask[row, :tokens] = 1

    def step(self, model: Cosmos3VFMTransformer, mode: str) -> torch.Tensor:
        """The velocities [2, 48, T, H, W] of one step in this mode."""
        model.set_denoising_step(MODES[mode], STEPS)
        return model(
            hidden_states=self.latents,
            timestep=self.raw / _TRAIN_TIMESTEPS,
            text_ids=self.ids,
            text_mask=self.mask,
            video_shape=self.case.latent_shape,
            raw_timestep=self.raw,
            fps=FPS,
        ).video
