# SPDX-License-Identifier: Apache-2.0
"""What CUDA graphs keep: counted for a request, not for another's, and given back when short."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3 import memory_estimate
from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import resolve_request
from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import (
    Captured,
    LayerGraphs,
    wants_graph,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.loop_inputs import Cosmos3Request
from tensorrt_llm._torch.visual_gen.models.cosmos3.memory_estimate import (
    check_fits,
    eager_bytes,
    estimate_bytes,
    graph_bytes,
    idle_capacity,
    release_graphs,
    request_capacity,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.vae_decoding import decode_bytes
from tensorrt_llm.visual_gen.params import VisualGenParams
from tests.support.fp8_oracle import policy
from tests.support.pipelines import load_pipeline

pytestmark = pytest.mark.cosmos3

GIB = 2**30
TRAITS = SimpleNamespace(
    family="nano",
    build="base",
    has_sound=False,
    default_use_system_prompt=False,
    requires_guardrails=False,
    video_negative_prompt="",
    fixed_sigmas=None,
)
VIDEO = {"height": 480, "width": 832, "num_frames": 189}
IMAGE = {"height": 1024, "width": 1024, "num_frames": 1}


def components(enable=True, any_length=True, windows=None, device="cpu"):
    """Nano's sizes, with graphs that nothing has captured yet."""
    recipe = None
    if windows is not None:
        recipe = {"runtime": {"diffusion_step_policy": policy(*windows)}}
    pretrained = SimpleNamespace(quantization_config=recipe)
    transformer = SimpleNamespace(
        arch=Cosmos3Architecture(sound_gen=True, sound_dim=64),
        dtype=torch.bfloat16,
        model_config=DiffusionModelConfig(pretrained_config=pretrained),
        graphs=LayerGraphs(None, any_length),
        captures=lambda rows: wants_graph(enable, any_length, rows),
    )
    vae = SimpleNamespace(
        config=SimpleNamespace(decoder_base_dim=256, dim_mult=[1], patch_size=2),
        dtype=torch.bfloat16,
    )
    sound = SimpleNamespace(
        vocoder_input_dim=64, hop_size=1920, sampling_rate=48000, dec_dim=320, dec_out_channels=2
    )
    return SimpleNamespace(
        transformer=transformer,
        vae=vae,
        sound_tokenizer=SimpleNamespace(config=sound, dtype=torch.bfloat16),
        device=torch.device(device),
    )


def request(size=VIDEO, lengths=(300, 20), **params):
    values = resolve_request("a", VisualGenParams(**size, **params), TRAITS)
    return Cosmos3Request(values, (1,) * lengths[0], (1,) * lengths[1])


# --- the bound of a request ---------------------------------------------------------------------


def test_a_captured_request_needs_the_text_room_and_a_step_more():
    given, parts = request(), components()
    rows = 2 * 48 * 15 * 26
    room = 2 * 2 * 36 * 4096 * 8 * 128 * 2
    assert room == pytest.approx(1.2e9, rel=0.01)
    media = rows * (4096 + 2 * 128) * 2
    step = rows * (4096 * 3 + 12288 * 5)
    assert graph_bytes(given, parts) == room + media + 2 * 4 + step
    decoding = memory_estimate._decode_bytes_at_least(given.values, parts)
    assert estimate_bytes(given, parts) == graph_bytes(given, parts) + decoding


@pytest.mark.parametrize(
    "given, enable, any_length",
    [(request(), None, True), (request(), False, True), (request(IMAGE), None, False)],
)
def test_nothing_changes_where_no_step_is_captured(given, enable, any_length):
    parts = components(enable, any_length)
    assert graph_bytes(given, parts) == 0
    assert estimate_bytes(given, parts) == eager_bytes(given.values, parts)


def test_a_short_step_is_counted_by_default():
    given = request(IMAGE)
    assert graph_bytes(given, components(None)) == graph_bytes(given, components(True)) > 1e9
    # 32,700 rows with both branches, 16,350 with one: those with two alone decide.
    clip = request({"height": 480, "width": 832, "num_frames": 165})
    interval = replace(clip, values=replace(clip.values, guidance_interval=(400.0, 1000.0)))
    assert graph_bytes(interval, components(None)) == 0


def test_without_device_lengths_the_text_has_room_for_its_own_tokens_alone():
    given, parts = request(), components(any_length=False)
    token = 2 * 2 * 36 * 8 * 128 * 2
    assert graph_bytes(request(), components()) - graph_bytes(given, parts) == token * (4096 - 300)
    # Room grows by whole capacities where it does not follow the text.
    longer = request(lengths=(300, 4097))
    assert graph_bytes(longer, components()) - graph_bytes(given, components()) == token * 4096


@pytest.mark.parametrize(
    "windows, steps, modes", [(None, 10, 1), ((3, 3), 10, 2), ((3, 3), 6, 1), ((0, 0), 10, 1)]
)
def test_the_second_mode_is_tried_beside_the_graph_of_the_first(windows, steps, modes):
    given, parts = request(num_inference_steps=steps), components(windows=windows)
    expected = memory_estimate._decode_bytes_at_least(given.values, parts)
    if modes == 2:
        expected = max(expected, memory_estimate._denoise_bytes(given.values, parts))
        assert expected == eager_bytes(given.values, parts)
    assert estimate_bytes(given, parts) - graph_bytes(given, parts) == expected


def test_the_tokens_of_the_sound_are_media_tokens():
    given, parts = request(), components()
    loud = replace(given, values=replace(given.values, enable_audio=True))
    silent, sounding = (memory_estimate._graph_shapes(r, parts)[0].media for r in (given, loud))
    assert sounding == (2, silent[1] + 197, 4096)  # 189 / 24 seconds, 25 tokens each


# --- what there is ------------------------------------------------------------------------------


def test_the_capacity_leaves_out_what_only_graphs_can_take(monkeypatch):
    def segment(total, allocated, pool, device=0):
        sizes = {"total_size": total, "allocated_size": allocated}
        return {**sizes, "segment_pool_id": pool, "device": device}

    segments = [
        segment(1000, 400, (0, 0)),
        segment(7000, 300, (0, 3)),
        segment(90_000, 0, (0, 0), device=1),
    ]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 10**6))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert idle_capacity(torch.device("cuda")) == 50 + 600
    assert idle_capacity(torch.device("cuda", 1)) == 50 + 90_000
    # A request may take that too: the graphs of others are dropped for it.
    parts = components(device="cuda")
    monkeypatch.setattr(LayerGraphs, "input_bytes", 11)
    assert request_capacity(parts) == 50 + 600 + 7000 + 11


def test_an_allocator_that_tells_no_segments_gives_what_it_holds_and_does_not_use(monkeypatch):
    def snapshot():
        raise RuntimeError("not supported by cudaMallocAsync")

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 10**6))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 900)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert idle_capacity(torch.device("cuda")) == 50 + 600
    assert request_capacity(components(device="cuda")) == 50 + 600


# --- refused, or let through --------------------------------------------------------------------


def test_a_request_that_fits_without_graphs_alone_is_refused_with_that_remedy():
    given, parts = request(), components()
    need, eager = estimate_bytes(given, parts), eager_bytes(given.values, parts)
    check_fits(given, parts, need)
    check_fits(given, components(enable=False), eager)
    keep = f"at least {need / GIB:.2f} GiB, of which CUDA graphs keep"
    switch = r"Remedy: load with cuda_graph_config: \{enable: false\}, without which.*fit; or ask"
    for capacity in (need - 1, eager):
        with pytest.raises(MemoryError, match=f"{keep}.*{switch}"):
            check_fits(given, parts, capacity)
    with pytest.raises(MemoryError, match=keep) as caught:
        check_fits(given, parts, eager - 1)
    assert "enable: false" not in str(caught.value)


@pytest.mark.parametrize(("size", "helps"), [(VIDEO, True), (IMAGE | {"num_frames": 29}, False)])
def test_less_guidance_is_a_remedy_where_decoding_would_fit(size, helps):
    given, parts = request(size), components(enable=False)
    decoding = memory_estimate._decode_bytes_at_least(given.values, parts)
    capacity = decoding if helps else decoding - 1
    assert eager_bytes(given.values, parts) > capacity
    with pytest.raises(MemoryError) as caught:
        check_fits(given, parts, capacity)
    assert ("guidance_scale 1" in str(caught.value)) == helps


class Held:
    """Graphs of these requests, as the device would hold them."""

    def __init__(self, parts, *requests):
        graphs = parts.transformer.graphs
        self.shapes = {s for r in requests for s in memory_estimate._graph_shapes(r, parts)}
        self.shape_key = graphs.shape_key
        parts.transformer.graphs = self

    def __len__(self):
        return len(self.shapes)

    def clear(self):
        self.shapes = set()


def ample(given, parts, graphs):
    """Half more than the request's own, decoded at once."""
    values = given.values
    at_once = decode_bytes(values.height, values.width, values.num_frames, 256)
    return 1.5 * (max(memory_estimate._denoise_bytes(values, parts), at_once) + graphs)


@pytest.mark.parametrize("other", [request(IMAGE), request(guidance_scale=1.0)])
@pytest.mark.parametrize("size", [VIDEO, {"height": 720, "width": 1280, "num_frames": 5}])
def test_graphs_of_other_sizes_are_dropped_for_a_request_that_may_need_their_memory(
    monkeypatch, other, size
):
    given, parts = request(size), components()
    need = ample(given, parts, graph_bytes(given, parts))
    for free, dropped in ((need, False), (need - 1, True)):
        held = Held(parts, other)
        monkeypatch.setattr(memory_estimate, "idle_capacity", lambda device, free=free: free)
        release_graphs(given, parts)
        assert (not held.shapes) == dropped


def test_a_vae_of_fp32_takes_twice_the_memory_to_decode_at_once(monkeypatch):
    given, parts = request({"height": 720, "width": 1280, "num_frames": 5}), components()
    parts.vae.dtype = torch.float32
    need = 1.5 * (2 * decode_bytes(720, 1280, 5, 256) + graph_bytes(given, parts))
    for free, dropped in ((need, False), (need - 1, True)):
        held = Held(parts, request(IMAGE))
        monkeypatch.setattr(memory_estimate, "idle_capacity", lambda device, free=free: free)
        release_graphs(given, parts)
        assert (not held.shapes) == dropped


def test_graphs_make_room_for_the_decoding_of_the_sound(monkeypatch):
    slow, parts = request({"height": 64, "width": 64, "num_frames": 121}), components()
    given = replace(slow, values=replace(slow.values, enable_audio=True, frame_rate=121 / 120))
    need = 1.5 * (4 * 320 * 120 * 48000 * 2 + graph_bytes(given, parts))
    for free, dropped in ((need, False), (need - 1, True)):
        held = Held(parts, request(IMAGE))
        monkeypatch.setattr(memory_estimate, "idle_capacity", lambda device, free=free: free)
        release_graphs(given, parts)
        assert (not held.shapes) == dropped


def test_the_graphs_of_its_own_size_count_as_there_and_are_never_dropped_alone(monkeypatch):
    given, parts = request(), components()
    monkeypatch.setattr(memory_estimate, "idle_capacity", lambda device: 0)
    held = Held(parts, given)
    release_graphs(given, parts)
    assert held.shapes
    need = ample(given, parts, 0)
    for free, dropped in ((need, False), (need - 1, True)):
        held = Held(parts, given, request(IMAGE))
        monkeypatch.setattr(memory_estimate, "idle_capacity", lambda device, free=free: free)
        release_graphs(given, parts)
        assert (not held.shapes) == dropped


def test_both_shapes_of_a_guided_picture_are_its_own(monkeypatch):
    given, parts = request(IMAGE), components()
    assert given.values.guidance_interval
    held = Held(parts, given)
    assert {shape.media[:2] for shape in held.shapes} == {(2, 1024), (1, 1024)}
    monkeypatch.setattr(memory_estimate, "idle_capacity", lambda device: 0)
    release_graphs(given, parts)
    assert held.shapes


def test_a_request_that_is_not_captured_takes_the_memory_of_graphs_too(monkeypatch):
    parts = components(enable=None)
    held = Held(parts, request(IMAGE))
    need = ample(request(), parts, 0)
    for free, dropped in ((need, False), (need - 1, True)):
        monkeypatch.setattr(memory_estimate, "idle_capacity", lambda device, free=free: free)
        release_graphs(request(), parts)
        assert (not held.shapes) == dropped


@pytest.fixture
def graphed_pipeline(tiny_fp8_checkpoint, monkeypatch):
    """The tiny checkpoint with captures that run again, on a device that has nothing free."""
    pipeline = load_pipeline(tiny_fp8_checkpoint)
    transformer = pipeline.transformer

    def capture(run):
        output = run()
        return Captured(output, output, lambda: output.copy_(run()))

    transformer._graphs = LayerGraphs(transformer._run_tokens, False, capture)
    transformer._captures = lambda hidden: True
    monkeypatch.setattr(memory_estimate, "idle_capacity", lambda device: 0)
    return pipeline


@pytest.mark.parametrize("enable_audio", [False, True])
def test_the_shapes_that_are_counted_are_those_that_a_request_captures(
    graphed_pipeline, enable_audio
):
    transformer = graphed_pipeline.transformer
    transformer.captures = lambda rows: True
    interval = {"enable_audio": enable_audio, "guidance_interval": [800, 1000]}
    params = VisualGenParams(
        height=64, width=96, num_frames=9, num_inference_steps=4, seed=0, extra_params=interval
    )
    given = graphed_pipeline.prepare_request("A robot.", params)
    graphed_pipeline.denoise(given)
    counted = memory_estimate._graph_shapes(given, graphed_pipeline.components)
    assert len(counted) == 2 and transformer.graphs.shapes == set(counted)


def tokens_held(pipeline):
    return {shape.media[1] for shape in pipeline.transformer.graphs.shapes}


def test_a_request_and_a_warm_up_make_room_before_they_run(graphed_pipeline):
    small, large = ({"height": 64, "width": width, "num_frames": 1} for width in (64, 96))
    for size, tokens in ((small, 4), (large, 6), (large, 6)):
        params = VisualGenParams(**size, num_inference_steps=2, seed=0)
        graphed_pipeline.denoise(graphed_pipeline.prepare_request("a", params))
        assert tokens_held(graphed_pipeline) == {tokens}
    shapes, arch = graphed_pipeline.transformer.graphs.shapes, graphed_pipeline.transformer.arch
    expected = sum(shape.input_bytes(arch, torch.bfloat16) for shape in shapes)
    assert graphed_pipeline.transformer.graphs.input_bytes == expected > 0
    graphed_pipeline.warmup([(64, 96), (64, 64)], [1])
    assert tokens_held(graphed_pipeline) == {4}
