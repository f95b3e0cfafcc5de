# SPDX-License-Identifier: Apache-2.0
"""Sound of a clip: the shape of its latents, and from final latents to a waveform.

Sound is denoised together with the video: both are tokens of one transformer call, each with a
scheduler of its own. The decoder gives whole latent frames, which is a little more than the clip
is long, so its end is cut off.
"""

import math
from typing import Any

import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.resolved_request import ResolvedRequest
from tensorrt_llm._utils import describe_error

# Tensors of the decoder's last level, the widest, that live at one moment; half a one more, its
# input, isn't counted (diffusers 0.42.1).
_DECODER_TENSORS = 4


class SoundDecoder:
    """The checkpoint's sound tokenizer, of which generation uses the decoding half.

    Args:
        tokenizer: diffusers Cosmos3AVAEAudioTokenizer; its dtype is that of the decoding.
        arch: The transformer's sizes.

    Raises:
        ValueError: the tokenizer decodes another width or rate than the transformer generates.
    """

    def __init__(self, tokenizer: Any, arch: Cosmos3Architecture) -> None:
        config = tokenizer.config
        self._tokenizer = tokenizer
        self._channels = config.vocoder_input_dim
        self._hop = config.hop_size or math.prod(config.dec_strides)
        self.sampling_rate: int = config.sampling_rate
        rate = self.sampling_rate / self._hop
        for name, found, expected in (
            ("vocoder_input_dim", self._channels, arch.sound_dim),
            ("sampling_rate / hop_size", rate, arch.sound_latent_fps),
        ):
            if found != expected:
                raise ValueError(
                    describe_error(
                        "The sound tokenizer contradicts the transformer",
                        where=f"sound_tokenizer/config.json, {name}",
                        expected=f"{expected}, as transformer/config.json says",
                        found=found,
                        remedy=(
                            "restore sound_tokenizer and transformer from one revision of the "
                            "checkpoint"
                        ),
                    )
                )

    def samples(self, values: ResolvedRequest) -> int:
        """Samples of the request's clip, rounded down (cosmos3.md E.2)."""
        return int(values.num_frames / values.frame_rate * self.sampling_rate)

    def latent_shape(self, values: ResolvedRequest) -> tuple[int, int, int]:
        """(1, C, T) of the request's sound latents, which cover the clip."""
        return 1, self._channels, math.ceil(self.samples(values) / self._hop)

    def decode_bytes(self, values: ResolvedRequest) -> int:
        """Bytes that ``decode`` takes beside the weights, at least.

        The last level of the decoder, or after it the waveform: as decoded and in FP32.
        """
        config, size = self._tokenizer.config, self._tokenizer.dtype.itemsize
        samples = self.latent_shape(values)[-1] * self._hop
        features = _DECODER_TENSORS * config.dec_dim * samples * size
        waveform = config.dec_out_channels * (samples * size + self.samples(values) * 4)
        return max(features, waveform)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, values: ResolvedRequest) -> torch.Tensor:
        """Latents FP32 [1, C, T] to a waveform, FP32 [channels, samples] in [-1, 1] on the CPU."""
        waveform = self._tokenizer.decode(latents.to(self._tokenizer.dtype))[0]
        return waveform[:, : self.samples(values)].float().clamp(-1.0, 1.0).cpu()
