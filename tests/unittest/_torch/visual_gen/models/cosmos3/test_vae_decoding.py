# SPDX-License-Identifier: Apache-2.0
"""Decoding at once or in tiles: the choice, its memory, and that nothing of it stays behind."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKLWan

from tensorrt_llm._torch.visual_gen.models.cosmos3 import pipeline_cosmos3
from tensorrt_llm._torch.visual_gen.models.cosmos3.vae_decoding import (
    TILES,
    Tile,
    choose_tile,
    decode_bytes,
    tiled,
    tiled_decode_bytes,
)
from tensorrt_llm.visual_gen.params import VisualGenParams
from tests.support.diffusers_oracle import relative_error
from tests.support.live_bytes import LiveBytes

GIB = 2**30
PUBLISHED = SimpleNamespace(base_dim=160, decoder_base_dim=256, dim_mult=[1, 2, 4, 4], patch_size=2)
VAE = SimpleNamespace(config=PUBLISHED, dtype=torch.bfloat16)


def full_size_vae():
    with torch.device("meta"):
        vae = AutoencoderKLWan(
            **vars(PUBLISHED),
            z_dim=48,
            in_channels=12,
            out_channels=12,
            is_residual=True,
            scale_factor_spatial=16,
            temperal_downsample=[False, True, True],
            num_res_blocks=2,
            latents_mean=[0.0] * 48,
            latents_std=[1.0] * 48,
        )
    return vae.bfloat16().eval()


@pytest.mark.parametrize("size", [(720, 1280, 189), (720, 1280, 1), (480, 832, 189)])
def test_it_decodes_at_once_where_that_fits(size):
    need = decode_bytes(*size, 256)
    assert choose_tile(VAE, *size, need / 0.89) is None
    assert choose_tile(VAE, *size, float("inf")) is None


def test_it_takes_the_largest_tile_that_fits_and_the_smallest_where_none_does():
    size = (720, 1280, 189)
    needs = [tiled_decode_bytes(*size, 256, tile) for tile in TILES]
    assert decode_bytes(*size, 256) > needs[0] > needs[1]
    assert choose_tile(VAE, *size, needs[0] / 0.89) == TILES[0] == Tile(512, 384)
    assert choose_tile(VAE, *size, needs[1] / 0.89) == TILES[1] == Tile(256, 192)
    assert choose_tile(VAE, *size, 1) == TILES[-1]


@pytest.mark.parametrize("size", [(64, 64, 1), (256, 256, 9)])
def test_what_no_tile_is_smaller_than_is_decoded_at_once(size):
    assert choose_tile(VAE, *size, 1) is None


def test_a_picture_between_two_tiles_takes_the_smaller():
    assert choose_tile(VAE, 320, 320, 17, 1) == TILES[1]


def test_an_fp32_vae_needs_twice_as_much():
    size = (720, 1280, 17)
    capacity = decode_bytes(*size, 256) / 0.89
    assert choose_tile(VAE, *size, capacity) is None
    fp32 = SimpleNamespace(config=PUBLISHED, dtype=torch.float32)
    assert choose_tile(fp32, *size, capacity) is not None
    assert choose_tile(fp32, *size, 2 * capacity) is None


@pytest.mark.parametrize("tile", TILES)
def test_decoding_in_tiles_takes_what_the_formula_says(tile):
    height, width, frames = 720, 1280, 17
    vae = full_size_vae()
    latents = torch.zeros(1, 48, 5, height // 16, width // 16, dtype=torch.bfloat16, device="meta")
    with torch.no_grad(), LiveBytes([*vae.parameters(), *vae.buffers()]) as live, tiled(vae, tile):
        pixels = vae.decode(latents, return_dict=False)[0]
    assert pixels.shape == (1, 3, frames, height, width)
    # An upper bound: what is refused or tiled too early costs seams, too late the request.
    assert 0.65 * tiled_decode_bytes(height, width, frames, 256, tile) < live.peak
    assert live.peak < 1.05 * tiled_decode_bytes(height, width, frames, 256, tile)


def test_the_choice_is_told_with_both_numbers(caplog):
    with caplog.at_level("WARNING", logger="tensorrt_llm"):
        choose_tile(VAE, 720, 1280, 189, 8 * GIB)
    (message,) = [r.getMessage() for r in caplog.records]
    assert "1280x720" in message and "tiles of" in message and "8.0 are free" in message


@pytest.mark.parametrize("fails", [False, True])
def test_the_vae_is_left_as_it_was(tiny_vae, fails):
    latents = torch.randn(1, 48, 1, 20, 20)
    before = tiny_vae.decode(latents, return_dict=False)[0]
    try:
        with tiled(tiny_vae, TILES[1]):
            assert tiny_vae.use_tiling
            if fails:
                raise RuntimeError("out of memory")
    except RuntimeError:
        assert fails
    assert not tiny_vae.use_tiling
    assert torch.equal(tiny_vae.decode(latents, return_dict=False)[0], before)


@pytest.fixture
def tiny_vae(fp32_pipeline):
    return fp32_pipeline.components.vae


@torch.no_grad()
def test_tiles_change_the_pixels_and_keep_the_picture(tiny_vae):
    latents = torch.randn(1, 48, 2, 20, 20, generator=torch.Generator().manual_seed(0))
    at_once = tiny_vae.decode(latents, return_dict=False)[0]
    with tiled(tiny_vae, TILES[1]):
        in_tiles = tiny_vae.decode(latents, return_dict=False)[0]
    assert in_tiles.shape == at_once.shape == (1, 3, 5, 320, 320)
    assert not torch.equal(in_tiles, at_once)
    # Attention sees a tile instead of the picture; on random weights that counts for much.
    assert relative_error(in_tiles, at_once) < 0.5
    assert torch.corrcoef(torch.stack((in_tiles.flatten(), at_once.flatten())))[0, 1] > 0.9


@pytest.mark.parametrize("capacity, tile", [(float("inf"), None), (1, TILES[-1])])
def test_a_request_reports_how_it_was_decoded(fp32_pipeline, monkeypatch, capacity, tile):
    monkeypatch.setattr(pipeline_cosmos3, "idle_capacity", lambda device: capacity)
    params = VisualGenParams(
        height=272, width=272, num_frames=1, num_inference_steps=1, seed=0, guidance_scale=1.0
    )
    output = fp32_pipeline.generate(fp32_pipeline.prepare_request("a", params))
    expected = None if tile is None else {"size": tile.size, "stride": tile.stride}
    assert output.metadata["decoding_tile"] == expected
    assert output.image.shape == (272, 272, 3)
    assert not fp32_pipeline.components.vae.use_tiling
