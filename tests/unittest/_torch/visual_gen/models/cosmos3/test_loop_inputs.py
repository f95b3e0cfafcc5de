# SPDX-License-Identifier: Apache-2.0
"""What is laid out before the loop: noise, seeds, guided steps, branches of text."""

from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.loop_inputs import (
    draw_noise,
    guided_steps,
    image_seeds,
    pad_branches,
)

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


def test_the_images_of_a_request_count_its_seed_on_and_start_again_at_the_end():
    assert image_seeds(5, 1) == [5]
    assert image_seeds(2**63 - 2, 3) == [2**63 - 2, 2**63 - 1, 0]
