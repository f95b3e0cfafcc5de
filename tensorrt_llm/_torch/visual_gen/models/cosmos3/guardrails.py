# SPDX-License-Identifier: Apache-2.0
"""Guardrails: what refuses unsafe texts and frames, through the optional cosmos_guardrail package.

A checkpoint asks for them in its ``model_index.json``. They are loaded with it; where that fails
the checkpoint still loads, and a request that wants them is refused with the ways out.
"""

import os
import threading
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.resolved_request import ResolvedRequest
from tensorrt_llm._utils import describe_error
from tensorrt_llm.logger import logger
from tensorrt_llm.visual_gen.output import RequestBlockedError
from tensorrt_llm.visual_gen.params import ParameterError

GUARDRAILS_OFF = "TRTLLM_DISABLE_COSMOS3_GUARDRAILS"
WAYS_OUT = (
    "pip install -c constraints.txt cosmos-guardrail and accept the license of "
    "nvidia/Cosmos-1.0-Guardrail on the Hub; or take the checks upon yourself with "
    f"{GUARDRAILS_OFF}=1 or use_guardrails False"
)


class Guardrails(Protocol):
    """What checks a request. Implementations may be called by one thread at a time."""

    def check_text(self, text: str) -> None:
        """Raises RequestBlockedError for an unsafe text."""

    def check_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """The frames that may leave, faces made unrecognisable for instance.

        Args:
            frames: uint8 RGB [T, H, W, 3] on the CPU; may be changed in place.

        Returns:
            Frames of the same shape and dtype.

        Raises:
            RequestBlockedError: none of them may.
        """


class CosmosGuardrails:
    """The checker of the cosmos_guardrail package.

    Its models stay on the CPU between checks, so that they cost no device memory while denoising.

    Args:
        checker: A ``cosmos_guardrail.CosmosSafetyChecker``.
        device: Where it runs.
    """

    def __init__(self, checker: Any, device: torch.device) -> None:
        self._checker, self._device = checker, device
        self._lock = threading.Lock()

    def check_text(self, text: str) -> None:
        """As ``Guardrails``."""
        if not self._run("check_text_safety", text):
            raise RequestBlockedError("unsafe text")

    def check_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """As ``Guardrails``."""
        checked = self._run("check_video_safety", frames.numpy())
        if checked is None:
            raise RequestBlockedError("unsafe frames")
        return torch.from_numpy(checked)

    def _run(self, method: str, value: Any) -> Any:
        with self._lock:
            self._checker.to(self._device)
            try:
                return getattr(self._checker, method)(value)
            finally:
                self._checker.to("cpu")


class MissingGuardrails:
    """Stands where no guardrails are loaded; whoever wants them is told why.

    Args:
        found: Why they are not there.
        remedy: What to do about it.
    """

    def __init__(self, found: str, remedy: str) -> None:
        self._found, self._remedy = found, remedy

    def refuse(self) -> None:
        """Raises ParameterError with the reason and the ways out."""
        where = "extra_params.use_guardrails"
        raise ParameterError(
            describe_error(
                "The request wants guardrails, which are not loaded",
                where=where,
                expected="the cosmos_guardrail package and its weights",
                found=self._found,
                remedy=self._remedy,
            ),
            [where],
        )

    def check_text(self, text: str) -> None:
        """Raises ValueError: nothing can be checked."""
        self.refuse()

    def check_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """Raises ValueError: nothing can be checked."""
        self.refuse()


def load_guardrails(index: Mapping[str, Any], device: torch.device) -> tuple[bool, Guardrails]:
    """Load what a checkpoint asks for.

    Args:
        index: Its ``model_index.json``; guardrails are asked for unless ``enable_safety_checker``
            is false.
        device: Where generation runs.

    Returns:
        Whether requests are checked by default, and what checks them.
    """
    if os.environ.get(GUARDRAILS_OFF) == "1":
        return False, MissingGuardrails(
            f"{GUARDRAILS_OFF}=1", "unset the variable and load the checkpoint again"
        )
    if not index.get("enable_safety_checker", True):
        return False, MissingGuardrails(
            "a checkpoint that doesn't ask for them",
            "set enable_safety_checker true in its model_index.json and load it again",
        )
    try:
        from cosmos_guardrail import CosmosSafetyChecker

        return True, CosmosGuardrails(CosmosSafetyChecker(), device)
    except Exception as error:  # a package of many parts: imports, downloads, files
        reason = f"{type(error).__name__}: {error}"
        logger.warning(
            "Guardrails can't be loaded (%s). Requests are refused until you %s.", reason, WAYS_OUT
        )
        return True, MissingGuardrails(reason, WAYS_OUT)


def require_guardrails(values: ResolvedRequest, guardrails: Guardrails) -> None:
    """Refuse a request that wants guardrails where none are loaded, before it is queued.

    Raises:
        ValueError: with the ways out.
    """
    if values.use_guardrails and isinstance(guardrails, MissingGuardrails):
        guardrails.refuse()


def guard_texts(values: ResolvedRequest, guardrails: Guardrails, default_negative: str) -> None:
    """Check what the caller wrote: the prompt, and a negative prompt that isn't the default.

    Raises:
        RequestBlockedError: one of them is unsafe; which one, but not its text.
    """
    if not values.use_guardrails:
        return
    texts = {"prompt": values.prompt}
    if values.negative_prompt not in ("", default_negative):
        texts["negative_prompt"] = values.negative_prompt
    for name, text in texts.items():
        try:
            guardrails.check_text(text)
        except RequestBlockedError as error:
            raise _blocked(name, error) from error


def guard_pixels(
    values: ResolvedRequest, guardrails: Guardrails, pixels: torch.Tensor
) -> torch.Tensor:
    """Check what was generated.

    Args:
        values: The request.
        guardrails: What checks it.
        pixels: uint8 RGB [N, T, H, W, 3] on the CPU; may be changed in place.

    Returns:
        The pixels that may leave, of the same shape.

    Raises:
        RequestBlockedError: one of the N results is unsafe: none leaves.
        RuntimeError: the guardrails gave back something else than frames.
    """
    if not values.use_guardrails:
        return pixels
    checked = []
    for index, frames in enumerate(pixels):
        try:
            safe = guardrails.check_frames(frames)
        except RequestBlockedError as error:
            raise _blocked(f"result {index}", error) from error
        if safe.shape != frames.shape or safe.dtype != frames.dtype:
            raise RuntimeError(
                describe_error(
                    "The guardrails changed the shape of the frames",
                    where=f"result {index}",
                    expected=f"{frames.dtype} {tuple(frames.shape)}",
                    found=f"{safe.dtype} {tuple(safe.shape)}",
                    remedy=(
                        "install another release of cosmos-guardrail, or set use_guardrails False"
                    ),
                )
            )
        checked.append(safe)
    return torch.stack(checked)


def _blocked(where: str, error: RequestBlockedError) -> RequestBlockedError:
    return RequestBlockedError(
        describe_error(
            "The guardrails blocked the request",
            where=where,
            expected="content within the model's license",
            found=error,
            remedy="reword the prompt, or generate with another seed",
        )
    )
