# SPDX-License-Identifier: Apache-2.0
"""From what a caller asked for to full values."""

import math

import numpy as np
import pytest

from tensorrt_llm import VisualGenParams
from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import EXTRA_PARAMS, resolve_request

NEGATIVE = "the checkpoint's negative prompt"


def resolve(prompt="A robot.", *, default_use_system_prompt=False, **params):
    return resolve_request(
        prompt,
        VisualGenParams(**params),
        default_use_system_prompt=default_use_system_prompt,
        video_negative_prompt=NEGATIVE,
    )


def violations(**params) -> str:
    with pytest.raises(ValueError) as error:
        resolve(**params)
    message = str(error.value)
    assert message.startswith("Parameter validation failed:")
    return message


def test_video_defaults():
    values = resolve()
    assert values.task == "text_to_video" and not values.is_image
    assert (values.height, values.width, values.num_frames) == (720, 1280, 189)
    assert (values.num_inference_steps, values.guidance_scale) == (35, 6.0)
    assert values.frame_rate == 24.0 and values.guidance_interval is None
    assert values.negative_prompt == NEGATIVE and values.flow_shift is None
    assert (values.max_sequence_length, values.num_images_per_prompt) == (4096, 1)
    assert values.use_duration_template and values.use_resolution_template
    assert values.latent_shape == (48, 45, 80)


@pytest.mark.parametrize("asked", [{"num_frames": 1}, {"extra_params": {"output_type": "image"}}])
def test_image_defaults(asked):
    values = resolve(**asked)
    assert values.task == "text_to_image" and values.is_image
    assert (values.height, values.width, values.num_frames) == (1024, 1024, 1)
    assert (values.num_inference_steps, values.guidance_scale) == (50, 7.0)
    assert values.guidance_interval == (400.0, 1000.0)
    assert values.negative_prompt == "" and values.frame_rate is None
    assert values.latent_shape == (1, 64, 64)


@pytest.mark.parametrize(
    ("asked", "resolved"), [(2, 5), (3, 5), (4, 5), (5, 5), (6, 9), (189, 189), (190, 193)]
)
def test_frames_are_rounded_up_to_4k_plus_1(asked, resolved):
    assert resolve(num_frames=asked).num_frames == resolved


@pytest.mark.parametrize("image", [False, True])
def test_an_absent_negative_prompt_is_the_tasks_and_an_empty_one_is_empty(image):
    task = {"num_frames": 1} if image else {}
    assert resolve(**task).negative_prompt == ("" if image else NEGATIVE)
    assert resolve(negative_prompt="", **task).negative_prompt == ""
    assert resolve(negative_prompt="blurry", **task).negative_prompt == "blurry"


def test_an_absent_seed_is_drawn_and_differs():
    seeds = {resolve().seed for _ in range(4)}
    assert len(seeds) == 4 and all(0 <= seed < 2**63 for seed in seeds)
    assert resolve(seed=0).seed == 0 and resolve(seed=2**63 - 1).seed == 2**63 - 1


@pytest.mark.parametrize("default", [False, True])
def test_the_system_prompt_is_the_checkpoints_choice_unless_said(default):
    assert resolve(default_use_system_prompt=default).use_system_prompt is default
    for said in (False, True):
        values = resolve(
            default_use_system_prompt=default, extra_params={"use_system_prompt": said}
        )
        assert values.use_system_prompt is said


BAD_VALUES = [
    ("height", [0, -16, 8, 4112, 10**9, 100.0, "720", "256p", True, math.nan, [720]]),
    ("width", [0, -5, 8, 100000, "1280", False, None.__class__]),
    ("num_inference_steps", [0, -1, 10**9, 1001, True, 2.0, "8"]),
    ("num_frames", [0, -3, 10**6, 1002, True, 17.0, "17"]),
    ("frame_rate", [0, -24, math.nan, math.inf, 121, True, "24", 10**400]),
    ("guidance_scale", [-0.1, math.nan, math.inf, -math.inf, True, "6", 10**400]),
    ("seed", [-1, 2**63, 2**64, True, 1.0, "1"]),
    ("max_sequence_length", [0, -1, 10**6, True, 4096.0]),
    ("num_images_per_prompt", [0, 11, True, 1.0]),
    ("negative_prompt", [1, ["a"], b"a", "x" * 200_001, "\ud800"]),
    ("extra_params", ["flow_shift", [1], 3]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_VALUES for value in values]
)
def test_a_bad_value_is_named_with_its_range(name, value):
    image = {"num_frames": 1} if name == "num_images_per_prompt" else {}
    message = violations(**{name: value}, **image)
    assert f" {name}: expected " in message and ", found " in message
    assert len(message) < 400


BAD_EXTRA = [
    ("flow_shift", [0, -1, math.nan, math.inf, True, "3", 101]),
    ("guidance_interval", [[1], [1, 2, 3], "ab", 5, [900, 100], [-1, 5], [0, 1001], [0, math.nan]]),
    ("use_duration_template", [1, "yes", 0]),
    ("use_resolution_template", [1, "no"]),
    ("use_system_prompt", ["true"]),
    ("output_type", ["gif", 1, True, ["image"]]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_EXTRA for value in values]
)
def test_a_bad_extra_value_is_named(name, value):
    assert f"extra_params.{name}: expected " in violations(extra_params={name: value})


@pytest.mark.parametrize("prompt", ["", "  \n", None, 3, ["a"], "x" * 2_000_000, "\udcff"])
def test_a_bad_prompt_is_named_and_not_repeated(prompt):
    message = violations(prompt=prompt)
    assert "prompt: expected " in message and len(message) < 300


def test_all_violations_come_at_once():
    message = violations(
        prompt="",
        height=100,
        width=True,
        num_frames=0,
        seed=-1,
        guidance_scale=math.nan,
        extra_params={"no_such_option": 1, "flow_shift": -1},
    )
    for name in ("prompt", "height", "width", "num_frames", "seed", "guidance_scale"):
        assert f" {name}: expected" in message
    assert "'no_such_option'" in message and "extra_params.flow_shift" in message


def test_a_side_that_is_no_multiple_of_16_names_both_neighbours():
    message = violations(height=710, width=1279)
    assert "nearest: 704 and 720" in message and "nearest: 1264 and 1280" in message


def test_sizes_are_pixels():
    values = resolve(height=256, width=256)
    assert (values.height, values.width) == (256, 256)


def test_the_whole_clip_is_bounded_too():
    assert resolve(height=4096, width=4096, num_frames=1).height == 4096
    assert "height * width * num_frames" in violations(height=4096, width=4096, num_frames=189)


def test_numpy_numbers_are_numbers():
    values = resolve(height=np.int64(256), guidance_scale=np.float32(2), seed=np.uint64(7))
    assert type(values.height) is int and type(values.guidance_scale) is float
    assert values.seed == 7


def test_contradictions_about_the_task_are_refused():
    assert "num_frames: expected 1" in violations(
        num_frames=17, extra_params={"output_type": "image"}
    )
    assert "num_frames: expected 2" in violations(
        num_frames=1, extra_params={"output_type": "video"}
    )
    assert "frame_rate: expected none" in violations(num_frames=1, frame_rate=24)
    assert "num_images_per_prompt: expected 1 for a video" in violations(num_images_per_prompt=2)


@pytest.mark.parametrize("scale", [0, 0.5, 1.0])
def test_options_of_guidance_are_refused_where_guidance_is_off(scale):
    values = resolve(num_frames=1, guidance_scale=scale)
    assert not values.is_guided and values.guidance_interval is None
    assert resolve(guidance_scale=scale).negative_prompt == ""
    assert "negative_prompt: expected none" in violations(
        guidance_scale=scale, negative_prompt="blurry"
    )
    assert "guidance_interval: expected none" in violations(
        guidance_scale=scale, extra_params={"guidance_interval": [0, 500]}
    )


@pytest.mark.parametrize(
    "name",
    [
        "use_guardrails",
        "enable_audio",
        "condition_video_latent_indexes",
        "condition_video_keep",
    ],
)
@pytest.mark.parametrize("value", [True, False])
def test_an_option_of_later_work_is_refused_by_name(name, value):
    with pytest.raises(NotImplementedError, match=name):
        resolve(extra_params={name: value})


@pytest.mark.parametrize("name", ["image_reference", "video_reference"])
def test_reference_media_are_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=name):
        resolve(**{name: "picture.png"})


def test_an_unknown_parameter_is_refused_at_construction():
    with pytest.raises(ValueError, match="no_such_parameter"):
        VisualGenParams(no_such_parameter=1)


@pytest.mark.parametrize("task", [{}, {"num_frames": 1}, {"guidance_scale": 1.0, "num_frames": 1}])
def test_the_report_asks_for_the_same_request_again(task):
    first = resolve(seed=5, **task)
    report = first.report()
    assert report.pop("task") == first.task
    assert resolve(**report) == first


def test_the_extra_parameters_described_are_those_accepted():
    good = {
        "use_duration_template": False,
        "use_resolution_template": False,
        "use_system_prompt": True,
        "output_type": "image",
        "flow_shift": 3.0,
        "guidance_interval": [100, 900],
    }
    assert set(good) == set(EXTRA_PARAMS)
    values = resolve(extra_params=good)
    reported = values.report()["extra_params"]
    assert reported == good
    assert resolve(extra_params=dict.fromkeys(EXTRA_PARAMS)).report() | {"seed": 0} == (
        resolve().report() | {"seed": 0}
    )
