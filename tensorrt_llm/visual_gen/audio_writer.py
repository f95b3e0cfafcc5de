# SPDX-License-Identifier: Apache-2.0
"""Sound to files: WAV (PCM, 16 bit), and the AAC track of an MP4."""

import wave
from fractions import Fraction
from pathlib import Path
from typing import Any

from tensorrt_llm._utils import describe_error

_LAYOUTS = {1: "mono", 2: "stereo"}
# What AAC has codes for; other rates would have to be resampled.
AAC_RATES = (
    *(96000, 88200, 64000, 48000, 44100, 32000, 24000),
    *(22050, 16000, 12000, 11025, 8000, 7350),
)
# Bits a second and channel: twice what better encoders than FFmpeg's own would need. The format
# holds at most 6144 bits for 1024 samples.
_AAC_BIT_RATE = 128_000
_AAC_MAX_BITS = 6
_MAX_WAV_RATE = 768_000
_PCM_PEAK = 32767


def as_sound(audio: Any, sample_rate: Any, where: object):
    """Check sound and give it as a FP32 NumPy array [channels, samples] in [-1, 1].

    Args:
        audio: Floating point tensor on the CPU or array [channels, samples]; clamped to [-1, 1].
        sample_rate: Samples a second.
        where: For the error.

    Raises:
        ValueError: another shape or dtype, values that are not finite, more than two channels, a
            rate that is no positive integer.
    """
    import numpy as np

    is_tensor = getattr(audio, "is_floating_point", bool)
    array = np.asarray(audio.float() if is_tensor() else audio)
    rate_ok = isinstance(sample_rate, int) and not isinstance(sample_rate, bool)
    for what, holds, expected, found, remedy in (
        (
            "Not sound",
            array.dtype.kind == "f",
            "a floating point tensor or array",
            array.dtype,
            "scale integer samples to -1..1 in floating point",
        ),
        (
            "Sound of another shape",
            array.ndim == 2 and array.shape[0] in _LAYOUTS and array.shape[1] > 0,
            "[1 or 2 channels, samples]",
            array.shape,
            "put the channels first, and mix more than two down to stereo",
        ),
        (
            "Bad sample rate",
            rate_ok and 0 < sample_rate <= _MAX_WAV_RATE,
            f"samples a second, 1 to {_MAX_WAV_RATE}",
            repr(sample_rate),
            "pass audio_sample_rate as a whole number, 48000 for instance",
        ),
    ):
        if not holds:
            raise ValueError(
                describe_error(what, where=where, expected=expected, found=found, remedy=remedy)
            )
    if not np.isfinite(array).all():
        raise ValueError(
            describe_error(
                "The sound is broken",
                where=where,
                expected="finite values",
                found="NaN or inf",
                remedy="replace those samples (torch.nan_to_num), or generate again",
            )
        )
    return np.clip(array.astype(np.float32), -1.0, 1.0)


def write_wav(path: Path, sound: Any, sample_rate: int) -> None:
    """Write sound from ``as_sound`` as PCM with 16 bits, full scale 32767."""
    samples = (sound.T * _PCM_PEAK).round().astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(samples.tobytes())


def check_track(sound: Any, sample_rate: int, seconds: Fraction, frame_rate: Fraction) -> None:
    """See that sound can be a clip's AAC track.

    Args:
        sound: From ``as_sound``.
        sample_rate: Samples a second.
        seconds: Length of the video track.
        frame_rate: Of the video track.

    Raises:
        ValueError: a rate that AAC lacks, or sound that is more than a frame longer or shorter.
    """
    if sample_rate not in AAC_RATES:
        raise ValueError(
            describe_error(
                "AAC can't hold this sample rate",
                where="audio_sample_rate",
                expected=f"one of {', '.join(map(str, AAC_RATES))}",
                found=sample_rate,
                remedy="save the sound as wav",
            )
        )
    length = Fraction(sound.shape[1], sample_rate)
    if abs(length - seconds) > 1 / frame_rate:
        raise ValueError(
            describe_error(
                "Sound and picture differ in length",
                where="VisualGenOutput.save",
                expected=f"{float(seconds):.3f} seconds of sound, within one frame",
                found=f"{float(length):.3f} seconds",
                remedy="change frame_rate and audio_sample_rate together, or neither",
            )
        )


class AacTrack:
    """The sound of an MP4 under way, muxed in step with the picture.

    Args:
        container: An open PyAV output container, before anything was muxed.
        sound: From ``as_sound``.
        sample_rate: Samples a second.
    """

    def __init__(self, container: Any, sound: Any, sample_rate: int) -> None:
        self._container, self._sound, self._rate = container, sound, sample_rate
        self._layout = _LAYOUTS[sound.shape[0]]
        self._stream = container.add_stream("aac", rate=sample_rate, layout=self._layout)
        bits = min(_AAC_BIT_RATE, _AAC_MAX_BITS * sample_rate)
        self._stream.bit_rate = bits * sound.shape[0]
        self._done = 0

    def mux_until(self, seconds: Fraction | None) -> None:
        """Encode and mux up to a time of the clip; None is the end, and closes the track."""
        import av
        import numpy as np

        total = self._sound.shape[1]
        until = total if seconds is None else min(total, int(seconds * self._rate))
        if until > self._done:
            part = np.ascontiguousarray(self._sound[:, self._done : until])
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=self._layout)
            frame.sample_rate, frame.pts = self._rate, self._done
            frame.time_base = Fraction(1, self._rate)
            self._container.mux(self._stream.encode(frame))
            self._done = until
        if seconds is None:
            self._container.mux(self._stream.encode())
