# SPDX-License-Identifier: Apache-2.0
"""The reference for Cosmos3's mathematics: diffusers' transformer and pipeline, driven by hand.

The product never imports this. diffusers' pipeline packs the joint sequence; its own helpers are
called here for that, so that a mistake in our packing can't repeat itself in the reference.
"""

from types import MethodType, SimpleNamespace

import torch
from diffusers import Cosmos3OmniPipeline, Cosmos3OmniTransformer

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "vocab_size": 320,
    "sound_gen": True,
    "sound_dim": 8,
    "action_gen": True,
    "action_dim": 12,
}


def random_transformer(seed: int = 0, **overrides) -> Cosmos3OmniTransformer:
    """A tiny FP32 reference whose norms, biases and modality embeddings are random too.

    Default initialisation (norm weights 1, biases 0) would hide a norm or a bias left out.
    """
    torch.manual_seed(seed)
    model = Cosmos3OmniTransformer(**(TINY | overrides)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif parameter.ndim == 1:
            parameter.normal_(std=0.2)
    return model


def pretrained_config(model: Cosmos3OmniTransformer, dtype: torch.dtype) -> SimpleNamespace:
    """The reference's configuration as our loader would read it from config.json."""
    values = {k: v for k, v in model.config.items() if not k.startswith("_")}
    return SimpleNamespace(**values, dtype=str(dtype).removeprefix("torch."))


def use_fp32_swiglu(model: Cosmos3OmniTransformer) -> Cosmos3OmniTransformer:
    """Let the reference compute ``silu(gate) * up`` in FP32, rounded once, as this project does.

    diffusers rounds silu(gate) to the 16-bit dtype before the product; interfaces.md fixes one
    formula in FP32 for every path. In FP32 nothing changes. Everything else stays diffusers' own,
    so that 16-bit comparisons can ask for equal bits.
    """

    def forward(mlp, x):
        gate, up = mlp.gate_proj(x).float(), mlp.up_proj(x).float()
        return mlp.down_proj((gate * torch.sigmoid(gate) * up).to(x.dtype))

    for layer in model.layers:
        for mlp in (layer.mlp, layer.mlp_moe_gen):
            mlp.forward = MethodType(forward, mlp)
    return model


def velocity(
    model: Cosmos3OmniTransformer,
    latents: torch.Tensor,
    token_ids: list[int],
    timestep: float,
    fps: float | None = 24.0,
    sound_latents: torch.Tensor | None = None,
    clean_frames: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One reference evaluation of one branch.

    Args:
        latents: [1, C, T, H, W].
        sound_latents: [C, T_sound].

    Returns:
        Velocities [1, C, T, H, W] and [C, T_sound] or None.
    """
    packer = SimpleNamespace(transformer=model, vae_scale_factor_temporal=4)
    text = Cosmos3OmniPipeline._prepare_text_segment(packer, token_ids, device="cpu")
    vision = Cosmos3OmniPipeline._prepare_vision_segment(
        packer,
        input_vision_tokens=latents,
        has_image_condition=False,
        mrope_offset=text["vision_start_temporal_offset"],
        vision_fps=fps,
        curr=text["und_len"],
        device="cpu",
        condition_frame_indexes=list(clean_frames),
    )
    positions = [text["text_mrope_ids"], vision["vision_mrope_ids"]]
    length = text["und_len"] + vision["num_vision_tokens"]
    sound = {}
    if sound_latents is not None:
        segment = Cosmos3OmniPipeline._prepare_sound_segment(
            packer,
            input_sound_tokens=sound_latents,
            mrope_offset=text["vision_start_temporal_offset"],
            sound_fps=float(model.config.sound_latent_fps),
            curr=length,
            device="cpu",
        )
        positions.append(segment["sound_mrope_ids"])
        sound = {
            key: segment[key]
            for key in (
                "sound_token_shapes",
                "sound_sequence_indexes",
                "sound_mse_loss_indexes",
                "sound_noisy_frame_indexes",
            )
        }
        sound["sound_tokens"] = [sound_latents.to(model.dtype)]
        sound["sound_timesteps"] = torch.full((segment["sound_len"],), timestep)
        length += segment["sound_len"]
    with torch.no_grad():
        video, audio, _ = model(
            input_ids=text["input_ids"],
            text_indexes=text["text_indexes"],
            position_ids=torch.cat(positions, dim=1),
            und_len=text["und_len"],
            sequence_length=length,
            vision_tokens=[latents.to(model.dtype)],
            vision_token_shapes=vision["vision_token_shapes"],
            vision_sequence_indexes=vision["vision_sequence_indexes"],
            vision_mse_loss_indexes=vision["vision_mse_loss_indexes"],
            vision_timesteps=torch.full((vision["num_noisy_vision_tokens"],), timestep),
            vision_noisy_frame_indexes=vision["vision_noisy_frame_indexes"],
            **sound,
            return_dict=False,
        )
    return video[0], None if audio is None else audio[0]


def relative_error(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2 error, in FP64; NaN stays NaN and fails every comparison."""
    found, reference = found.double(), reference.double()
    return ((found - reference).norm() / reference.norm()).item()
