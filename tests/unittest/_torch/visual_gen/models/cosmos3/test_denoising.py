# SPDX-License-Identifier: Apache-2.0
"""Guidance, checks, pixels and progress."""

import math

import pytest
import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.denoising import (
    Progress,
    StepRecord,
    check_decoded,
    check_latents,
    combine_branches,
    denormalize_latents,
    normalize_latents,
    summarize_trace,
    to_uint8,
)
from tensorrt_llm.visual_gen.output import RequestCancelledError


def test_guidance_leads_from_the_negative_to_the_prompt_in_fp32():
    velocity = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.bfloat16)
    combined = combine_branches(velocity, 6.0)
    assert combined.dtype == torch.float32
    assert combined.tolist() == [[1 + 6 * 2.0, 2 + 6 * -1.0]]
    assert combine_branches(velocity[:1], 6.0).tolist() == [[3.0, 1.0]]


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, None], ids=["nan", "inf", "-inf", "constant"]
)
def test_latents_without_a_picture_are_refused(bad):
    latents = torch.randn(2, 4, 1, 2, 2)
    check_latents(latents)
    if bad is None:
        latents[1] = 0.25
    else:
        latents[1, 0, 0, 1, 1] = bad
    with pytest.raises(RuntimeError, match="no picture.*picture 1"):
        check_latents(latents)
    with pytest.raises(RuntimeError, match="no sound.*sound 1"):
        check_latents(latents, "sound")


def test_latents_are_denormalised_with_the_inverse_rounded_after_the_division():
    std, mean = [0.4765, 1.0364], [-0.2289, 0.1]
    latents = torch.randn(1, 2, 3, 4, 5)
    found = denormalize_latents(latents, mean, std, torch.bfloat16)
    inverse = (1 / torch.tensor(std)).bfloat16().view(1, 2, 1, 1, 1)
    expected = latents.bfloat16() / inverse + torch.tensor(mean).bfloat16().view(1, 2, 1, 1, 1)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    exact = latents * torch.tensor(std).view(1, 2, 1, 1, 1)
    exact += torch.tensor(mean).view(1, 2, 1, 1, 1)
    in_fp32 = denormalize_latents(latents, mean, std, torch.float32)
    torch.testing.assert_close(in_fp32, exact)


def test_latents_are_normalised_as_diffusers_does_in_bf16():
    std, mean = [0.4765, 1.0364], [-0.2289, 0.1]
    encoded = torch.randn(1, 2, 3, 4, 5).bfloat16()
    inverse = (1 / torch.tensor(std)).bfloat16().view(1, 2, 1, 1, 1)
    expected = (encoded - torch.tensor(mean).bfloat16().view(1, 2, 1, 1, 1)) * inverse
    found = normalize_latents(encoded, mean, std)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    exact = encoded.float()
    back = denormalize_latents(normalize_latents(exact, mean, std), mean, std, torch.float32)
    torch.testing.assert_close(back, exact)


def test_pixels_are_rounded_and_clamped_and_channels_come_last():
    decoded = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0]).view(1, 3, 2, 1, 1)
    pixels = to_uint8(decoded)
    assert pixels.dtype == torch.uint8 and pixels.shape == (1, 2, 1, 1, 3)
    # 0.5 -> 191.25; 0 -> 127.5, to even.
    assert pixels[0, :, 0, 0].tolist() == [[0, 128, 255], [0, 191, 255]]
    assert pixels.is_contiguous()


def test_a_trace_is_summarised_by_runs():
    modes = ["w8a16"] * 3 + ["w8a8"] * 2 + ["w8a16"]
    trace = [StepRecord(0, mode, "bf16", "w8a16", 2) for mode in modes]
    expected = "generation 3 w8a16, 2 w8a8, 1 w8a16; attention 6 bf16; understanding 6 w8a16"
    assert summarize_trace(trace) == expected


def test_progress_counts_over_the_request_and_stops_when_asked():
    seen = []
    with Progress(3, lambda done, total: seen.append((done, total)), lambda: len(seen) == 2) as p:
        for _ in range(2):
            p.before_step()
            p.after_step()
        with pytest.raises(RequestCancelledError):
            p.before_step()
    assert seen == [(1, 3), (2, 3)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_decoded_values_that_are_no_pixels_are_refused_and_flat_pictures_are_not(bad):
    decoded = torch.zeros(1, 3, 1, 4, 4)
    check_decoded(decoded)
    decoded[0, 1, 0, 2, 2] = bad
    with pytest.raises(RuntimeError, match="no pixels"):
        check_decoded(decoded)
