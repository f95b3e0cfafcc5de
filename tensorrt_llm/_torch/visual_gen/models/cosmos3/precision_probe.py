# SPDX-License-Identifier: Apache-2.0
"""The first call of a loaded transformer: a small one that runs everything a request may meet."""

from typing import TYPE_CHECKING

import torch

from tensorrt_llm._utils import describe_error

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import (
        Cosmos3VFMTransformer,
    )

# Longer than any pair of windows, so that its middle is a native step.
_STEPS = 1000
# Patch rows and columns; text has as many tokens. Even and odd numbers of rows compile different
# kernels (``EVEN`` in triton_kernels.py). With fewer than 16 keys PyTorch's attention on CPU takes
# a row of NaN scores for a masked one and gives 0: NaN in a query weight would not show.
_GRIDS = ((4, 4), (1, 17))


@torch.inference_mode()
def probe_precisions(transformer: "Cosmos3VFMTransformer") -> None:
    """Run a small call at the start, the middle and the end of a long schedule.

    That covers every precision mode a request can meet, so a GEMM or kernel that is missing shows
    here and not minutes into a video.

    Raises:
        RuntimeError: velocities that are not finite.
    """
    try:
        for grid in _GRIDS:
            for step in (0, _STEPS // 2, _STEPS - 1):
                transformer.set_denoising_step(step, _STEPS)
                _probe(transformer, *grid)
    finally:
        transformer.reset_denoising_step()
        transformer.reset_cache()


def _probe(transformer: "Cosmos3VFMTransformer", rows: int, columns: int) -> None:
    arch, device = transformer.arch, transformer.device
    sides = (rows * arch.latent_patch_size, columns * arch.latent_patch_size)
    latents = torch.zeros(1, arch.latent_channel, 1, *sides, device=device)
    text = torch.zeros(1, rows * columns, dtype=torch.int64, device=device)
    sound = torch.zeros(1, arch.sound_dim, 1, device=device) if arch.sound_gen else None
    timestep = torch.full((1,), 0.5, device=device)
    output = transformer(
        hidden_states=latents,
        timestep=timestep,
        text_ids=text,
        text_mask=torch.ones_like(text),
        video_shape=tuple(latents.shape[2:]),
        raw_timestep=timestep * 1000,
        audio_latents=sound,
    )
    made = [part for part in (output.video, output.audio) if part is not None]
    if not all(bool(torch.isfinite(part).all()) for part in made):
        raise RuntimeError(
            describe_error(
                "The loaded weights give velocities that are not finite",
                where=f"probe at precision {transformer.gen_precision}",
                expected="finite values",
                found="NaN or infinity",
                remedy="compare the files' checksums with the Hub's, and download those that "
                "differ again",
            )
        )
