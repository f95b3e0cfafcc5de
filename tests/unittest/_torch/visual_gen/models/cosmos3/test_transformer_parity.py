# SPDX-License-Identifier: Apache-2.0
"""The transformer's velocities against diffusers 0.42.1 on the same weights."""

import pytest
import torch
from diffusers import Cosmos3OmniTransformer

from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer
from tests.support.diffusers_oracle import (
    pretrained_config,
    random_transformer,
    relative_error,
    use_fp32_swiglu,
    velocity,
)

pytestmark = pytest.mark.cosmos3

# (T, H, W) of the latents, text length, frame rate. Odd sizes are padded to whole patches; 24 fps
# alone would make the temporal modulation an identity.
CASES = [
    ((1, 4, 6), 5, 24.0),
    ((1, 5, 7), 33, 16.0),
    ((3, 4, 4), 30, 16.0),
    ((4, 5, 7), 9, 30.0),
    ((2, 6, 4), 120, None),
]


def ours_from(reference: Cosmos3OmniTransformer, dtype: torch.dtype) -> Cosmos3VFMTransformer:
    config = DiffusionModelConfig(pretrained_config=pretrained_config(reference, dtype))
    model = Cosmos3VFMTransformer(config)
    model.load_weights(reference.state_dict())
    model.post_load_weights()
    return model


@pytest.fixture(scope="module")
def fp32_pair():
    reference = random_transformer()
    return reference, ours_from(reference, torch.float32)


@pytest.fixture(scope="module")
def bf16_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16")
    random_transformer().save_pretrained(folder)
    return folder


def bf16_reference(folder) -> Cosmos3OmniTransformer:
    # Read back from a file: a model cast with .to() would round the rotary frequencies as well.
    return Cosmos3OmniTransformer.from_pretrained(folder, torch_dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def bf16_pair(bf16_folder):
    reference = use_fp32_swiglu(bf16_reference(bf16_folder))
    return reference, ours_from(reference, torch.bfloat16)


def inputs(shape: tuple[int, int, int], length: int, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, 48, *shape, generator=generator)
    sound = torch.randn(8, 7, generator=generator)
    ids = torch.randint(0, 320, (length,), generator=generator).tolist()
    return latents, sound, ids


def ours(model, latents, ids, timestep, fps=None, sound=None, clean=()):
    frames = latents.shape[2]
    mask = torch.ones(1, frames, dtype=torch.bool)
    mask[:, list(clean)] = False
    raw = torch.tensor([float(timestep)])
    return model(
        hidden_states=latents,
        timestep=raw / 1000,
        text_ids=torch.tensor([ids]),
        text_mask=torch.ones(1, len(ids), dtype=torch.int64),
        video_shape=tuple(latents.shape[2:]),
        raw_timestep=raw,
        fps=fps,
        noisy_frame_mask=mask if clean else None,
        audio_latents=None if sound is None else sound[None],
    )


@pytest.mark.parametrize(("shape", "length", "fps"), CASES)
def test_fp32_velocity_equals_diffusers(fp32_pair, shape, length, fps):
    reference, model = fp32_pair
    latents, _, ids = inputs(shape, length)
    expected, _ = velocity(reference, latents, ids, 700.0, fps)
    found = ours(model, latents, ids, 700.0, fps)
    error = relative_error(found.video, expected)
    assert error <= 5e-6, f"shape {shape}, text {length}, fps {fps}: {error:.2e}"


@pytest.mark.parametrize(("shape", "length", "fps"), CASES)
def test_fp32_velocity_with_sound_equals_diffusers(fp32_pair, shape, length, fps):
    reference, model = fp32_pair
    latents, sound, ids = inputs(shape, length)
    expected_video, expected_sound = velocity(reference, latents, ids, 341.0, fps, sound)
    found = ours(model, latents, ids, 341.0, fps, sound)
    assert relative_error(found.video, expected_video) <= 5e-6
    assert relative_error(found.audio[0], expected_sound) <= 5e-6


def test_fp32_velocity_with_clean_frames_equals_diffusers_and_is_zero_there(fp32_pair):
    reference, model = fp32_pair
    latents, _, ids = inputs((4, 5, 6), 12)
    expected, _ = velocity(reference, latents, ids, 500.0, 24.0, clean_frames=(0, 2))
    found = ours(model, latents, ids, 500.0, 24.0, clean=(0, 2)).video
    assert relative_error(found, expected) <= 5e-6
    assert not found[:, :, [0, 2]].any()


@pytest.mark.parametrize(("shape", "length", "fps"), CASES)
@pytest.mark.parametrize("with_sound", [False, True])
def test_bf16_velocity_is_bit_equal_to_diffusers(bf16_pair, shape, length, fps, with_sound):
    reference, model = bf16_pair
    latents, sound, ids = inputs(shape, length)
    sound = sound if with_sound else None
    expected, expected_sound = velocity(reference, latents, ids, 700.0, fps, sound)
    found = ours(model, latents, ids, 700.0, fps, sound)
    pairs = [(found.video, expected)] + ([(found.audio[0], expected_sound)] if with_sound else [])
    for ours_, theirs in pairs:
        assert ours_.dtype == theirs.dtype == torch.bfloat16
        assert torch.equal(
            ours_.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16)
        )


def test_bf16_velocity_is_close_to_diffusers_with_its_own_swiglu_rounding(bf16_folder, bf16_pair):
    _, model = bf16_pair
    reference = bf16_reference(bf16_folder)
    latents, _, ids = inputs((3, 4, 4), 30)
    expected, _ = velocity(reference, latents, ids, 700.0, 16.0)
    assert relative_error(ours(model, latents, ids, 700.0, 16.0).video, expected) <= 1e-2


def test_two_branches_of_different_length_equal_each_branch_alone(fp32_pair):
    _, model = fp32_pair
    latents, _, short = inputs((2, 4, 6), 7)
    _, _, long = inputs((2, 4, 6), 23, seed=2)
    ids = torch.tensor([short + [3] * (len(long) - len(short)), long])
    mask = torch.ones_like(ids)
    mask[0, len(short) :] = 0
    raw = torch.tensor([600.0, 600.0])
    both = model(
        torch.cat((latents, latents)), raw / 1000, ids, mask, (2, 4, 6), raw, fps=24.0
    ).video
    for row, tokens in enumerate((short, long)):
        alone = ours(model, latents, tokens, 600.0, 24.0).video
        assert relative_error(both[row : row + 1], alone) <= 1e-6


def test_understanding_tower_runs_once_for_a_branch_and_again_after_reset(fp32_pair, monkeypatch):
    _, model = fp32_pair
    model.reset_cache()
    encoded = []
    original = type(model.language_model).forward
    monkeypatch.setattr(
        type(model.language_model),
        "forward",
        lambda self, ids: encoded.append(tuple(ids[0].tolist())) or original(self, ids),
    )
    latents, _, cond = inputs((1, 4, 4), 6)
    _, _, uncond = inputs((1, 4, 4), 6, seed=2)
    both = torch.tensor([cond, uncond])
    mask = torch.ones_like(both)
    raw = torch.tensor([500.0, 500.0])

    def guided():
        model(torch.cat((latents, latents)), raw / 1000, both, mask, (1, 4, 4), raw)

    guided()
    guided()
    ours(model, latents, cond, 400.0)  # other tensors, known tokens
    assert encoded == [tuple(cond), tuple(uncond)]
    model.reset_cache()
    guided()
    assert len(encoded) == 4


def test_after_encode_text_a_step_neither_encodes_nor_reads_tokens(fp32_pair, monkeypatch):
    _, model = fp32_pair
    model.reset_cache()
    latents, _, ids = inputs((1, 4, 4), 6)
    text, mask, raw = torch.tensor([ids]), torch.ones(1, 6), torch.tensor([500.0])
    model.encode_text(text, mask)
    monkeypatch.setattr(
        type(model.language_model), "forward", lambda *_: pytest.fail("encoded in a step")
    )
    tolist = torch.Tensor.tolist

    def read(tensor):
        # The CPU's own kernels read the lengths, int32, where a GPU's do it on the device.
        return tolist(tensor) if tensor.dtype == torch.int32 else pytest.fail("read in a step")

    monkeypatch.setattr(torch.Tensor, "tolist", read)
    model(latents, raw / 1000, text, mask, (1, 4, 4), raw)


def test_a_text_tensor_changed_in_place_is_read_again(fp32_pair):
    _, model = fp32_pair
    latents, _, ids = inputs((1, 4, 4), 6)
    text, mask, raw = torch.tensor([ids]), torch.ones(1, 6), torch.tensor([500.0])
    before = model(latents, raw / 1000, text, mask, (1, 4, 4), raw).video
    text[0, 0] = (ids[0] + 1) % 320
    after = model(latents, raw / 1000, text, mask, (1, 4, 4), raw).video
    assert not torch.equal(before, after)


def test_last_understanding_layer_computes_keys_and_values_alone(fp32_pair):
    _, model = fp32_pair
    model.reset_cache()
    last = model.language_model.layers[-1]
    called = []
    handles = [
        module.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, module in last.named_modules()
        if name in {"self_attn.to_q", "self_attn.to_out.0", "mlp", "self_attn.to_k"}
    ]
    latents, _, ids = inputs((1, 4, 4), 6)
    ours(model, latents, ids, 500.0)
    for handle in handles:
        handle.remove()
    assert called == ["self_attn.to_k"]


@pytest.mark.parametrize("missing", ["timestep", "raw_timestep"])
def test_a_missing_timestep_is_refused(fp32_pair, missing):
    _, model = fp32_pair
    latents, _, ids = inputs((1, 4, 4), 6)
    call = {
        "hidden_states": latents,
        "timestep": torch.tensor([0.5]),
        "text_ids": torch.tensor([ids]),
        "text_mask": torch.ones(1, 6),
        "video_shape": (1, 4, 4),
        "raw_timestep": torch.tensor([500.0]),
    }
    with pytest.raises(ValueError, match="timestep and raw_timestep are required"):
        model(**(call | {missing: None}))


def test_latents_that_contradict_video_shape_or_text_are_refused(fp32_pair):
    _, model = fp32_pair
    latents, _, ids = inputs((1, 4, 4), 6)
    raw = torch.tensor([500.0])
    text, mask = torch.tensor([ids]), torch.ones(1, 6)
    with pytest.raises(ValueError, match="video_shape"):
        model(latents, raw / 1000, text, mask, (1, 4, 6), raw)
    with pytest.raises(ValueError, match="batch"):
        model(latents, raw / 1000, text.repeat(2, 1), mask.repeat(2, 1), (1, 4, 4), raw)
    with pytest.raises(ValueError, match="no token"):
        model(latents, raw / 1000, text, torch.zeros(1, 6), (1, 4, 4), raw)
    with pytest.raises(ValueError, match="one shape"):
        model(latents, raw / 1000, text, torch.ones(1, 5), (1, 4, 4), raw)
