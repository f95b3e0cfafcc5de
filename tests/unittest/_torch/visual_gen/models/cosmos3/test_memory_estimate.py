# SPDX-License-Identifier: Apache-2.0
"""The lower bound of a request's memory, and the capacity that it is held against."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKLWan

from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3 import memory_estimate, towers
from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import resolve_request
from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import LayerGraphs
from tensorrt_llm._torch.visual_gen.models.cosmos3.loop_inputs import Cosmos3Request
from tensorrt_llm._torch.visual_gen.models.cosmos3.memory_estimate import (
    check_fits,
    estimate_bytes,
    idle_capacity,
)
from tensorrt_llm.visual_gen.params import VisualGenParams
from tests.support.live_bytes import LiveBytes

GIB = 2**30
STEPS = Path(__file__).parents[6] / "benchmarks/results/step_nano_h200.json"
TRAITS = SimpleNamespace(
    family="nano",
    build="base",
    has_sound=False,
    default_use_system_prompt=False,
    requires_guardrails=False,
    video_negative_prompt="",
    fixed_sigmas=None,
)
# Sizes of the published VAE (cosmos3.md B.2).
NANO = SimpleNamespace(
    transformer=SimpleNamespace(
        arch=Cosmos3Architecture(),
        dtype=torch.bfloat16,
        model_config=DiffusionModelConfig(pretrained_config=SimpleNamespace()),
        graphs=LayerGraphs(None, any_length=True),
        captures=lambda rows: False,
    ),
    vae=SimpleNamespace(
        config=SimpleNamespace(
            base_dim=160, decoder_base_dim=256, dim_mult=[1, 2, 4, 4], patch_size=2
        ),
        dtype=torch.bfloat16,
    ),
    device=torch.device("cpu"),
)


def values(**params):
    return resolve_request("a", VisualGenParams(**params), TRAITS)


def request(resolved):
    return Cosmos3Request(resolved, (1, 2, 3), (4,))


@pytest.mark.parametrize(("case", "height", "width"), [("480p", 480, 832), ("720p", 720, 1280)])
def test_the_bound_of_a_step_lies_below_what_was_measured_and_not_far(case, height, width):
    rows = json.loads(STEPS.read_text())["rows"]
    step = next(
        row
        for row in rows
        if row["section"] == "step" and row["case"] == case and not row["graphs"]
    )
    arch = NANO.transformer.arch
    keys = 2 * arch.num_hidden_layers * arch.num_key_value_heads * arch.head_dim * 2
    measured = step["peak_gib"] - step["weights_gib"] - keys * sum(step["text_tokens"]) / GIB
    bound = memory_estimate._denoise_bytes(values(height=height, width=width), NANO) / GIB
    assert 0.5 * measured < bound < measured


def test_the_bound_of_a_large_step_counts_the_mlp_of_one_part(monkeypatch):
    video = values(height=720, width=1280)
    parts = memory_estimate._denoise_bytes(video, NANO)
    monkeypatch.setattr(towers, "MAX_MLP_ROWS", 10**9)
    rows, arch = 2 * 48 * 23 * 40, NANO.transformer.arch
    # Half of gate, up and product are gone, and the parts' outputs have come.
    saved = rows // 2 * arch.intermediate_size * 5 - rows * arch.hidden_size * 2
    assert memory_estimate._denoise_bytes(video, NANO) - parts == saved


def test_the_bound_grows_with_the_request_and_shrinks_without_guidance():
    small = values(height=480, width=832, num_frames=49)
    for larger in (
        replace(small, num_frames=97),
        replace(small, height=720),
        replace(small, width=1280),
    ):
        assert estimate_bytes(request(larger), NANO) > estimate_bytes(request(small), NANO)
    unguided = replace(small, guidance_scale=1.0)
    steps = [memory_estimate._denoise_bytes(v, NANO) for v in (small, unguided)]
    assert steps[1] < steps[0] <= 2 * steps[1]


@pytest.mark.parametrize(("height", "width", "frames"), [(480, 832, 9), (720, 1280, 17)])
def test_the_bound_of_decoding_lies_below_what_the_vae_takes_and_not_far(height, width, frames):
    config = vars(NANO.vae.config) | {
        "z_dim": 48,
        "in_channels": 12,
        "out_channels": 12,
        "is_residual": True,
        "scale_factor_spatial": 16,
        "latents_mean": [0.0] * 48,
        "latents_std": [1.0] * 48,
    }
    with torch.device("meta"):
        vae = AutoencoderKLWan(**config).eval()
    vae = vae.bfloat16()
    latents = torch.zeros(
        1, 48, frames // 4 + 1, height // 16, width // 16, dtype=torch.bfloat16, device="meta"
    )
    with torch.no_grad(), LiveBytes([*vae.parameters(), *vae.buffers()]) as live:
        pixels = vae.decode(latents, return_dict=False)[0]
    assert pixels.shape == (1, 3, frames, height, width)
    clip = values(height=height, width=width, num_frames=frames)
    bound = memory_estimate._decode_bytes(clip, NANO, height, width)
    assert 0.7 * live.peak < bound < live.peak


def loud(clip):
    """A clip with sound, and the sizes with the published sound tokenizer (cosmos3.md B.3)."""
    config = SimpleNamespace(
        vocoder_input_dim=64, hop_size=1920, sampling_rate=48000, dec_dim=320, dec_out_channels=2
    )
    tokenizer = SimpleNamespace(config=config, dtype=torch.bfloat16)
    transformer = SimpleNamespace(**vars(NANO.transformer))
    transformer.arch = Cosmos3Architecture(sound_gen=True, sound_dim=64)
    changes = {"transformer": transformer, "sound_tokenizer": tokenizer}
    return replace(clip, enable_audio=True), SimpleNamespace(**vars(NANO) | changes)


def test_a_long_clip_needs_what_its_sound_takes_to_decode():
    clip, parts = loud(replace(values(height=64, width=64, num_frames=121), frame_rate=121 / 120))
    waveform = 120 * 48000 * 2 * 4
    assert estimate_bytes(request(clip), parts) > waveform + 10 * GIB
    silent = replace(clip, enable_audio=False)
    assert estimate_bytes(request(silent), parts) < GIB


def test_the_remedy_leaves_the_sound_out_only_where_that_is_enough():
    clip, parts = loud(replace(values(height=64, width=64, num_frames=121), frame_rate=121 / 120))
    silent = estimate_bytes(request(replace(clip, enable_audio=False)), parts)
    way_out = "raise frame_rate or leave enable_audio out"
    with pytest.raises(MemoryError, match=way_out):
        check_fits(request(clip), parts, silent)
    with pytest.raises(MemoryError) as error:
        check_fits(request(clip), parts, silent - 1)
    assert way_out not in str(error.value)


def test_a_clip_that_decodes_in_tiles_alone_is_not_refused():
    clip = values(height=1280, width=1280, num_frames=5, guidance_scale=1.0)
    at_once = memory_estimate._decode_bytes(clip, NANO, 1280, 1280)
    assert estimate_bytes(request(clip), NANO) < 0.5 * at_once


def test_a_request_over_the_capacity_is_refused_with_both_numbers():
    clip = request(values(height=720, width=1280))
    need = estimate_bytes(clip, NANO)
    check_fits(clip, NANO, need)
    words = rf"height 720, width 1280, num_frames 189.*at most {(need - 1) / GIB:.2f} GiB"
    with pytest.raises(MemoryError, match=f"{words}.*at least {need / GIB:.2f} GiB") as caught:
        check_fits(clip, NANO, need - 1)
    assert "graph" not in str(caught.value)


def test_the_capacity_of_a_host_is_what_is_available_within_its_container(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_estimate, "_CGROUP", tmp_path)
    free = idle_capacity(torch.device("cpu"))
    assert 0 < free < math.inf
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert idle_capacity(torch.device("cpu")) == pytest.approx(free, rel=0.5)
    (tmp_path / "memory.max").write_text("5000\n")
    assert idle_capacity(torch.device("cpu")) == 4000


def test_pages_of_files_that_a_container_can_give_up_are_not_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_estimate, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4500\n")
    (tmp_path / "memory.stat").write_text("anon 500\nactive_file 1000\ninactive_file 3000\n")
    assert idle_capacity(torch.device("cpu")) == 3500


@pytest.mark.gpu
def test_the_capacity_of_a_gpu_counts_what_the_allocator_keeps():
    device = torch.device("cuda")
    before = idle_capacity(device)
    held = torch.empty(2**28, dtype=torch.uint8, device=device)
    assert before - idle_capacity(device) == pytest.approx(2**28, rel=0.1)
    del held
    assert idle_capacity(device) == pytest.approx(before, rel=0.01)
