# SPDX-License-Identifier: Apache-2.0
"""What CUDA graphs of layers of Nano's size keep on a GPU, against what is counted for them."""

import gc
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.config_fields import AttentionConfig, CudaGraphConfig
from tensorrt_llm._torch.visual_gen.inspection import memory as inspection
from tensorrt_llm._torch.visual_gen.models.cosmos3 import memory_estimate
from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import resolve_request
from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import LayerGraphs
from tensorrt_llm._torch.visual_gen.models.cosmos3.loop_inputs import Cosmos3Request
from tensorrt_llm._torch.visual_gen.models.cosmos3.memory_estimate import (
    graph_bytes,
    idle_capacity,
    request_capacity,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import (
    Cosmos3VFMTransformer,
)
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization.mode import QuantAlgo
from tensorrt_llm.visual_gen.params import VisualGenParams
from tests.support.fp8_oracle import policy

pytestmark = [pytest.mark.gpu, pytest.mark.cosmos3]

MIB = 2**20
# What the driver takes for a graph's nodes and for kernels that it loads late, and parts of blocks.
SLACK = 128 * MIB
STEPS = 10
TRAITS = SimpleNamespace(
    family="nano",
    build="base",
    has_sound=False,
    default_use_system_prompt=False,
    requires_guardrails=False,
    video_negative_prompt="",
    fixed_sigmas=None,
)
needs_fa3 = pytest.mark.skipif(
    importlib.util.find_spec("fa3_fwd_interface") is None,
    reason="needs the package fa3-fwd (extra hopper)",
)
BACKENDS = ["VANILLA", pytest.param("FA3", marks=needs_fa3)]


def two_layers(fp8: bool, backend: str, device="cuda", **sizes) -> Cosmos3VFMTransformer:
    """Two layers of Nano's size with random weights; FP8 ones with 16-bit steps at both ends."""
    recipe = {"runtime": {"diffusion_step_policy": policy(3, 3)}} if fp8 else None
    pretrained = {"num_hidden_layers": 2, "vocab_size": 100, "dtype": "bfloat16"} | sizes
    config = DiffusionModelConfig(
        pretrained_config=SimpleNamespace(**pretrained, quantization_config=recipe),
        quant_config=QuantConfig(quant_algo=QuantAlgo.FP8) if fp8 else QuantConfig(),
        attention=AttentionConfig(backend=backend),
        cuda_graph=CudaGraphConfig(enable=True),
    )
    with torch.device(device):
        transformer = Cosmos3VFMTransformer(config)
    for parameter in transformer.parameters():
        if parameter.dtype == torch.float8_e4m3fn:
            codes = torch.randint(0, 0x70, parameter.shape, dtype=torch.uint8, device=device)
            parameter.data.copy_(codes.view(torch.float8_e4m3fn))
        else:
            parameter.data.normal_(std=0.02)
    for module in transformer.modules():
        if fp8 and isinstance(module, Linear):
            module.weight_scale.data.fill_(1e-3)
            module.input_scale.data.fill_(1e-2)
    transformer.post_load_weights()
    return transformer


def guided(**params) -> Cosmos3Request:
    params = VisualGenParams(**params, num_inference_steps=STEPS, guidance_scale=6.0)
    return Cosmos3Request(resolve_request("a", params, TRAITS), (5, 6, 7, 8, 9), (5, 6))


@torch.no_grad()
def run(transformer: Cosmos3VFMTransformer, request: Cosmos3Request) -> None:
    """A step of each precision mode, in the order of a request's."""
    shape, options = request.values.latent_shape, {"device": transformer.device}
    ids = torch.tensor([request.prompt_ids, (*request.negative_ids, 0, 0, 0)], **options)
    mask = torch.tensor([[1] * 5, [1, 1, 0, 0, 0]], **options)
    raw = torch.full((2,), 500.0, **options)
    latents = torch.randn(2, transformer.arch.latent_channel, *shape, **options)
    for step in (0, STEPS // 2):
        transformer.set_denoising_step(step, STEPS)
        transformer(latents, raw / 1000, ids, mask, shape, raw, 24.0)
    transformer.reset_denoising_step()
    transformer.end_request()


def private_bytes(device: torch.device) -> int:
    return sum(s["total_size"] for s in memory_estimate._segments(device, private=True))


def scratch_bytes(graphs: LayerGraphs) -> int:
    """The dequantised weight of 16-bit steps: one for all graphs, gone with the last."""
    buffers = {id(x): x for graph in graphs._graphs.values() for x in graph.uses}
    assert len(buffers) <= 1
    return sum(buffer.nbytes for buffer in buffers.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_graphs_take_capacity_between_the_bound_and_the_estimate_and_give_it_back(
    fp8, backend, monkeypatch
):
    # What is free beside this process alone: other tests may run on the same GPU meanwhile.
    total = torch.cuda.get_device_properties(0).total_memory
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda _: (total - torch.cuda.memory_reserved(0), total)
    )
    transformer = two_layers(fp8, backend)
    parts = SimpleNamespace(transformer=transformer, device=torch.device("cuda"))
    given = guided(height=480, width=832, num_frames=81)
    # Kernels, libraries, and the workspaces of the stream that captures.
    run(transformer, given)
    transformer.reset_cache()
    gc.collect()  # graphs that an earlier test left in a cycle
    torch.cuda.empty_cache()
    others, before = private_bytes(parts.device), idle_capacity(parts.device)

    run(transformer, given)
    graphs = transformer.graphs
    assert len(graphs) == (2 if fp8 else 1)
    taken = before - idle_capacity(parts.device)
    scratch = scratch_bytes(graphs)
    assert (scratch > 0) == fp8
    kept = graphs.input_bytes + private_bytes(parts.device) - others + scratch
    assert kept - SLACK < taken < kept + SLACK
    assert request_capacity(parts) == pytest.approx(before + others - scratch, abs=SLACK)

    bound = graph_bytes(given, parts)
    config, arch = transformer.model_config, transformer.arch
    estimate = inspection.graph_bytes(config, arch, given.values)
    assert bound <= taken <= estimate <= 1.5 * taken + 256 * MIB

    graphs.clear()
    assert private_bytes(parts.device) == others
    assert idle_capacity(parts.device) == pytest.approx(before, abs=SLACK)


def test_after_a_drop_graphs_are_captured_again_also_while_an_output_is_held():
    transformer = two_layers(fp8=True, backend="VANILLA")
    given = guided(height=64, width=64, num_frames=5)
    run(transformer, given)
    held = [graph.output for graph in transformer.graphs._graphs.values()]
    transformer.graphs.clear()
    run(transformer, given)
    assert len(transformer.graphs) == len(held) == 2
