# SPDX-License-Identifier: Apache-2.0
"""The tiny static FP8 checkpoint on a GPU: against the CPU, without synchronisation, compiled."""

import pytest
import torch

from tensorrt_llm._torch.modules.linear import Linear, W8A16FP8LinearMethod
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGen, VisualGenArgs, VisualGenParams
from tests.support.diffusers_oracle import relative_error
from tests.support.fp8_oracle import OracleLinear, copy_checkpoint, policy

pytestmark = [pytest.mark.gpu, pytest.mark.cosmos3]

STEPS = 10
VIDEO = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": STEPS, "seed": 3}
IMAGE = {"height": 64, "width": 64, "num_frames": 1, "num_inference_steps": STEPS, "seed": 3}
PROMPT = "A robot arm pours water into a glass."
# Guided BF16 runs on two attention kernels differ by up to 4e-2 (cosmos3.md G.4).
GUIDED_TOLERANCE = 4e-2


def load(checkpoint, device, **compile_options):
    args = VisualGenArgs(model=str(checkpoint), torch_compile_config=compile_options)
    return PipelineLoader(args, device=device).load(skip_warmup=True)


@pytest.fixture(scope="module")
def eager(tiny_fp8_checkpoint):
    return load(tiny_fp8_checkpoint, "cuda", enable=False)


def latents(pipeline, params, on_latents=None):
    request = pipeline.prepare_request(PROMPT, VisualGenParams(**params))
    return pipeline.denoise(request, on_latents=on_latents)


@pytest.mark.parametrize("task", [VIDEO, IMAGE])
def test_each_task_runs_with_the_policys_trace_and_finite_latents(eager, task):
    denoised = latents(eager, task)
    assert bool(torch.isfinite(denoised.latents).all())
    assert [r.generation for r in denoised.trace] == ["w8a16"] * 3 + ["w8a8"] * 4 + ["w8a16"] * 3
    assert {r.understanding for r in denoised.trace} == {"w8a16"}


def test_gpu_and_cpu_give_the_same_video_up_to_bf16_kernels(tiny_fp8_checkpoint, eager):
    task = VIDEO | {"guidance_scale": 1.0}
    on_cpu = latents(load(tiny_fp8_checkpoint, "cpu"), task).latents
    assert relative_error(latents(eager, task).latents.cpu(), on_cpu) <= 2e-2


def test_the_same_seed_gives_the_same_bits_twice(eager):
    first, second = latents(eager, VIDEO).latents, latents(eager, VIDEO).latents
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))


def test_the_denoising_loop_never_synchronises(eager, monkeypatch):
    """From the first step to the last one, across both mode changes and with both branches."""
    latents(eager, VIDEO)  # kernels are compiled by now
    steps = []
    original = type(eager)._denoise_one

    def forbid_synchronising(self, *args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(type(eager), "_denoise_one", forbid_synchronising)
    found = latents(eager, VIDEO, lambda step, _: steps.append(step)).latents
    assert steps == list(range(STEPS)) and bool(found.isfinite().all())


def test_compiled_and_eager_agree_and_no_step_compiles_at_request_time(tiny_fp8_checkpoint, eager):
    compiled = load(tiny_fp8_checkpoint, "cuda", enable=True, enable_fullgraph=True)
    compiled.warmup(resolutions=[(64, 96)], num_frames=[9])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found = latents(compiled, VIDEO).latents
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    assert relative_error(found, latents(eager, VIDEO).latents) <= GUIDED_TOLERANCE


@torch.no_grad()
def test_every_linear_follows_the_formulas(eager):
    """W8A16 bit-equal to the oracle on the same device; W8A8 within 3e-3 (cosmos3.md G.4)."""
    w8a16 = W8A16FP8LinearMethod()
    generator = torch.Generator("cuda").manual_seed(0)
    checked = 0
    for name, linear in eager.transformer.named_modules():
        if not isinstance(linear, Linear):
            continue
        shape = (33, linear.in_features)
        x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        oracle = OracleLinear(linear.weight, linear.weight_scale, linear.input_scale)
        codes = torch.ops.trtllm.quantize_e4m3_static(x, linear.input_scale)
        assert torch.equal(codes.view(torch.uint8), oracle.quantise(x).view(torch.uint8)), name
        native = linear._recipe_method.apply(linear, x, None)
        assert relative_error(native, oracle(x)) <= 3e-3, name
        oracle.high_precision = True
        high = w8a16.apply(linear, x, None)
        assert torch.equal(high.view(torch.int16), oracle(x).view(torch.int16)), name
        checked += 1
    assert checked == 2 * 2 * 7


def test_contrast_modes_stay_apart_on_the_gpu(tiny_fp8_checkpoint, tmp_path):
    task = VIDEO | {"guidance_scale": 1.0}
    results = {}
    for first, last in ((99, 99), (0, 0), (3, 3)):
        checkpoint = copy_checkpoint(
            tiny_fp8_checkpoint,
            tmp_path / f"{first}-{last}",
            policy(first, last),
            input_scale_divisor=16.0,
            uniform_schedule=True,
        )
        on_gpu = latents(load(checkpoint, "cuda", enable=False), task).latents.cpu()
        results[first, last] = (on_gpu, latents(load(checkpoint, "cpu"), task).latents)
    for key, (on_gpu, own) in results.items():
        assert relative_error(on_gpu, own) <= 1e-2, key
        for other in results.keys() - {key}:
            assert relative_error(on_gpu, results[other][1]) >= 1e-2, (key, other)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_the_second_gpu_touches_no_other(tiny_fp8_checkpoint):
    """The worker is a thread of its own, whose current device is the first GPU by default."""
    options = {
        "torch_compile_config": {"enable": False},
        "cuda_graph_config": {"enable": True},
        "compilation_config": {"skip_warmup": True},
    }
    held = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    try:
        torch.cuda.set_device(1)
        with VisualGen(str(tiny_fp8_checkpoint), VisualGenArgs(**options)) as visual_gen:
            output = visual_gen.generate(PROMPT, VisualGenParams(**IMAGE))
    finally:
        torch.cuda.set_device(0)
    assert output.image.shape == (64, 64, 3)
    assert torch.cuda.max_memory_allocated(0) == held
