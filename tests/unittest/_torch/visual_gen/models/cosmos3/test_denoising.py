# SPDX-License-Identifier: Apache-2.0
"""The pure functions around the denoising loop."""

import math
from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.denoising import (
    Progress,
    StepRecord,
    check_latents,
    combine_branches,
    denormalize_latents,
    draw_noise,
    guided_steps,
    pad_branches,
    summarize_trace,
    to_uint8,
)
from tensorrt_llm.visual_gen.output import RequestCancelledError

CPU = torch.device("cpu")


def test_noise_is_that_of_a_cpu_generator_in_fp32():
    noise = draw_noise((1, 48, 2, 3, 4), torch.Generator().manual_seed(7), CPU)
    expected = torch.randn((1, 48, 2, 3, 4), generator=torch.Generator().manual_seed(7))
    assert noise.dtype == torch.float32 and torch.equal(noise, expected)


@pytest.mark.parametrize(
    ("is_guided", "interval", "expected"),
    [
        (True, None, [True] * 4),
        (True, (400.0, 1000.0), [True, True, True, False]),
        (True, (401.0, 899.0), [False, False, False, False]),
        (True, (0.0, 400.0), [False, False, True, True]),
        (False, None, [False] * 4),
    ],
)
def test_guidance_rests_outside_its_interval_and_both_ends_are_inside(
    is_guided, interval, expected
):
    values = SimpleNamespace(is_guided=is_guided, guidance_interval=interval)
    assert guided_steps(values, [1000, 900, 400, 399]) == expected


def test_branches_are_padded_on_the_right_and_masked():
    text = pad_branches([(5, 6, 7), (8,)], CPU)
    assert text.ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert text.mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert text.ids.dtype == torch.int64


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
    with pytest.raises(RuntimeError, match="image 1"):
        check_latents(latents)


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


def test_pixels_are_rounded_and_clamped_and_channels_come_last():
    decoded = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0]).view(1, 3, 2, 1, 1)
    pixels = to_uint8(decoded)
    assert pixels.dtype == torch.uint8 and pixels.shape == (1, 2, 1, 1, 3)
    # 0.5 -> 191.25; 0 -> 127.5, to even.
    assert pixels[0, :, 0, 0].tolist() == [[0, 128, 255], [0, 191, 255]]
    assert pixels.is_contiguous()


def test_a_trace_is_summarised_by_runs():
    modes = ["w8a16"] * 3 + ["w8a8"] * 2 + ["w8a16"]
    trace = [StepRecord(0, mode, "w8a16", 2) for mode in modes]
    expected = "generation 3 w8a16, 2 w8a8, 1 w8a16; understanding 6 w8a16"
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
