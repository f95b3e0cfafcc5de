# SPDX-License-Identifier: Apache-2.0
"""The tiny static FP8 checkpoint on a GPU: CUDA graphs, FlashAttention-3, no work left over."""

import dataclasses
import importlib.util

import pytest
import torch

from tensorrt_llm._torch.visual_gen.attention_backend import (
    E4M3Operands,
    KeyLengths,
    create_attention_backend,
)
from tensorrt_llm._torch.visual_gen.attention_backend import fa3 as fa3_backend
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs, VisualGenParams
from tensorrt_llm.visual_gen.output import RequestCancelledError
from tests.support.diffusers_oracle import relative_error
from tests.support.fp8_modules import assert_bit_equal
from tests.support.qkv_inputs import qkv_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.cosmos3]

STEPS = 10
VIDEO = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": STEPS, "seed": 3}
IMAGE = {"height": 64, "width": 64, "num_frames": 1, "num_inference_steps": STEPS, "seed": 3}
PROMPTS = ["A robot arm pours water into a glass.", "Rain."]

needs_fa3 = pytest.mark.skipif(
    importlib.util.find_spec("fa3_fwd_interface") is None,
    reason="needs the package fa3-fwd (extra hopper)",
)


def load(checkpoint, backend="VANILLA", graphs: bool | None = False, compiled=False):
    args = VisualGenArgs(
        model=str(checkpoint),
        torch_compile_config={"enable": compiled},
        cuda_graph_config={"enable": graphs},
        attention_config={"backend": backend},
    )
    return PipelineLoader(args, device="cuda").load(skip_warmup=True)


def latents(pipeline, params, prompt=PROMPTS[0], **options):
    request = pipeline.prepare_request(prompt, VisualGenParams(**params))
    return pipeline.denoise(request, **options).latents


@pytest.fixture(scope="module")
def plain(tiny_fp8_checkpoint):
    return load(tiny_fp8_checkpoint)


BACKENDS = ["VANILLA", *(pytest.param(n, marks=needs_fa3) for n in ("FA3", "FA3_FP8"))]


# --- CUDA graphs --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_give_the_bits_of_the_layers_for_every_prompt_and_size(tiny_fp8_checkpoint, backend):
    eager = load(tiny_fp8_checkpoint, backend)
    graphed = load(tiny_fp8_checkpoint, backend, graphs=True)
    for params in (VIDEO, IMAGE, VIDEO | {"guidance_scale": 1.0}, VIDEO):
        for prompt in PROMPTS:
            found = latents(graphed, params, prompt)
            assert_bit_equal(found, latents(eager, params, prompt))
    shapes = {shape for _, shape in graphed.transformer._graphs._graphs}
    assert {mode for mode, _ in graphed.transformer._graphs._graphs} == {"w8a8", "w8a16"}
    if backend != "VANILLA":
        # One graph a mode and size serves both prompts; guidance rests for a picture's last steps.
        assert len(shapes) == 4
        assert shapes == {shape._replace(capacity=4096, lengths=None) for shape in shapes}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_or_failed_request_leaves_the_next_one_bit_identical(
    tiny_fp8_checkpoint, backend
):
    pipeline = load(tiny_fp8_checkpoint, backend, graphs=True)
    before = latents(pipeline, VIDEO)
    for stop_after in (1, 4, STEPS - 1):
        with pytest.raises(RequestCancelledError):
            latents(pipeline, VIDEO, PROMPTS[1], **cancel_after(stop_after))
        with pytest.raises(RuntimeError, match="no more"):
            latents(pipeline, IMAGE, on_latents=fail_at(stop_after))
        assert not pipeline.transformer.step_precision_controller.high_precision
        assert_bit_equal(latents(pipeline, VIDEO), before)


def cancel_after(steps):
    done = []
    return {
        "on_step": lambda n, total: done.append(n),
        "should_cancel": lambda: len(done) == steps,
    }


def fail_at(step):
    def on_latents(index, _):
        if index == step:
            raise RuntimeError("no more")

    return on_latents


@needs_fa3
def test_short_steps_are_captured_by_default_with_fa3(tiny_fp8_checkpoint):
    pipeline = load(tiny_fp8_checkpoint, "FA3", graphs=None)
    latents(pipeline, IMAGE)
    # Both modes with guidance; it rests for the last steps, which are 16 bit.
    graphs = pipeline.transformer._graphs._graphs
    assert sorted((mode, shape.media[0]) for mode, shape in graphs) == [
        ("w8a16", 1),
        ("w8a16", 2),
        ("w8a8", 2),
    ]
    vanilla = load(tiny_fp8_checkpoint, "VANILLA", graphs=None)
    latents(vanilla, IMAGE)
    assert len(vanilla.transformer._graphs) == 0


@needs_fa3
def test_with_fa3_a_warmed_up_shape_captures_nothing_in_a_request(tiny_fp8_checkpoint):
    pipeline = load(tiny_fp8_checkpoint, "FA3", graphs=True)
    pipeline.warmup(resolutions=[(64, 64)], num_frames=[1])
    graphs = pipeline.transformer._graphs
    captured = dict(graphs._graphs)
    assert captured
    for prompt in PROMPTS:
        latents(pipeline, IMAGE, prompt)
    assert graphs._graphs.keys() == captured.keys()
    assert all(graphs._graphs[key] is graph for key, graph in captured.items())


# --- nothing is compiled in a request -----------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_no_kernel_is_compiled_by_a_request_of_another_size_or_prompt(
    tiny_fp8_checkpoint, backend, compiled
):
    import triton

    pipeline = load(tiny_fp8_checkpoint, backend, compiled=compiled)
    pipeline.warmup(resolutions=[(256, 256)], num_frames=[1, 5])  # the default
    made = []
    hook = triton.knobs.runtime.jit_cache_hook

    def record(*args, **kwargs):
        made.append(kwargs.get("fn").name if kwargs.get("fn") is not None else "kernel")
        return None

    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    triton.knobs.runtime.jit_cache_hook = record
    try:
        for size in ({"height": 80, "width": 112, "num_frames": 13}, {"height": 48, "width": 80}):
            for guidance in (6.0, 1.0):
                for prompt in PROMPTS:
                    latents(pipeline, VIDEO | size | {"guidance_scale": guidance}, prompt)
    finally:
        triton.knobs.runtime.jit_cache_hook = hook
    assert not made
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


# --- FlashAttention-3 ---------------------------------------------------------------------------


def qkv(q_len, lengths, heads, kv_heads, head_dim, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    batch, capacity = len(lengths), max(lengths)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q = normal(batch, q_len, heads, head_dim)
    k, v = (normal(batch, capacity, kv_heads, head_dim) for _ in range(2))
    for i, length in enumerate(lengths):
        k[i, length:], v[i, length:] = 0, 0
    device = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return q, k, v, device


@needs_fa3
@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (32, 8)])
@pytest.mark.parametrize(
    "q_len, lengths",
    [(257, (300, 290)), (64, (65, 128)), (1024, (2624, 1924)), (2500, (4096, 3100))],
)
def test_fa3_agrees_with_pytorch_and_with_itself_over_device_lengths(
    q_len, lengths, heads, kv_heads, head_dim, monkeypatch
):
    monkeypatch.setattr(fa3_backend, "_ONE_CALL_ROWS", 0)  # branch by branch with host lengths
    q, k, v, device = qkv(q_len, lengths, heads, kv_heads, head_dim)
    on_host, on_device = KeyLengths(device, lengths), KeyLengths(device, None)
    fa3 = create_attention_backend("FA3")
    found = fa3.forward(q, k, v, lengths=on_host)
    assert_bit_equal(fa3.forward(q, k, v, lengths=on_device), found)
    exact = create_attention_backend("VANILLA").forward(
        q.float(), k.float(), v.float(), lengths=on_host
    )
    assert relative_error(found, exact) <= 5e-3
    causal = fa3.forward(k[:1], k[:1], v[:1], is_causal=True)
    expected = create_attention_backend("VANILLA").forward(
        k[:1].float(), k[:1].float(), v[:1].float(), is_causal=True
    )
    assert relative_error(causal, expected) <= 5e-3


@needs_fa3
def test_fp8_attention_stays_near_16_bit_attention(monkeypatch):
    monkeypatch.setattr(fa3_backend, "_ONE_CALL_ROWS", 0)  # branch by branch with host lengths
    q, k, v, device = qkv(1024, (2624, 1924), 32, 8, 128)
    lengths = KeyLengths(device, (2624, 1924))
    backend = create_attention_backend("FA3_FP8")

    def quantise(x, heads):
        rows = x.float().unflatten(2, (heads, -1))
        scale = rows.abs().amax((1, 3, 4)).clamp_min(1e-12) / 448
        codes = (rows / scale[:, None, :, None, None]).to(torch.float8_e4m3fn)
        return codes.flatten(2, 3), scale

    (q8, qs), (k8, ks), (v8, vs) = (quantise(x, 8) for x in (q, k, v))
    mean = torch.zeros(2, 8, 128, device="cuda")  # nothing was subtracted
    operands = E4M3Operands(q8, k8, v8, qs, ks, vs, mean)
    found = backend.forward_e4m3(operands, lengths=lengths)
    exact = create_attention_backend("FA3").forward(q, k, v, lengths=lengths)
    assert found.dtype == torch.bfloat16
    # 0.067 on normal random data at full size (spec/performance.md).
    assert 1e-3 < relative_error(found, exact) <= 0.09
    on_device = KeyLengths(device, None)
    assert_bit_equal(backend.forward_e4m3(operands, lengths=on_device), found)


@needs_fa3
def test_fp8_attention_over_values_with_a_large_mean_stays_near_exact_attention():
    # 21,024 and 15,000 keys of one sign. The tensor cores cut each product to 13 fraction bits
    # below the running sum, so that the products of the last keys vanish beside it.
    inputs = qkv_inputs((8, 2, 128), (2, 1024, 20000), [20000, 13976], device="cuda")
    inputs.v.normal_(3, generator=torch.Generator("cuda").manual_seed(1))
    inputs.text_v.add_(2)
    ops = torch.ops.trtllm
    q, k, v = ops.qk_norm_rope(*inputs)
    lengths = KeyLengths(inputs.text_lengths, (20000, 13976)).plus(1024)
    exact = create_attention_backend("VANILLA").forward(
        q.float(), k.float(), v.float(), lengths=lengths
    )
    backend = create_attention_backend("FA3_FP8")
    operands = E4M3Operands(*ops.qkv_norm_rope_e4m3(*inputs))
    found = ops.add_value_mean(backend.forward_e4m3(operands, lengths=lengths), operands.v_mean)
    # Emulating the cut gives 0.002, most of it the rounding of the result to BF16.
    assert relative_error(found, exact) < 2e-2
    # The same with the mean in the codes: a quarter to a third is lost.
    v_descale = v.float().abs().amax((1, 3)) / 448
    v_codes = (v.float() / v_descale[:, None, :, None]).to(torch.float8_e4m3fn)
    kept = dataclasses.replace(operands, v=v_codes, v_descale=v_descale)
    assert relative_error(backend.forward_e4m3(kept, lengths=lengths), exact) > 0.1


@needs_fa3
@pytest.mark.parametrize("params", [VIDEO, IMAGE])
def test_runs_on_fa3_agree_with_runs_on_pytorch(tiny_fp8_checkpoint, plain, params):
    fa3 = load(tiny_fp8_checkpoint, "FA3")
    params = params | {"guidance_scale": 1.0}
    assert relative_error(latents(fa3, params), latents(plain, params)) <= 2e-2


@needs_fa3
def test_fp8_attention_runs_on_the_fp8_steps_alone(tiny_fp8_checkpoint):
    pipeline = load(tiny_fp8_checkpoint, "FA3_FP8")
    request = pipeline.prepare_request(PROMPTS[0], VisualGenParams(**VIDEO))
    trace = pipeline.denoise(request).trace
    assert [r.attention for r in trace] == ["bf16"] * 3 + ["fp8"] * 4 + ["bf16"] * 3
    assert [r.generation for r in trace] == ["w8a16"] * 3 + ["w8a8"] * 4 + ["w8a16"] * 3


@needs_fa3
def test_auto_takes_fa3_on_hopper(tiny_fp8_checkpoint):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU (compute capability 9.0)")
    pipeline = load(tiny_fp8_checkpoint, "AUTO")
    assert pipeline.transformer.gen_layers[0].attention.backend.name == "FA3"
