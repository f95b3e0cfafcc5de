# SPDX-License-Identifier: Apache-2.0
"""A request with every value filled in and checked: what the pipeline runs and reports."""

from dataclasses import dataclass
from typing import Any

from tensorrt_llm._torch.visual_gen.models.cosmos3.violations import SPATIAL_FACTOR
from tensorrt_llm.visual_gen.params import VisualGenParams

# The VAE makes a latent frame of every four frames after the first (cosmos3.md B.2).
TEMPORAL_FACTOR = 4


@dataclass(frozen=True)
class ResolvedRequest:
    """Every value of one request, as it will run. Fields as in ``VisualGenParams``.

    Attributes:
        task: "text_to_image", "text_to_video", "image_to_video" or "video_to_video".
        negative_prompt: '' without guidance.
        frame_rate: Frames a second, None for an image.
        guidance_scale: 1 and below means one branch.
        flow_shift: Of the uniform flow schedule; None is the checkpoint's own schedule.
        guidance_interval: Raw timesteps, both included, outside which guidance rests; None without
            bounds or without guidance.
        enable_audio: Whether sound is generated with the video.
        condition_video_latent_indexes: Latent frames that the reference fixes, ascending: (0,) for
            image_to_video, () for the tasks from text alone.
        condition_video_keep: Which end of a reference video the condition is, "first" or "last".
        use_guardrails: Whether texts and frames go through the guardrails.
    """

    task: str
    prompt: str
    negative_prompt: str
    height: int
    width: int
    num_frames: int
    frame_rate: float | None
    num_inference_steps: int
    guidance_scale: float
    max_sequence_length: int
    seed: int
    num_images_per_prompt: int
    use_duration_template: bool
    use_resolution_template: bool
    use_system_prompt: bool
    flow_shift: float | None
    guidance_interval: tuple[float, float] | None
    enable_audio: bool
    condition_video_latent_indexes: tuple[int, ...]
    condition_video_keep: str
    use_guardrails: bool

    @property
    def is_image(self) -> bool:
        """Whether one frame is generated, as an image."""
        return self.num_frames == 1

    @property
    def is_guided(self) -> bool:
        """Whether any step may run both branches."""
        return self.guidance_scale > 1.0

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(T, H, W) of the latents."""
        frames = latent_frames(self.num_frames)
        return frames, self.height // SPATIAL_FACTOR, self.width // SPATIAL_FACTOR

    def report(self) -> dict[str, Any]:
        """The values under the names of ``VisualGenParams``, to be read or asked for again.

        References are left out: the pipeline that read them says where they came from.
        """
        conditioned = self.task == "video_to_video"
        extra = {
            "output_type": "image" if self.is_image else "video",
            "use_duration_template": self.use_duration_template,
            "use_resolution_template": self.use_resolution_template,
            "use_system_prompt": self.use_system_prompt,
            "use_guardrails": self.use_guardrails,
            "enable_audio": self.enable_audio,
            "condition_video_latent_indexes": list(self.condition_video_latent_indexes)
            if conditioned
            else None,
            "condition_video_keep": self.condition_video_keep if conditioned else None,
            "flow_shift": self.flow_shift,
            "guidance_interval": self.guidance_interval and list(self.guidance_interval),
        }
        names = ("prompt", *VisualGenParams.model_fields)
        values = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return {"task": self.task, **values, "extra_params": extra}


def latent_frames(num_frames: int) -> int:
    """Latent frames of a clip of ``num_frames`` = 4k + 1 frames."""
    return (num_frames - 1) // TEMPORAL_FACTOR + 1
