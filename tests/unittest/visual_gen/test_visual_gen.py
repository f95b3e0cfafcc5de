# SPDX-License-Identifier: Apache-2.0
"""The public API on the tiny static FP8 checkpoint."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm import VisualGen, VisualGenArgs, VisualGenParams, VisualGenResult
from tensorrt_llm._torch.visual_gen import executor
from tensorrt_llm._torch.visual_gen.models.cosmos3 import memory_estimate
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import RequestCancelledError

pytestmark = pytest.mark.cosmos3

SMALL = {"height": 64, "width": 96, "num_inference_steps": 4, "seed": 5}
LONG = 60


def image(**values) -> VisualGenParams:
    return VisualGenParams(**SMALL | {"num_frames": 1} | values)


@pytest.fixture(scope="module")
def visual_gen(tiny_fp8_checkpoint):
    args = VisualGenArgs(compilation_config={"resolutions": [[64, 96]], "num_frames": [1]})
    with VisualGen(str(tiny_fp8_checkpoint), args) as visual_gen:
        yield visual_gen


def test_a_prompt_gives_one_output_and_a_list_gives_a_list(visual_gen):
    one = visual_gen.generate("A robot arm.", image())
    assert one.image.shape == (64, 96, 3) and one.error is None
    several = visual_gen.generate(["A robot arm.", "A towel."], image())
    assert len(several) == 2 and torch.equal(several[0].image, one.image)
    assert not torch.equal(several[1].image, one.image)
    assert several[1].request_id == several[0].request_id + 1 == one.request_id + 2


def test_a_video_request(visual_gen, tmp_path):
    output = visual_gen.generate("A robot arm.", VisualGenParams(**SMALL, num_frames=8))
    assert output.video.shape == (9, 64, 96, 3) and output.frame_rate == 24.0
    assert output.metadata["request"]["num_frames"] == 9
    assert output.save(tmp_path / "clip.mp4").stat().st_size > 1000


def test_each_prompt_of_a_list_may_have_its_own_params(visual_gen):
    outputs = visual_gen.generate(["a", "b"], [image(), image(width=64)])
    assert [output.image.shape[1] for output in outputs] == [96, 64]
    with pytest.raises(ValueError, match="pair up.*2.*found 1"):
        visual_gen.generate(["a", "b"], [image()])


def test_a_list_never_raises_for_one_item(visual_gen):
    params = [image(), image(height=100), image(extra_params={"enable_audio": True}), image()]
    outputs = visual_gen.generate(["a", "b", "c", "a"], params)
    assert outputs[0].error is None and outputs[3].error is None
    assert outputs[1].error.startswith("Parameter validation failed: height")
    assert "enable_audio" in outputs[2].error
    assert outputs[1].image is None
    assert torch.equal(outputs[0].image, outputs[3].image)


def test_a_single_request_raises(visual_gen):
    with pytest.raises(ValueError, match="^Parameter validation failed: height.*seed"):
        visual_gen.generate("a", image(height=100, seed=-1))
    with pytest.raises(ValueError, match="image_reference: expected none for an image"):
        visual_gen.generate("a", image(image_reference="picture.png"))
    with pytest.raises(ValueError, match="Bad params.*dict"):
        visual_gen.generate("a", {"height": 64})
    with pytest.raises(ValueError, match="max_sequence_length = 20 tokens, found"):
        visual_gen.generate("many words " * 50, image(max_sequence_length=20))
    with pytest.raises(ValueError, match="prompt: expected text"):
        visual_gen.generate_async(["a"], image())
    with pytest.raises(ValueError, match="Bad inputs"):
        visual_gen.generate(None)


def test_a_drawn_seed_is_reported_and_reproduces_the_picture(visual_gen):
    first = visual_gen.generate("A robot arm.", image(seed=None))
    seed = first.metadata["request"]["seed"]
    again = visual_gen.generate("A robot arm.", image(seed=seed))
    assert torch.equal(first.image, again.image)


def test_a_result_can_be_waited_for_in_every_way(visual_gen):
    result = visual_gen.generate_async("A robot arm.", image())
    assert isinstance(result, VisualGenResult)
    output = result.result(LONG)
    assert result.done and result.progress == ("done", 4, 4)
    assert output.request_id == result.request_id
    assert not result.cancel()

    async def gather():
        results = [visual_gen.generate_async("A robot arm.", image()) for _ in range(2)]
        return [await results[0], await results[1].aresult(timeout=LONG)]

    for other in asyncio.run(gather()):
        assert torch.equal(other.image, output.image)


def hold_the_worker(visual_gen, monkeypatch):
    """Let the next request stop in front of its first step until the event is set."""
    go, reached = threading.Event(), threading.Event()
    denoise = visual_gen._pipeline.denoise

    def waiting(request, **options):
        reached.set()
        assert go.wait(LONG)
        return denoise(request, **options)

    monkeypatch.setattr(visual_gen._pipeline, "denoise", waiting)
    return go, reached


def test_waiting_times_out_and_the_request_goes_on(visual_gen, monkeypatch, caplog):
    go, reached = hold_the_worker(visual_gen, monkeypatch)
    result = visual_gen.generate_async("a", image())
    with pytest.raises(TimeoutError):
        result.result(timeout=0.01)
    with pytest.raises(TimeoutError):
        asyncio.run(result.aresult(timeout=0.01))
    go.set()
    assert result.result(LONG).image is not None
    # Nothing was left to wake in the event loop, which is closed by now.
    assert not caplog.records


def test_cancelling_works_while_queued_and_while_running(visual_gen, monkeypatch):
    go, reached = hold_the_worker(visual_gen, monkeypatch)
    running = visual_gen.generate_async("a", image())
    assert reached.wait(LONG)
    queued = visual_gen.generate_async("b", image())
    assert asyncio.run(visual_gen.get_stats_async())["queued"] == 1
    assert queued.cancel() and queued.done
    assert running.cancel() and not running.done
    go.set()
    for result in (queued, running):
        with pytest.raises(RequestCancelledError):
            result.result(LONG)
    assert visual_gen.generate("a", image()).image is not None
    stats = asyncio.run(visual_gen.get_stats_async())
    assert stats["cancelled"] == 2 and stats["queued"] == stats["running"] == 0


@pytest.mark.parametrize("inputs", ["a", ["a", "b", "c"]])
def test_an_interrupted_wait_leaves_no_request_behind(visual_gen, monkeypatch, inputs):
    go, reached = hold_the_worker(visual_gen, monkeypatch)
    before = asyncio.run(visual_gen.get_stats_async())

    def interrupted(self, timeout=None):
        assert reached.wait(LONG)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(VisualGenResult, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            visual_gen.generate(inputs, image())
    assert asyncio.run(visual_gen.get_stats_async())["queued"] == 0
    go.set()
    assert visual_gen.generate("a", image()).image is not None
    after = asyncio.run(visual_gen.get_stats_async())
    assert after["cancelled"] - before["cancelled"] == len(inputs)
    assert after["completed"] - before["completed"] == 1


def test_what_the_checkpoint_offers_is_described(visual_gen):
    defaults = visual_gen.default_params
    assert (defaults.height, defaults.max_sequence_length) == (None, 4096)
    defaults.max_sequence_length = 16
    assert visual_gen.default_params.max_sequence_length == 4096
    tasks = visual_gen.task_defaults
    assert list(tasks) == ["text_to_image", "text_to_video", "image_to_video", "video_to_video"]
    assert (tasks["text_to_video"]["height"], tasks["text_to_image"]["height"]) == (720, 1024)
    tasks["text_to_video"]["height"] = 16
    assert visual_gen.task_defaults["text_to_video"]["height"] == 720
    specs = visual_gen.extra_param_specs
    assert specs["output_type"].choices == ("video", "image")
    assert "nvidia/Cosmos3-Nano" in VisualGen.supported_models()


def test_params_changed_after_the_call_do_not_reach_the_request(visual_gen, monkeypatch):
    go, _ = hold_the_worker(visual_gen, monkeypatch)
    params = image(extra_params={})
    result = visual_gen.generate_async("a", params)
    params.seed, params.extra_params["output_type"] = 77, "video"
    go.set()
    assert result.result(LONG).metadata["request"]["seed"] == 5


def test_arguments_for_another_model_are_refused(tiny_fp8_checkpoint):
    with pytest.raises(ValueError, match="Two different models"):
        VisualGen(str(tiny_fp8_checkpoint), VisualGenArgs(model="another/model"))


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), MemoryError),
        (OSError("no network"), RuntimeError),
        (ValueError("bad checkpoint"), ValueError),
    ],
)
def test_loading_fails_with_the_same_three_kinds(monkeypatch, raised, kind):
    def fail(loader):
        raise raised

    monkeypatch.setattr(PipelineLoader, "load", fail)
    with pytest.raises(kind, match=str(raised)) as error:
        VisualGen("some/model")
    assert error.value is raised or error.value.__cause__ is raised


def test_after_shutdown_requests_are_refused(tiny_fp8_checkpoint):
    args = VisualGenArgs(compilation_config={"skip_warmup": True})
    visual_gen = VisualGen(str(tiny_fp8_checkpoint), args)
    visual_gen.shutdown()
    visual_gen.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        visual_gen.generate("a", image())


def test_the_worker_is_told_the_device_of_the_model(monkeypatch):
    loaded = SimpleNamespace(components=SimpleNamespace(device=torch.device("cuda:1")))
    workers = []
    monkeypatch.setattr(PipelineLoader, "load", lambda self: loaded)
    monkeypatch.setattr(executor, "VisualGenExecutor", lambda *args: workers.append(args))
    monkeypatch.setattr(memory_estimate, "request_capacity", lambda components: 0)
    VisualGen("some/model")
    assert workers == [(loaded, torch.device("cuda:1"))]
