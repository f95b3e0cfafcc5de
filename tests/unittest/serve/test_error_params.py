# SPDX-License-Identifier: Apache-2.0
"""``param`` of an error names the field that the client sent, whatever became of it inside."""

import base64

import pytest

from tensorrt_llm.serve.requests import ImageGenerationRequest, VideoGenerationRequest
from tensorrt_llm.visual_gen.params import VisualGenParams

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(64)).decode()
URI = f"data:image/png;base64,{PNG}"
AS_IMAGE = {"extra_params": {"output_type": "image"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"size": "100x128"}, "size"),
        ({"size": "128x5008"}, "size"),
        ({"width": 100, "height": 128}, "width"),
        ({"width": 128, "height": 100}, "height"),
        ({"num_frames": 2000}, "num_frames"),
        ({"seconds": 100}, "seconds"),
        ({"seconds": "100", "fps": 24}, "seconds"),
        # Too many pixels in all: the first of the fields that were given.
        ({"size": "4096x4096", "num_frames": 1001}, "size"),
        ({"size": "auto", "width": None, "num_frames": 1001}, "num_frames"),
        ({"fps": 1e-9}, "fps"),
        ({"frame_rate": 1e-9}, "frame_rate"),
        (AS_IMAGE | {"fps": 12}, "fps"),
        (AS_IMAGE | {"seconds": 2}, "seconds"),
        (AS_IMAGE | {"input_reference": URI}, "input_reference"),
        (AS_IMAGE | {"image_reference": URI}, "image_reference"),
        (AS_IMAGE, "extra_params.output_type"),
        ({"num_inference_steps": 5000}, "num_inference_steps"),
        ({"guidance_scale": 1, "negative_prompt": "blurry"}, "negative_prompt"),
        ({"prompt": " "}, "prompt"),
        ({"extra_params": {"flow_shift": -1}}, "extra_params.flow_shift"),
        ({"extra_params": {"no_such_option": 1}}, "extra_params"),
        ({"prompt": '{"resolve": "ValueError"}'}, None),
    ],
    ids=str,
)
def test_a_video_that_can_not_be_made_names_the_field_sent(server, fields, param):
    answer = server.http.post("/v1/videos", json={"prompt": "a", **fields})
    body = answer.json()
    assert (answer.status_code, body["type"], body["param"]) == (400, "BadRequestError", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"size": "100x128"}, "size"),
        ({"width": 100, "height": 128}, "width"),
        ({"max_sequence_length": 10**6}, "max_sequence_length"),
        ({"extra_params": {"output_type": "video"}}, "extra_params.output_type"),
    ],
    ids=str,
)
def test_a_picture_that_can_not_be_made_names_the_field_sent(server, fields, param):
    answer = server.http.post("/v1/images/generations", json={"prompt": "a", **fields})
    assert (answer.status_code, answer.json()["param"]) == (400, param)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: ImageGenerationRequest(prompt="a", size="64x64", n=2, max_sequence_length=9),
        lambda: VideoGenerationRequest(prompt="a", size="64x64", fps=9, num_frames=5, seed=1),
        lambda: VideoGenerationRequest(prompt="a", width=64, height=64, frame_rate=9),
    ],
)
def test_every_param_but_those_of_the_route_has_an_origin(request_of):
    body = request_of()
    origins = body.origins()
    assert set(body.params()) - {"num_frames"} <= set(origins) and origins["prompt"] == "prompt"
    assert set(origins.values()) == body.model_fields_set
    assert set(body.params()) <= set(VisualGenParams.model_fields)
