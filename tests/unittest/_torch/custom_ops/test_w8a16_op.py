# SPDX-License-Identifier: Apache-2.0
"""``trtllm::linear_w8a16``: the formula bit for bit, its refusals, and one scratch buffer."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import tensorrt_llm._torch.custom_ops  # noqa: F401
from tensorrt_llm._torch.custom_ops import w8a16_ops
from tests.support.fp8_modules import assert_bit_equal

OP = torch.ops.trtllm.linear_w8a16
FP8, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16


def operands(shape=(3, 5, 32), out_features=48, dtype=BF16, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).to(device, dtype)
    weight = (torch.randn(out_features, shape[-1], generator=generator) * 64).to(FP8).to(device)
    bias = torch.randn(out_features, generator=generator).to(device, dtype)
    return x, weight, torch.tensor(0.0123, device=device), bias


def expected(x, weight, scale, bias):
    return F.linear(x, weight.to(x.dtype) * scale.to(x.dtype), bias)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(32,), (7, 32), (2, 3, 32)])
def test_it_is_f_linear_with_the_dequantised_weight_bit_for_bit(dtype, with_bias, shape):
    x, weight, scale, bias = operands(shape, dtype=dtype)
    bias = bias if with_bias else None
    assert_bit_equal(OP(x, weight, scale, bias), expected(x, weight, scale, bias))


@pytest.mark.parametrize("rank", [2, 3])
def test_opcheck(rank):
    # opcheck's schema test compares inputs with allclose, which FP8 lacks.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x, weight, scale, bias = operands((2, 3, 32)[-rank:])
    copies = [t.clone() for t in (x, weight, scale, bias)]
    torch.library.opcheck(OP.default, (x, weight, scale, bias), test_utils=checks)
    torch.library.opcheck(OP.default, (x, weight, scale), test_utils=checks)
    for tensor, copy in zip((x, weight, scale, bias), copies, strict=True):
        assert_bit_equal(tensor, copy)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, w, s, b: (x.float(), w, s, b), "bfloat16 or torch.float16"),
        (lambda x, w, s, b: (x.to(FP8), w, s, b), "bfloat16 or torch.float16"),
        (lambda x, w, s, b: (x, w.to(BF16), s, b), "float8_e4m3fn"),
        (lambda x, w, s, b: (x, w, s.view(1), b), "one FP32 number"),
        (lambda x, w, s, b: (x, w[:, :16], s, b), "do not multiply"),
        (lambda x, w, s, b: (x, w, s, b[:5]), "bias"),
        (lambda x, w, s, b: (x, w, s, b.float()), "bias"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        OP(*change(*operands()))


def test_a_bias_on_another_device_is_refused():
    x, weight, scale, bias = operands()
    with pytest.raises(ValueError, match="same device"):
        OP(x, weight, scale, bias.to("meta"))


def test_nan_and_the_largest_code_come_through():
    x, weight, scale, _ = operands((2, 32))
    weight[0, 0] = float("nan")
    weight[1, 1] = 448.0
    found = OP(x, weight, scale)
    assert found[:, 0].isnan().all() and not found[:, 1:].isnan().any()
    assert_bit_equal(found, expected(x, weight, scale, None))


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def no_scratch(monkeypatch):
    monkeypatch.setattr(w8a16_ops, "_SCRATCH", {})
    return w8a16_ops._SCRATCH


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("rows, features", [(7, (32, 48)), (2048, (4096, 12288))])
def test_on_the_gpu_it_is_f_linear_with_the_dequantised_weight(no_scratch, dtype, rows, features):
    x, weight, scale, bias = operands((rows, features[0]), features[1], dtype, "cuda")
    assert_bit_equal(OP(x, weight, scale, bias), expected(x, weight, scale, bias))


@pytest.mark.gpu
def test_layers_of_one_stream_share_one_buffer_of_the_largest_weight(no_scratch):
    sizes = [(64, 128), (128, 64), (64, 256), (32, 32)]
    layers = [operands((5, i), o, device="cuda") for i, o in sizes]
    results = [OP(*layer) for layer in layers]
    (buffer,) = no_scratch.values()
    assert buffer.numel() == max(i * o for i, o in sizes) and buffer.dtype == BF16
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    again = [OP(*layer) for layer in layers]
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated == len(layers)  # the outputs, and nothing else
    assert [*no_scratch.values()][0] is buffer
    for layer, first, second in zip(layers, results, again, strict=True):
        assert_bit_equal(first, expected(*layer))
        assert_bit_equal(second, first)


@pytest.mark.gpu
def test_streams_do_not_share_a_buffer(no_scratch):
    layer = operands((5, 64), 128, device="cuda")
    OP(*layer)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = OP(*layer)
    torch.cuda.synchronize()
    assert len(no_scratch) == 2
    assert_bit_equal(found, expected(*layer))


def test_threads_that_share_a_stream_never_queue_between_a_weight_and_its_gemm(monkeypatch):
    """Two engines of one process: the CUDA path, played on the CPU with one buffer for both."""
    buffer = torch.empty(48 * 32, dtype=BF16)

    def dequantise(weight, out, scale):
        out.copy_(weight.to(out.dtype) * scale.to(out.dtype))
        time.sleep(1e-3)  # where a launch lets another thread run

    monkeypatch.setattr(w8a16_ops, "device_guard", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(w8a16_ops, "reserve_scratch", lambda *_: buffer)
    monkeypatch.setattr(w8a16_ops, "dequantize_e4m3_into", dequantise)

    def engine(seed):
        layer = operands(seed=seed)
        wanted = expected(*layer)
        return sum(not torch.equal(w8a16_ops._cuda(*layer), wanted) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(engine, (1, 2))] == [0, 0]


def test_the_buffers_of_a_stream_are_those_of_its_device_and_handle(no_scratch):
    class Stream:
        device_index, cuda_stream = 0, 7

    mine = [torch.empty(1), torch.empty(2)]
    w8a16_ops._SCRATCH |= {
        (0, 7, BF16): mine[0],
        (0, 7, FP16): mine[1],
        (1, 7, BF16): torch.empty(3),
        (0, 8, BF16): torch.empty(4),
    }
    found = w8a16_ops.scratch_buffers(Stream)
    assert len(found) == 2 and all(a is b for a, b in zip(found, mine, strict=True))


@pytest.mark.gpu
def test_a_captured_graph_replays_it_on_new_inputs(no_scratch):
    x, weight, scale, bias = operands((64, 64), 128, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        OP(x, weight, scale, bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = OP(x, weight, scale, bias)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert_bit_equal(found, expected(x, weight, scale, bias))


@pytest.mark.gpu
def test_compiled_fullgraph_equals_eager_on_the_gpu(no_scratch):
    layer = operands((64, 64), 128, device="cuda")
    assert_bit_equal(torch.compile(OP, fullgraph=True)(*layer), OP(*layer))
