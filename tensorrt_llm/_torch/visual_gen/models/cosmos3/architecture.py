# SPDX-License-Identifier: Apache-2.0
"""The numbers of one Cosmos3 transformer, read from ``transformer/config.json`` and checked.

``Cosmos3Architecture.from_pretrained_config`` is pure: it reads a namespace, fills the defaults of
fields that newer conversions leave out, and refuses by name what this implementation does not
compute. Every later part takes its sizes from here and from nowhere else.
"""

from dataclasses import dataclass, fields
from types import SimpleNamespace

from tensorrt_llm._torch.visual_gen.checkpoints.config_values import (
    FLAG,
    NATURAL_NUMBER,
    POSITIVE_INTEGER,
    POSITIVE_NUMBER,
    Rule,
    check_values,
    list_of,
)
from tensorrt_llm._utils import describe_error

_CONFIG_FILE = "transformer/config.json"
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size", "latent_channel", "latent_patch_size"),
    *("patch_latent_dim", "sound_dim"),
)
_NUMBERS = ("rms_norm_eps", "rope_theta", "timestep_scale", "base_fps", "sound_latent_fps")
_FLAGS = (
    *("attention_bias", "enable_fps_modulation", "unified_3d_mrope_reset_spatial_ids"),
    "sound_gen",
)
_RULES = {
    **dict.fromkeys(_SIZES, POSITIVE_INTEGER),
    **dict.fromkeys(_NUMBERS, POSITIVE_NUMBER),
    **dict.fromkeys(_FLAGS, FLAG),
    "unified_3d_mrope_temporal_modality_margin": NATURAL_NUMBER,
    "rope_axes_dim": list_of(POSITIVE_INTEGER, 3),
    "rope_scaling": Rule("an object", lambda value: isinstance(value, dict)),
}
_NOT_FAMILY = "load a Cosmos3 Nano or Super checkpoint: no other family is built here"

# Values that change the mathematics. Each is checked only where the file names it: newer
# conversions leave some of them out (NVIDIA/TensorRT-LLM PR 16563).
_REQUIRED_VALUES = {
    "position_embedding_type": "unified_3d_mrope",
    "joint_attn_implementation": "two_way",
    "hidden_act": "silu",
    "qk_norm_for_text": True,
    "qk_norm_for_diffusion": True,
    "use_und_k_norm_for_gen": False,
    "video_temporal_causal": False,
    "temporal_compression_factor": 4,
    "temporal_compression_factor_sound": 1,
}


@dataclass(frozen=True)
class Cosmos3Architecture:
    """Sizes and constants of the transformer; the defaults are those of Cosmos3-Nano.

    Source of the defaults: the class defaults of diffusers 0.42.1, which agree with the published
    Nano configuration.
    """

    hidden_size: int = 4096
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 12288
    vocab_size: int = 151936
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5_000_000.0
    rope_axes_dim: tuple[int, int, int] = (24, 20, 20)
    attention_bias: bool = False
    latent_channel: int = 48
    latent_patch_size: int = 2
    timestep_scale: float = 0.001
    base_fps: float = 24.0
    enable_fps_modulation: bool = True
    unified_3d_mrope_reset_spatial_ids: bool = True
    unified_3d_mrope_temporal_modality_margin: int = 15000
    sound_gen: bool = False
    sound_dim: int | None = None
    sound_latent_fps: float = 25.0

    @property
    def patch_dim(self) -> int:
        """Width of one vision token before the input projection: patch * patch * channels."""
        return self.latent_patch_size**2 * self.latent_channel

    @classmethod
    def from_pretrained_config(cls, config: SimpleNamespace) -> "Cosmos3Architecture":
        """Read the architecture from the namespace of ``transformer/config.json``.

        Raises:
            NotImplementedError: the file asks for mathematics that is not built (the Edge family's
                backbone or squared ReLU, another position embedding, ...).
            ValueError: values of another type or without sense, sizes that contradict each other.
        """
        values = {name: value for name, value in vars(config).items() if value is not None}
        if "backbone_type" in values:
            raise NotImplementedError(
                describe_error(
                    "This Cosmos3 variant is not supported: it names a backbone",
                    where=f"{_CONFIG_FILE}, backbone_type",
                    expected="no such field, as for Nano and Super",
                    found=repr(values["backbone_type"]),
                    remedy=_NOT_FAMILY,
                )
            )
        for name, required in _REQUIRED_VALUES.items():
            found = values.get(name, required)
            if found != required:
                raise NotImplementedError(
                    describe_error(
                        f"This Cosmos3 variant is not supported: {name}={found!r}",
                        where=f"{_CONFIG_FILE}, {name}",
                        expected=repr(required),
                        found=repr(found),
                        remedy=_NOT_FAMILY,
                    )
                )
        check_values(values, _RULES, _CONFIG_FILE)
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        axes = values.get("rope_axes_dim") or values.get("rope_scaling", {}).get("mrope_section")
        if axes is not None:
            section = {"rope_scaling.mrope_section": axes}
            rules = dict.fromkeys(section, _RULES["rope_axes_dim"])
            check_values(section, rules, _CONFIG_FILE)
            known["rope_axes_dim"] = tuple(axes)
        architecture = cls(**known)
        architecture._check(values.get("patch_latent_dim"))
        return architecture

    def _check(self, patch_latent_dim: int | None) -> None:
        rules = [
            (
                "rope_axes_dim",
                sum(self.rope_axes_dim) * 2 == self.head_dim,
                f"three sections that sum to head_dim / 2 = {self.head_dim / 2:g}",
                self.rope_axes_dim,
            ),
            (
                "num_key_value_heads",
                self.num_attention_heads % self.num_key_value_heads == 0,
                f"a divisor of num_attention_heads = {self.num_attention_heads}",
                self.num_key_value_heads,
            ),
            (
                "patch_latent_dim",
                patch_latent_dim is None or patch_latent_dim == self.patch_dim,
                f"latent_patch_size**2 * latent_channel = {self.patch_dim}",
                patch_latent_dim,
            ),
            (
                "sound_dim",
                not self.sound_gen or self.sound_dim is not None,
                "a width, because sound_gen is true",
                self.sound_dim,
            ),
        ]
        for name, holds, expected, found in rules:
            if not holds:
                raise ValueError(
                    describe_error(
                        f"Inconsistent Cosmos3 configuration: {name}",
                        where=f"{_CONFIG_FILE}, {name}",
                        expected=expected,
                        found=found,
                        remedy=(
                            "restore transformer/config.json from the published checkpoint, "
                            "whose sizes agree"
                        ),
                    )
                )
