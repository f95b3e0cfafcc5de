# SPDX-License-Identifier: Apache-2.0
"""Step precision: the policy's validation and the trace of modes."""

import pytest

from tensorrt_llm._torch.modules.linear import Linear, W8A16FP8LinearMethod
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import (
    StepPrecisionController,
    StepPrecisionPolicy,
    install_step_precision,
    parse_diffusion_step_policy,
    step_uses_high_precision,
)
from tensorrt_llm.models.modeling_utils import QuantConfig

POLICY = {
    "schema_version": 1,
    "type": "first_last_n",
    "index_space": "denoising_loop_iteration",
    "scope": ["transformer"],
    "default_mode": "native",
    "first_steps": {"count": 3, "mode": "a16"},
    "last_steps": {"count": 2, "mode": "a16"},
    "overlap": "a16",
    "reasoner": "a16",
}


def parse(**changes):
    return parse_diffusion_step_policy({"runtime": {"diffusion_step_policy": POLICY | changes}})


# --- the policy ---------------------------------------------------------------------------------


def test_the_published_policy_is_read():
    assert parse() == StepPrecisionPolicy(3, 2, True)
    assert parse(reasoner="native") == StepPrecisionPolicy(3, 2, False)


@pytest.mark.parametrize(
    "config",
    [None, "FP8", [], {}, {"quant_algo": "FP8"}, {"runtime": None}, {"runtime": ["x"]},
     {"runtime": {}}, {"runtime": {"other": 1}}],
)  # fmt: skip
def test_a_config_without_a_policy_has_none(config):
    assert parse_diffusion_step_policy(config) is None


def test_a_scope_without_the_transformer_has_none():
    assert parse(scope=["vae", "text_encoder"]) is None
    assert parse(scope=["vae", "transformer"]) is not None


@pytest.mark.parametrize("policy", [None, 3, "first_last_n", [POLICY]])
def test_a_policy_that_is_no_mapping_is_a_type_error(policy):
    with pytest.raises(TypeError, match="must be a mapping"):
        parse_diffusion_step_policy({"runtime": {"diffusion_step_policy": policy}})


@pytest.mark.parametrize("field", sorted(POLICY))
def test_every_missing_field_is_named(field):
    policy = {name: value for name, value in POLICY.items() if name != field}
    with pytest.raises(ValueError, match=f"Missing diffusion_step_policy fields.*{field}"):
        parse_diffusion_step_policy({"runtime": {"diffusion_step_policy": policy}})


def test_unknown_fields_are_reported_before_missing_ones():
    with pytest.raises(ValueError, match="Unknown diffusion_step_policy fields.*surprise"):
        parse_diffusion_step_policy({"runtime": {"diffusion_step_policy": {"surprise": 1, 7: 2}}})


@pytest.mark.parametrize(
    "field, value",
    [
        ("schema_version", 2),
        ("schema_version", True),
        ("schema_version", 1.0),
        ("schema_version", "1"),
        ("type", "last_n"),
        ("index_space", "timestep"),
        ("default_mode", "a16"),
        ("overlap", "native"),
        ("reasoner", "bf16"),
        ("reasoner", ["a16"]),
        ("reasoner", None),
        ("first_steps", {"count": 3}),
        ("first_steps", {"count": 3, "mode": "a16", "extra": 0}),
        ("last_steps", {"mode": "a16"}),
        ("last_steps", {"count": 3, "mode": "native"}),
    ],
)
def test_a_value_outside_the_schema_is_a_value_error_that_names_its_field(field, value):
    with pytest.raises(ValueError, match=field):
        parse(**{field: value})


@pytest.mark.parametrize(
    "field, value",
    [
        ("scope", []),
        ("scope", "transformer"),
        ("scope", ["transformer", 1]),
        ("scope", None),
        ("first_steps", 3),
        ("last_steps", None),
        ("first_steps", {"count": True, "mode": "a16"}),
        ("first_steps", {"count": 3.0, "mode": "a16"}),
        ("last_steps", {"count": -1, "mode": "a16"}),
        ("last_steps", {"count": "3", "mode": "a16"}),
    ],
)
def test_a_wrong_type_is_a_type_error_that_names_its_field(field, value):
    with pytest.raises(TypeError, match=field):
        parse(**{field: value})


def test_checks_run_in_the_documented_order():
    """Each change alone is an error; of all that are left, the first in the list is reported."""
    broken = {
        "schema_version": 0,
        "type": 0,
        "index_space": 0,
        "default_mode": 0,
        "overlap": 0,
        "scope": 0,
        "reasoner": 0,
        "first_steps": 0,
        "last_steps": 0,
    }
    while broken:
        with pytest.raises((TypeError, ValueError)) as caught:
            parse(**broken)
        first = next(iter(broken))
        assert f"diffusion_step_policy.{first})" in str(caught.value)
        del broken[first]


def test_a_scope_without_the_transformer_ends_the_checks_before_reasoner_and_windows():
    assert parse(scope=["vae"], reasoner=0, first_steps=0, last_steps=0) is None


# --- the trace ----------------------------------------------------------------------------------

# Written out by hand: "h" is a 16-bit step, "." an FP8 step.
TRACES = {
    (3, 3): {1: ".", 2: "hh", 4: "hhhh", 5: "hhhhh", 6: "hhhhhh", 7: "hhh.hhh",
             35: "hhh" + "." * 29 + "hhh", 50: "hhh" + "." * 44 + "hhh"},
    (0, 3): {1: ".", 2: "hh", 4: ".hhh", 5: "..hhh", 6: "...hhh", 7: "....hhh",
             35: "." * 32 + "hhh", 50: "." * 47 + "hhh"},
    (3, 0): {1: ".", 2: "hh", 4: "hhh.", 5: "hhh..", 6: "hhh...", 7: "hhh....",
             35: "hhh" + "." * 32, 50: "hhh" + "." * 47},
    (0, 0): {n: "." * n for n in (1, 2, 4, 5, 6, 7, 35, 50)},
    (99, 99): {1: "."} | {n: "h" * n for n in (2, 4, 5, 6, 7, 35, 50)},
}  # fmt: skip
CASES = [(windows, n, trace) for windows, traces in TRACES.items() for n, trace in traces.items()]


@pytest.mark.parametrize("windows, num_steps, trace", CASES)
def test_the_trace_of_modes_is_exact(windows, num_steps, trace):
    policy = StepPrecisionPolicy(*windows, reasoner_high_precision=True)
    controller = StepPrecisionController(*windows)
    gen = Linear(16, 16, quant_config=QuantConfig(quant_algo="FP8"))
    install_step_precision(gen, controller)
    seen = {"pure": "", "policy": "", "controller": "", "bound": ""}
    for i in range(num_steps):
        controller.set_step(i, num_steps=num_steps)
        modes = (
            step_uses_high_precision(windows, i, num_steps),
            step_uses_high_precision(policy, i, num_steps),
            controller.high_precision,
            isinstance(gen.quant_method, W8A16FP8LinearMethod),
        )
        assert all(type(mode) is bool for mode in modes)
        for name, mode in zip(seen, modes, strict=True):
            seen[name] += "h" if mode else "."
    assert seen == dict.fromkeys(seen, trace)


@pytest.mark.parametrize("index", [-1, 4, 5])
def test_a_step_outside_the_schedule_is_an_index_error(index):
    controller = StepPrecisionController(3, 3)
    with pytest.raises(IndexError, match="step index in"):
        controller.set_step(index, num_steps=4)
    with pytest.raises(IndexError, match="step index in"):
        step_uses_high_precision((3, 3), index, 4)


@pytest.mark.parametrize("num_steps", [0, -1])
def test_a_schedule_without_steps_is_a_value_error(num_steps):
    with pytest.raises(ValueError, match="num_steps must be positive"):
        StepPrecisionController(3, 3).set_step(0, num_steps=num_steps)


@pytest.mark.parametrize("windows", [(-1, 3), (3, -1), (1.5, 0), (True, 0)])
def test_a_controller_wants_non_negative_counts(windows):
    with pytest.raises(ValueError, match="non-negative"):
        StepPrecisionController(*windows)
