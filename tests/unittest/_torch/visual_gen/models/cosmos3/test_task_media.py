# SPDX-License-Identifier: Apache-2.0
"""Real references through the tiny checkpoint, and what comes out as a file."""

import av
import numpy as np
import pytest
import torch
from PIL import Image

from tensorrt_llm._torch.visual_gen.models.cosmos3.conditioning import encode_frames, fit_frames
from tensorrt_llm.visual_gen.params import VisualGenParams

pytestmark = pytest.mark.cosmos3

CPU = torch.device("cpu")
SMALL = {"height": 64, "num_frames": 9, "num_inference_steps": 2, "seed": 5}
PHOTOGRAPH = "images/humanoid_robot.jpg"
# name -> (width, height of the default size, frame rate, width at height 64)
CLIPS = {
    "videos/robotics_next_action.mp4": (1104, 832, 4.0, 80),
    "videos/umi.mp4": (960, 960, 20.0, 64),
}


def reference_file(shared_dir, name):
    path = shared_dir / "data" / name
    if not path.is_file():
        pytest.skip(f"needs {path}")
    return path


def frames_of(path) -> torch.Tensor:
    """All frames of a clip, decoded here once more."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames))


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_the_photograph_is_the_first_frames_latent_bit_for_bit(fp8_pipeline, shared_dir):
    path = reference_file(shared_dir, PHOTOGRAPH)
    request = fp8_pipeline.prepare_request(
        "It waves", VisualGenParams(image_reference=path, **SMALL)
    )
    # 1672x941; a side that is left open keeps the aspect, to 16 pixels.
    assert (request.values.height, request.values.width) == (64, 112)
    assert request.values.task == "image_to_video" and request.values.frame_rate == 24.0
    photograph = torch.from_numpy(np.array(Image.open(path).convert("RGB")))[None]
    expected = encode_frames(fp8_pipeline.components.vae, fit_frames(photograph, 64, 112), CPU)
    latents = fp8_pipeline.denoise(request).latents
    assert latents.shape == (1, 48, 3, 4, 7)
    assert same_bits(latents[:, :, :1], expected)
    assert not torch.allclose(latents[:, :, 1:2], expected, atol=0.1)


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("keep", ["first", "last"])
def test_a_clip_is_the_given_latent_frames_bit_for_bit(fp8_pipeline, shared_dir, name, keep):
    path = reference_file(shared_dir, name)
    extra = {"condition_video_keep": keep}
    request = fp8_pipeline.prepare_request(
        "It moves on", VisualGenParams(video_reference=str(path), extra_params=extra, **SMALL)
    )
    width = CLIPS[name][3]
    assert (request.values.height, request.values.width) == (64, width)
    clip = frames_of(path)
    ends = {"first": clip[:5], "last": clip[-5:]}
    distance = {
        end: (request.frames.int() - fit_frames(part, 64, width).int()).abs().float().mean()
        for end, part in ends.items()
    }
    # PyAV's own conversion of colours differs by a code or two.
    assert distance[keep] < 1.5 and max(distance.values()) > 3
    expected = encode_frames(fp8_pipeline.components.vae, request.frames, CPU)
    latents = fp8_pipeline.denoise(request).latents
    assert same_bits(latents[:, :, :2], expected)


def test_without_a_size_the_output_has_the_trained_one_nearest_to_the_source(
    fp8_pipeline, shared_dir
):
    path = reference_file(shared_dir, PHOTOGRAPH)
    request = fp8_pipeline.prepare_request("It waves", VisualGenParams(image_reference=path))
    assert (request.values.width, request.values.height) == (1280, 720)
    assert request.frames.shape == (1, 720, 1280, 3)
    for name, (width, height, rate, _) in CLIPS.items():
        path = reference_file(shared_dir, name)
        request = fp8_pipeline.prepare_request("It moves", VisualGenParams(video_reference=path))
        values = request.values
        assert (values.width, values.height, values.frame_rate) == (width, height, rate)
        assert request.frames.shape == (5, height, width, 3)
        assert request.reference["frame_rate"] == rate


def test_a_clip_with_sound_becomes_an_mp4_with_two_tracks_of_one_length(fp8_pipeline, tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    params = VisualGenParams(
        image_reference=picture,
        frame_rate=12.5,
        extra_params={"enable_audio": True},
        **SMALL | {"width": 96},
    )
    output = fp8_pipeline.generate(fp8_pipeline.prepare_request("It hums", params))
    assert output.audio.shape == (2, int(9 / 12.5 * 48000))
    assert output.audio.abs().max() <= 1.0 and output.audio.std() > 1e-3
    with av.open(str(output.save(tmp_path / "clip.mp4"))) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        lengths = [float(s.duration * s.time_base) for s in (video, audio)]
        assert (audio.codec_context.name, audio.rate, audio.channels) == ("aac", 48000, 2)
        assert len(list(container.decode(video))) == 9
    assert abs(lengths[0] - lengths[1]) <= 1 / 12.5 and abs(lengths[0] - 0.72) <= 1 / 12.5
    assert output.save(tmp_path / "clip.wav").stat().st_size == 44 + 4 * output.audio.shape[1]
