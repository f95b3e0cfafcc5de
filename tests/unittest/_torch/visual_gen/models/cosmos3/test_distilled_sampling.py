# SPDX-License-Identifier: Apache-2.0
"""The schedule and the solver of the 4-step builds: against the formula, and against diffusers."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from tensorrt_llm._torch.visual_gen.models.cosmos3.sampling import Cosmos3SamplingPolicy
from tests.support.cosmos3_requests import T_LIST

FIXED = {"t_list": list(T_LIST), "sample_type": "sde"}
DISTILLED = {"stochastic_sampling": True, "shift": 1.0, "num_train_timesteps": 1000}


def checkpoint_scheduler(fixed=FIXED, **changes) -> FlowMatchEulerDiscreteScheduler:
    config = DISTILLED | changes
    if fixed is not None:
        config["fixed_step_sampler_config"] = fixed
    return FlowMatchEulerDiscreteScheduler.from_config(config)


def ours(base=None):
    base = checkpoint_scheduler() if base is None else base
    policy = Cosmos3SamplingPolicy.from_scheduler(base)
    scheduler = policy.new_scheduler(base)
    policy.set_timesteps(scheduler, num_inference_steps=len(policy.fixed_sigmas))
    return policy, scheduler


def velocities(shape=(1, 4, 2, 3, 5)):
    """A velocity for each step, not drawn from the request's generator."""
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(shape, generator=generator) for _ in T_LIST]


def run(policy, scheduler, seed):
    """All samples of a run, the initial noise first."""
    generator = torch.Generator().manual_seed(seed)
    samples = [torch.randn((1, 4, 2, 3, 5), generator=generator)]
    kwargs = policy.scheduler_step_kwargs(generator)
    for timestep, velocity in zip(scheduler.timesteps.tolist(), velocities(), strict=True):
        step = scheduler.step(velocity, timestep, samples[-1], return_dict=False, **kwargs)
        samples.append(step[0])
    return torch.stack(samples)


def reference_run(seed):
    """The recipe of cosmos3.md E.3 in float64, with the noise in the documented order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((1, 4, 2, 3, 5), generator=generator)
    samples = [x]
    x = x.double()
    levels = [*T_LIST, 0.0]
    for i, velocity in enumerate(velocities()):
        clean = x - levels[i] * velocity.double()
        if levels[i + 1] == 0:
            x = clean
        else:
            noise = torch.randn(x.shape, generator=generator).double()
            x = (1 - levels[i + 1]) * clean + levels[i + 1] * noise
        samples.append(x)
    return torch.stack([sample.double() for sample in samples])


def test_the_schedule_is_the_checkpoints_noise_levels_unshifted():
    policy, scheduler = ours()
    assert policy.fixed_sigmas == T_LIST
    assert scheduler.sigmas.tolist() == pytest.approx([*T_LIST, 0.0], abs=1e-7)
    assert scheduler.timesteps.tolist() == pytest.approx([1000.0, 937.5, 833.33333, 625.0])
    assert scheduler.timesteps.dtype == torch.float32


@pytest.mark.parametrize("seed", [0, 7])
def test_a_run_is_the_formula(seed):
    torch.testing.assert_close(run(*ours(), seed).double(), reference_run(seed), rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 7])
def test_every_step_has_the_bits_of_diffusers(seed):
    reference = checkpoint_scheduler()
    reference.set_timesteps(sigmas=list(T_LIST))
    policy, scheduler = ours()
    assert torch.equal(scheduler.sigmas.view(torch.int32), reference.sigmas.view(torch.int32))
    assert torch.equal(scheduler.timesteps.view(torch.int32), reference.timesteps.view(torch.int32))
    found, expected = run(policy, scheduler, seed), run(policy, reference, seed)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_a_seed_gives_the_same_bits_again_and_another_seed_others():
    first, again, other = (run(*ours(), seed) for seed in (3, 3, 4))
    assert torch.equal(first.view(torch.int32), again.view(torch.int32))
    assert not torch.equal(first[-1], other[-1])


def test_the_noise_is_fresh_in_each_step_and_none_is_drawn_for_the_last():
    policy, scheduler = ours()
    generator = torch.Generator().manual_seed(0)
    kwargs = policy.scheduler_step_kwargs(generator)
    still = torch.zeros((1, 2))
    noises = [
        scheduler.step(still, timestep, still, return_dict=False, **kwargs)[0]
        for timestep in scheduler.timesteps.tolist()
    ]
    expected = torch.Generator().manual_seed(0)
    for noise, level in zip(noises, T_LIST[1:], strict=False):
        assert torch.allclose(noise, level * torch.randn((1, 2), generator=expected))
    assert noises[-1].count_nonzero() == 0
    assert torch.equal(generator.get_state(), expected.get_state())


def test_a_step_is_counted_and_returns_an_output_object_when_asked():
    policy, scheduler = ours()
    zeros = torch.zeros((1, 2))
    kwargs = policy.scheduler_step_kwargs(torch.Generator().manual_seed(0))
    assert scheduler.step(zeros, 1000.0, zeros, **kwargs).prev_sample.shape == (1, 2)
    assert scheduler.step_index == 1


def test_the_coefficients_stay_on_the_host():
    policy, scheduler = ours()
    sample = torch.zeros((1, 2, 1, 2, 2), device="meta")
    kwargs = policy.scheduler_step_kwargs(torch.Generator())
    for timestep in scheduler.timesteps.tolist():
        sample = scheduler.step(sample, timestep, sample, return_dict=False, **kwargs)[0]
    assert sample.device.type == "meta"


@pytest.mark.gpu
def test_steps_on_the_gpu_wait_for_nothing_and_agree_with_the_cpu():
    policy, scheduler = ours()
    kwargs = policy.scheduler_step_kwargs(torch.Generator().manual_seed(0))
    on_gpu = [velocity.cuda() for velocity in velocities()]
    sample = torch.zeros_like(on_gpu[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for timestep, velocity in zip(scheduler.timesteps.tolist(), on_gpu, strict=True):
            (sample,) = scheduler.step(velocity, timestep, sample, return_dict=False, **kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    policy, scheduler = ours()
    kwargs = policy.scheduler_step_kwargs(torch.Generator().manual_seed(0))
    expected = torch.zeros_like(velocities()[0])
    for timestep, velocity in zip(scheduler.timesteps.tolist(), velocities(), strict=True):
        (expected,) = scheduler.step(velocity, timestep, expected, return_dict=False, **kwargs)
    torch.testing.assert_close(sample.cpu(), expected, rtol=0, atol=1e-6)


def test_a_request_leaves_the_checkpoints_scheduler_alone():
    base = checkpoint_scheduler()
    before = {name: str(value) for name, value in vars(base).items()}
    run(*ours(base), 0)
    assert {name: str(value) for name, value in vars(base).items()} == before


def test_other_steps_and_a_flow_shift_are_refused():
    policy, scheduler = ours()
    with pytest.raises(ValueError, match="num_inference_steps"):
        policy.set_timesteps(scheduler, num_inference_steps=5)
    with pytest.raises(ValueError, match="flow_shift"):
        policy.new_scheduler(checkpoint_scheduler(), 5.0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fixed_step_sampler_config.t_list", {"fixed": None}),
        ("fixed_step_sampler_config.t_list", {"fixed": {"sample_type": "sde"}}),
        ("fixed_step_sampler_config.t_list", {"fixed": FIXED | {"t_list": []}}),
        ("fixed_step_sampler_config.t_list", {"fixed": FIXED | {"t_list": [0.5, 1.0]}}),
        ("fixed_step_sampler_config.t_list", {"fixed": FIXED | {"t_list": [1.0, 0.5, 0.5]}}),
        ("fixed_step_sampler_config.t_list", {"fixed": FIXED | {"t_list": [1.0, 0.0]}}),
        ("fixed_step_sampler_config.t_list", {"fixed": FIXED | {"t_list": [1.5, 0.5]}}),
        ("fixed_step_sampler_config.t_list", {"fixed": FIXED | {"t_list": [float("nan")]}}),
        ("fixed_step_sampler_config.t_list", {"fixed": FIXED | {"t_list": ["1.0"]}}),
        ("fixed_step_sampler_config.t_list", {"fixed": FIXED | {"t_list": "1.0"}}),
        ("fixed_step_sampler_config.t_list", {"fixed": FIXED | {"t_list": [True]}}),
        ("fixed_step_sampler_config.t_list", {"fixed": [1.0, 0.5]}),
        ("fixed_step_sampler_config.sample_type", {"fixed": {"t_list": [1.0]}}),
        ("fixed_step_sampler_config.sample_type", {"fixed": FIXED | {"sample_type": "ode"}}),
        ("stochastic_sampling", {"stochastic_sampling": False}),
        ("shift", {"shift": 5.0}),
        ("shift_terminal", {"shift_terminal": 0.1}),
        ("use_dynamic_shifting", {"use_dynamic_shifting": True}),
        ("use_karras_sigmas", {"use_karras_sigmas": True}),
        ("invert_sigmas", {"invert_sigmas": True}),
    ],
)
def test_a_scheduler_that_is_not_a_distilled_builds_is_refused_by_its_field(name, changes):
    with pytest.raises(ValueError, match=f"scheduler_config.json, {name}"):
        Cosmos3SamplingPolicy.from_scheduler(checkpoint_scheduler(**changes))


def test_unipc_with_fixed_noise_levels_is_refused():
    base = UniPCMultistepScheduler.from_config(
        {
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
            "fixed_step_sampler_config": FIXED,
        }
    )
    with pytest.raises(ValueError, match="fixed_step_sampler_config"):
        Cosmos3SamplingPolicy.from_scheduler(base)
