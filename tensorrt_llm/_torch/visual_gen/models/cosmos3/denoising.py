# SPDX-License-Identifier: Apache-2.0
"""What happens in and after the denoising loop: guidance, checks, pixels, progress."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from tqdm import tqdm

from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen.output import RequestCancelledError


@dataclass(frozen=True)
class StepRecord:
    """How one denoising step ran.

    Attributes:
        timestep: Raw timestep.
        generation: Precision of the generation tower's linears.
        attention: Operands of its attention.
        understanding: Precision of the understanding tower's linears.
        branches: Guidance branches of the call.
    """

    timestep: float
    generation: str
    attention: str
    understanding: str
    branches: int


@dataclass(frozen=True)
class Denoised:
    """What the loop leaves.

    Attributes:
        latents: FP32 [N, C, T, H, W], a row per image of the request.
        sound: FP32 [1, C, T], or None without sound.
        sigmas: Noise levels of the schedule, one more than steps.
        trace: A record per step; all images of a request share it.
        pre_denoise: Seconds before the loop.
        denoise: Seconds in the loop.
    """

    latents: torch.Tensor
    sound: torch.Tensor | None
    sigmas: tuple[float, ...]
    trace: tuple[StepRecord, ...]
    pre_denoise: float
    denoise: float


def combine_branches(velocity: torch.Tensor, guidance_scale: float) -> torch.Tensor:
    """FP32 velocity [1, ...] of one branch [1, ...], or of prompt and negative [2, ...]."""
    velocity = velocity.float()
    if velocity.shape[0] == 1:
        return velocity
    conditional, unconditional = velocity.chunk(2)
    return unconditional + guidance_scale * (conditional - unconditional)


def check_latents(latents: torch.Tensor, kind: str = "picture") -> None:
    """Refuse latents that nothing can come from, so that a failed kernel is not saved as a result.

    Args:
        latents: A row for each result.
        kind: "picture" or "sound".

    Raises:
        RuntimeError: a value is not finite, or all values of a row are equal.
    """
    for index, row in enumerate(latents):
        low, high = row.min().item(), row.max().item()
        if not float("-inf") < low < high < float("inf"):
            raise RuntimeError(
                describe_error(
                    f"The generation failed: its latents hold no {kind}",
                    where=f"final latents of {kind} {index}",
                    expected="finite values that differ",
                    found=f"values from {low} to {high}",
                    remedy=(
                        "download the checkpoint again; if that changes nothing, report the "
                        "request with its seed"
                    ),
                )
            )


def check_decoded(decoded: torch.Tensor) -> None:
    """Refuse decoded pixels that are not finite: as uint8 they would pass for a black picture.

    Raises:
        RuntimeError: a value is NaN or infinite.
    """
    low, high = (bound.item() for bound in torch.aminmax(decoded))
    if not float("-inf") < low <= high < float("inf"):
        raise RuntimeError(
            describe_error(
                "The generation failed: the VAE decoded values that are no pixels",
                where="decoded frames",
                expected="finite values",
                found=f"values from {low} to {high}",
                remedy="download the checkpoint's vae folder again",
            )
        )


def normalize_latents(
    encoded: torch.Tensor, mean: Sequence[float], std: Sequence[float]
) -> torch.Tensor:
    """What the VAE encoded [N, C, T, H, W] to latents, in its dtype (cosmos3.md J, B.2)."""
    mean, inverse_std = _channel_statistics(mean, std, encoded)
    return (encoded - mean) * inverse_std


def denormalize_latents(
    latents: torch.Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> torch.Tensor:
    """Latents [N, C, T, H, W] to what the VAE decodes, in its dtype (cosmos3.md J, B.2)."""
    latents = latents.to(dtype)
    mean, inverse_std = _channel_statistics(mean, std, latents)
    return latents / inverse_std + mean


def _channel_statistics(
    mean: Sequence[float], std: Sequence[float], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and 1 / std [1, C, 1, 1, 1], rounded to the dtype of ``like`` after the division."""
    values = (torch.tensor(mean), 1.0 / torch.tensor(std, dtype=torch.float32))
    mean, inverse_std = (v.to(like.device, like.dtype).view(1, -1, 1, 1, 1) for v in values)
    return mean, inverse_std


def to_uint8(decoded: torch.Tensor) -> torch.Tensor:
    """Decoded [N, 3, T, H, W] in [-1, 1] to uint8 RGB [N, T, H, W, 3] on the CPU."""
    # One FP32 copy, then in place: 189 frames of 720p are 2 GB each time.
    values = decoded.to(torch.float32, copy=True).mul_(0.5).add_(0.5).clamp_(0, 1)
    values = values.mul_(255).round_().to(torch.uint8)
    return values.permute(0, 2, 3, 4, 1).contiguous().cpu()


def summarize_trace(trace: Sequence[StepRecord]) -> str:
    """ "generation 3 w8a16, 32 w8a8; attention 35 bf16; understanding 35 w8a16": equal steps."""
    parts = []
    for tower in ("generation", "attention", "understanding"):
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
