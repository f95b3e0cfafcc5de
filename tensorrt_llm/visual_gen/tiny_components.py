# SPDX-License-Identifier: Apache-2.0
"""Configurations and random weights of the tiny checkpoint's components.

Modules are built on the meta device for their names and shapes only; every value is drawn here,
by name, so that nothing keeps a default initialisation (unit norms, zero biases) behind which a
mistake could hide.
"""

import contextlib
import json
import math
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import (
    AutoencoderKLWan,
    Cosmos3AVAEAudioTokenizer,
    Cosmos3OmniTransformer,
    UniPCMultistepScheduler,
)
from safetensors.torch import save_file

from tensorrt_llm.visual_gen.tiny_tokenizer import write_tokenizer

TRANSFORMER_SHARDS = 3
WEIGHTS_STEM = "diffusion_pytorch_model"

_TRANSFORMER_CONFIG = {
    "attention_bias": False,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "latent_channel": 48,
    "latent_patch_size": 2,
    "patch_latent_dim": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    # The three sections add up to head_dim / 2.
    "rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_type": "default"},
    "rope_theta": 5_000_000.0,
    "sound_gen": True,
    "sound_dim": 8,
    "sound_latent_fps": 25.0,
    "action_gen": True,
    "action_dim": 12,
    "num_embodiment_domains": 32,
}

# Fields that the published config.json carries and diffusers' class does not know (cosmos3.md A.2).
_PUBLISHED_EXTRA_FIELDS = {
    "dtype": "bfloat16",
    "freeze_und": False,
    "initializer_range": 0.02,
    "joint_attn_implementation": "two_way",
    "max_action_dim": 12,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_vl_text",
    "position_embedding_type": "unified_3d_mrope",
    "qk_norm": False,
    "qk_norm_for_diffusion": True,
    "temporal_compression_factor_sound": 1,
    "use_cache": True,
    "use_moe": True,
    "video_temporal_causal": False,
}

# Wan 2.2 TI2V latent statistics (cosmos3.md B.2): not zeros and ones, so that a missed or reversed
# normalisation changes the picture.
_LATENTS_MEAN = [
    *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542),
    *(0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109),
    *(0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899),
    *(-0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748),
    *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
]
_LATENTS_STD = [
    *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344),
    *(0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804),
    *(0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999),
    *(0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887),
    *(0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
]

_VAE_CONFIG = {
    "base_dim": 8,
    "decoder_base_dim": 8,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "latents_mean": _LATENTS_MEAN,
    "latents_std": _LATENTS_STD,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
}

_SOUND_TOKENIZER_CONFIG = {
    "sampling_rate": 48000,
    "hop_size": 1920,
    "stereo": True,
    "vocoder_input_dim": _TRANSFORMER_CONFIG["sound_dim"],
    "dec_dim": 4,
    "dec_c_mults": [1, 2, 4, 8, 16],
    "dec_strides": [2, 4, 5, 6, 8],
    "dec_out_channels": 2,
    "enc_dim": 4,
    "enc_num_blocks": 1,
    "enc_n_fft": 64,
    "enc_hop_length": 16,
    "enc_latent_dim": 16,
    "enc_c_mults": [1, 2, 4],
    "enc_strides": [4, 5, 6],
}

# The published base schedule (cosmos3.md E.3).
_SCHEDULER_CONFIG = {
    "num_train_timesteps": 1000,
    "solver_order": 2,
    "solver_type": "bh2",
    "prediction_type": "flow_prediction",
    "predict_x0": True,
    "thresholding": False,
    "lower_order_final": True,
    "disable_corrector": [],
    "use_karras_sigmas": True,
    "use_flow_sigmas": True,
    "flow_shift": 1.0,
    "final_sigmas_type": "zero",
    "sigma_min": 0.147,
    "sigma_max": 200.0,
}

# Output deviation of a linear or convolution for a unit input, by a pattern of its name, first
# match wins. The members of a q, k, v or gate, up group differ a few times, as in published
# checkpoints (cosmos3.md D.3), so that their weight scales can't be mixed up unseen. q and k are
# normalised after the projection, so their factors do not change attention; gate and up are kept
# in balance.
_GAINS = (
    (r"\.self_attn\.to_q\.", 1.0),
    (r"\.self_attn\.to_k\.", 2.5),
    (r"\.self_attn\.to_v\.", 0.7),
    (r"\.self_attn\.add_q_proj\.", 2.0),
    (r"\.self_attn\.add_k_proj\.", 0.6),
    (r"\.self_attn\.add_v_proj\.", 1.2),
    (r"\.self_attn\.to_(add_)?out\.", 1.5),
    (r"\.mlp\.gate_proj\.", 2.2),
    (r"\.mlp\.up_proj\.", 0.7),
    (r"\.mlp_moe_gen\.gate_proj\.", 0.8),
    (r"\.mlp_moe_gen\.up_proj\.", 2.0),
    (r"\.down_proj\.", 0.7),
    (r"^time_embedder\.", 2.0),
    # VAE: SiLU in front of a convolution leaves about 0.6 of the deviation.
    (r"^decoder\.conv_out\.", 0.9),
    (r"\.conv[12]\.weight$", 1.5),
    # Sound decoder: the waveform stays inside [-1, 1].
    (r"\.res_unit\d\.conv2\.weight_g$", 0.3),
    (r"^decoder\.conv2\.weight_g$", 0.15),
)


def write_bf16_checkpoint(folder: Path, seed: int) -> None:
    """Fill an empty folder with the BF16 checkpoint of a seed.

    Args:
        folder: An existing, empty folder.
        seed: Seed of all weights.
    """
    vocab_size = write_tokenizer(folder / "text_tokenizer")
    with quiet_libraries(), torch.device("meta"):
        transformer = Cosmos3OmniTransformer(**_TRANSFORMER_CONFIG, vocab_size=vocab_size)
        vae = AutoencoderKLWan(**_VAE_CONFIG)
        sound_tokenizer = Cosmos3AVAEAudioTokenizer(**_SOUND_TOKENIZER_CONFIG)

    config = _config_of(transformer) | _PUBLISHED_EXTRA_FIELDS
    write_json(folder / "transformer" / "config.json", config)
    write_sharded(folder / "transformer", _draw_weights(transformer, seed), TRANSFORMER_SHARDS)
    for name, module in (("vae", vae), ("sound_tokenizer", sound_tokenizer)):
        write_json(folder / name / "config.json", _config_of(module))
        _save(folder / name / f"{WEIGHTS_STEM}.safetensors", _draw_weights(module, seed))
    UniPCMultistepScheduler(**_SCHEDULER_CONFIG).save_pretrained(folder / "scheduler")
    write_json(
        folder / "model_index.json",
        {
            "_class_name": "Cosmos3OmniPipeline",
            "_diffusers_version": diffusers.__version__,
            "default_use_system_prompt": False,
            "enable_safety_checker": False,
            "safety_checker": [None, None],
            "scheduler": ["diffusers", "UniPCMultistepScheduler"],
            "sound_tokenizer": ["diffusers", "Cosmos3AVAEAudioTokenizer"],
            "text_tokenizer": ["transformers", "PreTrainedTokenizerFast"],
            "transformer": ["diffusers", "Cosmos3OmniTransformer"],
            "use_native_flow_schedule": False,
            "vae": ["diffusers", "AutoencoderKLWan"],
        },
    )


def write_sharded(folder: Path, state: Mapping[str, torch.Tensor], shards: int) -> None:
    """Write a state dict as safetensors shards with their index, in the state dict's order.

    The cut is by number of tensors, not bytes: here the two embedding tables hold most of the
    bytes, and the layers are what should spread over the shards.
    """
    names = list(state)
    per_shard = math.ceil(len(names) / shards)
    weight_map = {}
    for index in range(shards):
        file = f"{WEIGHTS_STEM}-{index + 1:05d}-of-{shards:05d}.safetensors"
        members = names[index * per_shard : (index + 1) * per_shard]
        _save(folder / file, {name: state[name] for name in members})
        weight_map |= dict.fromkeys(members, file)
    total_size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    write_json(
        folder / f"{WEIGHTS_STEM}.safetensors.index.json",
        {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))},
    )


def write_json(path: Path, content: Mapping) -> None:
    """Write a JSON file with sorted keys, making its folder when it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence the warnings and progress bars of diffusers and transformers, then restore both."""
    loggers = (diffusers.utils.logging, transformers.utils.logging)
    before = [(log.get_verbosity(), log.is_progress_bar_enabled()) for log in loggers]
    try:
        for log in loggers:
            log.set_verbosity_error()
            log.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, (verbosity, progress_bar) in zip(loggers, before, strict=True):
            log.set_verbosity(verbosity)
            if progress_bar:
                log.enable_progress_bar()


def _config_of(module: diffusers.ModelMixin) -> dict:
    return json.loads(module.to_json_string())


def _save(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(state), path, metadata={"format": "pt"})


def _draw_weights(module: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Draw a value for every entry of a module's state dict, BF16 but for the time embedder."""
    prefix = f"{seed}/{type(module).__name__}"
    drawn = {}
    for name, like in module.state_dict().items():
        # A generator for each name: the values do not depend on the order of the entries.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{prefix}/{name}".encode()))
        value = _draw(name, like.shape, generator)
        dtype = torch.float32 if name.startswith("time_embedder.") else torch.bfloat16
        drawn[name] = value.to(dtype).contiguous()
    return drawn


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(shape, generator=generator)
    if re.search(r"self_attn\.norm_\w+\.weight$", name):
        return (
            1.2 + 0.2 * normal
        )  # attention logits with a deviation near 1.4: neither flat nor hard
    if re.search(r"(norm\w*\.weight|gamma)$", name):
        return 1.0 + 0.2 * normal
    if name.endswith((".alpha", ".beta")):  # log-scale parameters of the snake activation
        return 0.2 * normal
    if name == "embed_tokens.weight":
        return normal
    if name.endswith("modality_embed"):
        return 0.5 * normal
    if name.endswith((".bias", ".bias.weight")):
        return 0.1 * normal
    if name.startswith("action_proj_"):  # [domains, in * out] tables
        width = _TRANSFORMER_CONFIG["action_dim" if "_in." in name else "hidden_size"]
        return normal / math.sqrt(width)
    gain = next((gain for pattern, gain in _GAINS if re.search(pattern, name)), 1.0)
    if name.endswith(".weight_g"):  # the norm of each row of weight_v
        return gain * (1.0 + 0.1 * normal)
    return gain * normal / math.sqrt(math.prod(shape[1:]))
