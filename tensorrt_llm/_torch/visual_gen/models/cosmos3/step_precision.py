# SPDX-License-Identifier: Apache-2.0
"""Which denoising steps run static FP8 (W8A8) and which run 16-bit activations (W8A16).

A static FP8 checkpoint may carry a policy in ``transformer/config.json``, under
``quantization_config.runtime.diffusion_step_policy``: the first and last few iterations of the
denoising loop keep the FP8 weights but leave the activations at 16 bit ("a16"), because one
calibrated activation scale fits the outer steps worst. The understanding tower ("reasoner") runs
once per request, so the policy gives it one precision for good.

Contract:

* ``parse_diffusion_step_policy`` validates the policy in one fixed order and is a pure function, as
  is ``step_uses_high_precision``, which says what step i of n does.
* ``StepPrecisionController`` rebinds ``Linear.quant_method``; it touches modules only when the mode
  changes. Nothing above a Linear holds a mode of its own: whoever wants to quantise an activation
  asks ``Linear.requires_unquantized_activation``.
* A Linear has at most one governor, named by its attribute ``_step_precision_governor``; the FP8
  method to give back is kept by that governor alone. So a later install finds the earlier
  controller through the Linear, takes the Linear over, and the earlier one forgets it: no global
  registry, and nothing outlives the modules (the cycle Linear <-> controller is the collector's).
* The bindings are state of the model, so one denoising loop runs on a model at a time; the caller
  selects a step before every transformer call and calls ``reset()`` in ``finally``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from tensorrt_llm._torch.modules.linear import (
    Linear,
    LinearMethodBase,
    W8A16FP8LinearMethod,
)
from tensorrt_llm._utils import describe_error

_WHERE = "quantization_config.runtime.diffusion_step_policy"
_GOVERNOR = "_step_precision_governor"

# The values that schema 1 allows, in the order in which they are checked.
_FIXED_FIELDS = {
    "type": "first_last_n",
    "index_space": "denoising_loop_iteration",
    "default_mode": "native",
    "overlap": "a16",
}
_FIELDS = {"schema_version", *_FIXED_FIELDS, "scope", "reasoner", "first_steps", "last_steps"}
_WINDOW_FIELDS = {"count", "mode"}
_REASONER_MODES = ("native", "a16")

# W8A16FP8LinearMethod is stateless, so every Linear on a 16-bit step shares this one.
_W8A16 = W8A16FP8LinearMethod()


@dataclass(frozen=True)
class StepPrecisionPolicy:
    """A validated ``diffusion_step_policy``.

    Attributes:
        first_steps: How many steps at the start of the loop run W8A16.
        last_steps: How many steps at its end run W8A16.
        reasoner_high_precision: True if the understanding tower always runs W8A16, False if it
            always runs W8A8; it never follows the steps.
    """

    first_steps: int
    last_steps: int
    reasoner_high_precision: bool


def parse_diffusion_step_policy(quantization_config: object) -> StepPrecisionPolicy | None:
    """Read the step policy from a checkpoint's ``quantization_config``.

    Args:
        quantization_config: The mapping of ``transformer/config.json``, or None.

    Returns:
        The policy, or None where there is none: no mapping, no ``runtime`` mapping, no
        ``diffusion_step_policy`` in it, or a scope without "transformer".

    Raises:
        TypeError: the policy or a window is no mapping, the scope no non-empty list of strings, or
            a count no non-negative integer.
        ValueError: unknown or missing fields, or a value that schema 1 does not have.
    """
    runtime = (
        quantization_config.get("runtime") if isinstance(quantization_config, Mapping) else None
    )
    if not isinstance(runtime, Mapping) or "diffusion_step_policy" not in runtime:
        return None
    policy = runtime["diffusion_step_policy"]
    if not isinstance(policy, Mapping):
        what = "The diffusion_step_policy must be a mapping"
        raise TypeError(_message(what, "a mapping", policy))
    unknown = sorted(str(field) for field in policy if field not in _FIELDS)
    if unknown:
        raise ValueError(_message("Unknown diffusion_step_policy fields", sorted(_FIELDS), unknown))
    missing = sorted(_FIELDS - policy.keys())
    if missing:
        raise ValueError(
            _message(
                f"Missing diffusion_step_policy fields {missing}", sorted(_FIELDS), dict(policy)
            )
        )

    version = policy["schema_version"]
    if type(version) is not int or version != 1:  # True == 1, and is not a version
        raise ValueError(_field_message("schema_version", "the integer 1", version))
    for field, only_value in _FIXED_FIELDS.items():
        if policy[field] != only_value:
            raise ValueError(_field_message(field, repr(only_value), policy[field]))

    scope = policy["scope"]
    if not isinstance(scope, list) or not scope or not all(isinstance(s, str) for s in scope):
        raise TypeError(_field_message("scope", "a non-empty list of strings", scope))
    if "transformer" not in scope:
        return None

    if policy["reasoner"] not in _REASONER_MODES:
        raise ValueError(
            _field_message("reasoner", f"one of {_REASONER_MODES}", policy["reasoner"])
        )
    return StepPrecisionPolicy(
        first_steps=_parse_window("first_steps", policy["first_steps"]),
        last_steps=_parse_window("last_steps", policy["last_steps"]),
        reasoner_high_precision=policy["reasoner"] == "a16",
    )


def _parse_window(name: str, window: object) -> int:
    """Return the count of a window, which is exactly ``{"count": N, "mode": "a16"}``."""
    if not isinstance(window, Mapping):
        raise TypeError(_message(f"The window {name} must be a mapping", "a mapping", window, name))
    if window.keys() != _WINDOW_FIELDS:
        fields = f"exactly the fields {sorted(_WINDOW_FIELDS)}"
        raise ValueError(_field_message(name, fields, dict(window)))
    if window["mode"] != "a16":
        raise ValueError(_field_message(f"{name}.mode", "'a16'", window["mode"]))
    count = window["count"]
    if type(count) is not int or count < 0:
        raise TypeError(_field_message(f"{name}.count", "a non-negative integer", count))
    return count


def _field_message(field: str, expected: object, found: object) -> str:
    return _message(f"Unsupported diffusion_step_policy {field}", expected, found, field)


def _message(what: str, expected: object, found: object, field: str | None = None) -> str:
    return describe_error(
        what,
        where=_WHERE if field is None else f"{_WHERE}.{field}",
        expected=expected,
        found=repr(found),
        remedy=(
            "copy runtime.diffusion_step_policy from the published transformer/config.json, or "
            "remove it to run every step natively"
        ),
    )


def step_uses_high_precision(
    windows: StepPrecisionPolicy | tuple[int, int], step_index: int, num_steps: int
) -> bool:
    """Say whether one step of the denoising loop runs W8A16.

    A step in either window does, also where the windows overlap. A schedule of one step runs
    native: it is a probe (a warm-up, a smoke test), and a window would leave nothing native in it.

    Args:
        windows: A policy, or the pair (first_steps, last_steps).
        step_index: Index of the loop iteration, from 0; never derived from a timestep, since
            timesteps repeat on some schedules.
        num_steps: Length of the whole schedule.

    Returns:
        True for W8A16, False for the native precision.

    Raises:
        ValueError: num_steps is not positive.
        IndexError: step_index is outside [0, num_steps).
    """
    if num_steps <= 0:
        raise ValueError(
            describe_error(
                "num_steps must be positive",
                where="step precision",
                expected="the number of denoising steps, at least 1",
                found=num_steps,
                remedy="pass the number of timesteps that the loop runs",
            )
        )
    if not 0 <= step_index < num_steps:
        raise IndexError(
            describe_error(
                "Denoising step out of range",
                where="step precision",
                expected=f"a step index in [0, {num_steps})",
                found=step_index,
                remedy="pass the loop's own index, not a timestep",
            )
        )
    if isinstance(windows, StepPrecisionPolicy):
        first_steps, last_steps = windows.first_steps, windows.last_steps
    else:
        first_steps, last_steps = windows
    if num_steps == 1:
        return False
    return step_index < first_steps or step_index >= num_steps - last_steps


class StepPrecisionController:
    """Binds W8A16 or the native FP8 method to the linears it governs, step by step.

    Args:
        first_steps: W8A16 steps at the start of the loop.
        last_steps: W8A16 steps at its end.

    Raises:
        ValueError: a count is not a non-negative integer.
    """

    def __init__(self, first_steps: int, last_steps: int) -> None:
        for name, count in (("first_steps", first_steps), ("last_steps", last_steps)):
            if type(count) is not int or count < 0:
                raise ValueError(
                    describe_error(
                        f"{name} must be non-negative",
                        where="StepPrecisionController",
                        expected="a non-negative integer",
                        found=repr(count),
                        remedy="pass the counts of a parsed StepPrecisionPolicy",
                    )
                )
        self._windows = (first_steps, last_steps)
        self._high_precision = False
        # Linear -> the FP8 method to give back.
        self._governed: dict[nn.Module, LinearMethodBase] = {}
        self._pinned: dict[nn.Module, LinearMethodBase] = {}

    @property
    def high_precision(self) -> bool:
        """True while the selected step runs W8A16; False after ``reset()`` and at the start."""
        return self._high_precision

    def set_step(self, step_index: int, *, num_steps: int) -> None:
        """Select a step of the loop, before the transformer calls of that step.

        Raises:
            ValueError: "num_steps must be positive".
            IndexError: step_index is outside [0, num_steps).
        """
        self._select(step_uses_high_precision(self._windows, step_index, num_steps))

    def reset(self) -> None:
        """Give every governed linear its FP8 method back; pinned ones stay W8A16."""
        self._select(False)

    def govern(self, module: nn.Module, fp8_method: LinearMethodBase) -> None:
        """Let the steps decide the module's method, from the current mode on.

        Takes the module over from an earlier governor, and unpins it.

        Args:
            module: A static FP8 ``Linear``.
            fp8_method: The object to bind on native steps.

        Raises:
            ValueError: fp8_method is itself the W8A16 method, so that no step could be native.
        """
        _require_native(module, fp8_method)
        _release(module)
        setattr(module, _GOVERNOR, self)
        self._governed[module] = fp8_method
        module.quant_method = _W8A16 if self._high_precision else fp8_method

    def pin_unquantized(self, module: nn.Module) -> None:
        """Keep the module at W8A16 whatever the step, until it is governed again or released.

        Raises:
            ValueError: the module's FP8 method is unknown, see ``install_step_precision``.
        """
        fp8_method = _native_method(module)
        _require_native(module, fp8_method)
        _release(module)
        setattr(module, _GOVERNOR, self)
        self._pinned[module] = fp8_method
        module.quant_method = _W8A16

    def _select(self, high_precision: bool) -> None:
        if high_precision == self._high_precision:
            return
        self._high_precision = high_precision
        for module, fp8_method in self._governed.items():
            module.quant_method = _W8A16 if high_precision else fp8_method

    def _fp8_method(self, module: nn.Module) -> LinearMethodBase:
        return self._governed[module] if module in self._governed else self._pinned[module]

    def _forget(self, module: nn.Module) -> None:
        self._governed.pop(module, None)
        self._pinned.pop(module, None)


def install_step_precision(
    roots: Iterable[nn.Module] | nn.Module,
    controller: StepPrecisionController,
    always_high: bool = False,
) -> int:
    """Put every static FP8 Linear under the roots under one controller.

    May be called again at any moment, with the same or another controller and with another
    ``always_high``: afterwards each of these linears is governed by exactly this controller, in the
    mode this controller is in. Linears outside the roots are left alone.

    Args:
        roots: Modules whose linears are meant; a linear under several of them counts once.
        controller: The controller to install.
        always_high: Pin the linears to W8A16 instead of letting the steps decide.

    Returns:
        The number of linears now governed (or pinned). 0 means that nothing here is static FP8.

    Raises:
        ValueError: a linear's FP8 method is unknown: it has no weights yet, or W8A16 was bound by
            something else than a controller. Nothing has been changed then.
    """
    linears = static_fp8_linears(roots)
    for linear in linears:
        _require_native(linear, _native_method(linear))
    for linear in linears:
        if always_high:
            controller.pin_unquantized(linear)
        else:
            controller.govern(linear, _native_method(linear))
    return len(linears)


def uninstall_step_precision(roots: Iterable[nn.Module] | nn.Module) -> int:
    """Give every governed or pinned Linear under the roots its FP8 method back, for good.

    This is how a tower becomes plainly native again, for instance when a policy with
    ``reasoner: native`` follows one that pinned it.

    Returns:
        The number of linears that had been governed or pinned.
    """
    linears = [m for m in _modules(roots) if getattr(m, _GOVERNOR, None) is not None]
    for linear in linears:
        linear.quant_method = _native_method(linear)
        _release(linear)
    return len(linears)


def _modules(roots: Iterable[nn.Module] | nn.Module) -> list[nn.Module]:
    """Return every module under the roots once, in order."""
    roots = (roots,) if isinstance(roots, nn.Module) else roots
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


def static_fp8_linears(roots: Iterable[nn.Module] | nn.Module) -> list[Linear]:
    """Return the linears under the roots that a policy can govern, each once."""
    return [
        module
        for module in _modules(roots)
        if isinstance(module, Linear)
        and module.has_fp8_qdq
        and not module.force_dynamic_quantization
    ]


def _native_method(module: nn.Module) -> LinearMethodBase:
    """Return what the module runs on a native step, whichever method is bound just now."""
    governor: StepPrecisionController | None = getattr(module, _GOVERNOR, None)
    return module.quant_method if governor is None else governor._fp8_method(module)


def _release(module: nn.Module) -> None:
    """Detach the module from its governor, if any; the bound method stays for the caller to set."""
    governor: StepPrecisionController | None = getattr(module, _GOVERNOR, None)
    if governor is not None:
        governor._forget(module)
        delattr(module, _GOVERNOR)


def _require_native(module: nn.Module, method: LinearMethodBase | None) -> None:
    if method is None or isinstance(method, W8A16FP8LinearMethod):
        raise ValueError(
            describe_error(
                "The FP8 method of a linear is unknown",
                where=repr(module),
                expected="a bound FP8QDQLinearMethod to return to on native steps",
                found="no method" if method is None else f"{type(method).__name__}, ungoverned",
                remedy="create and load the weights before installing step precision, and let only "
                "a StepPrecisionController bind the W8A16 method",
            )
        )
