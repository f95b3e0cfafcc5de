# SPDX-License-Identifier: Apache-2.0
"""The flow schedule of a request, and the solver step on it.

``Cosmos3SamplingPolicy`` owns the schedule: every request gets a scheduler of its own from it, so
no shift or solver history reaches the next request.
"""

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteSchedulerOutput,
)

from tensorrt_llm._utils import describe_error

# What the solver below computes. All are the published scheduler's values (cosmos3.md E.3).
_REQUIRED_CONFIG = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "predict_x0": True,
    "solver_type": "bh2",
    "solver_p": None,
    "thresholding": False,
    "lower_order_final": True,
    "final_sigmas_type": "zero",
    "use_dynamic_shifting": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
}
_SOLVER_ORDERS = (1, 2)
# What would change the fixed noise levels, and has to leave them alone. The published recipe is a
# t_list that is already shifted, beside shift 1.0 (cosmos3.md E.3).
_REQUIRED_DISTILLED_CONFIG = {
    "stochastic_sampling": True,
    "shift": 1.0,
    "shift_terminal": None,
    "use_dynamic_shifting": False,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "invert_sigmas": False,
}
_FIXED_STEPS = "fixed_step_sampler_config"


class HostCoefficientUniPC(UniPCMultistepScheduler):
    """diffusers' UniPC scheduler whose update coefficients stay on the host.

    diffusers computes them on the latents' device, which costs three synchronisations a step there
    (scalar uploads, a checked 2x2 solve) and gives other last bits on another device. Here they are
    0-d CPU tensors that enter the kernels as scalars: no synchronisation, the same coefficients
    everywhere, and on CPU the bits of diffusers. Schedule and bookkeeping are inherited.
    """

    def multistep_uni_p_bh_update(
        self, model_output: torch.Tensor, *, sample: torch.Tensor, order: int
    ) -> torch.Tensor:
        """The predictor: from the current sigma to the next."""
        target = self.step_index + 1
        phi = self._exponent(target)
        moved = self._exact_part(sample, target, phi)
        if order == 1:
            return moved
        residual = 0.5 * self._history_slope(self._history_ratio(target))
        return moved - (1 - self.sigmas[target]) * phi * residual

    def multistep_uni_c_bh_update(
        self,
        this_model_output: torch.Tensor,
        *,
        last_sample: torch.Tensor,
        this_sample: torch.Tensor,
        order: int,
    ) -> torch.Tensor:
        """The corrector: the last step once more, now knowing the model output at its end."""
        target = self.step_index
        phi = self._exponent(target)
        slope_now = this_model_output - self.model_outputs[-1]
        if order == 1:
            residual = 0.5 * slope_now
        else:
            ratio = self._history_ratio(target)
            older, newer = _corrector_weights(ratio, self._step_size(target), phi)
            residual = older * self._history_slope(ratio) + newer * slope_now
        moved = self._exact_part(last_sample, target, phi)
        return moved - (1 - self.sigmas[target]) * phi * residual

    def _log_snr(self, index: int) -> torch.Tensor:
        sigma = self.sigmas[index]
        return torch.log(1 - sigma) - torch.log(sigma)

    def _step_size(self, target: int) -> torch.Tensor:
        """h, the step in log-SNR that ends at ``target``."""
        return self._log_snr(target) - self._log_snr(target - 1)

    def _exponent(self, target: int) -> torch.Tensor:
        return torch.expm1(-self._step_size(target))

    def _history_ratio(self, target: int) -> torch.Tensor:
        """Where the model output before the last lies, in units of h from the last one."""
        back = self._log_snr(target - 2) - self._log_snr(target - 1)
        return back / self._step_size(target)

    def _history_slope(self, ratio: torch.Tensor) -> torch.Tensor:
        return (self.model_outputs[-2] - self.model_outputs[-1]) / ratio

    def _exact_part(self, sample: torch.Tensor, target: int, phi: torch.Tensor) -> torch.Tensor:
        """The solution for a model output that doesn't change over the step."""
        sigma, previous = self.sigmas[target], self.sigmas[target - 1]
        return sigma / previous * sample - (1 - sigma) * phi * self.model_outputs[-1]


def _corrector_weights(
    ratio: torch.Tensor, step: torch.Tensor, phi: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the second-order corrector (UniPC, B(h) = expm1(-h); cosmos3.md J, E.3)."""
    first = phi / -step - 1
    second = first / -step - 0.5
    system = torch.stack((torch.ones(2), torch.stack((ratio, torch.ones(())))))
    moments = torch.stack((first / phi, second * 2 / phi))
    older, newer = torch.linalg.solve(system, moments)
    return older, newer


class FixedStepSde(FlowMatchEulerDiscreteScheduler):
    """The solver of the distilled builds: predict the clean sample, put fresh noise on it.

    The bits of diffusers' stochastic FlowMatchEuler step. What differs is that the noise comes from
    the CPU without a synchronisation, and that the last step, which adds none, draws none.
    """

    def step(
        self,
        model_output: torch.Tensor,
        timestep: float,
        sample: torch.Tensor,
        *,
        generator: torch.Generator,
        return_dict: bool = True,
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple[torch.Tensor]:
        """From the current noise level to the next.

        Args:
            model_output: FP32 velocity, of any shape.
            timestep: The current one, by which only a first step without ``set_begin_index`` goes.
            sample: FP32, of the same shape.
            generator: The request's, on the CPU. Each step but the last draws once from it.
            return_dict: False gives the sample in a tuple.
        """
        if self.step_index is None:
            self._init_step_index(timestep)
        # 0-d CPU tensors: they enter the kernels as numbers.
        sigma, next_sigma = self.sigmas[self.step_index], self.sigmas[self.step_index + 1]
        self._step_index += 1
        result = sample - sigma * model_output
        if next_sigma > 0:
            noise = torch.randn(
                sample.shape,
                generator=generator,
                dtype=torch.float32,
                pin_memory=sample.device.type == "cuda",
            )
            noise = noise.to(sample.device, non_blocking=True)
            result = (1.0 - next_sigma) * result + next_sigma * noise
        if not return_dict:
            return (result,)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=result)


@dataclass(frozen=True)
class Cosmos3SamplingPolicy:
    """How a build samples.

    Base builds run UniPC on the checkpoint's schedule or, with a flow shift, on the uniform grid.
    Distilled builds run ``FixedStepSde`` on their own noise levels, a step for each.

    Attributes:
        fixed_sigmas: Noise levels of a distilled build, descending, without the final 0; None for a
            base build.
    """

    fixed_sigmas: tuple[float, ...] | None = None

    @classmethod
    def from_scheduler(cls, scheduler: Any) -> "Cosmos3SamplingPolicy":
        """Choose the policy from the checkpoint's scheduler object.

        Raises:
            ValueError: a scheduler that no build has, a UniPC configuration of another solver or
                with fixed noise levels, a FlowMatchEuler configuration that is not that of a
                distilled build.
        """
        config = scheduler.config
        if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            sigmas = _read_fixed_sigmas(config)
            _require(config, _REQUIRED_DISTILLED_CONFIG)
            return cls(fixed_sigmas=sigmas)
        if not isinstance(scheduler, UniPCMultistepScheduler):
            raise ValueError(
                describe_error(
                    "Unknown scheduler",
                    where="scheduler",
                    expected="UniPCMultistepScheduler or FlowMatchEulerDiscreteScheduler",
                    found=type(scheduler).__name__,
                    remedy="pass the scheduler that the checkpoint's scheduler folder describes",
                )
            )
        if config.get(_FIXED_STEPS):
            expected = "absent: fixed noise levels belong to FlowMatchEulerDiscreteScheduler"
            _refuse_config(_FIXED_STEPS, expected, config[_FIXED_STEPS])
        _require(config, _REQUIRED_CONFIG)
        if config["solver_order"] not in _SOLVER_ORDERS:
            _refuse_config("solver_order", "1 or 2", config["solver_order"])
        return cls()

    def new_scheduler(
        self, scheduler: Any, flow_shift: float | None = None
    ) -> HostCoefficientUniPC | FixedStepSde:
        """A request's own scheduler; the checkpoint's is only read.

        Args:
            scheduler: The checkpoint's.
            flow_shift: None keeps the checkpoint's schedule. A number selects the uniform flow grid
                with this shift: on a karras schedule the shift alone would do nothing.

        Raises:
            ValueError: a flow shift for a distilled build.
        """
        if self.fixed_sigmas is not None:
            if flow_shift is not None:
                raise ValueError(
                    describe_error(
                        "A flow shift has no effect on fixed noise levels",
                        where="flow_shift",
                        expected="None with a distilled build",
                        found=flow_shift,
                        remedy="leave flow_shift out for a 4-step build",
                    )
                )
            # Every other value that matters is the class's default: ``from_scheduler`` saw to it.
            return FixedStepSde(scheduler.config.num_train_timesteps, stochastic_sampling=True)
        changes = {}
        if flow_shift is not None:
            changes = {"flow_shift": flow_shift, "use_karras_sigmas": False}
        return HostCoefficientUniPC.from_config(scheduler.config, **changes)

    def set_timesteps(
        self,
        scheduler: HostCoefficientUniPC | FixedStepSde,
        *,
        num_inference_steps: int,
        device: torch.device | str | None = None,
    ) -> None:
        """Lay out the steps, and count them by index from 0.

        Timesteps repeat (karras from 40 steps, the uniform grid from 101 with shift 10), so a step
        is never looked up by its timestep.

        Args:
            scheduler: A request's own.
            num_inference_steps: 1 or more; for a distilled build, the number of its noise levels.
            device: Where ``scheduler.timesteps`` lives; the solver reads none of it.

        Raises:
            ValueError: another number of steps than a distilled build has noise levels.
        """
        grid = {} if self.fixed_sigmas is None else {"sigmas": self.fixed_sigmas}
        scheduler.set_timesteps(num_inference_steps, device=device, **grid)
        scheduler.set_begin_index(0)

    def scheduler_step_kwargs(self, generator: torch.Generator) -> dict[str, Any]:
        """Further arguments of ``scheduler.step``.

        Args:
            generator: The request's, on the CPU, from which the initial noise has been drawn. A
                distilled build draws the noise of its steps from it, a draw a step, after that;
                UniPC draws none.
        """
        return {} if self.fixed_sigmas is None else {"generator": generator}


def _read_fixed_sigmas(config: Mapping[str, Any]) -> tuple[float, ...]:
    """The noise levels of a distilled build, from its scheduler's configuration."""
    fixed = config.get(_FIXED_STEPS)
    if not isinstance(fixed, Mapping) or not fixed.get("t_list"):
        _refuse_config(f"{_FIXED_STEPS}.t_list", "the noise levels of a distilled build", fixed)
    if fixed.get("sample_type") != "sde":
        _refuse_config(f"{_FIXED_STEPS}.sample_type", "sde", fixed.get("sample_type"))
    levels = fixed["t_list"]
    numeric = isinstance(levels, (list, tuple)) and all(
        isinstance(level, numbers.Real) and not isinstance(level, bool) for level in levels
    )
    if not numeric or not all(
        0 < level < above for level, above in zip(levels, (1.0 + 2**-52, *levels), strict=False)
    ):
        _refuse_config(f"{_FIXED_STEPS}.t_list", "numbers that fall from 1 at most to 0", levels)
    return tuple(float(level) for level in levels)


def _require(config: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    for key, value in required.items():
        if config[key] != value:
            _refuse_config(key, value, config[key])


def _refuse_config(key: str, expected: object, found: object) -> None:
    raise ValueError(
        describe_error(
            "The checkpoint's scheduler asks for another solver",
            where=f"scheduler/scheduler_config.json, {key}",
            expected=repr(expected),
            found=repr(found),
            remedy="restore the checkpoint's published scheduler/scheduler_config.json",
        )
    )
