# SPDX-License-Identifier: Apache-2.0
"""A pipeline of full size with random weights, made in memory: no file of its size is written.

The transformer is that of the step benchmark. The VAE has the published sizes and random weights
that keep decoded values finite. Tokenizer, schedule and the VAE's latent statistics are those of
the tiny checkpoint, which has the published ones.
"""

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import BF16, Family
from benchmarks.random_model import Variant, random_transformer
from tensorrt_llm._torch.visual_gen.checkpoints.components import read_scheduler
from tensorrt_llm._torch.visual_gen.checkpoints.json_files import read_json_object
from tensorrt_llm._torch.visual_gen.checkpoints.text_tokenizer import read_tokenizer
from tensorrt_llm._torch.visual_gen.models.cosmos3.guardrails import load_guardrails
from tensorrt_llm._torch.visual_gen.models.cosmos3.pipeline_cosmos3 import Cosmos3OmniMoTPipeline
from tensorrt_llm._torch.visual_gen.pipeline_loader import Cosmos3Components
from tensorrt_llm.visual_gen.tiny_checkpoint import make_tiny_checkpoint
from tensorrt_llm.visual_gen.tiny_components import quiet_libraries

# What the published VAE (Wan 2.2 TI2V, cosmos3.md B.2) has larger than the tiny one.
_PUBLISHED_VAE = {"base_dim": 160, "decoder_base_dim": 256, "num_res_blocks": 2}


def random_pipeline(
    family: Family, device: torch.device, variant: Variant
) -> Cosmos3OmniMoTPipeline:
    """The pipeline that a published static FP8 checkpoint would give, on random weights."""
    with tempfile.TemporaryDirectory() as folder:
        root = make_tiny_checkpoint(Path(folder) / "tiny", precision="bf16")
        tokenizer, scheduler = read_tokenizer(root), read_scheduler(root)
        vae_config = read_json_object(root / "vae" / "config.json")
    if family.name != "small":
        vae_config |= _PUBLISHED_VAE
    _, guardrails = load_guardrails({"enable_safety_checker": False}, device)
    return Cosmos3OmniMoTPipeline(
        Cosmos3Components(
            transformer=random_transformer(family, device, variant),
            vae=random_vae(vae_config, device),
            sound_tokenizer=None,
            tokenizer=tokenizer,
            scheduler=scheduler,
            model=f"random {family.name}",
            revision=None,
            commit=None,
            default_use_system_prompt=False,
            negative_prompt=None,
            requires_guardrails=False,
            guardrails=guardrails,
            device=device,
        )
    )


def random_vae(config: dict[str, Any], device: torch.device) -> nn.Module:
    """diffusers' VAE in BF16; each convolution keeps a unit input near unit size."""
    from diffusers import AutoencoderKLWan

    with quiet_libraries(), torch.device("meta"):
        vae = AutoencoderKLWan(**{k: v for k, v in config.items() if not k.startswith("_")})
        vae = vae.to(BF16)
    vae = vae.to_empty(device=device)
    torch.manual_seed(0)
    for name, parameter in vae.named_parameters():
        if name.endswith("gamma"):
            parameter.data.fill_(1.0)
        elif parameter.ndim == 1:
            parameter.data.zero_()
        else:
            parameter.data.normal_(std=1 / math.sqrt(math.prod(parameter.shape[1:])))
    return vae.eval().requires_grad_(False)


def prompt_of(pipeline: Cosmos3OmniMoTPipeline, tokens: int) -> str:
    """A prompt of about this many tokens."""
    words = "a robot arm lifts one colored block and sets it down beside the others near a window"
    per_repeat = len(pipeline.components.tokenizer(f" {words}")["input_ids"])
    return " ".join([words] * max(1, round(tokens / per_repeat)))
