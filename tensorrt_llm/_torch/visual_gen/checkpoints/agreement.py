# SPDX-License-Identifier: Apache-2.0
"""Whether the parts of a checkpoint agree with each other and with what is built here."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tensorrt_llm._torch.visual_gen.checkpoints.config_values import FLAG, Rule, check_values
from tensorrt_llm._torch.visual_gen.checkpoints.json_files import read_json_object
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_policy import (
    requested_step_policy,
    uses_static_fp8,
)
from tensorrt_llm._utils import describe_error

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import (
        Cosmos3VFMTransformer,
    )

_INDEX_RULES = {
    "_class_name": Rule("a class name", lambda value: isinstance(value, str)),
    # Read by its truth, "false" would ask for guardrails and null would switch them off.
    "enable_safety_checker": FLAG,
    "default_use_system_prompt": FLAG,
    "use_native_flow_schedule": FLAG,
}


def read_model_index(root: Path) -> dict[str, Any]:
    """``model_index.json`` of a checkpoint.

    Raises:
        ValueError: no JSON object, a class that is no name, or a flag that is no boolean.
        NotImplementedError: a checkpoint of the Edge family.
    """
    path = root / "model_index.json"
    index = read_json_object(path)
    check_values(index, _INDEX_RULES, path)
    if index.get("use_native_flow_schedule", False):
        raise NotImplementedError(
            describe_error(
                "use_native_flow_schedule belongs to the Edge family, which is not supported",
                where="model_index.json, use_native_flow_schedule",
                expected="false or absent",
                found="true",
                remedy="use a Cosmos3 Nano or Super checkpoint",
            )
        )
    return index


def check_step_dtype(model_config: DiffusionModelConfig) -> None:
    """Refuse 16-bit steps in a model that is not in 16 bit.

    Static FP8 without such steps runs in FP32 too: its linears quantise whatever they are handed.

    Raises:
        ValueError: a step policy with 16-bit steps or a 16-bit understanding tower, in FP32.
    """
    policy = requested_step_policy(model_config)
    if policy is None or not uses_static_fp8(model_config):
        return
    high = policy.first_steps or policy.last_steps or policy.reasoner_high_precision
    if high and model_config.torch_dtype == torch.float32:
        raise ValueError(
            describe_error(
                "diffusion_step_policy can't be served in this dtype: it asks for 16-bit steps",
                where="transformer/config.json, dtype and quantization_config.runtime",
                expected="dtype bfloat16 or float16 beside a diffusion_step_policy",
                found="float32",
                remedy='set dtype to "bfloat16", which the published checkpoints have',
            )
        )


def check_latents(vae: nn.Module, transformer: "Cosmos3VFMTransformer") -> None:
    """Refuse a VAE whose latents have other channels than the transformer's.

    Raises:
        ValueError: they differ.
    """
    if vae.config.z_dim != transformer.arch.latent_channel:
        raise ValueError(
            describe_error(
                "The VAE contradicts the transformer",
                where="vae/config.json, z_dim",
                expected=f"{transformer.arch.latent_channel}, as transformer/config.json says",
                found=vae.config.z_dim,
                remedy="take vae and transformer from one revision of the checkpoint",
            )
        )
