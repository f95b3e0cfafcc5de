# SPDX-License-Identifier: Apache-2.0
"""The peer of the benchmarks: diffusers' Cosmos3 transformer in ModelOpt FP8, and its twin of ours.

``random_peer`` builds diffusers' transformer with random weights, calibrates it on one evaluation
and compresses it with ModelOpt. ``export_state`` gives its tensors as a static FP8 checkpoint
holds them and ``build_ours`` loads them, so that both sides hold the same codes and scales. Both
take an ``Evaluation``: one denoising step's two guidance branches. On CUDA the peer's linears run
ModelOpt's FP8 GEMM; on a CPU ModelOpt has none and multiplies dequantised operands in BF16.

    peer = random_peer("nano", torch.device("cuda"))
    ours = build_ours(export_state(peer), model_config(peer), torch.device("cuda"))
    step = random_evaluation(peer, (48, 45, 80), (1600, 900))
    packed = pack_for_peer(peer, step)  # once a request, as diffusers' pipeline does
    peer_velocity(peer, step, packed), our_velocity(ours, step)
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from diffusers import Cosmos3OmniPipeline, Cosmos3OmniTransformer
from torch import nn

from tensorrt_llm._torch.visual_gen.checkpoints.weight_apply import allocate
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer
from tensorrt_llm._utils import describe_error
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization.mode import QuantAlgo

FP8 = torch.float8_e4m3fn
E4M3_MAX = 448.0
TRAIN_TIMESTEPS = 1000

# cosmos3.md A.2; the fields that are missing have diffusers' defaults, which are Nano's.
_PUBLISHED = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "rope_scaling": {"mrope_section": [24, 20, 20], "mrope_interleaved": True},
    "sound_gen": True,
    "sound_dim": 64,
    "action_gen": True,
    "action_dim": 64,
}
SIZES = {
    "nano": _PUBLISHED
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
    },
    "super": _PUBLISHED
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "rope_scaling": {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
        "sound_gen": True,
        "sound_dim": 8,
        "action_gen": True,
        "action_dim": 12,
    },
}
# Latents [T, H, W] and text tokens of the calibration: 9 frames of 256 x 448 pixels.
_CALIBRATION = ((3, 16, 28), (64, 48))

# What stays in 16 bit is what the published checkpoints' ignore list names (cosmos3.md D.1).
_MODELOPT_CONFIG = {
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}},
        {"quantizer_name": "*input_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}},
        *(
            {"quantizer_name": f"*{name}*", "enable": False}
            for name in ("proj_in", "proj_out", "time_embedder", "lm_head")
        ),
    ],
    "algorithm": "max",
}


@dataclass(frozen=True)
class Evaluation:
    """One denoising evaluation of two guidance branches.

    Attributes:
        latents: FP32 [2, C, T, H, W].
        token_ids: int64 [2, L]; row b holds ``lengths[b]`` tokens, the rest is padding.
        text_mask: int64 [2, L], 1 = token.
        lengths: Tokens of each branch.
        timestep: The scheduler's, 0 to 999.
        fps: Frames per second.
    """

    latents: torch.Tensor
    token_ids: torch.Tensor
    text_mask: torch.Tensor
    lengths: tuple[int, int]
    timestep: float
    fps: float


def random_evaluation(
    peer: nn.Module,
    shape: tuple[int, int, int],
    lengths: tuple[int, int],
    seed: int = 1,
    timestep: float = 500.0,
    fps: float = 24.0,
) -> Evaluation:
    """Draw one on the device of a peer.

    Args:
        shape: Latents [T, H, W]; 720p x 189 frames is (48, 45, 80).
        lengths: Text tokens of the two branches.
    """
    device = peer.device
    generator = torch.Generator(device).manual_seed(seed)
    size = (2, max(lengths))
    latents = torch.randn(2, peer.config.latent_channel, *shape, generator=generator, device=device)
    ids = torch.randint(0, peer.config.vocab_size, size, generator=generator, device=device)
    places = torch.arange(size[1], device=device)
    mask = (places < torch.tensor(lengths, device=device)[:, None]).long()
    return Evaluation(latents, ids * mask, mask, lengths, timestep, fps)


def random_peer(size: str, device: torch.device, seed: int = 0) -> Cosmos3OmniTransformer:
    """diffusers' transformer with random weights, quantised by ModelOpt.

    Args:
        size: A key of SIZES. Nano takes 31 GB on the device while it is built, Super 128 GB, and
            half of that afterwards.
        device: Where.

    Returns:
        In BF16 with an FP32 timestep embedder, its linears inside the layers in FP8.

    Raises:
        RuntimeError: ModelOpt left a linear unquantised or uncalibrated; on CUDA also one that has
            no FP8 GEMM, since its time would be that of another computation.
    """
    mtq, registry = _modelopt()
    torch.manual_seed(seed)
    with _default_dtype(torch.bfloat16), device:
        peer = Cosmos3OmniTransformer(**SIZES[size]).eval().requires_grad_(False)
    # As from_pretrained keeps it.
    peer.time_embedder.float()
    for name, parameter in peer.named_parameters():
        # Norms of one and empty biases would hide a norm or a bias that is left out.
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif parameter.ndim == 1:
            parameter.normal_(std=0.2)
    calibration = random_evaluation(peer, *_CALIBRATION)
    packed = pack_for_peer(peer, calibration)
    mtq.quantize(peer, _MODELOPT_CONFIG, lambda _: peer_velocity(peer, calibration, packed))
    mtq.compress(peer)
    for name, linear in quantised_linears(peer):
        amax = [linear.weight_quantizer.amax, linear.input_quantizer.amax]
        calibrated = all(value is not None and value > 0 for value in amax)
        native = device.type != "cuda" or registry.find_match(linear, None) is not None
        if linear.weight.dtype != FP8 or not calibrated or not native:
            raise RuntimeError(
                describe_error(
                    "ModelOpt did not quantise the peer",
                    where=name,
                    expected="FP8 weights, positive amax of weight and input, an FP8 GEMM on CUDA",
                    found=f"{linear.weight.dtype}, calibrated: {calibrated}, GEMM: {native}",
                    remedy="install nvidia-modelopt 0.44.0 and run on sm_89 or newer",
                )
            )
    return peer


def quantised_linears(peer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of the linears inside the layers: all that FP8 is for (cosmos3.md D.3)."""
    for name, module in peer.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("layers."):
            yield name, module


def export_state(peer: nn.Module) -> dict[str, torch.Tensor]:
    """The peer's tensors as a static FP8 checkpoint names and stores them.

    ``weight`` float8_e4m3fn, ``weight_scale`` and ``input_scale`` 0-d FP32 (amax / 448 in FP32, as
    ModelOpt's GEMM computes them) of each linear inside the layers; everything else as it is. The
    tensors are the peer's own memory, scales apart.
    """
    state = {
        name: tensor.detach().as_subclass(torch.Tensor)
        for name, tensor in peer.state_dict().items()
        if "_quantizer." not in name
    }
    for name, linear in quantised_linears(peer):
        # A subclass of ModelOpt holds the codes and would dequantise itself.
        state[f"{name}.weight"] = linear.weight.data.as_subclass(torch.Tensor)
        state[f"{name}.weight_scale"] = _amax(linear, "weight") / E4M3_MAX
        state[f"{name}.input_scale"] = _amax(linear, "input") / E4M3_MAX
    return state


def model_config(
    peer: nn.Module, step_policy: Mapping[str, Any] | None = None, **options: Any
) -> DiffusionModelConfig:
    """The configuration of our transformer for a peer's tensors.

    Args:
        step_policy: A ``diffusion_step_policy``; None runs every step W8A8.
        options: Further fields of DiffusionModelConfig, such as the attention backend.
    """
    values = {key: value for key, value in peer.config.items() if not key.startswith("_")}
    recipe: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    if step_policy is not None:
        recipe["runtime"] = {"diffusion_step_policy": dict(step_policy)}
    pretrained = SimpleNamespace(**values, dtype="bfloat16", quantization_config=recipe)
    return DiffusionModelConfig(
        pretrained_config=pretrained, quant_config=QuantConfig(quant_algo=QuantAlgo.FP8), **options
    )


def build_ours(
    state: Mapping[str, torch.Tensor], config: DiffusionModelConfig, device: torch.device
) -> Cosmos3VFMTransformer:
    """Our transformer with a copy of the exported tensors.

    Raises:
        ValueError: a tensor that does not fit, listed with all others.
    """
    with torch.device("meta"):
        model = Cosmos3VFMTransformer(config)
    allocate(model, device)
    model.load_weights(state)
    model.post_load_weights()
    return model.eval()


def pack_for_peer(peer: nn.Module, evaluation: Evaluation) -> tuple[dict[str, Any], ...]:
    """What diffusers' pipeline prepares once a request for each branch, by its own helpers."""
    packer = SimpleNamespace(transformer=peer, vae_scale_factor_temporal=4)
    device = evaluation.latents.device
    branches = []
    for ids, length in zip(evaluation.token_ids.tolist(), evaluation.lengths, strict=True):
        text = Cosmos3OmniPipeline._prepare_text_segment(packer, ids[:length], device=device)
        vision = Cosmos3OmniPipeline._prepare_vision_segment(
            packer,
            input_vision_tokens=evaluation.latents[:1],
            has_image_condition=False,
            mrope_offset=text["vision_start_temporal_offset"],
            vision_fps=evaluation.fps,
            curr=length,
            device=device,
        )
        kept = ("token_shapes", "sequence_indexes", "mse_loss_indexes", "noisy_frame_indexes")
        branches.append(
            {key: text[key] for key in ("input_ids", "text_indexes", "und_len")}
            | {f"vision_{key}": vision[f"vision_{key}"] for key in kept}
            | {
                "position_ids": torch.cat((text["text_mrope_ids"], vision["vision_mrope_ids"]), 1),
                "sequence_length": length + vision["num_vision_tokens"],
            }
        )
    return tuple(branches)


@torch.no_grad()
def peer_velocity(
    peer: nn.Module, evaluation: Evaluation, packed: tuple[dict[str, Any], ...]
) -> torch.Tensor:
    """One denoising evaluation as diffusers' pipeline makes it: branch after branch.

    Args:
        packed: From ``pack_for_peer`` on an evaluation of these shapes and texts.

    Returns:
        BF16 [2, C, T, H, W].
    """
    latents = evaluation.latents.to(peer.dtype)
    tokens = len(packed[0]["vision_mse_loss_indexes"])
    timesteps = torch.full((tokens,), evaluation.timestep, device=latents.device)
    velocities = [
        peer(
            **branch,
            vision_tokens=[latents[row : row + 1]],
            vision_timesteps=timesteps,
            return_dict=False,
        )[0][0]
        for row, branch in enumerate(packed)
    ]
    return torch.cat(velocities)


@torch.no_grad()
def our_velocity(model: Cosmos3VFMTransformer, evaluation: Evaluation) -> torch.Tensor:
    """The same evaluation by ours, both branches in one batch: BF16 [2, C, T, H, W].

    The text's keys and values are cached by the identity of the evaluation's tensors:
    ``model.reset_cache()`` forgets them.
    """
    latents = evaluation.latents
    raw = torch.full((2,), evaluation.timestep, device=latents.device)
    return model(
        latents,
        raw / TRAIN_TIMESTEPS,
        evaluation.token_ids,
        evaluation.text_mask,
        tuple(latents.shape[2:]),
        raw,
        evaluation.fps,
    ).video


def _modelopt() -> tuple[Any, Any]:
    """ModelOpt's quantisation module and its GEMM registry, the FP8 GEMM registered."""
    try:
        import pulp  # noqa: F401
    except ImportError:
        # ModelOpt's search imports this solver; calibration by maximum has no use for it.
        sys.modules["pulp"] = MagicMock()
    import modelopt.torch.quantization as mtq
    import modelopt.torch.quantization.backends.fp8_per_tensor_gemm  # noqa: F401
    from modelopt.torch.quantization.backends.gemm_registry import gemm_registry

    return mtq, gemm_registry


def _amax(linear: nn.Module, kind: str) -> torch.Tensor:
    return getattr(linear, f"{kind}_quantizer").amax.detach().float().reshape(())


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
