# SPDX-License-Identifier: Apache-2.0
"""Sound in files: what is written is read back and compared."""

import os
import wave
from fractions import Fraction

import av
import numpy as np
import pytest
import torch

from tensorrt_llm import VisualGenOutput

RATE = 48000


def tones(samples: int, channels: int = 2, rate: int = RATE) -> np.ndarray:
    """Two different tones of half the full scale; the second channel is the higher one."""
    time = np.arange(samples) / rate
    waves = [np.sin(2 * np.pi * hertz * time) for hertz in (440, 660)]
    return (0.5 * np.stack(waves[:channels])).astype(np.float32)


def clip(frames: int = 9, rate: float = 24.0, **values) -> VisualGenOutput:
    audio = torch.from_numpy(tones(int(frames / rate * RATE)))
    pixels = np.zeros((frames, 32, 48, 3), np.uint8)
    output = VisualGenOutput(
        video=pixels, frame_rate=rate, audio=audio, audio_sample_rate=RATE, metadata={}
    )
    return output.model_copy(update=values)


def read_sound(path) -> tuple[np.ndarray, dict]:
    with av.open(path) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        facts = {
            "codec": audio.codec_context.name,
            "rate": audio.rate,
            "channels": audio.channels,
            "start": audio.start_time,
            "video": video.duration * video.time_base,
            "audio": audio.duration * audio.time_base,
        }
        samples = np.concatenate([f.to_ndarray() for f in container.decode(audio)], axis=1)
    return samples, facts


@pytest.mark.parametrize(
    ("frames", "rate"), [(9, 24.0), (49, 16.0), (61, 60.0), (31, 29.97), (121, 120.0)]
)
def test_an_mp4_has_sound_as_long_as_its_picture(tmp_path, frames, rate):
    output = clip(frames, rate)
    samples, facts = read_sound(output.save(tmp_path / "clip.mp4"))
    assert (facts["codec"], facts["rate"], facts["channels"]) == ("aac", RATE, 2)
    assert facts["start"] == 0
    assert abs(facts["video"] - facts["audio"]) <= 1 / rate
    assert abs(facts["audio"] - frames / rate) <= 1 / rate
    assert samples.shape[1] >= output.audio.shape[1]


def test_the_sound_of_an_mp4_is_in_place_and_in_its_channels(tmp_path):
    output = clip(49)
    samples, _ = read_sound(output.save(tmp_path / "clip.mp4"))
    wanted = output.audio.numpy()
    # A lossy coder; a delay of its 1024 samples, or swapped channels, would give errors of 0.5.
    error = samples[:, : wanted.shape[1]] - wanted
    assert np.sqrt((error**2).mean()) < 0.05


def test_packets_of_both_tracks_are_interleaved(tmp_path):
    """In a clip longer than the 10 seconds of packets that FFmpeg would sort by itself."""
    path = clip(193, 12.0).save(tmp_path / "clip.mp4")
    with av.open(path) as container:
        packets = sorted((p.pos, p.stream.type) for p in container.demux() if p.size)
    kinds = [kind for _, kind in packets]
    assert kinds.count("video") == 193
    # About one packet in five is a picture, from the start on.
    for start in range(0, len(kinds) - 100, 100):
        assert 5 < kinds[start : start + 100].count("video") < 45, start


def test_mono_sound_makes_a_mono_track(tmp_path):
    output = clip(audio=tones(18000, channels=1))
    _, facts = read_sound(output.save(tmp_path / "clip.mp4"))
    assert facts["channels"] == 1


def test_wav_holds_every_sample_in_16_bit(tmp_path):
    audio = np.array([[0.0, 1.0, -1.0, 2.0], [0.5, -0.5, 1e-9, -7.0]], np.float32)
    path = clip(audio=torch.from_numpy(audio)).save(tmp_path / "sound.wav")
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, RATE)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2).T
    assert samples.tolist() == [[0, 32767, -32767, 32767], [16384, -16384, 0, -32767]]
    assert os.listdir(tmp_path) == ["sound.wav"]


def test_16_bit_sound_is_saved_too(tmp_path):
    path = clip(audio=torch.ones(2, 4, dtype=torch.bfloat16)).save(tmp_path / "sound.wav")
    assert path.stat().st_size == 44 + 16


def test_slow_motion_takes_both_rates(tmp_path):
    path = clip().save(tmp_path / "slow.mp4", frame_rate=12, audio_sample_rate=24000)
    _, facts = read_sound(path)
    assert facts["rate"] == 24000
    assert facts["video"] == Fraction(3, 4) and abs(facts["audio"] - Fraction(3, 4)) < 1 / 12


@pytest.mark.parametrize(
    ("values", "name", "options", "named"),
    [
        ({}, "clip.mp4", {"frame_rate": 12}, "differ in length.*0.750.*0.375"),
        ({}, "clip.mp4", {"audio_sample_rate": 47999}, "AAC.*47999"),
        ({}, "clip.wav", {"frame_rate": 12}, "frame_rate has no meaning"),
        ({}, "clip.wav", {"audio_sample_rate": 0}, "sample rate"),
        ({}, "clip.wav", {"audio_sample_rate": 48000.0}, "sample rate"),
        ({"audio_sample_rate": None}, "clip.mp4", {}, "sample rate"),
        ({"audio": None}, "clip.wav", {}, "No audio to save"),
        ({"audio": None}, "clip.mp4", {"audio_sample_rate": RATE}, "audio_sample_rate has no"),
        ({"audio": torch.ones(2, 18000, dtype=torch.int16)}, "clip.wav", {}, "Not sound.*int16"),
        ({"audio": torch.ones(18000)}, "clip.wav", {}, "shape"),
        ({"audio": torch.ones(3, 18000)}, "clip.wav", {}, "shape"),
        ({"audio": torch.ones(2, 0)}, "clip.wav", {}, "shape"),
        ({"audio": torch.full((2, 18000), torch.nan)}, "clip.mp4", {}, "finite"),
        ({"audio": torch.ones(2, 9000)}, "clip.mp4", {}, "differ in length"),
    ],
)
def test_sound_that_can_not_be_saved_is_a_value_error_and_leaves_nothing(
    tmp_path, values, name, options, named
):
    with pytest.raises(ValueError, match=named):
        clip(**values).save(tmp_path / name, **options)
    assert os.listdir(tmp_path) == []


def test_an_image_with_no_sound_takes_no_sample_rate(tmp_path):
    output = VisualGenOutput(image=np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="audio_sample_rate has no meaning"):
        output.save(tmp_path / "image.png", audio_sample_rate=RATE)
