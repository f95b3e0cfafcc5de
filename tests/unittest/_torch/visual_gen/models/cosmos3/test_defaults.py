# SPDX-License-Identifier: Apache-2.0
"""From what a caller asked for to full values."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tensorrt_llm import VisualGenParams
from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import EXTRA_PARAMS
from tests.support.cosmos3_requests import FOUR_STEPS, NANO, NEGATIVE, resolve


def violations(**params) -> str:
    with pytest.raises(ValueError) as error:
        resolve(**params)
    message = str(error.value)
    assert message.startswith("Parameter validation failed:")
    return message


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
    traits = replace(NANO, default_use_system_prompt=default)
    assert resolve(traits=traits).use_system_prompt is default
    assert resolve(traits=traits, video_reference="clip.mp4").use_system_prompt is True
    for said in (False, True):
        for reference in (None, "clip.mp4"):
            values = resolve(
                traits=traits,
                video_reference=reference,
                extra_params={"use_system_prompt": said},
            )
            assert values.use_system_prompt is said


BAD_VALUES = [
    ("height", [0, -16, 8, 4112, 10**9, 100.0, "720", "256p", True, math.nan, [720]]),
    ("width", [0, -5, 8, 100000, "1280", False, None.__class__]),
    ("num_inference_steps", [0, -1, 10**9, 1001, True, 2.0, "8"]),
    ("num_frames", [0, -3, 10**6, 1002, True, 17.0, "17"]),
    ("frame_rate", [0, -24, math.nan, math.inf, 121, True, "24", 10**400]),
    ("guidance_scale", [-0.1, 100.1, 1e9, math.nan, math.inf, -math.inf, True, "6", 10**400]),
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


def test_guidance_has_a_finite_range_and_its_ends_are_in_it():
    assert [resolve(guidance_scale=scale).guidance_scale for scale in (0, 100)] == [0.0, 100.0]
    message = violations(guidance_scale=101, negative_prompt="blurry")
    # Too much guidance is guidance: the negative prompt is not at fault.
    assert "guidance_scale: expected a finite number from 0 to 100, found 101." in message
    assert "negative_prompt" not in message


BAD_EXTRA = [
    ("flow_shift", [0, -1, math.nan, math.inf, True, "3", 101]),
    ("guidance_interval", [[1], [1, 2, 3], "ab", 5, [900, 100], [-1, 5], [0, 1001], [0, math.nan]]),
    ("use_duration_template", [1, "yes", 0]),
    ("use_resolution_template", [1, "no"]),
    ("use_system_prompt", ["true"]),
    ("output_type", ["gif", 1, True, ["image"], np.array(["image", "video"])]),
    ("use_guardrails", [1, "no"]),
    ("enable_audio", [0, "yes"]),
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
    message = violations(height=4096, width=4096, num_frames=1001)
    assert "height * width * num_frames: expected at most 536870912, " in message
    assert "found '4096*4096*1001 = 16793993216'" in message


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


IMAGE = {"image_reference": "picture.png"}
CLIP = {"video_reference": "clip.mp4"}


@pytest.mark.parametrize(
    "value",
    [[], [0, 0], [-1], [3], [True], ["0"], [0.0], "01", 0, [[0]], None.__class__, [0] * 10**6],
)
def test_bad_condition_indexes_are_named_with_their_range(value):
    message = violations(
        num_frames=9, **CLIP, extra_params={"condition_video_latent_indexes": value}
    )
    assert "extra_params.condition_video_latent_indexes: expected " in message
    assert len(message) < 400
    if value in ([-1], [3]):
        assert "from 0 to 2" in message


def test_condition_indexes_are_a_set_and_may_fix_every_latent_frame():
    for given in ([2, 0, 1], (1, 2, 0), [np.int64(0), 1, 2]):
        extra = {"condition_video_latent_indexes": given, "condition_video_keep": "last"}
        values = resolve(num_frames=9, **CLIP, extra_params=extra)
        assert values.condition_video_latent_indexes == (0, 1, 2)
        assert all(type(index) is int for index in values.condition_video_latent_indexes)
        assert values.condition_video_keep == "last"


def test_the_end_of_the_clip_that_is_kept_is_first_or_last():
    for value in ("middle", 1, True, np.array(["first", "last"])):
        message = violations(**CLIP, extra_params={"condition_video_keep": value})
        assert "extra_params.condition_video_keep: expected 'first' or 'last'" in message


@pytest.mark.parametrize("reference", [{}, IMAGE])
@pytest.mark.parametrize(
    ("name", "value"), [("condition_video_latent_indexes", [0]), ("condition_video_keep", "first")]
)
def test_conditions_of_a_clip_are_refused_without_one(reference, name, value):
    message = violations(**reference, extra_params={name: value})
    assert f"extra_params.{name}: expected none without a video_reference" in message


def test_two_references_are_refused():
    message = violations(**IMAGE, **CLIP)
    assert "image_reference and video_reference: expected one of them" in message


@pytest.mark.parametrize("asked", [{"num_frames": 1}, {"extra_params": {"output_type": "image"}}])
@pytest.mark.parametrize("reference", [IMAGE, CLIP])
def test_a_reference_of_an_image_is_refused(reference, asked):
    (name,) = reference
    assert f"{name}: expected none for an image" in violations(**reference, **asked)


def test_sound_is_refused_where_there_is_none():
    sound = {"enable_audio": True}
    assert resolve(extra_params=sound).enable_audio is True
    assert resolve(**IMAGE, extra_params=sound).enable_audio is True
    assert "enable_audio: expected False for an image" in violations(
        num_frames=1, extra_params=sound
    )
    for traits in (replace(NANO, has_sound=False), FOUR_STEPS):
        message = violations(traits=traits, **IMAGE, extra_params=sound)
        assert "enable_audio: expected False with this checkpoint" in message
        assert not resolve(traits=traits, **IMAGE, extra_params={"enable_audio": False}).is_image


@pytest.mark.parametrize("required", [False, True])
def test_guardrails_are_the_checkpoints_choice_unless_said(required):
    traits = replace(NANO, requires_guardrails=required)
    assert resolve(traits=traits).use_guardrails is required
    for said in (False, True):
        values = resolve(traits=traits, extra_params={"use_guardrails": said})
        assert values.use_guardrails is said


def test_a_distilled_build_refuses_what_conflicts_with_its_training_by_name():
    message = violations(
        traits=FOUR_STEPS,
        num_frames=1,
        num_inference_steps=5,
        guidance_scale=2.0,
        extra_params={"flow_shift": 5.0},
    )
    assert "num_inference_steps: expected 4" in message
    assert "guidance_scale: expected 1.0" in message
    assert "extra_params.flow_shift: expected none" in message
    message = violations(
        traits=FOUR_STEPS,
        num_frames=1,
        negative_prompt="blurry",
        extra_params={"guidance_interval": [0, 500]},
    )
    assert "negative_prompt: expected none" in message
    assert "extra_params.guidance_interval: expected none" in message


def test_a_distilled_build_takes_its_own_values_said_aloud():
    values = resolve(
        traits=FOUR_STEPS,
        num_frames=1,
        num_inference_steps=4,
        guidance_scale=1.0,
        negative_prompt="",
    )
    assert (values.num_inference_steps, values.guidance_scale) == (4, 1.0)


@pytest.mark.parametrize(("task", "reference"), [("text_to_video", {}), ("video_to_video", CLIP)])
def test_a_distilled_build_refuses_tasks_that_it_was_not_trained_for(task, reference):
    message = violations(traits=FOUR_STEPS, **reference)
    assert "task: expected text_to_image or image_to_video" in message and task in message


def test_an_unknown_parameter_is_refused_at_construction():
    with pytest.raises(ValueError, match="no_such_parameter"):
        VisualGenParams(no_such_parameter=1)


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"num_frames": 1},
        {"guidance_scale": 1.0, "num_frames": 1},
        IMAGE,
        CLIP | {"extra_params": {"condition_video_latent_indexes": [3], "enable_audio": True}},
        IMAGE | {"traits": FOUR_STEPS},
    ],
)
def test_the_report_asks_for_the_same_request_again(task):
    first = resolve(seed=5, **task)
    report = first.report()
    assert report.pop("task") == first.task
    context = {name: value for name, value in task.items() if name in ("traits", *IMAGE, *CLIP)}
    assert resolve(**context, **report) == first


def test_the_extra_parameters_described_are_those_accepted():
    good = {
        "output_type": "video",
        "use_duration_template": False,
        "use_resolution_template": False,
        "use_system_prompt": False,
        "use_guardrails": True,
        "enable_audio": True,
        "condition_video_latent_indexes": [0, 2],
        "condition_video_keep": "last",
        "flow_shift": 3.0,
        "guidance_interval": [100, 900],
    }
    assert list(good) == list(EXTRA_PARAMS)
    values = resolve(**CLIP, extra_params=good)
    assert values.report()["extra_params"] == good
    assert resolve(extra_params=dict.fromkeys(EXTRA_PARAMS)).report() | {"seed": 0} == (
        resolve().report() | {"seed": 0}
    )


def test_the_defaults_of_an_extra_parameter_are_those_described():
    described = {
        name: spec.default for name, spec in EXTRA_PARAMS.items() if spec.default is not None
    }
    resolved = resolve().report()["extra_params"]
    assert described == {name: resolved[name] for name in described}
    assert described == {
        "use_duration_template": True,
        "use_resolution_template": True,
        "enable_audio": False,
    }
