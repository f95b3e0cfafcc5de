# SPDX-License-Identifier: Apache-2.0
"""Every resolved default of every family and task, written out; and that no request leaves any."""

import itertools

import pytest

from tensorrt_llm import VisualGenParams
from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import (
    DEFAULTS,
    SourceInfo,
    default_params,
    resolve_request,
    task_defaults,
)
from tests.support.cosmos3_requests import FOUR_STEPS, NANO, NEGATIVE, SUPER, T_LIST, resolve

ASKED = {
    "text_to_image": {"num_frames": 1},
    "text_to_video": {},
    "image_to_video": {"image_reference": "picture.png"},
    "video_to_video": {"video_reference": "clip.mp4"},
}
TRAITS = {
    ("nano", "base"): NANO,
    ("super", "base"): SUPER,
    ("super", "distilled"): FOUR_STEPS,
}

COLUMNS = (
    "height",
    "width",
    "num_frames",
    "frame_rate",
    "num_inference_steps",
    "guidance_scale",
    "guidance_interval",
    "flow_shift",
    "negative_prompt",
    "use_system_prompt",
    "condition_video_latent_indexes",
)
BASE = {
    "text_to_image": (1024, 1024, 1, None, 50, 7.0, (400.0, 1000.0), None, "", False, ()),
    "text_to_video": (720, 1280, 189, 24.0, 35, 6.0, None, None, NEGATIVE, False, ()),
    "image_to_video": (720, 1280, 189, 24.0, 35, 6.0, None, None, NEGATIVE, False, (0,)),
    "video_to_video": (720, 1280, 189, 24.0, 35, 6.0, None, 10.0, NEGATIVE, True, (0, 1)),
}
# The 4-step Super-Image2Video says default_use_system_prompt true (cosmos3.md A.1), as here.
DISTILLED = {
    "text_to_image": (1024, 1024, 1, None, 4, 1.0, None, None, "", True, ()),
    "image_to_video": (720, 1280, 189, 24.0, 4, 1.0, None, None, "", True, (0,)),
}
TABLE = {
    ("nano", "base"): BASE,
    ("super", "base"): BASE,
    ("super", "distilled"): DISTILLED,
}
# The same for every family and task.
COMMON = {
    "max_sequence_length": 4096,
    "num_images_per_prompt": 1,
    "use_duration_template": True,
    "use_resolution_template": True,
    "enable_audio": False,
    "condition_video_keep": "first",
    "use_guardrails": False,
}
CASES = [(family, task) for family, rows in TABLE.items() for task in rows]


def values_of(request) -> dict[str, object]:
    return vars(request) | {"seed": None}


@pytest.mark.parametrize(("family", "task"), CASES)
def test_the_defaults_of_a_task(family, task):
    expected = dict(zip(COLUMNS, TABLE[family][task], strict=True)) | COMMON
    expected |= {"task": task, "prompt": "A robot.", "seed": None}
    assert values_of(resolve(traits=TRAITS[family], **ASKED[task])) == expected


def test_the_table_has_no_other_rows():
    # No distilled Nano is published; tiny checkpoints stand in for one in tests.
    assert set(DEFAULTS) == {*TABLE, ("nano", "distilled")}
    assert DEFAULTS["nano", "distilled"] == DEFAULTS["super", "distilled"]
    assert {key: set(DEFAULTS[key]) for key in TABLE} == {key: set(TABLE[key]) for key in TABLE}


@pytest.mark.parametrize(("family", "task"), CASES)
def test_an_image_is_also_asked_for_by_its_type_and_a_video_by_its_length(family, task):
    plain = resolve(traits=TRAITS[family], **ASKED[task])
    asked = {name: value for name, value in ASKED[task].items() if name != "num_frames"}
    kind = "image" if task == "text_to_image" else "video"
    said = resolve(traits=TRAITS[family], **asked, extra_params={"output_type": kind})
    assert values_of(said) == values_of(plain)


@pytest.mark.parametrize(("family", "task"), CASES)
def test_a_report_says_every_resolved_value(family, task):
    values = resolve(traits=TRAITS[family], **ASKED[task])
    report = values.report()
    said = report | report["extra_params"]
    for name, value in vars(values).items():
        if name.startswith("condition_video") and task != "video_to_video":
            assert said[name] is None
        else:
            assert said[name] == (list(value) if isinstance(value, tuple) else value), name


# Requests that set whatever another request might be left with.
TELLING = {
    "text_to_image": {
        "num_frames": 1,
        "negative_prompt": "an image's",
        "extra_params": {"flow_shift": 3.0, "guidance_interval": [1, 2], "use_system_prompt": True},
    },
    "text_to_video": {
        "height": 256,
        "width": 320,
        "num_frames": 9,
        "frame_rate": 10.0,
        "num_inference_steps": 3,
        "extra_params": {"enable_audio": True, "use_duration_template": False},
    },
    "image_to_video": {
        "image_reference": "picture.png",
        "guidance_scale": 2.0,
        "max_sequence_length": 77,
        "extra_params": {"flow_shift": 5.0, "use_resolution_template": False},
    },
    "video_to_video": {
        "video_reference": "clip.mp4",
        "negative_prompt": "",
        "extra_params": {
            "flow_shift": 2.0,
            "condition_video_latent_indexes": [2],
            "condition_video_keep": "last",
            "use_guardrails": True,
        },
    },
}


@pytest.mark.parametrize("order", list(itertools.permutations(TELLING, 3)), ids=" ".join)
def test_no_request_changes_another_ones_values(order):
    source = SourceInfo(width=100, height=300, frame_rate=12.0, num_frames=40)
    asked = [VisualGenParams(**TELLING[task]) for task in order]
    before = [params.model_dump() for params in asked]
    for params in asked:
        resolve_request("A robot.", params, NANO, source)
        for task in BASE:
            expected = dict(zip(COLUMNS, BASE[task], strict=True)) | COMMON
            found = vars(resolve(**ASKED[task]))
            assert {name: found[name] for name in expected} == expected
    assert [params.model_dump() for params in asked] == before


def test_default_params_hold_what_all_tasks_share_and_nothing_that_depends_on_the_task():
    given = {name: value for name, value in default_params(NANO) if value is not None}
    assert given == {"max_sequence_length": 4096, "num_images_per_prompt": 1}
    given = {name: value for name, value in default_params(FOUR_STEPS) if value is not None}
    assert given == {
        "num_inference_steps": len(T_LIST),
        "guidance_scale": 1.0,
        "negative_prompt": "",
        "max_sequence_length": 4096,
        "num_images_per_prompt": 1,
    }


@pytest.mark.parametrize(("family", "task"), CASES)
def test_default_params_with_another_task_are_that_tasks_defaults(family, task):
    params = default_params(TRAITS[family])
    for name, value in ASKED[task].items():
        setattr(params, name, value)
    request = resolve_request("A robot.", params, TRAITS[family])
    assert values_of(request) == values_of(resolve(traits=TRAITS[family], **ASKED[task]))


@pytest.mark.parametrize(("family", "task"), CASES)
def test_task_defaults_are_what_a_request_resolves_to(family, task):
    tasks = task_defaults(TRAITS[family])
    assert set(tasks) == set(TABLE[family])
    request = resolve(traits=TRAITS[family], **ASKED[task])
    assert tasks[task] == {name: getattr(request, name) for name in tasks[task]}
    assert set(COLUMNS) <= set(tasks[task])
