# SPDX-License-Identifier: Apache-2.0
"""One pass through everything that a request of a given shape may run."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.denoising import check_latents
from tensorrt_llm._torch.visual_gen.models.cosmos3.loop_inputs import lay_out
from tensorrt_llm._torch.visual_gen.models.cosmos3.memory_estimate import release_graphs
from tensorrt_llm.logger import logger
from tensorrt_llm.visual_gen.params import VisualGenParams

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.models.cosmos3.pipeline_cosmos3 import (
        Cosmos3OmniMoTPipeline,
    )

# (step, number of steps) that between them reach every mode of any policy: one step alone is
# native, the two steps of a short run lie in the first and in the last window.
_STEPS = ((0, 1), (0, 2), (1, 2))


def warm_shape(
    pipeline: "Cosmos3OmniMoTPipeline", height: int, width: int, num_frames: int
) -> None:
    """Run each precision mode with and without guidance, and every coder, at one shape.

    Raises:
        RuntimeError: values that are constant or not finite.
    """
    # Nothing is shown to anybody, and a checkpoint that asks for guardrails loads without them.
    extra_params = {"use_guardrails": False}
    params = VisualGenParams(height=height, width=width, num_frames=num_frames, seed=0)
    if num_frames > 1:
        params.image_reference = np.zeros((height, width, 3), np.uint8)
        extra_params["enable_audio"] = pipeline.sound is not None
    params.extra_params = extra_params
    request = pipeline.prepare_request("A warm-up run.", params)
    values, transformer = request.values, pipeline.transformer
    release_graphs(request, pipeline.components)
    guided = [True, False] if values.is_guided else [False]
    inputs = lay_out(pipeline.components, request, torch.full((len(guided),), 500.0), guided)
    start = pipeline.start(inputs, values.seed)
    seen = set()
    try:
        for step, num_steps in _STEPS:
            transformer.set_denoising_step(step, num_steps)
            mode = transformer.gen_precision
            if mode in seen:
                continue
            seen.add(mode)
            for i in range(len(guided)):
                velocity, sound = pipeline.velocities(start.latents, start.sound, inputs, i)
                check_latents(velocity)
                if sound is not None:
                    check_latents(sound, "sound")
    finally:
        transformer.reset_denoising_step()
        transformer.end_request()
    pipeline.decode(start.latents, pipeline.decoding_tile(values))
    if start.sound is not None:
        pipeline.sound.decode(start.sound, values)
    logger.info(
        "Warm-up at %dx%d, %d frames: %s.",
        values.height,
        values.width,
        values.num_frames,
        ", ".join(sorted(seen)),
    )
