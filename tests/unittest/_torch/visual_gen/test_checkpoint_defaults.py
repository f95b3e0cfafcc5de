# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says about its defaults reaches its requests; a warm-up runs unless skipped."""

import json
import shutil

import pytest

from tensorrt_llm import VisualGenArgs, VisualGenParams
from tensorrt_llm._torch.visual_gen.models.cosmos3.pipeline_cosmos3 import Cosmos3OmniMoTPipeline
from tensorrt_llm._torch.visual_gen.models.cosmos3.prompts import packaged_negative_prompt
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tests.support.spoiled_checkpoints import json_changed

pytestmark = pytest.mark.cosmos3

NEGATIVE = {"subjects": [], "style": "A blurry picture, ein unscharfes Bild: \u00e4."}
SYSTEM = "You are a helpful assistant who will generate"
CLIP = VisualGenParams(height=64, width=96, num_frames=5, num_inference_steps=2, seed=1)


def load(path, without_warmup=True, **compilation):
    args = VisualGenArgs(model=str(path), compilation_config=compilation)
    return PipelineLoader(args, device="cpu").load(skip_warmup=without_warmup)


def texts(pipeline, **params) -> tuple[str, str]:
    """What the two branches of a request are made of."""
    request = pipeline.prepare_request("A cup.", CLIP.model_copy(update=params))
    decode = pipeline.components.tokenizer.decode
    return decode(request.prompt_ids), decode(request.negative_ids)


@pytest.fixture
def checkpoint(tiny_bf16_checkpoint, tmp_path):
    return shutil.copytree(tiny_bf16_checkpoint, tmp_path / "checkpoint")


@pytest.mark.parametrize(("stated", "used"), [(True, True), (False, False), (None, False)])
def test_the_system_prompt_is_put_in_front_where_the_model_index_says_so(checkpoint, stated, used):
    def change(index):
        index.pop("default_use_system_prompt", None)
        if stated is not None:
            index["default_use_system_prompt"] = stated

    json_changed("model_index.json", change)(checkpoint)
    pipeline = load(checkpoint)
    assert pipeline.task_defaults["text_to_video"]["use_system_prompt"] is used
    for text in texts(pipeline):
        assert (SYSTEM in text) is used
    # A request's own word counts more.
    for text in texts(pipeline, extra_params={"use_system_prompt": not used}):
        assert (SYSTEM in text) is not used


def test_the_negative_prompt_of_a_video_is_the_checkpoints_file_as_it_was_written(checkpoint):
    (checkpoint / "assets").mkdir(exist_ok=True)
    file = checkpoint / "assets" / "negative_prompt.json"
    file.write_text(json.dumps(NEGATIVE, indent=4, ensure_ascii=False), encoding="utf-8")
    pipeline = load(checkpoint)
    expected = json.dumps(NEGATIVE)
    assert pipeline.task_defaults["text_to_video"]["negative_prompt"] == expected
    assert expected.rstrip(".") in texts(pipeline)[1]
    assert "blurry" not in texts(pipeline, negative_prompt="dark")[1]
    file.unlink()
    own = load(checkpoint).task_defaults["text_to_video"]["negative_prompt"]
    assert own == packaged_negative_prompt() != expected


@pytest.mark.parametrize(
    ("by_the_call", "by_the_options", "runs"),
    [(False, False, True), (True, False, False), (False, True, False)],
)
def test_the_warm_up_runs_at_every_shape_asked_for_unless_it_is_skipped(
    tiny_bf16_checkpoint, monkeypatch, by_the_call, by_the_options, runs
):
    shapes = set()
    velocities = Cosmos3OmniMoTPipeline.velocities

    def watched(self, latents, *args):
        shapes.add(tuple(latents.shape[2:]))
        return velocities(self, latents, *args)

    monkeypatch.setattr(Cosmos3OmniMoTPipeline, "velocities", watched)
    warmup = {"resolutions": [(32, 48), (64, 32)], "num_frames": [1, 5]}
    load(tiny_bf16_checkpoint, by_the_call, skip_warmup=by_the_options, **warmup)
    every = {(1, 2, 3), (2, 2, 3), (1, 4, 2), (2, 4, 2)}
    assert shapes == (every if runs else set())
