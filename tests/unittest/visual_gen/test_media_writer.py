# SPDX-License-Identifier: Apache-2.0
"""Files: what is written is read back and compared."""

import math
import os
import socket
import stat
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image

from tensorrt_llm import VisualGenOutput
from tensorrt_llm.visual_gen.media_writer import exact_frame_rate, resolve_format

# Saturated and mixed colours: BT.601 and BT.709 differ by up to 20 codes on them.
COLOURS = [
    (255, 0, 0),
    (0, 255, 0),
    (0, 0, 255),
    (200, 100, 50),
    (128, 128, 128),
    (30, 60, 200),
    (250, 240, 10),
    (0, 0, 0),
]


def bars(frames: int, height: int = 64) -> np.ndarray:
    pixels = np.zeros((frames, height, 40 * len(COLOURS), 3), np.uint8)
    for index, colour in enumerate(COLOURS):
        pixels[:, :, index * 40 : (index + 1) * 40] = colour
    return pixels


def picture(height: int = 48, width: int = 64) -> torch.Tensor:
    rows = torch.linspace(0, 255, height)[:, None, None]
    columns = torch.linspace(0, 255, width)[None, :, None]
    channels = torch.tensor([1.0, 0.5, 0.2])
    return ((rows + columns) / 2 * channels).round().to(torch.uint8)


def only_file(folder) -> str:
    (name,) = os.listdir(folder)
    return name


def test_mp4_has_the_frames_rate_codec_and_tags(tmp_path):
    path = VisualGenOutput(video=bars(17), frame_rate=23.976).save(tmp_path / "clip.mp4")
    with av.open(path) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        frames = list(container.decode(stream))
    assert (context.name, context.pix_fmt, stream.frames) == ("h264", "yuv420p", 17)
    assert len(frames) == 17 and {(f.width, f.height) for f in frames} == {(320, 64)}
    assert stream.average_rate == Fraction(24000, 1001)
    assert stream.duration * stream.time_base == 17 / Fraction(24000, 1001)
    tags = (context.colorspace, context.color_range, context.color_primaries, context.color_trc)
    assert [int(tag) for tag in tags] == [1, 1, 1, 1]  # BT.709, limited range


def test_mp4_pixels_are_what_the_tags_say(tmp_path):
    path = VisualGenOutput(video=bars(5), frame_rate=24).save(tmp_path / "clip.mp4", quality=100)
    with av.open(path) as container:
        planes = [f.to_ndarray() for f in container.decode(video=0)][-1].astype(float)
    luma, blue, red = planes[:64], planes[64:80].reshape(32, -1), planes[80:].reshape(32, -1)
    for index, colour in enumerate(COLOURS):
        y = (luma[32, index * 40 + 20] - 16) / 219
        cb = (blue[16, index * 20 + 10] - 128) / 224
        cr = (red[16, index * 20 + 10] - 128) / 224
        r, b = y + 1.5748 * cr, y + 1.8556 * cb
        found = np.array([r, (y - 0.2126 * r - 0.0722 * b) / 0.7152, b]) * 255
        assert np.abs(found - colour).max() < 3, (colour, found)


def test_mp4_index_comes_before_the_data(tmp_path):
    path = VisualGenOutput(video=bars(5), frame_rate=24).save(tmp_path / "clip.mp4")
    content = path.read_bytes()
    assert 0 < content.index(b"moov") < content.index(b"mdat")


def test_quality_changes_the_size_of_every_lossy_format(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (5, 64, 96, 3), np.uint8)
    outputs = {
        "mp4": VisualGenOutput(video=noise, frame_rate=24),
        "jpg": VisualGenOutput(image=noise[0]),
        "webp": VisualGenOutput(image=noise[0]),
    }
    for suffix, output in outputs.items():
        sizes = [
            output.save(tmp_path / f"{quality}.{suffix}", quality=quality).stat().st_size
            for quality in (20, 60, 95)
        ]
        assert sizes == sorted(sizes) and len(set(sizes)) == 3, (suffix, sizes)


@pytest.mark.parametrize(
    ("rate", "exact"),
    [
        (24, Fraction(24)),
        (24.0, Fraction(24)),
        (23.976, Fraction(24000, 1001)),
        (24000 / 1001, Fraction(24000, 1001)),
        (29.97, Fraction(30000, 1001)),
        (59.94, Fraction(60000, 1001)),
        (12.5, Fraction(25, 2)),
        (7.3, Fraction(73, 10)),
        (23.98, Fraction(1199, 50)),
        (Fraction(30000, 1001), Fraction(30000, 1001)),
        (0.01, Fraction(1, 100)),
        (120, Fraction(120)),
    ],
)
def test_a_frame_rate_is_an_exact_fraction(rate, exact):
    assert exact_frame_rate(rate) == exact


@pytest.mark.parametrize("rate", [0, -24, math.nan, math.inf, 120.1, True, None, "24", 1e-9])
def test_a_bad_frame_rate_is_a_value_error(tmp_path, rate):
    with pytest.raises(ValueError, match="frame rate"):
        VisualGenOutput(video=bars(1), frame_rate=24).model_copy(update={"frame_rate": rate}).save(
            tmp_path / "clip.mp4"
        )
    assert os.listdir(tmp_path) == []


def test_png_is_lossless_and_the_others_are_close(tmp_path):
    for suffix, tolerance in (("png", 0), ("jpg", 6), ("jpeg", 6), ("webp", 8)):
        path = VisualGenOutput(image=picture()).save(tmp_path / f"picture.{suffix}")
        with Image.open(path) as image:
            expected = {"png": "PNG", "webp": "WEBP"}.get(suffix, "JPEG")
            assert (image.format, image.mode) == (expected, "RGB")
            difference = np.abs(np.asarray(image).astype(int) - picture().numpy())
        assert difference.max() <= tolerance, (suffix, difference.max())


def test_an_explicit_format_serves_a_name_without_suffix(tmp_path):
    path = VisualGenOutput(image=picture()).save(tmp_path / "picture", format="WEBP")
    assert path.read_bytes()[8:12] == b"WEBP"


def test_an_existing_file_is_replaced_and_nothing_else_is_left(tmp_path):
    (tmp_path / "picture.png").write_text("old")
    VisualGenOutput(image=picture()).save(tmp_path / "picture.png")
    assert only_file(tmp_path) == "picture.png"
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("broken", "name"), [(av.VideoFrame, "from_ndarray"), (os, "replace")])
def test_a_failure_midway_leaves_the_old_file_and_no_partial_one(
    tmp_path, monkeypatch, broken, name
):
    (tmp_path / "clip.mp4").write_text("old")

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(broken, name, fail)
    with pytest.raises(OSError, match="no space"):
        VisualGenOutput(video=bars(2), frame_rate=24).save(tmp_path / "clip.mp4")
    assert only_file(tmp_path) == "clip.mp4" and (tmp_path / "clip.mp4").read_text() == "old"


IMAGE, VIDEO = {"image": picture()}, {"video": bars(2), "frame_rate": 24}
SOUND = {"audio": torch.zeros(1, 4000), "audio_sample_rate": 48000}
EVERYTHING = VisualGenOutput(**IMAGE, **VIDEO, **SOUND)


@pytest.mark.parametrize(
    ("output", "name", "options", "named"),
    [
        (IMAGE, "picture.gif", {}, "Unknown media format.*gif"),
        (IMAGE, "picture", {}, "without suffix"),
        (IMAGE, "picture.png", {"format": "jpg"}, "contradicts"),
        (IMAGE, "picture.png", {"format": "bmp"}, "Unknown media format"),
        (IMAGE, "picture.mp4", {}, "No video to save"),
        (VIDEO, "clip.png", {}, "No image to save"),
        (VIDEO, "clip.avi", {}, "Unknown media format.*avi"),
        ({"error": "it failed"}, "picture.png", {}, "it failed"),
        (IMAGE, "no/such/folder/picture.png", {}, "existing folder"),
        (IMAGE, "picture.png", {"frame_rate": 24}, "frame_rate has no meaning"),
        (IMAGE, "picture.png", {"audio_sample_rate": 48000}, "audio_sample_rate"),
        (IMAGE, "picture.jpg", {"quality": 0}, "quality"),
        (IMAGE, "picture.jpg", {"quality": 101}, "quality"),
        (IMAGE, "picture.jpg", {"quality": True}, "quality"),
        ({"image": picture().float()}, "picture.png", {}, "uint8"),
        ({"image": picture()[..., :1]}, "picture.png", {}, "shape"),
        ({"image": torch.stack([picture()] * 2)}, "picture.png", {}, "2 images"),
        ({"image": picture(1, 16384)}, "picture.webp", {}, "16383"),
        ({"video": bars(2)}, "clip.mp4", {}, "frame rate"),
        ({"video": bars(2)[:, :63], "frame_rate": 24}, "clip.mp4", {}, "even height.*63x320"),
        ({"video": bars(2)[:, :, :319], "frame_rate": 24}, "clip.mp4", {}, "even width.*64x319"),
        ({"video": bars(0), "frame_rate": 24}, "clip.mp4", {}, "at least one frame"),
    ],
)
def test_what_can_not_be_saved_is_a_value_error_and_leaves_nothing(
    tmp_path, output, name, options, named
):
    with pytest.raises(ValueError, match=named):
        VisualGenOutput(**output).save(tmp_path / name, **options)
    assert os.listdir(tmp_path) == []


def test_a_folder_is_no_target(tmp_path):
    (tmp_path / "clip.mp4").mkdir()
    with pytest.raises(ValueError, match="a folder"):
        VisualGenOutput(**VIDEO).save(tmp_path / "clip.mp4")


def names(folder) -> set[str]:
    return set(os.listdir(folder))


@pytest.mark.parametrize("link", [False, True], ids=["itself", "through a link"])
@pytest.mark.parametrize("name", ["picture.png", "clip.mp4", "sound.wav"])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path, name, link):
    fifo = tmp_path / ("fifo" if link else name)
    os.mkfifo(fifo)
    if link:
        (tmp_path / name).symlink_to(fifo)
    before = names(tmp_path)
    with pytest.raises(ValueError, match=f"{name}.*expected .*found a FIFO. Remedy: "):
        EVERYTHING.save(tmp_path / name)
    assert names(tmp_path) == before and stat.S_ISFIFO(fifo.stat().st_mode)
    assert (tmp_path / name).is_symlink() == link


def test_a_socket_is_refused_and_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("picture.png")
        with pytest.raises(ValueError, match="found a socket"):
            EVERYTHING.save("picture.png")
        assert stat.S_ISSOCK(os.stat("picture.png").st_mode)


@pytest.mark.parametrize("dangling", [False, True], ids=["to a file", "dangling"])
@pytest.mark.parametrize("name", ["picture.png", "clip.mp4", "sound.wav"])
def test_a_link_is_written_through(tmp_path, name, dangling):
    store = tmp_path / "store"
    store.mkdir()
    target, link = store / "stored", tmp_path / name
    if not dangling:
        target.write_bytes(b"old")
    (tmp_path / "second").symlink_to(os.path.join("store", "stored"))
    link.symlink_to("second")
    assert EVERYTHING.save(link) == link
    assert os.readlink(link) == "second" and os.readlink(tmp_path / "second") == "store/stored"
    assert only_file(store) == "stored"
    alone = tmp_path / f"alone.{name.rpartition('.')[2]}"
    EVERYTHING.save(alone)
    assert target.read_bytes() == alone.read_bytes() != b"old"


def test_a_failed_write_through_a_link_leaves_the_file(tmp_path):
    target, link = tmp_path / "stored", tmp_path / "picture.jpg"
    target.write_bytes(b"old")
    link.symlink_to(target)
    with pytest.raises(ValueError, match="quality"):
        EVERYTHING.save(link, quality=0)
    assert target.read_bytes() == b"old" and names(tmp_path) == {"stored", "picture.jpg"}


@pytest.mark.parametrize(
    ("points_to", "found"),
    [("picture.png", "symbolic links"), ("gone/stored", "no folder"), (".", "a folder")],
)
def test_a_link_to_no_place_is_refused_and_stays(tmp_path, points_to, found):
    (tmp_path / "picture.png").symlink_to(points_to)
    with pytest.raises(ValueError, match=f"picture.png.*found.*{found}"):
        EVERYTHING.save(tmp_path / "picture.png")
    assert os.readlink(tmp_path / "picture.png") == points_to
    assert only_file(tmp_path) == "picture.png"


def test_a_rate_of_its_own_replaces_the_output_rate(tmp_path):
    path = VisualGenOutput(**VIDEO).save(tmp_path / "clip.mp4", frame_rate=29.97)
    with av.open(path) as container:
        assert container.streams.video[0].average_rate == Fraction(30000, 1001)


def test_formats_are_known_by_any_case(tmp_path):
    assert resolve_format(tmp_path / "A.JPEG", None) == "jpg"
