# SPDX-License-Identifier: Apache-2.0
"""The schedule and the solver against diffusers' own scheduler, bit for bit."""

import pytest
import torch
from diffusers import DDIMScheduler, UniPCMultistepScheduler

from tensorrt_llm._torch.visual_gen.models.cosmos3.sampling import Cosmos3SamplingPolicy

PUBLISHED = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "use_karras_sigmas": True,
    "solver_order": 2,
    "sigma_min": 0.147,
    "sigma_max": 200.0,
    "flow_shift": 1.0,
}
STEPS = [1, 2, 3, 6, 35, 40, 50, 100, 101, 120]


def published(**changes) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(**PUBLISHED | changes)


def ours(base, steps, flow_shift=None):
    policy = Cosmos3SamplingPolicy.from_scheduler(base)
    scheduler = policy.new_scheduler(base, flow_shift)
    policy.set_timesteps(scheduler, num_inference_steps=steps)
    return scheduler


def assert_same_schedule(scheduler, reference):
    assert torch.equal(scheduler.timesteps, reference.timesteps)
    assert scheduler.timesteps.dtype == torch.int64
    assert torch.equal(scheduler.sigmas.view(torch.int32), reference.sigmas.view(torch.int32))


@pytest.mark.parametrize("steps", STEPS)
def test_the_checkpoints_schedule_is_diffusers_own(steps):
    reference = published()
    reference.set_timesteps(steps)
    assert_same_schedule(ours(published(), steps), reference)


@pytest.mark.parametrize("shift", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("steps", STEPS)
def test_an_explicit_shift_selects_the_uniform_grid(steps, shift):
    reference = published(use_karras_sigmas=False, flow_shift=shift)
    reference.set_timesteps(steps)
    assert_same_schedule(ours(published(), steps, flow_shift=shift), reference)


def test_published_tables():
    karras = ours(published(), 35)
    assert karras.timesteps[:5].tolist() == [995, 994, 993, 992, 991]
    assert karras.timesteps[-4:].tolist() == [292, 229, 174, 128]
    expected = [0.995025, 0.994317, 0.993493, 0.992529, 0.229421, 0.174285, 0.128160, 0]
    found = karras.sigmas[[0, 1, 2, 3, -4, -3, -2, -1]].tolist()
    assert found == pytest.approx(expected, abs=1e-6)
    assert ours(published(), 35, 10.0).timesteps[-4:].tolist() == [565, 486, 381, 233]
    assert ours(published(), 50, 3.0).timesteps[:5].tolist() == [999, 993, 986, 979, 971]
    assert ours(published(), 1).timesteps.tolist() == [995]


def test_the_shift_has_no_effect_on_a_karras_schedule_unless_it_is_explicit():
    assert_same_schedule(ours(published(flow_shift=7.0), 8), ours(published(), 8))
    assert not torch.equal(ours(published(), 8, 7.0).sigmas, ours(published(), 8).sigmas)


def run(scheduler, steps, seed=0):
    """All samples of a run on random model outputs."""
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn((1, 4, 2, 3, 5), generator=generator)
    samples = []
    for timestep in scheduler.timesteps.tolist():
        velocity = torch.randn(sample.shape, generator=generator)
        sample = scheduler.step(velocity, timestep, sample, return_dict=False)[0]
        samples.append(sample)
    return torch.stack(samples)


@pytest.mark.parametrize("changes", [{}, {"solver_order": 1}, {"disable_corrector": [0, 2]}])
@pytest.mark.parametrize("shift", [None, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 6, 35, 50])
def test_every_step_has_the_bits_of_diffusers(steps, shift, changes):
    uniform = {} if shift is None else {"use_karras_sigmas": False, "flow_shift": shift}
    reference = published(**changes | uniform)
    reference.set_timesteps(steps)
    reference.set_begin_index(0)
    found = run(ours(published(**changes), steps, shift), steps)
    assert found.isfinite().all()
    assert torch.equal(found.view(torch.int32), run(reference, steps).view(torch.int32))


@pytest.mark.parametrize(("steps", "shift"), [(50, None), (101, 10.0), (120, 10.0)])
def test_repeated_timesteps_are_stepped_by_index(steps, shift):
    scheduler = ours(published(), steps, shift)
    timesteps = scheduler.timesteps.tolist()
    assert len(set(timesteps)) < steps
    samples = run(scheduler, steps)
    assert len(samples) == steps and samples.isfinite().all()
    assert scheduler.step_index == steps


def test_a_request_leaves_the_checkpoints_scheduler_and_the_next_request_alone():
    base = published()
    before = {name: str(value) for name, value in vars(base).items()}
    shifted = ours(base, 6, 10.0)
    run(shifted, 6)
    assert {name: str(value) for name, value in vars(base).items()} == before
    reference = published()
    reference.set_timesteps(6)
    assert_same_schedule(ours(base, 6), reference)


def test_the_coefficients_stay_on_the_host():
    # On another device than the coefficients', a 0-d CPU tensor enters an operation as a number.
    scheduler = ours(published(), 3)
    sample = torch.zeros((1, 2, 1, 2, 2), device="meta")
    for timestep in scheduler.timesteps.tolist():
        sample = scheduler.step(sample, timestep, sample, return_dict=False)[0]
    assert sample.device.type == "meta"


def test_base_builds_draw_no_noise_in_a_step():
    policy = Cosmos3SamplingPolicy.from_scheduler(published())
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    assert policy.scheduler_step_kwargs(generator) == {}
    assert torch.equal(generator.get_state(), state)


def test_another_scheduler_is_a_value_error():
    with pytest.raises(ValueError, match="DDIMScheduler"):
        Cosmos3SamplingPolicy.from_scheduler(DDIMScheduler())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prediction_type", "epsilon"),
        ("use_flow_sigmas", False),
        ("predict_x0", False),
        ("solver_type", "bh1"),
        ("thresholding", True),
        ("lower_order_final", False),
        ("final_sigmas_type", "sigma_min"),
        ("solver_order", 3),
    ],
)
def test_another_solver_than_the_published_one_is_refused_by_its_field(name, value):
    with pytest.raises(ValueError, match=name):
        Cosmos3SamplingPolicy.from_scheduler(published(**{name: value}))
