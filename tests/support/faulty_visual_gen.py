# SPDX-License-Identifier: Apache-2.0
"""``VisualGen`` whose prompts can make it fail in the middle of the denoising loop."""

import os
import signal
from typing import Any

import torch

from tensorrt_llm import VisualGen
from tensorrt_llm.serve.visual_gen_spec import load_visual_gen

FAULTY = f"{__name__}:load"


def load(model: str, args: dict[str, Any]) -> VisualGen:
    """Load as the server does, and put the faults in."""
    visual_gen = load_visual_gen(model, args)
    pipeline = visual_gen._pipeline
    denoise = pipeline.denoise

    def denoise_or_fail(request, **options):
        def fail(step, latents):
            if step == 1:
                _fail(request.values.prompt)

        return denoise(request, **options | {"on_latents": fail})

    pipeline.denoise = denoise_or_fail
    return visual_gen


def _fail(prompt: str) -> None:
    match prompt:
        case "raise":
            raise RuntimeError("a scripted failure")
        case "out of memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
