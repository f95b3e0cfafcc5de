# SPDX-License-Identifier: Apache-2.0
"""What surrounds the denoising loop: noise, branches, guidance, checks, pixels, progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from tqdm import tqdm

from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import ResolvedRequest
from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen.output import RequestCancelledError


@dataclass(frozen=True)
class StepRecord:
    """How one denoising step ran: its raw timestep, each tower's precision, branches per call."""

    timestep: int
    generation: str
    understanding: str
    branches: int


@dataclass(frozen=True)
class TextBatch:
    """Token ids and mask [B, L] int64 (1 = token) of the branches that one call runs."""

    ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Denoised:
    """What the loop leaves.

    Attributes:
        latents: FP32 [N, C, T, H, W], a row per image of the request.
        sigmas: Noise levels of the schedule, one more than steps.
        trace: A record per step; all images of a request share it.
        pre_denoise: Seconds before the loop.
        denoise: Seconds in the loop.
    """

    latents: torch.Tensor
    sigmas: tuple[float, ...]
    trace: tuple[StepRecord, ...]
    pre_denoise: float
    denoise: float


def draw_noise(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Standard normal FP32 noise, drawn on the CPU so that a seed means one picture everywhere."""
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)


def guided_steps(values: ResolvedRequest, timesteps: Sequence[int]) -> list[bool]:
    """Whether each step runs both branches: guidance above 1 and the timestep in the interval."""
    low, high = values.guidance_interval or (float("-inf"), float("inf"))
    return [values.is_guided and low <= timestep <= high for timestep in timesteps]


def pad_branches(branches: Sequence[tuple[int, ...]], device: torch.device) -> TextBatch:
    """Token ids of B branches as one batch, padded on the right, and the mask that says where."""
    length = max(len(ids) for ids in branches)
    ids = torch.tensor([(*ids, *[0] * (length - len(ids))) for ids in branches])
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in branches])
    return TextBatch(ids.to(device), mask.to(device))


def combine_branches(velocity: torch.Tensor, guidance_scale: float) -> torch.Tensor:
    """FP32 velocity [1, ...] of one branch [1, ...], or of prompt and negative [2, ...]."""
    velocity = velocity.float()
    if velocity.shape[0] == 1:
        return velocity
    conditional, unconditional = velocity.chunk(2)
    return unconditional + guidance_scale * (conditional - unconditional)


def check_latents(latents: torch.Tensor) -> None:
    """Refuse latents that no picture can come from, so that a failed kernel is not saved as one.

    Raises:
        RuntimeError: a value is not finite, or all values of an image are equal.
    """
    for index, image in enumerate(latents):
        low, high = image.min().item(), image.max().item()
        if not float("-inf") < low < high < float("inf"):
            raise RuntimeError(
                describe_error(
                    "The generation failed: its latents hold no picture",
                    where=f"final latents of image {index}",
                    expected="finite values that differ",
                    found=f"values from {low} to {high}",
                    remedy="see whether the checkpoint is intact, and report the request",
                )
            )


def denormalize_latents(
    latents: torch.Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> torch.Tensor:
    """Latents [N, C, T, H, W] to what the VAE decodes, in its dtype (cosmos3.md J, B.2)."""

    def per_channel(values: torch.Tensor) -> torch.Tensor:
        return values.to(latents.device, dtype).view(1, -1, 1, 1, 1)

    inverse_std = per_channel(1.0 / torch.tensor(std, dtype=torch.float32))
    return latents.to(dtype) / inverse_std + per_channel(torch.tensor(mean, dtype=torch.float32))


def to_uint8(decoded: torch.Tensor) -> torch.Tensor:
    """Decoded [N, 3, T, H, W] in [-1, 1] to uint8 RGB [N, T, H, W, 3] on the CPU."""
    # One FP32 copy, then in place: 189 frames of 720p are 2 GB each time.
    values = decoded.to(torch.float32, copy=True).mul_(0.5).add_(0.5).clamp_(0, 1)
    values = values.mul_(255).round_().to(torch.uint8)
    return values.permute(0, 2, 3, 4, 1).contiguous().cpu()


def summarize_trace(trace: Sequence[StepRecord]) -> str:
    """ "generation 3 w8a16, 29 w8a8, 3 w8a16; understanding 35 w8a16": runs of equal steps."""
    parts = []
    for tower in ("generation", "understanding"):
        runs = groupby(getattr(record, tower) for record in trace)
        parts.append(f"{tower} " + ", ".join(f"{len([*run])} {mode}" for mode, run in runs))
    return "; ".join(parts)


class Progress:
    """Counts steps for the bar and the caller, and stops between steps when asked to.

    Args:
        total: Steps of the whole request.
        on_step: Called after each step with (steps done, total).
        should_cancel: Asked before each step.
    """

    def __init__(
        self,
        total: int,
        on_step: Callable[[int, int], None] | None,
        should_cancel: Callable[[], bool] | None,
    ) -> None:
        self._done, self._total = 0, total
        self._on_step, self._should_cancel = on_step, should_cancel
        # disable=None: no bar where stderr is no terminal.
        self._bar = tqdm(total=total, unit="step", disable=None)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def before_step(self) -> None:
        """Raises RequestCancelledError when the caller wants an end."""
        stop_if(self._should_cancel)

    def after_step(self) -> None:
        """Count one step and tell the caller."""
        self._done += 1
        self._bar.update()
        if self._on_step is not None:
            self._on_step(self._done, self._total)


def stop_if(should_cancel: Callable[[], bool] | None) -> None:
    """Raises RequestCancelledError when ``should_cancel`` says so."""
    if should_cancel is not None and should_cancel():
        raise RequestCancelledError("The request was cancelled.")
