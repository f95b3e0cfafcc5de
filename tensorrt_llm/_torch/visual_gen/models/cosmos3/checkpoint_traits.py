# SPDX-License-Identifier: Apache-2.0
"""What a loaded checkpoint is, as far as a request's defaults and limits depend on it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorrt_llm._torch.visual_gen.models.cosmos3.prompts import packaged_negative_prompt
from tensorrt_llm._torch.visual_gen.models.cosmos3.sampling import Cosmos3SamplingPolicy

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
    from tensorrt_llm._torch.visual_gen.pipeline_loader import Cosmos3Components

# (hidden_size, num_hidden_layers, num_attention_heads) of Super (cosmos3.md A.2).
_SUPER_SIZES = (5120, 64, 64)


@dataclass(frozen=True)
class CheckpointTraits:
    """Facts of one checkpoint, read once from its configuration and never from its name.

    Attributes:
        family: "super" for a transformer of Super's sizes, else "nano": the rows of defaults. The
            image and video builds of Super are of its family; their files don't tell them apart.
        build: "base", or "distilled" for a build whose noise levels are fixed (the 4-step ones).
        has_sound: Whether it generates sound: not without a sound tokenizer, and no distilled
            build does (cosmos3.md E.1).
        default_use_system_prompt: The checkpoint's own default.
        requires_guardrails: Whether requests are checked unless they say otherwise.
        video_negative_prompt: What an absent negative prompt means for a video.
        fixed_sigmas: Noise levels of a distilled build, without the final 0; None for a base build.
    """

    family: str
    build: str
    has_sound: bool
    default_use_system_prompt: bool
    requires_guardrails: bool
    video_negative_prompt: str
    fixed_sigmas: tuple[float, ...] | None

    @classmethod
    def from_components(cls, components: "Cosmos3Components") -> "CheckpointTraits":
        """Read the traits of what the loader has loaded.

        Raises:
            ValueError: the scheduler is one that no build has.
        """
        fixed = Cosmos3SamplingPolicy.from_scheduler(components.scheduler).fixed_sigmas
        negative = components.negative_prompt
        return cls(
            family=family_of(components.transformer.arch),
            build="base" if fixed is None else "distilled",
            has_sound=fixed is None
            and components.transformer.arch.sound_gen
            and components.sound_tokenizer is not None,
            default_use_system_prompt=components.default_use_system_prompt,
            requires_guardrails=components.requires_guardrails,
            video_negative_prompt=packaged_negative_prompt() if negative is None else negative,
            fixed_sigmas=fixed,
        )


def family_of(arch: "Cosmos3Architecture") -> str:
    """ "super" or "nano", by the transformer's sizes."""
    sizes = (arch.hidden_size, arch.num_hidden_layers, arch.num_attention_heads)
    return "super" if sizes == _SUPER_SIZES else "nano"
