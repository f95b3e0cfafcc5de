# SPDX-License-Identifier: Apache-2.0
"""The two functions that load references: hostile ones, real ones, and what they cost."""

import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from tensorrt_llm.visual_gen.media_policy import LOCAL_PATHS_OFF
from tensorrt_llm.visual_gen.media_refs import MediaError, load_image, load_video
from tests.support.hostile_media import data_uri, images, jpeg, load, mp4, png, videos
from tests.support.media_files import pattern

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning", "ignore:Corrupt EXIF")
@pytest.mark.parametrize(("kind", "catalogue"), [("image", images), ("video", videos)])
def test_hostile_references_are_refused_clearly_and_quickly(kind, catalogue, tmp_path, monkeypatch):
    cases, bad = catalogue(), []
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TMPDIR", str(work))
    for name, reference in cases.items():
        made = reference(tmp_path) if callable(reference) else reference
        start = time.monotonic()
        try:
            load(kind, made)
            bad.append(f"{name}: accepted")
        except MediaError as error:
            message = str(error)
            if f"(where: {kind}_reference" not in message or len(message) > 600:
                bad.append(f"{name}: {message}")
        except Exception as error:
            bad.append(f"{name}: {error!r}")
        if (seconds := time.monotonic() - start) > 5:
            bad.append(f"{name}: {seconds:.1f} seconds")
    assert not bad, "\n".join(bad)
    assert len(cases) >= 50
    assert os.listdir(work) == []


def test_hostile_references_take_little_memory_and_open_nothing_for_writing(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.hostile_media", str(tmp_path)]
    # One thread each: the pools of BLAS and of FFmpeg would reserve memory by the core.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    refused, cases = map(int, result.stdout.split())
    assert refused == cases >= 100, result.stderr


def test_importing_the_module_costs_none_of_the_heavy_libraries():
    code = (
        "import sys, tensorrt_llm.visual_gen.media_refs\n"
        "print([name for name in ('torch', 'numpy', 'PIL', 'av') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_the_same_media_give_the_same_pixels_however_they_come(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "a.mp4").write_bytes(mp4())
    with Image.open(tmp_path / "a.png") as opened:
        pictures = [tmp_path / "a.png", png(), data_uri("image/png", png()), opened, pattern()]
        for reference in pictures:
            assert np.array_equal(load_image(reference).pixels, pattern())
    whole = load_video(mp4(), num_frames=12).frames
    for reference in (
        *(str(tmp_path / "a.mp4"), data_uri("video/mp4", mp4()), whole, list(whole)),
        [Image.fromarray(frame) for frame in whole],
    ):
        assert np.array_equal(load_video(reference, num_frames=12).frames, whole)


def test_no_file_stays_open(tmp_path):
    (tmp_path / "a.png").write_bytes(jpeg())  # refused: the name says PNG
    (tmp_path / "a.mp4").write_bytes(mp4())
    load_video(tmp_path / "a.mp4", num_frames=3)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        load_video(tmp_path / "a.mp4", num_frames=3, keep="last")
        with pytest.raises(MediaError):
            load_image(tmp_path / "a.png")
        with pytest.raises(MediaError):
            load_image(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_environment_forbids_paths_for_both(monkeypatch, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    load_image(tmp_path / "a.png")
    monkeypatch.setenv(LOCAL_PATHS_OFF, "1")
    for load_one in (load_image, lambda path: load_video(path, num_frames=2)):
        with pytest.raises(MediaError, match=f"forbidden.*{LOCAL_PATHS_OFF}"):
            load_one(tmp_path / "a.png")


def test_the_real_photograph(shared_dir):
    path = shared_dir / "data" / "images" / "humanoid_robot.jpg"
    result = load_image(path)
    with Image.open(path) as image:
        assert np.array_equal(result.pixels, np.asarray(image.convert("RGB")))
    assert result.pixels.shape == (941, 1672, 3)
    assert (result.source_height, result.source_width, result.format) == (941, 1672, "jpeg")
    assert result.applied == ()


@pytest.mark.parametrize(
    ("name", "count", "rate", "size"),
    [("umi", 33, 20, (256, 256)), ("robotics_next_action", 26, 4, (476, 644))],
)
def test_the_real_clips(shared_dir, name, count, rate, size):
    path = shared_dir / "data" / "videos" / f"{name}.mp4"
    with av.open(str(path)) as container:
        plain = np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])
    for keep, part in (("first", slice(5)), ("last", slice(-5, None))):
        result = load_video(path, num_frames=5, keep=keep)
        assert result.frames.shape == (5, *size, 3)
        # The same but for rounding and for chroma, which is interpolated better here.
        assert np.abs(result.frames.astype(int) - plain[part]).mean() < 1.5
        assert (result.source_frames, result.frame_rate) == (count, rate)
        assert result.duration == Fraction(count, rate)
        places = range(count)[part]
        assert result.timestamps == tuple(Fraction(place, rate) for place in places)
    assert np.array_equal(load_video(path, num_frames=99).frames[-5:], result.frames)
