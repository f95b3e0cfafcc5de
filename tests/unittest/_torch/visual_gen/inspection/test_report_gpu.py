# SPDX-License-Identifier: Apache-2.0
"""On a CUDA device: the report sets the need against it, and the estimate against its allocator."""

from types import SimpleNamespace

import pytest
import torch

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.attention_backend import KeyLengths
from tensorrt_llm._torch.visual_gen.checkpoints.source import resolve_source
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.inspection.memory import layer_bytes
from tensorrt_llm._torch.visual_gen.inspection.render import render_text
from tensorrt_llm._torch.visual_gen.inspection.report import inspect_checkpoint
from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.branch_cache import TextKeys
from tensorrt_llm._torch.visual_gen.models.cosmos3.towers import (
    GenerationLayer,
    ResidualStream,
)
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization.mode import QuantAlgo
from tensorrt_llm.visual_gen import VisualGenParams

pytestmark = [pytest.mark.gpu, pytest.mark.cosmos3]


def test_the_need_of_a_small_request_fits_the_device_that_is_named(tiny_fp8_checkpoint):
    params = VisualGenParams(height=64, width=64, num_frames=9)
    report = inspect_checkpoint(resolve_source(str(tiny_fp8_checkpoint), None), params)
    assert report.refusal is None
    name, free, total = report.memory.device
    assert name == torch.cuda.get_device_name()
    assert total == torch.cuda.mem_get_info()[1] >= free
    assert report.memory.fits and report.memory.largest_num_frames == 9
    assert f"fits: {name} has" in render_text(report)


def static_fp8_layer(config: DiffusionModelConfig, device: torch.device) -> GenerationLayer:
    """A generation layer of Nano's size with random FP8 weights."""
    with device:
        layer = GenerationLayer(Cosmos3Architecture(), config, 0)
    for module in layer.modules():
        if isinstance(module, Linear):
            codes = torch.randint(0, 0x70, module.weight.shape, dtype=torch.uint8, device=device)
            module.weight.data.copy_(codes.view(torch.float8_e4m3fn))
            module.weight_scale.data.fill_(1e-3)
            module.input_scale.data.fill_(1e-2)
        elif hasattr(module, "weight"):
            module.weight.data.fill_(1.0)
    for module in layer.modules():
        if hasattr(module, "post_load_weights"):
            module.post_load_weights()
    return layer


@torch.no_grad()
def test_the_estimate_of_a_layer_is_what_the_allocator_counts_at_480p():
    device = torch.device("cuda")
    branches, tokens = 2, 48 * 15 * 26
    config = DiffusionModelConfig(
        pretrained_config=SimpleNamespace(dtype="bfloat16"),
        quant_config=QuantConfig(quant_algo=QuantAlgo.FP8),
    )
    arch, layer = Cosmos3Architecture(), static_fp8_layer(config, device)
    options = {"dtype": torch.bfloat16, "device": device}
    tables = torch.rand(2, branches, tokens, arch.head_dim, **options)
    keys = torch.randn(branches, 300, arch.num_key_value_heads, arch.head_dim, **options)
    lengths = KeyLengths(
        torch.full((branches,), 300, dtype=torch.int32, device=device), (300,) * branches
    )
    text = TextKeys((keys,), (keys,), lengths)
    given = tables.numel() * tables.element_size()
    for _ in range(2):  # the first run compiles kernels and loads libraries
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        stream = ResidualStream(torch.randn(branches, tokens, arch.hidden_size, **options))
        hidden, _ = stream.take()
        stream.put(hidden, torch.randn_like(hidden))
        del hidden
        layer(stream, *tables, text, lengths.plus(tokens))
        stream.take()
    peak = torch.cuda.max_memory_allocated() - before + given
    estimate = layer_bytes(config, arch, branches, tokens)
    # Workspaces of GEMM and attention are what the estimate leaves out.
    assert 0.95 * estimate < peak < 1.3 * estimate
