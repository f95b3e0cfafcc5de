# SPDX-License-Identifier: Apache-2.0
"""The logic around CUDA graphs: keys, inputs, bounds, failures. A capture is played on the CPU."""

import contextlib
import gc
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tensorrt_llm._torch.custom_ops import w8a16_ops
from tensorrt_llm._torch.visual_gen.attention_backend import KeyLengths
from tensorrt_llm._torch.visual_gen.models.cosmos3 import layer_graphs
from tensorrt_llm._torch.visual_gen.models.cosmos3.branch_cache import TextKeys
from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import (
    MAX_GRAPHS,
    TEXT_CAPACITY,
    Captured,
    CudaCapture,
    LayerGraphs,
)

HIDDEN = 4


def capture(run):
    """Like a CUDA graph: a fixed output that each replay fills from the same inputs again."""
    first = run()
    output = torch.full_like(first, float("nan"))
    return Captured(first, output, lambda: output.copy_(run()))


class Layers:
    """Adds up everything it is given, in a mode that is read when it runs."""

    def __init__(self):
        self.mode, self.runs = 1.0, 0

    def __call__(self, hidden, cos, sin, text):
        self.runs += 1
        rows = text.lengths.device.view(-1, 1)
        valid = torch.arange(text.keys[0].shape[1]) < rows
        total = sum(
            (k[..., 0, 0] + 10 * v[..., 0, 0]) * valid
            for k, v in zip(text.keys, text.values, strict=True)
        ).sum(1)
        return self.mode * (hidden + cos.sum() + 2 * sin.sum() + total.view(-1, 1, 1))


def inputs(seed=0, branches=2, tokens=6, lengths=(3, 2)):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.rand(shape, generator=generator)

    lengths = lengths[:branches]
    keys, values = ([rand(branches, max(lengths), 1, 2) for _ in range(2)] for _ in range(2))
    text = TextKeys(
        tuple(keys),
        tuple(values),
        KeyLengths(torch.tensor(lengths, dtype=torch.int32), tuple(lengths)),
    )
    table = (branches, tokens, 2)
    return rand(branches, tokens, HIDDEN), rand(*table), rand(*table), text


@pytest.fixture
def layers():
    return Layers()


@pytest.fixture(params=[True, False], ids=["any length", "own lengths"])
def graphs(layers, request):
    return LayerGraphs(layers, any_length=request.param, capture=capture)


def test_a_replay_gives_what_the_layers_give_for_new_inputs(graphs, layers):
    given = inputs()
    for seed in range(3):
        hidden = inputs(seed)[0]
        expected = Layers()(hidden, *given[1:])
        torch.testing.assert_close(graphs("w8a8", hidden, *given[1:]), expected)
    assert len(graphs) == 1


def test_a_new_request_of_the_same_shape_reuses_the_graph_with_its_own_text_and_tables(graphs):
    for seed in range(3):
        given = inputs(seed)
        torch.testing.assert_close(graphs("w8a8", *given), Layers()(*given))
    assert len(graphs) == 1


def test_text_and_tables_are_copied_once_a_request(graphs, monkeypatch):
    given, copies = inputs(), []
    graphs("w8a8", *given)
    original = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, x: (copies.append(tuple(x.shape)), original(self, x))[1]
    )
    graphs("w8a8", *given)
    assert copies.count(tuple(given[0].shape)) == 2  # the media tokens, and the replayed output
    assert len(copies) == 2


def test_each_mode_has_a_graph_of_its_own(graphs, layers):
    given = inputs()
    for mode, factor in (("w8a8", 1.0), ("w8a16", 2.0), ("w8a8", 1.0), ("w8a16", 2.0)):
        layers.mode = factor
        expected = Layers()
        expected.mode = factor
        torch.testing.assert_close(graphs(mode, *given), expected(*given))
    assert len(graphs) == 2


def test_other_lengths_need_no_other_graph_where_the_backend_reads_them_on_the_device(layers):
    graphs = LayerGraphs(layers, any_length=True, capture=capture)
    for lengths in ((3, 2), (1, 5), (7, 7), (TEXT_CAPACITY, 1)):
        given = inputs(lengths=lengths)
        torch.testing.assert_close(graphs("w8a8", *given), Layers()(*given), rtol=1e-5, atol=1e-2)
    assert len(graphs) == 1
    given = inputs(lengths=(TEXT_CAPACITY + 1, 1))
    graphs("w8a8", *given)
    assert len(graphs) == 2


def test_other_lengths_need_another_graph_elsewhere(layers):
    graphs = LayerGraphs(layers, any_length=False, capture=capture)
    for lengths in ((3, 2), (2, 3), (3, 2)):
        given = inputs(lengths=lengths)
        torch.testing.assert_close(graphs("w8a8", *given), Layers()(*given))
    assert len(graphs) == 2


def test_a_captured_run_is_told_no_host_lengths_where_one_graph_serves_all(layers):
    seen = []

    def run(hidden, cos, sin, text):
        seen.append(text.lengths.host)
        return layers(hidden, cos, sin, text)

    LayerGraphs(run, any_length=True, capture=capture)("w8a8", *inputs())
    LayerGraphs(run, any_length=False, capture=capture)("w8a8", *inputs())
    assert seen == [None, (3, 2)]


def test_graphs_are_bounded_and_the_one_used_longest_ago_goes(graphs):
    for tokens in range(1, MAX_GRAPHS + 1):
        graphs("w8a8", *inputs(tokens=tokens))
    graphs("w8a8", *inputs(tokens=1))
    graphs("w8a8", *inputs(tokens=99))
    assert len(graphs) == MAX_GRAPHS
    kept = {shape.media[1] for _, shape in graphs._graphs}
    assert kept == {1, 99, *range(3, MAX_GRAPHS + 1)}
    assert {shape.media[1] for shape in graphs._inputs} == kept


def test_the_modes_of_one_shape_share_its_inputs(graphs):
    given = inputs()
    graphs("w8a8", *given)
    graphs("w8a16", *given)
    assert len(graphs._inputs) == 1 and len(graphs) == 2


def test_the_device_of_the_inputs_is_the_current_one_while_a_graph_is_captured(layers, monkeypatch):
    current, found = [], []

    @contextlib.contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    def noting(run):
        found.extend(current)
        return capture(run)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    given = inputs()
    LayerGraphs(layers, any_length=True, capture=noting)("w8a8", *given)
    assert len(found) == 1 and found[0] is given[0] and not current


def test_a_capture_that_fails_leaves_the_others_and_no_trace(layers):
    failing = [False]

    def unsure(run):
        if failing[0]:
            raise RuntimeError("out of memory")
        return capture(run)

    graphs = LayerGraphs(layers, any_length=True, capture=unsure)
    given = inputs()
    before = graphs("w8a8", *given).clone()
    failing[0] = True
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs("w8a16", *given)
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs("w8a8", *inputs(tokens=9))
    assert len(graphs) == 1 and len(graphs._inputs) == 1
    assert torch.equal(graphs("w8a8", *given), before)


@pytest.mark.parametrize("after", range(2, 9))
def test_a_request_that_stopped_while_its_inputs_were_copied_does_not_spoil_the_next(
    graphs, monkeypatch, after
):
    first, second = inputs(1), inputs(2)
    graphs("w8a8", *first)
    original, left = torch.Tensor.copy_, [after]

    def stop(self, x):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("stopped")
        return original(self, x)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            graphs("w8a8", *second)
    for given in (first, second, first):
        torch.testing.assert_close(graphs("w8a8", *given), Layers()(*given))


def test_after_a_request_its_text_and_tables_are_let_go_and_the_graph_stays(graphs):
    given = inputs(1)
    before = graphs("w8a8", *given).clone()
    references = [weakref.ref(given[1]), weakref.ref(given[3])]
    graphs.end_request()
    del given
    assert all(reference() is None for reference in references)
    assert len(graphs) == 1
    torch.testing.assert_close(graphs("w8a8", *inputs(1)), before)
    torch.testing.assert_close(graphs("w8a8", *inputs(2)), Layers()(*inputs(2)))


def test_clearing_drops_graphs_and_inputs(graphs):
    graphs("w8a8", *inputs())
    graphs.clear()
    assert len(graphs) == 0 and not graphs._inputs
    torch.testing.assert_close(graphs("w8a8", *inputs()), Layers()(*inputs()))


def test_the_inputs_of_a_shape_take_the_bytes_that_the_formula_says(graphs):
    arch = SimpleNamespace(head_dim=2, num_hidden_layers=2, num_key_value_heads=1)
    expected = 0
    for branches, tokens in ((2, 6), (1, 6), (2, 9)):
        given = inputs(branches=branches, tokens=tokens)
        graphs("w8a8", *given)
        graphs("w8a16", *given)
        shape = graphs.shape_key(tuple(given[0].shape), given[3].lengths.host)
        expected += shape.input_bytes(arch, torch.float32)
        assert graphs.input_bytes == expected
    assert len(graphs.shapes) == 3


def test_dropping_graphs_gives_their_pool_back_to_the_device(graphs, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(graphs)))
    graphs.clear()
    assert emptied == []
    graphs("w8a8", *inputs())
    graphs.clear()
    assert emptied == [0] and graphs.input_bytes == 0


def test_a_capture_says_what_it_captures(graphs, monkeypatch):
    found = []
    monkeypatch.setattr(layer_graphs.logger, "info", lambda text, *args: found.append(text % args))
    graphs("w8a16", *inputs())
    assert found == ["Capturing a CUDA graph: w8a16, 2x6x4 tokens."]


# --- CudaCapture, with torch.cuda played --------------------------------------------------------


class Stream:
    device_index, cuda_stream = 0, 7

    def wait_stream(self, other):
        pass


class Graph:
    def replay(self):
        pass


@pytest.fixture
def capture_options(monkeypatch):
    """Lets CudaCapture run without a device; what each capture was asked for."""
    options = []

    @contextlib.contextmanager
    def graph(graph, **given):
        options.append(given)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return options


def test_a_capture_is_not_ended_by_what_another_thread_asks_of_the_driver(capture_options):
    CudaCapture()(mock.Mock)
    (options,) = capture_options
    assert options["capture_error_mode"] == "thread_local"


@pytest.fixture
def scratch(monkeypatch):
    monkeypatch.setattr(w8a16_ops, "_SCRATCH", {})
    return w8a16_ops._SCRATCH


def reserving(scratch):
    """What a run of W8A16 layers on the capture's stream does, beside another stream's."""

    def run():
        for handle in (Stream.cuda_stream, 8):
            scratch.setdefault((0, handle, torch.bfloat16), torch.empty(4))
        return mock.Mock()

    return run


def test_the_scratch_buffer_goes_with_the_last_graph_and_another_streams_stays(
    capture_options, scratch
):
    cuda = CudaCapture()
    graphs = [cuda(reserving(scratch)) for _ in range(2)]
    buffer = weakref.ref(scratch[0, 7, torch.bfloat16])
    graphs.pop()
    assert len(scratch) == 2
    graphs.pop()
    assert [*scratch] == [(0, 8, torch.bfloat16)] and buffer() is None


def test_a_graph_holds_the_scratch_buffer_that_another_model_drops(capture_options, scratch):
    kept = CudaCapture()(reserving(scratch))
    buffer = scratch[0, 7, torch.bfloat16]
    other = CudaCapture()(reserving(scratch))  # on a stream of the same handle: torch has 32
    del other
    assert len(scratch) == 1 and len(kept.uses) == 1 and kept.uses[0] is buffer


@pytest.mark.parametrize("runs", [0, 1], ids=["warm-up", "capture"])
def test_a_capture_that_fails_leaves_no_scratch_buffer(capture_options, scratch, runs):
    run, done = reserving(scratch), []

    def fail():
        done.append(run())
        if len(done) > runs:
            raise RuntimeError("out of memory")
        return done[-1]

    with pytest.raises(RuntimeError, match="out of memory"):
        CudaCapture()(fail)
    gc.collect()
    assert [*scratch] == [(0, 8, torch.bfloat16)]


def test_clearing_drops_the_scratch_buffer_of_the_graphs(capture_options, scratch, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append([*scratch]))
    run = reserving(scratch)
    graphs = LayerGraphs(lambda *_: run(), any_length=True)
    graphs("w8a8", *inputs())
    graphs("w8a16", *inputs())
    assert len(scratch) == 2
    graphs.clear()
    assert emptied == [[(0, 8, torch.bfloat16)]]
