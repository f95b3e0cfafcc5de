# SPDX-License-Identifier: Apache-2.0
"""From decoded pixels to clean latent frames, against diffusers' own preprocessing and encoding."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import _preprocess_conditioning_image

from tensorrt_llm._torch.visual_gen.models.cosmos3.conditioning import (
    Condition,
    encode_frames,
    fit_frames,
    make_condition,
    pad_frames,
    read_reference,
)
from tensorrt_llm.visual_gen.media_refs import MediaPolicy
from tensorrt_llm.visual_gen.params import VisualGenParams
from tests.support.cosmos3_requests import resolve

CPU = torch.device("cpu")


def frames(count: int, height: int, width: int) -> torch.Tensor:
    values = np.random.default_rng(height * width).integers(0, 256, (count, height, width, 3))
    return torch.from_numpy(values.astype(np.uint8))


@pytest.mark.parametrize(
    "size", [(64, 96), (48, 96), (64, 64), (33, 47), (200, 300), (301, 97), (64, 99), (67, 96)]
)
def test_a_picture_is_scaled_and_cropped_as_in_diffusers(size):
    picture = frames(1, *size)
    found = fit_frames(picture, 64, 96)
    assert found.dtype == torch.uint8 and found.shape == (1, 64, 96, 3)
    expected = _preprocess_conditioning_image(picture[0].numpy(), height=64, width=96)
    assert torch.equal(found.permute(0, 3, 1, 2) / 127.5 - 1.0, expected)


def test_each_frame_of_a_clip_is_fitted_alone_and_never_stretched():
    clip = frames(3, 50, 120)
    clip[:, :, 60:] = 255  # the right half is white, so the middle column stays the border
    fitted = fit_frames(clip, 32, 48)
    assert torch.equal(fitted[1:2], fit_frames(clip[1:2], 32, 48))
    assert (fitted[:, :, 25:] == 255).all() and not (fitted[:, :, :23] == 255).all()


@pytest.mark.parametrize(
    ("count", "expected"), [(5, [0, 1, 2, 2, 2]), (3, [0, 1, 2]), (1, [0]), (2, [0, 1])]
)
def test_a_short_clip_goes_on_with_its_last_frame(count, expected):
    clip = frames(3, 4, 4)
    assert torch.equal(pad_frames(clip, count), clip[expected])


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def vae(request, tiny_bf16_checkpoint):
    return AutoencoderKLWan.from_pretrained(
        tiny_bf16_checkpoint / "vae", torch_dtype=request.param, low_cpu_mem_usage=False
    ).requires_grad_(False)


def diffusers_encoding(vae, video: torch.Tensor) -> torch.Tensor:
    """FP32 [1, C, T, H, W] of FP32 video [1, 3, T, H, W], by diffusers' pipeline."""
    pipe = Cosmos3OmniPipeline.__new__(Cosmos3OmniPipeline)
    pipe.vae = vae
    pipe._vae_latents_mean = torch.tensor(vae.config.latents_mean)
    pipe._vae_latents_inv_std = 1.0 / torch.tensor(vae.config.latents_std)
    return pipe._encode_video(video).float()


@pytest.mark.parametrize("count", [1, 5])
def test_an_encoding_has_the_bits_of_diffusers(vae, count):
    clip = frames(count, 32, 48)
    video = clip.permute(3, 0, 1, 2)[None] / 127.5 - 1.0
    found = encode_frames(vae, clip, CPU)
    assert found.dtype == torch.float32 and found.shape == (1, 48, (count + 3) // 4, 2, 3)
    expected = diffusers_encoding(vae, video)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert found.std() > 0.1


def test_the_rest_of_a_clip_does_not_change_the_latents_of_its_start(vae):
    """diffusers encodes the whole padded clip; the VAE is causal, so the start is enough."""
    clip = frames(5, 32, 48)
    whole = pad_frames(clip, 9).permute(3, 0, 1, 2)[None] / 127.5 - 1.0
    expected = diffusers_encoding(vae, whole)[:, :, :2]
    assert torch.equal(encode_frames(vae, clip, CPU), expected)


def test_a_condition_holds_the_given_frames_and_marks_them():
    encoded = torch.randn(1, 4, 3, 2, 2)
    condition = make_condition(encoded, (0, 2), 5)
    assert condition.noisy.tolist() == [[False, True, False, True, True]]
    assert condition.latents.shape == (1, 4, 5, 2, 2)
    assert torch.equal(condition.latents[:, :, [0, 2]], encoded[:, :, [0, 2]])
    latents = torch.randn(1, 4, 5, 2, 2)
    imposed = condition.impose(latents)
    assert torch.equal(imposed[:, :, [0, 2]], encoded[:, :, [0, 2]])
    assert torch.equal(imposed[:, :, [1, 3, 4]], latents[:, :, [1, 3, 4]])


def test_imposing_replaces_whatever_is_there():
    latents = torch.full((1, 1, 2, 1, 1), torch.nan)
    condition = Condition(torch.zeros(1, 1, 2, 1, 1), torch.tensor([[False, True]]))
    assert condition.impose(latents).flatten().tolist()[0] == 0.0


def read(policy=None, **values):
    params = VisualGenParams(**values)
    return read_reference(params, resolve(**values), policy or MediaPolicy())


def test_text_alone_has_no_reference():
    assert read(num_frames=9) is None


def test_an_image_says_its_size_and_no_rate():
    reference = read(image_reference=frames(1, 40, 64)[0], num_frames=9)
    assert reference.frames.shape == (1, 40, 64, 3)
    source = reference.source
    assert (source.width, source.height) == (64, 40)
    assert source.frame_rate is None and source.num_frames is None


def test_of_a_video_only_the_frames_that_matter_are_read():
    clip = frames(12, 40, 64).numpy()
    for keep, used in (("first", clip[:9]), ("last", clip[-9:])):
        extra = {"condition_video_latent_indexes": [2], "condition_video_keep": keep}
        reference = read(video_reference=clip, num_frames=17, extra_params=extra)
        assert np.array_equal(reference.frames.numpy(), used)
        assert reference.source.num_frames == 12
        assert reference.report()["frames_used"] == 9


def test_a_read_only_picture_is_taken_without_a_warning(recwarn):
    picture = frames(1, 40, 64)[0].numpy()
    picture.setflags(write=False)
    assert read(image_reference=picture, num_frames=9).frames.shape == (1, 40, 64, 3)
    assert not recwarn.list


def test_the_policy_reaches_the_decoders():
    with pytest.raises(ValueError, match="too large"):
        read(MediaPolicy(max_side=32), image_reference=frames(1, 40, 64)[0], num_frames=9)
