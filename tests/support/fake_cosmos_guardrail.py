# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the cosmos_guardrail package (0.3.2), whose models no test can have."""

from types import ModuleType

import numpy as np

UNSAFE = "forbidden"


class CosmosSafetyChecker:
    """Finds texts with ``UNSAFE`` in them unsafe, and frames while ``blocks_frames``.

    Attributes:
        texts: Texts checked.
        frames: Frames checked, as they came.
        devices: Devices it was moved to, in order.
        used_on: The device of each check.
    """

    def __init__(self) -> None:
        self.texts, self.frames, self.devices, self.used_on = [], [], [], []
        self.blocks_frames = False

    def to(self, device) -> None:
        self.devices.append(str(device))

    def check_text_safety(self, prompt: str) -> bool:
        self.used_on.append(self.devices[-1])
        self.texts.append(prompt)
        return UNSAFE not in prompt

    def check_video_safety(self, frames: np.ndarray) -> np.ndarray | None:
        self.used_on.append(self.devices[-1])
        self.frames.append(frames.copy())
        if self.blocks_frames:
            return None
        frames[:, :8, :8] = 0  # a face, pixelated in place as the package does it
        return np.array(list(frames))


def package() -> ModuleType:
    """The module, to be put into ``sys.modules["cosmos_guardrail"]``."""
    module = ModuleType("cosmos_guardrail")
    module.CosmosSafetyChecker = CosmosSafetyChecker
    return module
