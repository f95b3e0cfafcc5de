# SPDX-License-Identifier: Apache-2.0
"""The flow schedule of a request, and the solver step on it.

``Cosmos3SamplingPolicy`` owns the schedule: every request gets a scheduler of its own from it, so
no shift or solver history reaches the next request.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

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


@dataclass(frozen=True)
class Cosmos3SamplingPolicy:
    """How a build samples. Base builds: UniPC on the checkpoint's schedule.

    Attributes:
        use_native_flow_schedule: The checkpoint's flag: a uniform grid from 1 - 1/1000 to 0 instead
            of diffusers' own. Without effect on a karras schedule, as in diffusers.
    """

    use_native_flow_schedule: bool = False

    @classmethod
    def from_scheduler(
        cls, scheduler: Any, *, use_native_flow_schedule: bool = False
    ) -> "Cosmos3SamplingPolicy":
        """Choose the policy from the checkpoint's scheduler object.

        Raises:
            NotImplementedError: a FlowMatchEuler scheduler, which belongs to the distilled builds.
            ValueError: another scheduler, or a UniPC configuration of another solver.
        """
        name = type(scheduler).__name__
        if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            raise NotImplementedError(
                describe_error(
                    f"{name}: distilled builds are not supported yet",
                    where="scheduler",
                    expected=UniPCMultistepScheduler.__name__,
                    found=name,
                    remedy="use the base checkpoint",
                )
            )
        if not isinstance(scheduler, UniPCMultistepScheduler):
            raise ValueError(
                describe_error(
                    "Unknown scheduler",
                    where="scheduler",
                    expected=UniPCMultistepScheduler.__name__,
                    found=name,
                )
            )
        config = scheduler.config
        for key, required in _REQUIRED_CONFIG.items():
            if config[key] != required:
                _refuse_config(key, required, config[key])
        if config["solver_order"] not in _SOLVER_ORDERS:
            _refuse_config("solver_order", "1 or 2", config["solver_order"])
        return cls(use_native_flow_schedule)

    def new_scheduler(
        self, scheduler: UniPCMultistepScheduler, flow_shift: float | None = None
    ) -> HostCoefficientUniPC:
        """A request's own scheduler; the checkpoint's is only read.

        Args:
            scheduler: The checkpoint's.
            flow_shift: None keeps the checkpoint's schedule. A number selects the uniform flow grid
                with this shift: on a karras schedule the shift alone would do nothing.
        """
        changes = {}
        if flow_shift is not None:
            changes = {"flow_shift": flow_shift, "use_karras_sigmas": False}
        return HostCoefficientUniPC.from_config(scheduler.config, **changes)

    def set_timesteps(
        self,
        scheduler: HostCoefficientUniPC,
        *,
        num_inference_steps: int,
        device: torch.device | str | None = None,
    ) -> None:
        """Lay out the steps, and count them by index from 0.

        Timesteps repeat (karras from 40 steps, the uniform grid from 101 with shift 10), so a step
        is never looked up by its timestep.

        Args:
            scheduler: A request's own.
            num_inference_steps: 1 or more.
            device: Where ``scheduler.timesteps`` lives; the solver reads none of it.
        """
        grid = {}
        if self.use_native_flow_schedule and not scheduler.config.use_karras_sigmas:
            # Unshifted: the scheduler applies the shift itself (cosmos3.md J, E.3.3).
            last = 1.0 - 1.0 / scheduler.config.num_train_timesteps
            grid = {"sigmas": np.linspace(last, 0.0, num_inference_steps + 1)[:-1]}
        scheduler.set_timesteps(num_inference_steps, device=device, **grid)
        scheduler.set_begin_index(0)

    def scheduler_step_kwargs(self, generator: torch.Generator) -> dict[str, Any]:
        """Further arguments of ``scheduler.step``: none, since UniPC draws no noise of its own."""
        return {}


def _refuse_config(key: str, expected: object, found: object) -> None:
    raise ValueError(
        describe_error(
            "The checkpoint's scheduler asks for another solver",
            where=f"scheduler/scheduler_config.json, {key}",
            expected=repr(expected),
            found=repr(found),
            remedy="use the scheduler that was published with the checkpoint",
        )
    )
