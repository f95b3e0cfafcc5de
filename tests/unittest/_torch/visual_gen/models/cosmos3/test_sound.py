# SPDX-License-Identifier: Apache-2.0
"""The sound decoder: lengths, and which checkpoints have it."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from diffusers import Cosmos3AVAEAudioTokenizer
from safetensors.torch import load_file, save_file

from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.sound import SoundDecoder
from tests.support.cosmos3_requests import resolve
from tests.support.fake_pipeline import SOUND_CHANNELS, FakeSoundTokenizer
from tests.support.live_bytes import LiveBytes
from tests.support.pipelines import load_pipeline

ARCH = Cosmos3Architecture(sound_gen=True, sound_dim=SOUND_CHANNELS)


@pytest.mark.parametrize(
    ("frames", "rate", "samples", "latents"),
    [
        (189, 24.0, 378000, 197),
        (9, 24.0, 18000, 10),
        (49, 24.0, 98000, 52),
        (97, 24.0, 194000, 102),
        # An exact multiple of 1920 samples gets no frame more.
        (125, 25.0, 240000, 125),
        (189, 29.97, 302702, 158),
        (5, 120.0, 2000, 2),
    ],
)
def test_sound_covers_the_clip(frames, rate, samples, latents):
    decoder = SoundDecoder(FakeSoundTokenizer(), ARCH)
    values = replace(resolve(num_frames=5), num_frames=frames, frame_rate=rate)
    assert decoder.samples(values) == samples
    assert decoder.latent_shape(values) == (1, SOUND_CHANNELS, latents)
    waveform = decoder.decode(torch.randn(1, SOUND_CHANNELS, latents), values)
    assert waveform.shape == (2, samples) and waveform.dtype == torch.float32
    assert waveform.abs().max() <= 1.0


@pytest.mark.filterwarnings("ignore::FutureWarning")  # diffusers' weight norm
@pytest.mark.parametrize("seconds", [8, 120])
def test_the_bound_of_decoding_lies_below_what_the_tokenizer_takes_and_not_far(seconds):
    with torch.device("meta"):
        tokenizer = Cosmos3AVAEAudioTokenizer(encoder_enabled=False).eval()  # the published sizes
    tokenizer = tokenizer.bfloat16()
    decoder = SoundDecoder(tokenizer, Cosmos3Architecture(sound_gen=True, sound_dim=64))
    values = replace(resolve(num_frames=5), num_frames=seconds * 5, frame_rate=5.0)
    latents = torch.zeros(decoder.latent_shape(values), dtype=torch.bfloat16, device="meta")
    weights = sum(p.nbytes for p in tokenizer.parameters())  # weight norm makes them anew
    with torch.no_grad(), LiveBytes([*tokenizer.parameters()]) as live:
        waveform = tokenizer.decode(latents)
    assert waveform.shape == (1, 2, seconds * 48000)
    bound = decoder.decode_bytes(values)
    assert 0.8 * (live.peak - weights) < bound < live.peak
    assert bound > 2 * 4 * seconds * 48000  # the waveform in FP32


@pytest.fixture
def checkpoint(tiny_bf16_checkpoint, tmp_path):
    return shutil.copytree(tiny_bf16_checkpoint, tmp_path / "checkpoint")


def sound_weights(checkpoint):
    (file,) = (checkpoint / "sound_tokenizer").glob("*.safetensors")
    return file, load_file(file)


@pytest.mark.cosmos3
def test_a_checkpoint_may_come_without_sound(checkpoint):
    shutil.rmtree(checkpoint / "sound_tokenizer")
    pipeline = load_pipeline(checkpoint)
    assert pipeline.components.sound_tokenizer is None and not pipeline.traits.has_sound


@pytest.mark.cosmos3
def test_the_decoding_half_is_enough(checkpoint, recwarn):
    file, tensors = sound_weights(checkpoint)
    assert any(name.startswith("encoder.") for name in tensors)
    decoder = {name: t for name, t in tensors.items() if name.startswith("decoder.")}
    save_file(decoder, file)
    pipeline = load_pipeline(checkpoint)
    assert pipeline.traits.has_sound
    assert not [w for w in recwarn.list if issubclass(w.category, FutureWarning)]


@pytest.mark.cosmos3
def test_a_missing_tensor_of_the_sound_decoder_is_named(checkpoint):
    file, tensors = sound_weights(checkpoint)
    name = next(name for name in tensors if name.startswith("decoder."))
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"missing.*{name}"):
        load_pipeline(checkpoint)


@pytest.mark.cosmos3
def test_a_sound_tokenizer_of_another_rate_is_refused_at_load(checkpoint):
    path = checkpoint / "sound_tokenizer" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"hop_size": 960}))
    with pytest.raises(ValueError, match="hop_size.*25.*50"):
        load_pipeline(checkpoint)
