# SPDX-License-Identifier: Apache-2.0
"""The pipeline over a transformer that records its calls, a VAE and a sound decoder of one line."""

from types import SimpleNamespace

import torch
from diffusers import UniPCMultistepScheduler

from tensorrt_llm import VisualGenParams
from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import LayerGraphs
from tensorrt_llm._torch.visual_gen.models.cosmos3.pipeline_cosmos3 import Cosmos3OmniMoTPipeline
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import step_uses_high_precision

CHANNELS = 4
SOUND_CHANNELS = 8


class RecordingTransformer:
    """A transformer with windows of three 16-bit steps at both ends; velocity = latents / 2.

    The second branch's velocities are 1/8 higher; clean frames have velocity 0, as the real one's.
    """

    dtype = torch.bfloat16
    arch = Cosmos3Architecture(sound_gen=True, sound_dim=SOUND_CHANNELS)
    und_precision = "w8a16"
    attention_precision = "bf16"
    factor = 0.5
    graphs = LayerGraphs(None, any_length=False)

    def __init__(self):
        self.calls, self.events, self.step, self.stepping = [], [], None, False
        self.encoded = []

    def set_denoising_step(self, step_index, num_steps):
        self.step = (step_index, num_steps)

    def reset_denoising_step(self):
        self.step = None
        self.events.append("reset step")

    def end_request(self):
        self.events.append("end request")
        self.stepping = False

    def encode_text(self, text_ids, text_mask):
        assert not self.stepping, "text is encoded before the first step"
        self.encoded.append((text_ids, text_mask))

    @property
    def gen_precision(self):
        high = self.step is not None and step_uses_high_precision((3, 3), *self.step)
        return "w8a16" if high else "w8a8"

    def captures(self, rows):
        return False

    def fp8_linear_counts(self):
        return {"understanding": 14, "generation": 14}

    def __call__(self, **inputs):
        self.stepping = True
        self.calls.append(inputs | {"precision": self.gen_precision})
        latents, sound = inputs["hidden_states"], inputs["audio_latents"]
        branch = torch.arange(len(latents)) * 0.125
        video = latents * self.factor + branch.view(-1, 1, 1, 1, 1)
        if inputs["noisy_frame_mask"] is not None:
            video = video * inputs["noisy_frame_mask"][:, None, :, None, None]
        audio = None if sound is None else sound * self.factor + branch.view(-1, 1, 1)
        return SimpleNamespace(video=video, audio=audio)


class TwoWordTokenizer:
    eos_token_id = 7

    def get_vocab(self):
        return {"<|vision_start|>": 8}

    def apply_chat_template(self, messages, **options):
        return {"input_ids": [ord(c) % 97 for c in messages[-1]["content"][:12]]}


class FakeVae:
    """Latents are the pixels' mean over a cell, and the other way round; encodes are recorded."""

    dtype = torch.bfloat16
    config = SimpleNamespace(
        z_dim=CHANNELS,
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
        base_dim=8,
        decoder_base_dim=None,
        dim_mult=[1],
        patch_size=None,
    )

    def __init__(self):
        self.encoded = []

    def encode(self, video):
        assert video.dtype == self.dtype
        self.encoded.append(video)
        cells = torch.nn.functional.avg_pool3d(video[:, :, ::4].float(), (1, 16, 16))
        latents = torch.cat((cells, cells[:, :1]), dim=1).to(self.dtype)
        return SimpleNamespace(latent_dist=SimpleNamespace(mode=lambda: latents))

    def decode(self, latents, return_dict):
        assert latents.dtype == self.dtype
        frames = (latents.shape[2] - 1) * 4 + 1
        pixels = latents[:, :3].repeat_interleave(4, 2)[:, :, :frames]
        return (pixels.repeat_interleave(16, 3).repeat_interleave(16, 4),)


class FakeSoundTokenizer:
    """Each latent frame becomes 1920 samples of its first two channels, three times as loud."""

    dtype = torch.bfloat16
    config = SimpleNamespace(
        vocoder_input_dim=SOUND_CHANNELS,
        hop_size=None,
        dec_strides=[2, 4, 5, 6, 8],
        dec_dim=4,
        dec_out_channels=2,
        sampling_rate=48000,
    )

    def decode(self, latents):
        assert latents.dtype == self.dtype
        return latents[:, :2].repeat_interleave(1920, dim=2) * 3


def fake_components(**changes):
    """What the loader would give, for ``Cosmos3OmniMoTPipeline``."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        use_karras_sigmas=True,
        sigma_min=0.147,
        sigma_max=200.0,
    )
    values = {
        "transformer": RecordingTransformer(),
        "vae": FakeVae(),
        "sound_tokenizer": FakeSoundTokenizer(),
        "tokenizer": TwoWordTokenizer(),
        "scheduler": scheduler,
        "model": "some/model",
        "revision": "fp8",
        "commit": "abc123",
        "default_use_system_prompt": False,
        "negative_prompt": "the checkpoint's",
        "requires_guardrails": False,
        "guardrails": None,
        "device": torch.device("cpu"),
    }
    return SimpleNamespace(**values | changes)


def fake_pipeline(**changes) -> Cosmos3OmniMoTPipeline:
    """A pipeline of fakes; ``changes`` replace components."""
    return Cosmos3OmniMoTPipeline(fake_components(**changes))


def params(**values) -> VisualGenParams:
    """Options of a small clip of nine frames."""
    size = {"height": 32, "width": 48, "num_frames": 9, "num_inference_steps": 8, "seed": 1}
    return VisualGenParams(**size | values)
