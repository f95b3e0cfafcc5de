# SPDX-License-Identifier: Apache-2.0
"""The random components behave: diffusers loads them, and signals keep a sensible size."""

import pytest
import torch
from diffusers import AutoencoderKLWan, Cosmos3OmniPipeline

from tensorrt_llm.visual_gen import tiny_fp8
from tensorrt_llm.visual_gen.tiny_components import quiet_libraries

pytestmark = pytest.mark.cosmos3


@pytest.fixture(scope="module")
def bf16_pipeline(tiny_bf16_checkpoint):
    with quiet_libraries():
        pipeline = Cosmos3OmniPipeline.from_pretrained(tiny_bf16_checkpoint, dtype=torch.bfloat16)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_the_pipeline_generates_an_image_that_depends_on_the_prompt(bf16_pipeline):
    def generate(prompt, output_type):
        return bf16_pipeline(
            prompt=prompt,
            num_frames=1,
            height=64,
            width=64,
            num_inference_steps=2,
            guidance_scale=6.0,
            generator=torch.Generator().manual_seed(0),
            output_type=output_type,
        ).video

    picture = torch.as_tensor(generate("A red tram in the rain", "pt"))
    assert picture.shape == (1, 3, 64, 64)
    assert picture.std() > 0.05
    saturated = ((picture == 0) | (picture == 1)).float().mean()
    assert saturated < 0.2
    one = generate("A red tram in the rain", "latent")
    two = generate("A robot pours water into a glass", "latent")
    assert (one - two).norm() > 0.1 * one.norm()


def test_a_forward_gives_velocities_of_order_one_and_no_degenerate_attention(
    bf16_pipeline, monkeypatch
):
    import diffusers.models.transformers.transformer_cosmos3 as module

    peaks, velocities = [], []
    attend = module.dispatch_attention_fn

    def watch(query, key, value, *, is_causal, **kwargs):
        if not is_causal:
            key_heads = key.float().transpose(1, 2).repeat_interleave(2, dim=1)
            logits = query.float().transpose(1, 2) @ key_heads.transpose(-1, -2)
            peaks.append((logits * query.shape[-1] ** -0.5).softmax(-1).amax(-1).mean().item())
        return attend(query, key, value, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(module, "dispatch_attention_fn", watch)
    hook = bf16_pipeline.transformer.register_forward_hook(
        lambda _module, _args, output: velocities.append(output[0][0].float())
    )
    try:
        tiny_fp8.run_calibration(bf16_pipeline)
    finally:
        hook.remove()
    assert len(velocities) == 6  # 3 steps, 2 branches
    assert all(0.3 < velocity.std() < 3.0 for velocity in velocities)
    # Uniform attention over some 70 keys would peak at 0.014, a hard one at 1.
    assert all(0.05 < peak < 0.6 for peak in peaks), peaks


def test_the_vae_codes_a_clip_and_has_latent_statistics_worth_applying(tiny_bf16_checkpoint):
    with quiet_libraries():
        vae = AutoencoderKLWan.from_pretrained(tiny_bf16_checkpoint / "vae", dtype=torch.bfloat16)
    assert len(set(vae.config.latents_mean)) > 40 and len(set(vae.config.latents_std)) > 40
    noise = torch.randn(1, 48, 5, 12, 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        clip = vae.decode(noise.bfloat16()).sample
        latents = vae.encode(clip).latent_dist.mode()
    assert clip.shape == (1, 3, 17, 192, 320)
    assert 0.2 < clip.float().std() < 1.0
    assert latents.shape == noise.shape
    assert 0.1 < latents.float().std() < 3.0


def test_the_sound_decoder_stays_inside_the_waveform_range(bf16_pipeline):
    noise = torch.randn(1, 8, 10, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wave = bf16_pipeline.sound_tokenizer.decode(noise.bfloat16())
    assert wave.shape == (1, 2, 19200)
    assert 0.01 < wave.float().std() < 0.5
    assert (wave.abs() >= 1.0).float().mean() < 0.01
