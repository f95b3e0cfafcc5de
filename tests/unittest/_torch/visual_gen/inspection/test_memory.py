# SPDX-License-Identifier: Apache-2.0
"""The memory formulas against tensor bytes counted at full size on the meta device."""

import dataclasses
from types import SimpleNamespace

import diffusers
import pytest
import torch
import torch.nn.functional as F

from tensorrt_llm._torch.modules import quant_group
from tensorrt_llm._torch.modules.linear import Linear, W8A16FP8LinearMethod
from tensorrt_llm._torch.visual_gen.attention_backend import KeyLengths
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.config_fields import AttentionConfig, CudaGraphConfig
from tensorrt_llm._torch.visual_gen.inspection.memory import (
    WeightSizes,
    decode_bytes,
    graph_bytes,
    layer_bytes,
    request_need,
    text_cache_bytes,
    vision_tokens,
)
from tensorrt_llm._torch.visual_gen.inspection.report import largest_num_frames
from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.branch_cache import TextKeys
from tensorrt_llm._torch.visual_gen.models.cosmos3.towers import (
    GenerationLayer,
    ResidualStream,
    UnderstandingTower,
)
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization.mode import QuantAlgo
from tests.support.fp8_oracle import policy
from tests.support.live_bytes import LiveBytes

pytestmark = pytest.mark.cosmos3

SUPER = {"hidden_size": 5120, "num_attention_heads": 64, "intermediate_size": 25600}
FP8 = QuantConfig(quant_algo=QuantAlgo.FP8)
STEP_POLICY = {"runtime": {"diffusion_step_policy": policy(3, 3)}}
# Wan 2.2's (cosmos3.md B.2).
VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}


class NoAttention:
    """An attention backend whose workspace is not counted, as in the estimate."""

    quantizes = False

    def forward(self, q, k, v, *, lengths):
        return torch.empty_like(q)


def model_config(sizes, quant_config, recipe=None):
    pretrained = SimpleNamespace(**sizes, dtype="bfloat16", quantization_config=recipe)
    return DiffusionModelConfig(pretrained_config=pretrained, quant_config=quant_config)


@pytest.mark.parametrize("sizes", [{}, SUPER], ids=["nano", "super"])
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("grid", [(48, 23, 40), (1, 32, 32)], ids=["video", "image"])
@pytest.mark.parametrize("mode", ["bf16", "w8a8", "w8a16"])
def test_a_generation_layer_holds_what_the_formula_says(sizes, branches, grid, mode, monkeypatch):
    quant_config = QuantConfig() if mode == "bf16" else FP8
    config = model_config(sizes, quant_config, STEP_POLICY if mode == "w8a16" else None)
    arch = Cosmos3Architecture.from_pretrained_config(config.pretrained_config)
    # On meta there is no scale to confirm; the checkpoints' groups do share theirs.
    monkeypatch.setattr(quant_group, "accept_fp8", lambda members: mode == "w8a8")
    tokens = grid[0] * grid[1] * grid[2]
    with torch.device("meta"), torch.no_grad():
        layer = GenerationLayer(arch, config, 0)
        layer.attention.backend = NoAttention()
        if mode == "w8a16":
            for linear in (m for m in layer.modules() if isinstance(m, Linear)):
                linear.quant_method = W8A16FP8LinearMethod()
        hidden = torch.empty(branches, tokens, arch.hidden_size, dtype=torch.bfloat16)
        delta = torch.empty_like(hidden)
        tables = torch.empty(2, branches, tokens, arch.head_dim, dtype=torch.bfloat16)
        rows = (branches, 300, arch.num_key_value_heads, arch.head_dim)
        keys = torch.empty(rows, dtype=torch.bfloat16)
        lengths = KeyLengths(torch.empty(branches, dtype=torch.int32), (300,) * branches)
        text = TextKeys((keys,), (keys,), lengths)
        given = [hidden, delta, tables]
        del hidden, delta
        with LiveBytes(known=[*layer.parameters(), keys, lengths.device]) as live:
            stream = ResidualStream(None)
            stream.put(*(torch.empty_like(given.pop(0)) for _ in range(2)))
            layer(stream, *tables, text, lengths.plus(tokens))
    counted = live.peak + tables.numel() * tables.element_size()
    if mode == "w8a16":
        counted += 2 * arch.hidden_size * arch.intermediate_size  # the op's scratch, not on meta
    assert layer_bytes(config, arch, branches, tokens) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("frames", [1, 9, 45])
def test_the_vae_holds_what_the_formula_says_while_it_decodes(frames, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, *rest, **kw: q.clone())
    with torch.device("meta"), torch.no_grad():
        vae = diffusers.AutoencoderKLWan(**VAE).to(torch.bfloat16)
        latents = torch.empty(1, 48, (frames - 1) // 4 + 1, 20, 12, dtype=torch.bfloat16)
        with LiveBytes(known=vae.parameters()) as live:
            video = vae.decode(latents, return_dict=False)[0]
    assert video.shape == (1, 3, frames, 320, 192)
    assert decode_bytes(320, 192, frames, 256) == pytest.approx(live.peak, rel=0.05)


def test_a_long_video_needs_most_when_it_becomes_uint8():
    from tensorrt_llm._torch.visual_gen.models.cosmos3.denoising import to_uint8

    with LiveBytes() as live:
        decoded = torch.zeros(1, 3, 401, 16, 16, dtype=torch.bfloat16)
        to_uint8(decoded)
    assert decode_bytes(16, 16, 401, 1) == pytest.approx(live.peak, rel=0.05)


def test_the_text_cache_is_every_layers_keys_and_values_of_every_branch():
    config = model_config(
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "vocab_size": 10,
            "rope_axes_dim": [4, 2, 2],
        },
        QuantConfig(),
    )
    arch = Cosmos3Architecture.from_pretrained_config(config.pretrained_config)
    keys, values = UnderstandingTower(arch, config)(torch.zeros(1, 7, dtype=torch.int64))
    stored = sum(t.numel() * t.element_size() for t in (*keys, *values))
    assert text_cache_bytes(config, arch, 2, 7) == 2 * stored


def request(**changes):
    """The fields of a resolved request that memory depends on: 720p video, guided."""
    values = {"height": 720, "width": 1280, "num_frames": 189, "max_sequence_length": 4096}
    values |= {"is_guided": True, "guidance_interval": None} | changes
    shape = ((values["num_frames"] - 1) // 4 + 1, values["height"] // 16, values["width"] // 16)
    kind = dataclasses.make_dataclass("Request", [*values, "latent_shape"], frozen=True)
    return kind(**values, latent_shape=shape)


def test_the_larger_phase_counts_and_one_branch_needs_less_than_two():
    config, sizes = model_config({}, FP8), WeightSizes(10 * 2**30, 2**30, 2**29, 2, 256)
    two, one = (request_need(config, sizes, request(is_guided=g)) for g in (True, False))
    assert vision_tokens(Cosmos3Architecture(), request()) == 44_160  # performance.md
    assert two.total == 11 * 2**30 + 2**29 + max(two.denoising + two.text_cache, two.decoding)
    assert two.text_cache == 2 * one.text_cache
    # Two branches go through the MLP one by one at this size.
    assert 1.2 < two.denoising / one.denoising < 2
    image = request_need(config, sizes, request(num_frames=1, height=1024, width=1024))
    assert image.total < two.total


def test_a_vae_in_fp32_decodes_in_twice_the_memory():
    config = model_config({}, QuantConfig())
    bf16, fp32 = (request_need(config, WeightSizes(0, 0, 0, e, 256), request()) for e in (2, 4))
    assert fp32.decoding == 2 * bf16.decoding


def test_a_step_policy_that_the_callers_recipe_drops_needs_no_16_bit_step():
    arch, config = Cosmos3Architecture(), model_config({}, FP8, STEP_POLICY)
    with_policy = layer_bytes(config, arch, 2, 1024)
    config.quant_config_overridden = True
    assert layer_bytes(config, arch, 2, 1024) < with_policy
    assert layer_bytes(config, arch, 2, 1024) == layer_bytes(model_config({}, FP8), arch, 2, 1024)


IMAGE = {"num_frames": 1, "height": 1024, "width": 1024}
INTERVAL = IMAGE | {"guidance_interval": (400.0, 1000.0)}


def graphs_of(enable, backend, changes, recipe=STEP_POLICY):
    config = model_config({}, FP8 if recipe else QuantConfig(), recipe)
    config.attention = AttentionConfig(backend=backend)
    config.cuda_graph = CudaGraphConfig(enable=enable)
    return graph_bytes(config, Cosmos3Architecture(), request(**changes))


@pytest.mark.parametrize(
    "enable, backend, changes, captured",
    [
        (None, "FA3", IMAGE, True),
        (None, "FA3_FP8", IMAGE, True),
        (None, "VANILLA", IMAGE, False),
        (None, "FA3", {}, False),
        (True, "VANILLA", {}, True),
        (False, "FA3", IMAGE, False),
    ],
)
def test_graphs_count_where_a_step_is_captured(enable, backend, changes, captured):
    assert (graphs_of(enable, backend, changes) > 0) == captured


def test_graphs_keep_inputs_for_each_shape_and_one_pool_for_the_largest():
    arch, config = Cosmos3Architecture(), model_config({}, FP8, STEP_POLICY)
    tokens = 1024
    text = 2 * 36 * 4096 * 8 * 128 * 2
    inputs = tokens * (4096 + 2 * 128) * 2 + text + 4
    step = layer_bytes(config, arch, 2, tokens) - 2 * tokens * 2 * 128 * 2
    output = tokens * 4096 * 2
    found = graphs_of(None, "FA3", IMAGE)
    assert found == 2 * inputs + 1.5 * step + 2 * output
    # The steps without guidance have a shape of their own, in both modes.
    assert graphs_of(None, "FA3", INTERVAL) == found + inputs + 2 * output
    one = graphs_of(None, "FA3", IMAGE, recipe=None)
    step = layer_bytes(model_config({}, QuantConfig()), arch, 2, tokens) - 2 * tokens * 2 * 128 * 2
    assert one == 2 * inputs + 1.5 * step
    assert graphs_of(True, "FA3", IMAGE | {"is_guided": False}, None) < one


def test_graphs_come_on_top_of_either_phase():
    sizes, needs = WeightSizes(0, 0, 0, 2, 256), []
    for enable in (False, True):
        config = model_config({}, FP8)
        config.cuda_graph = CudaGraphConfig(enable=enable)
        needs.append(request_need(config, sizes, request()))
    assert needs[0].graphs == 0 < needs[1].graphs
    assert needs[1].total == needs[0].total + needs[1].graphs


def test_the_most_frames_that_fit_are_the_last_that_do():
    config, sizes = model_config({}, FP8), WeightSizes(0, 0, 0, 2, 256)

    def needed(frames):
        return request_need(config, sizes, request(num_frames=frames)).total

    def most(free):
        needs = {frames: needed(frames) for frames in range(1, 190, 4)}
        return largest_num_frames(needs.__getitem__, 189, free)

    assert most(needed(189)) == 189
    assert most(needed(189) - 1) == 185
    assert most(needed(93) + 1) == 93
    assert most(needed(1) - 1) == 0
