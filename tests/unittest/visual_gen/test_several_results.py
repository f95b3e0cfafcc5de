# SPDX-License-Identifier: Apache-2.0
"""Lists of prompts, several images of one, and their seeds: each result can be made again alone."""

import numpy as np
import pytest
import torch

from tensorrt_llm import VisualGen, VisualGenArgs, VisualGenParams
from tensorrt_llm.visual_gen.args import CompilationConfig

pytestmark = pytest.mark.cosmos3

SIZE = {"height": 32, "width": 48, "num_inference_steps": 2, "negative_prompt": ""}
IMAGE = SIZE | {"num_frames": 1}
CLIP = SIZE | {"num_frames": 5, "image_reference": np.full((40, 60, 3), 99, np.uint8)}


@pytest.fixture(scope="module")
def visual_gen(tiny_fp8_checkpoint):
    args = VisualGenArgs(compilation_config=CompilationConfig(skip_warmup=True))
    with VisualGen(tiny_fp8_checkpoint, args) as visual_gen:
        yield visual_gen


def test_each_item_of_a_list_is_what_it_is_alone_and_a_failing_one_stands_apart(visual_gen):
    prompts = ["a robot", "a towel", "a broken reference", "a kitchen"]
    params = [
        VisualGenParams(**IMAGE, seed=11),
        VisualGenParams(**CLIP, seed=12, extra_params={"enable_audio": True}),
        VisualGenParams(**CLIP | {"image_reference": b"no picture"}, seed=13),
        VisualGenParams(**IMAGE),
    ]
    outputs = visual_gen.generate(prompts, params)
    assert [output.error is None for output in outputs] == [True, True, False, True]
    assert "image_reference" in outputs[2].error and outputs[2].video is None
    drawn = outputs[3].metadata["request"]["seed"]
    params[3] = params[3].model_copy(update={"seed": drawn})
    for index in (0, 1, 3):
        alone = visual_gen.generate(prompts[index], params[index])
        for name in ("image", "video", "audio"):
            found, expected = getattr(outputs[index], name), getattr(alone, name)
            assert found is expected is None or torch.equal(found, expected), (index, name)


def test_one_seed_for_a_list_is_that_of_every_item(visual_gen):
    first, second = visual_gen.generate(["a robot"] * 2, VisualGenParams(**IMAGE, seed=5))
    assert torch.equal(first.image, second.image)
    without = visual_gen.generate(["a robot"] * 2, VisualGenParams(**IMAGE))
    assert not torch.equal(without[0].image, without[1].image)


def test_each_image_of_several_can_be_made_alone(visual_gen):
    several = visual_gen.generate(
        "a robot", VisualGenParams(**IMAGE, seed=7, num_images_per_prompt=3)
    )
    assert several.metadata["image_seeds"] == [7, 8, 9]
    for image, seed in zip(several.image, (7, 8, 9), strict=True):
        alone = visual_gen.generate("a robot", VisualGenParams(**IMAGE, seed=seed))
        assert torch.equal(image, alone.image)
