# SPDX-License-Identifier: Apache-2.0
"""Given frames, sound and guardrails in the loop, on a transformer that records its calls."""

import numpy as np
import pytest
import torch

from tensorrt_llm._torch.visual_gen.models.cosmos3.conditioning import (
    encode_frames,
    fit_frames,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.guardrails import MissingGuardrails
from tensorrt_llm.visual_gen.media_refs import MediaPolicy
from tensorrt_llm.visual_gen.output import RequestBlockedError
from tensorrt_llm.visual_gen.params import ParameterError
from tests.support.fake_pipeline import (
    CHANNELS,
    SOUND_CHANNELS,
    fake_pipeline,
    params,
)

CPU = torch.device("cpu")


@pytest.fixture
def pipeline():
    return fake_pipeline()


def pictures(count: int, height: int = 40, width: int = 60) -> np.ndarray:
    """Frames that differ, from each other and inside."""
    return np.random.default_rng(7).integers(0, 256, (count, height, width, 3), np.uint8)


def image_request(pipeline, **values):
    return pipeline.prepare_request("A robot", params(image_reference=pictures(1)[0], **values))


def video_request(pipeline, count=12, **extra):
    values = params(video_reference=pictures(count), num_frames=17, extra_params=extra)
    return pipeline.prepare_request("A robot", values)


def kept_frames(call) -> list[int]:
    """Latent frames that a call marks as given, the same in every branch."""
    mask = call["noisy_frame_mask"]
    assert mask.dtype == torch.bool and len(mask) == len(call["hidden_states"])
    assert torch.equal(mask, mask[:1].expand_as(mask))
    return (~mask[0]).nonzero().flatten().tolist()


def test_from_text_alone_no_frame_is_given_and_there_is_no_sound(pipeline):
    output = pipeline.generate(pipeline.prepare_request("A robot", params()))
    assert {call["noisy_frame_mask"] for call in pipeline.transformer.calls} == {None}
    assert {call["audio_latents"] for call in pipeline.transformer.calls} == {None}
    assert output.audio is None and output.audio_sample_rate is None
    assert output.metadata["reference"] is None and pipeline.components.vae.encoded == []


def test_the_picture_is_frame_0_before_and_after_every_step_bit_for_bit(pipeline):
    request = image_request(pipeline)
    expected = encode_frames(pipeline.components.vae, request.frames, CPU)
    states = []
    done = pipeline.denoise(request, on_latents=lambda i, x: states.append(x))
    assert done.latents.shape == (1, CHANNELS, 3, 2, 3) and len(states) == 8
    for state in (*states, done.latents):
        assert torch.equal(state[:, :, :1].view(torch.int32), expected.view(torch.int32))
    for call in pipeline.transformer.calls:
        assert kept_frames(call) == [0]
        assert torch.equal(call["hidden_states"][:1, :, :1], expected.bfloat16())
    assert len({state[:, :, 1:].sum().item() for state in states}) == 8


def test_given_frames_survive_a_scheduler_that_moves_them(pipeline, monkeypatch):
    """Zero velocity alone would leave them to the solver's rounding."""
    new = pipeline.sampling.new_scheduler

    def moving(self, *args):
        scheduler = new(*args)
        step = scheduler.step

        def move(*values, **options):
            (latents,) = step(*values, **options)
            return (latents + 0.25,)

        scheduler.step = move
        return scheduler

    monkeypatch.setattr(type(pipeline.sampling), "new_scheduler", moving)
    request = image_request(pipeline)
    expected = encode_frames(pipeline.components.vae, request.frames, CPU)
    done = pipeline.denoise(request)
    assert torch.equal(done.latents[:, :, :1], expected)
    for call in pipeline.transformer.calls:
        assert torch.equal(call["hidden_states"][:1, :, :1], expected.bfloat16())


def test_noise_is_that_of_the_seed_beside_the_given_frames(pipeline):
    pipeline.denoise(image_request(pipeline))
    noise = torch.randn((1, CHANNELS, 3, 2, 3), generator=torch.Generator().manual_seed(1))
    first = pipeline.transformer.calls[0]["hidden_states"][:1]
    assert torch.equal(first[:, :, 1:], noise[:, :, 1:].bfloat16())


def test_of_a_picture_one_frame_is_encoded(pipeline):
    pipeline.denoise(image_request(pipeline))
    (video,) = pipeline.components.vae.encoded
    assert video.shape == (1, 3, 1, 32, 48)


@pytest.mark.parametrize(
    ("extra", "frames", "kept"),
    [
        ({}, range(5), [0, 1]),
        ({"condition_video_latent_indexes": [0]}, range(1), [0]),
        ({"condition_video_latent_indexes": [2]}, range(9), [2]),
        ({"condition_video_latent_indexes": [2, 0]}, range(9), [0, 2]),
        ({"condition_video_keep": "last"}, range(7, 12), [0, 1]),
        (
            {"condition_video_keep": "last", "condition_video_latent_indexes": [0]},
            [11],
            [0],
        ),
        # Every latent frame given: nothing is left to generate, which diffusers accepts too.
        ({"condition_video_latent_indexes": [0, 1, 2, 3, 4]}, [*range(12), *[11] * 5], [*range(5)]),
        (
            {"condition_video_keep": "last", "condition_video_latent_indexes": [4]},
            [*range(12), *[11] * 5],
            [4],
        ),
    ],
)
def test_of_a_clip_the_frames_of_the_given_latent_frames_are_encoded(pipeline, extra, frames, kept):
    """A shorter clip goes on with its last frame, at whichever end it is kept."""
    request = video_request(pipeline, **extra)
    done = pipeline.denoise(request)
    (video,) = pipeline.components.vae.encoded
    clip = torch.from_numpy(pictures(12))
    assert video.shape == (1, 3, len(frames), 32, 48)
    assert torch.equal(request.frames, fit_frames(clip, 32, 48)[[*frames]])
    assert all(kept_frames(call) == kept for call in pipeline.transformer.calls)
    encoded = encode_frames(pipeline.components.vae, request.frames, CPU)
    assert torch.equal(done.latents[:, :, kept], encoded[:, :, kept])


def test_the_reference_is_reported(pipeline):
    output = pipeline.generate(video_request(pipeline, count=3))
    reference = output.metadata["reference"]
    assert (reference["width"], reference["height"], reference["num_frames"]) == (60, 40, 3)
    assert reference["frames_used"] == 3 and reference["frame_rate"] is None
    assert output.metadata["request"]["task"] == "video_to_video"


def test_a_reference_is_read_before_the_request_is_queued_and_may_change_after(pipeline):
    picture = pictures(1)[0]
    request = pipeline.prepare_request("A robot", params(image_reference=picture))
    before = pipeline.denoise(request).latents
    picture[:] = 0
    assert torch.equal(pipeline.denoise(request).latents, before)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"image_reference": pictures(1)[0], "num_frames": 1}, "num_frames|image_reference"),
        (
            {"image_reference": pictures(1)[0], "video_reference": pictures(3)},
            "image_reference.*video_reference|one of the two",
        ),
        ({"video_reference": pictures(3), "num_frames": 1}, "num_frames|video_reference"),
        ({"condition_video_latent_indexes": [3]}, "condition_video_latent_indexes"),
        ({"condition_video_latent_indexes": []}, "condition_video_latent_indexes"),
        ({"condition_video_latent_indexes": [-1]}, "condition_video_latent_indexes"),
        ({"condition_video_latent_indexes": [True]}, "condition_video_latent_indexes"),
        ({"condition_video_keep": "middle"}, "condition_video_keep"),
    ],
)
def test_conditions_that_make_no_sense_are_refused_by_name_before_a_reference_is_read(
    pipeline, monkeypatch, values, named
):
    module = "tensorrt_llm._torch.visual_gen.models.cosmos3.conditioning"
    monkeypatch.setattr(f"{module}.load_image", lambda *a, **k: pytest.fail("read"))
    monkeypatch.setattr(f"{module}.load_video", lambda *a, **k: pytest.fail("read"))
    if "num_frames" not in values and "image_reference" not in values:
        values = {"video_reference": pictures(3), "extra_params": values}
    with pytest.raises(ValueError, match=named):
        pipeline.prepare_request("A robot", params(**values))


def test_the_pipelines_media_policy_limits_references(pipeline, tmp_path):
    pipeline.media_policy = MediaPolicy(allow_local_paths=False)
    values = params(image_reference=str(tmp_path / "picture.png"))
    with pytest.raises(ValueError, match="forbidden"):
        pipeline.prepare_request("A robot", values)


# Sound


def sound_request(pipeline, **values):
    return pipeline.prepare_request(
        "A robot", params(**values, extra_params={"enable_audio": True})
    )


def test_sound_is_denoised_beside_the_video_in_every_branch(pipeline):
    done = pipeline.denoise(sound_request(pipeline))
    # 9 frames at 24 a second are 18,000 samples: 9.4 latent frames of 1920.
    assert done.sound.shape == (1, SOUND_CHANNELS, 10) and done.sound.dtype == torch.float32
    for call in pipeline.transformer.calls:
        audio = call["audio_latents"]
        assert audio.shape == (2, SOUND_CHANNELS, 10) and audio.dtype == torch.bfloat16
        assert torch.equal(audio[0], audio[1])


def test_sound_noise_is_drawn_after_the_videos_and_leaves_it_alone(pipeline):
    generator = torch.Generator().manual_seed(1)
    video = torch.randn((1, CHANNELS, 3, 2, 3), generator=generator)
    sound = torch.randn((1, SOUND_CHANNELS, 10), generator=generator)
    pipeline.denoise(sound_request(pipeline))
    first = pipeline.transformer.calls[0]
    assert torch.equal(first["hidden_states"][:1], video.bfloat16())
    assert torch.equal(first["audio_latents"][:1], sound.bfloat16())


def test_sound_has_a_scheduler_of_its_own_on_the_same_schedule(pipeline):
    """The fake's velocities don't mix the two, so the video is that of a run without sound."""
    with_sound = pipeline.denoise(sound_request(pipeline))
    silent = pipeline.denoise(pipeline.prepare_request("A robot", params()))
    assert torch.equal(with_sound.latents, silent.latents)

    scheduler = pipeline._new_schedule(sound_request(pipeline).values)
    generator = torch.Generator().manual_seed(1)
    torch.randn((1, CHANNELS, 3, 2, 3), generator=generator)
    sound = torch.randn((1, SOUND_CHANNELS, 10), generator=generator)
    for timestep in scheduler.timesteps.tolist():
        conditional = (sound.bfloat16() / 2).float()
        negative = conditional + 0.125
        velocity = negative + 6.0 * (conditional - negative)
        (sound,) = scheduler.step(velocity, timestep, sound, return_dict=False)
    assert torch.equal(with_sound.sound, sound)


@pytest.mark.parametrize(
    ("frames", "rate", "samples"), [(9, 24.0, 18000), (5, 29.97, 8008), (17, 120.0, 6800)]
)
def test_sound_is_as_long_as_the_clip_and_clamped(pipeline, frames, rate, samples):
    output = pipeline.generate(sound_request(pipeline, num_frames=frames, frame_rate=rate))
    assert output.audio.shape == (2, samples) and output.audio.dtype == torch.float32
    assert output.audio.abs().max() == 1.0 and output.audio_sample_rate == 48000
    assert len(output.video) == frames and output.frame_rate == rate


def test_the_waveform_is_the_decoders_up_to_the_clips_end(pipeline):
    request = sound_request(pipeline)
    sound = pipeline.denoise(request).sound
    expected = pipeline.components.sound_tokenizer.decode(sound.bfloat16())[0].float()
    output = pipeline.generate(request)
    assert torch.equal(output.audio, expected[:, :18000].clamp(-1, 1))


def test_sound_that_is_broken_fails_the_request(pipeline, monkeypatch):
    call = type(pipeline.transformer).__call__

    def broken(self, **inputs):
        output = call(self, **inputs)
        output.audio = output.audio * float("nan")
        return output

    monkeypatch.setattr(type(pipeline.transformer), "__call__", broken)
    with pytest.raises(RuntimeError, match="no sound"):
        pipeline.generate(sound_request(pipeline))


def test_sound_is_refused_for_an_image_and_without_a_sound_tokenizer(pipeline):
    with pytest.raises(ValueError, match="enable_audio"):
        sound_request(pipeline, num_frames=1)
    silent = fake_pipeline(sound_tokenizer=None)
    assert silent.sound is None
    with pytest.raises(ValueError, match="enable_audio.*no sound"):
        sound_request(silent)
    assert silent.generate(silent.prepare_request("A robot", params())).audio is None


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("vocoder_input_dim", 9, "vocoder_input_dim"), ("dec_strides", [2, 4, 5, 6, 9], "hop_size")],
)
def test_a_sound_tokenizer_of_another_model_is_refused_at_load(
    pipeline, monkeypatch, field, value, named
):
    config = pipeline.components.sound_tokenizer.config
    monkeypatch.setattr(config, field, value)
    with pytest.raises(ValueError, match=named):
        fake_pipeline()


def test_sound_goes_with_a_picture_and_with_a_clip(pipeline):
    extra = {"enable_audio": True}
    for reference in ({"image_reference": pictures(1)[0]}, {"video_reference": pictures(5)}):
        request = pipeline.prepare_request("A robot", params(**reference, extra_params=extra))
        output = pipeline.generate(request)
        assert output.audio.shape == (2, 18000)
        call = pipeline.transformer.calls[-1]
        assert call["audio_latents"] is not None and call["noisy_frame_mask"] is not None


# Warm-up


def test_warm_up_runs_the_encoder_and_the_sound_decoder(pipeline):
    decoded, tokenizer = [], pipeline.components.sound_tokenizer
    decode = tokenizer.decode
    tokenizer.decode = lambda latents: decoded.append(latents.shape) or decode(latents)
    pipeline.warmup(resolutions=[(32, 48)], num_frames=[1, 9])
    assert [video.shape for video in pipeline.components.vae.encoded] == [(1, 3, 1, 32, 48)]
    assert decoded == [(1, SOUND_CHANNELS, 10)]
    kinds = {(c["video_shape"][0], c["audio_latents"] is None) for c in pipeline.transformer.calls}
    assert kinds == {(1, True), (3, False)}


# Guardrails


class Guardrails:
    """Records what it is asked, and refuses what it is told to refuse."""

    def __init__(self, blocked=()):
        self.asked, self.blocked = [], blocked

    def check_text(self, text):
        self.asked.append(text)
        if text in self.blocked:
            raise RequestBlockedError("unsafe")

    def check_frames(self, frames):
        assert frames.dtype == torch.uint8 and frames.ndim == 4
        self.asked.append(tuple(frames.shape))
        if "frames" in self.blocked:
            raise RequestBlockedError("unsafe")
        return 255 - frames


def guarded(blocked=()):
    guardrails = Guardrails(blocked)
    return fake_pipeline(guardrails=guardrails, requires_guardrails=True), guardrails


def test_texts_are_checked_before_any_work_and_frames_before_they_leave():
    pipeline, guardrails = guarded()
    plain = fake_pipeline()
    values = params(negative_prompt="rain")
    output = pipeline.generate(pipeline.prepare_request("A robot", values))
    assert guardrails.asked == ["A robot", "rain", (9, 32, 48, 3)]
    unchecked = plain.generate(plain.prepare_request("A robot", values))
    assert torch.equal(output.video, 255 - unchecked.video)


@pytest.mark.parametrize("text", ["A robot", "rain"])
def test_a_blocked_text_costs_no_work(text):
    pipeline, _ = guarded([text])
    request = pipeline.prepare_request("A robot", params(negative_prompt="rain"))
    with pytest.raises(RequestBlockedError):
        pipeline.generate(request)
    assert pipeline.transformer.calls == []


def test_blocked_frames_do_not_leave():
    pipeline, _ = guarded(["frames"])
    with pytest.raises(RequestBlockedError):
        pipeline.generate(pipeline.prepare_request("A robot", params()))


def test_a_request_may_go_without_guardrails_and_needs_them_loaded_otherwise():
    pipeline, guardrails = guarded(["A robot", "frames"])
    values = params(extra_params={"use_guardrails": False})
    assert pipeline.generate(pipeline.prepare_request("A robot", values)).video is not None
    assert guardrails.asked == []
    missing = fake_pipeline(
        guardrails=MissingGuardrails("nothing", "install it"), requires_guardrails=True
    )
    with pytest.raises(ParameterError, match="install it") as caught:
        missing.prepare_request("A robot", params())
    assert caught.value.names == ("extra_params.use_guardrails",)
    assert missing.generate(missing.prepare_request("A robot", values)).video is not None
