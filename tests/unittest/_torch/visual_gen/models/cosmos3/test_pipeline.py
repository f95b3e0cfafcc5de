# SPDX-License-Identifier: Apache-2.0
"""The pipeline's loop on a transformer that records its calls."""

import logging
import threading

import pytest
import torch

from tensorrt_llm import VisualGenParams
from tensorrt_llm.visual_gen.output import RequestCancelledError
from tests.support.fake_pipeline import CHANNELS, fake_pipeline, params


@pytest.fixture
def pipeline():
    return fake_pipeline()


def image_params(**values):
    return params(**{"num_frames": 1} | values)


def test_both_branches_run_in_one_call_on_the_same_latents(pipeline):
    pipeline.generate(pipeline.prepare_request("A robot", params()))
    calls = pipeline.transformer.calls
    assert len(calls) == 8
    for call, timestep in zip(calls, [995, 990, 979, 954, 890, 729, 422, 128], strict=True):
        hidden = call["hidden_states"]
        assert hidden.shape == (2, CHANNELS, 3, 2, 3) and hidden.dtype == torch.bfloat16
        assert torch.equal(hidden[0], hidden[1])
        assert call["video_shape"] == (3, 2, 3) and call["fps"] == 24.0
        assert call["raw_timestep"].tolist() == [timestep] * 2
        assert call["raw_timestep"].dtype == torch.float32
        assert call["timestep"].tolist() == pytest.approx([timestep / 1000] * 2)


def test_the_text_tensors_are_the_same_objects_on_every_step(pipeline):
    interval = {"guidance_interval": [800, 1000]}
    pipeline.generate(pipeline.prepare_request("A robot", params(extra_params=interval)))
    calls = pipeline.transformer.calls
    assert [len(call["text_ids"]) for call in calls] == [2, 2, 2, 2, 2, 1, 1, 1]
    for branches in (1, 2):
        ids = [call["text_ids"] for call in calls if len(call["text_ids"]) == branches]
        masks = [call["text_mask"] for call in calls if len(call["text_ids"]) == branches]
        assert all(x is ids[0] for x in ids) and all(x is masks[0] for x in masks)
    both, alone = calls[0], calls[-1]
    assert torch.equal(both["text_ids"][:1], alone["text_ids"])


def test_every_text_that_a_step_uses_is_encoded_before_the_first(pipeline):
    interval = {"guidance_interval": [800, 1000]}
    pipeline.generate(pipeline.prepare_request("A robot", params(extra_params=interval)))
    encoded = pipeline.transformer.encoded
    assert len(encoded) == 2
    for call in pipeline.transformer.calls:
        # By identity: the transformer recognises them so, and reads no token back in the loop.
        assert any(call["text_ids"] is i and call["text_mask"] is m for i, m in encoded)


def test_an_image_has_no_frame_rate(pipeline):
    pipeline.generate(pipeline.prepare_request("A robot", image_params()))
    assert {call["fps"] for call in pipeline.transformer.calls} == {None}


@pytest.mark.parametrize("steps", [1, 2, 5, 6, 7, 8])
def test_the_trace_says_how_each_step_ran(pipeline, steps):
    request = pipeline.prepare_request("A robot", params(num_inference_steps=steps))
    output = pipeline.generate(request)
    trace = output.metadata["precision_trace"]
    expected = ["w8a8"] if steps == 1 else ["w8a16"] * steps
    expected[3:-3] = ["w8a8"] * max(0, steps - 6)
    assert [record["generation"] for record in trace] == expected
    assert [call["precision"] for call in pipeline.transformer.calls] == expected
    assert {record["understanding"] for record in trace} == {"w8a16"}
    assert {record["attention"] for record in trace} == {"bf16"}
    assert [record["branches"] for record in trace] == [2] * steps


def test_a_guidance_interval_does_not_shift_the_steps_precision(pipeline):
    interval = {"guidance_interval": [960, 985]}
    request = pipeline.prepare_request("A robot", params(extra_params=interval))
    trace = pipeline.generate(request).metadata["precision_trace"]
    assert [record["branches"] for record in trace] == [1, 1, 2, 1, 1, 1, 1, 1]
    modes = [record["generation"] for record in trace]
    assert modes == ["w8a16"] * 3 + ["w8a8"] * 2 + ["w8a16"] * 3


def test_the_trace_is_one_line_of_the_log_without_the_prompt(pipeline, caplog):
    with caplog.at_level(logging.INFO, logger="tensorrt_llm"):
        pipeline.generate(pipeline.prepare_request("A secret robot", params()))
    (line,) = [r.getMessage() for r in caplog.records if "Precision" in r.getMessage()]
    trace = "generation 3 w8a16, 2 w8a8, 3 w8a16; attention 8 bf16; understanding 8 w8a16"
    assert trace in line
    assert "secret" not in caplog.text


def test_the_output_reports_request_checkpoint_and_times(pipeline):
    output = pipeline.generate(pipeline.prepare_request("A robot", params()))
    assert output.video.shape == (9, 32, 48, 3) and output.video.dtype == torch.uint8
    assert output.image is None and output.frame_rate == 24.0
    metadata = output.metadata
    assert (metadata["model"], metadata["revision"]) == ("some/model", "fp8")
    assert metadata["commit"] == "abc123" and len(metadata["sigmas"]) == 9
    assert metadata["fp8_linears"] == {"understanding": 14, "generation": 14}
    assert metadata["request"]["negative_prompt"] == "the checkpoint's"
    assert metadata["request"]["seed"] == 1
    metrics = output.metrics
    parts = metrics.pre_denoise + metrics.denoise + metrics.post_denoise
    assert metrics.denoise > 0 and parts <= metrics.generation


def test_several_images_count_their_seeds_on_and_each_can_be_made_alone(pipeline):
    seen = []
    request = pipeline.prepare_request("A robot", image_params(num_images_per_prompt=3))
    many = pipeline.generate(request, on_step=lambda *step: seen.append(step))
    assert many.image.shape == (3, 32, 48, 3)
    assert seen == [(i, 24) for i in range(1, 25)]
    assert many.metadata["image_seeds"] == [1, 2, 3]
    alone = [
        pipeline.generate(pipeline.prepare_request("A robot", image_params(seed=seed))).image
        for seed in (1, 2, 3)
    ]
    assert alone[0].shape == (32, 48, 3)
    assert torch.equal(many.image, torch.stack(alone))
    assert not torch.equal(alone[0], alone[1])
    noise = torch.randn((1, CHANNELS, 1, 2, 3), generator=torch.Generator().manual_seed(2))
    assert torch.equal(noise.bfloat16(), pipeline.transformer.calls[8]["hidden_states"][:1])


def test_seeds_wrap_at_their_end(pipeline):
    last = 2**63 - 1
    request = pipeline.prepare_request(
        "A robot", image_params(seed=last, num_images_per_prompt=2, num_inference_steps=1)
    )
    assert pipeline.generate(request).metadata["image_seeds"] == [last, 0]


def test_cancelling_stops_before_the_next_step_and_resets(pipeline):
    request = pipeline.prepare_request("A robot", params())
    with pytest.raises(RequestCancelledError):
        pipeline.generate(request, should_cancel=lambda: len(pipeline.transformer.calls) == 3)
    transformer = pipeline.transformer
    assert len(transformer.calls) == 3 and transformer.step is None
    assert transformer.events == ["reset step", "end request"]


def test_a_cancel_after_the_last_step_saves_the_decoding(pipeline, monkeypatch):
    request = pipeline.prepare_request("A robot", params())
    monkeypatch.setattr(pipeline, "decode", lambda latents: pytest.fail("decoded"))
    with pytest.raises(RequestCancelledError):
        pipeline.generate(request, should_cancel=lambda: len(pipeline.transformer.calls) == 8)


def test_an_error_in_the_middle_resets_the_transformer(pipeline):
    def fail(done, total):
        if done == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pipeline.generate(pipeline.prepare_request("A robot", params()), on_step=fail)
    assert pipeline.transformer.step is None
    assert pipeline.transformer.events[-2:] == ["reset step", "end request"]


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_run_that_gives_no_picture_fails(pipeline, factor):
    pipeline.transformer.factor = factor
    with pytest.raises(RuntimeError, match="no picture"):
        pipeline.generate(pipeline.prepare_request("A robot", params()))


def test_one_request_does_not_set_the_next_ones_schedule(pipeline):
    def timesteps(**values):
        request = pipeline.prepare_request("A robot", params(**values))
        trace = pipeline.generate(request).metadata["precision_trace"]
        return [record["timestep"] for record in trace]

    before = timesteps()
    assert timesteps(extra_params={"flow_shift": 3.0}) != before
    assert timesteps() == before


def test_requests_of_two_threads_do_not_interleave(pipeline):
    request = pipeline.prepare_request("A robot", params())
    expected = pipeline.denoise(request).latents
    results = []

    def work():
        results.append(pipeline.denoise(request).latents)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(torch.equal(result, expected) for result in results)
    events = pipeline.transformer.events
    assert events == ["reset step", "end request"] * 5


def test_warm_up_runs_both_modes_for_one_and_two_branches_at_every_shape(pipeline):
    pipeline.warmup(resolutions=[(32, 48), (64, 32)], num_frames=[1, 9])
    calls = pipeline.transformer.calls
    found = {(c["video_shape"], c["precision"], len(c["text_ids"])) for c in calls}
    shapes = [(1, 2, 3), (3, 2, 3), (1, 4, 2), (3, 4, 2)]
    expected = {(s, m, b) for s in shapes for m in ("w8a8", "w8a16") for b in (1, 2)}
    assert found == expected and len(calls) == len(expected)
    assert pipeline.transformer.step is None
    assert pipeline.transformer.events[-2:] == ["reset step", "end request"]


def test_a_warm_up_that_gives_no_numbers_fails_at_load(pipeline):
    pipeline.transformer.factor = float("nan")
    with pytest.raises(RuntimeError, match="no picture"):
        pipeline.warmup(resolutions=[(32, 48)], num_frames=[1])


def test_default_params_are_those_of_an_empty_request(pipeline):
    defaults = pipeline.default_params
    empty = pipeline.prepare_request("A robot", VisualGenParams(seed=1))
    filled = pipeline.prepare_request("A robot", defaults.model_copy(update={"seed": 1}))
    assert filled == empty
    assert empty.values.latent_shape == (48, 45, 80)


def test_without_a_text_of_the_checkpoint_the_packaged_negative_prompt_serves():
    pipeline = fake_pipeline(negative_prompt=None)
    request = pipeline.prepare_request("A robot", params(max_sequence_length=4096))
    assert request.values.negative_prompt.startswith('{"')


def test_only_a_negative_prompt_that_the_caller_left_out_is_called_the_default():
    pipeline = fake_pipeline()
    for given, said in ((None, True), ("blurry", False)):
        with pytest.raises(ValueError, match="max_sequence_length = 1 tokens") as error:
            values = params(max_sequence_length=1, negative_prompt=given)
            pipeline.prepare_request("A robot", values)
        assert ("negative_prompt, the default one,: expected" in str(error.value)) == said
