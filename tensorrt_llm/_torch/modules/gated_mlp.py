# SPDX-License-Identifier: Apache-2.0
"""The gated MLP ``down(silu(gate(x)) * up(x))``, fused or split.

Fused, one Linear computes gate and up; split, each is a Linear of its own that keeps its own FP8
codes and scale as the checkpoint has them (fusing would re-round one of the two). Split loses no
work: the shared activation is quantised once for both, and SwiGLU reads the two results in place.

Where ``down_proj`` is static FP8, SwiGLU emits its input as FP8 directly. On a 16-bit step, and for
every other recipe, all activations stay at 16 bit.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.modules import quant_group
from tensorrt_llm._torch.modules.linear import WeightMode, linear_of
from tensorrt_llm._torch.modules.swiglu import swiglu, swiglu_2in
from tensorrt_llm._utils import describe_error


class GatedMLP(nn.Module):
    """See the module's docstring.

    Args:
        hidden_size: Width of input and output.
        intermediate_size: Width between.
        bias: Whether the projections have one.
        activation: ``F.silu``; another one is refused when the module is called.
        dtype: Dtype of high-precision weights and of results; by default that of a
            DiffusionModelConfig, else torch's.
        config: Quantisation recipe and runtime flags.
        layer_idx: Named in errors.
        module_name: Full name of this module, by which the recipe may exclude its linears.
        swiglu_limit: Clamp of gate (from above) and up (both sides); None for none.
        swiglu_alpha: Factor inside the sigmoid; None is 1.
        swiglu_beta: Added to up; None is 0.
        split_gate_up: Two projections ``gate_proj`` and ``up_proj`` instead of ``gate_up_proj``.

    Raises:
        ValueError: split_gate_up together with force_dynamic_quantization; a recipe that excludes
            one of gate and up where they are merged.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        dtype: torch.dtype | None = None,
        config: ModelConfig | None = None,
        layer_idx: int | None = None,
        module_name: str | None = None,
        swiglu_limit: float | None = None,
        swiglu_alpha: float | None = None,
        swiglu_beta: float | None = None,
        split_gate_up: bool = False,
    ) -> None:
        super().__init__()
        config = ModelConfig() if config is None else config
        if dtype is None:
            dtype = getattr(config, "torch_dtype", None)  # a plain ModelConfig names none
        self.layer_idx = layer_idx
        self.module_name = module_name
        self.activation = activation
        self.split_gate_up = split_gate_up
        self._swiglu_args = {
            "swiglu_limit": swiglu_limit,
            "swiglu_alpha": swiglu_alpha,
            "swiglu_beta": swiglu_beta,
        }
        if split_gate_up and config.force_dynamic_quantization:
            raise ValueError(
                describe_error(
                    "split_gate_up can't be combined with force_dynamic_quantization",
                    where=self._where(),
                    expected="a static FP8 recipe, or none",
                    found="force_dynamic_quantization=True",
                    remedy="use the fused projection for dynamic quantisation",
                )
            )

        linear = partial(linear_of, config, module_name, bias=bias, dtype=dtype)
        if split_gate_up:
            self.gate_up_proj = None
            self.gate_proj = linear("gate_proj", hidden_size, intermediate_size)
            self.up_proj = linear("up_proj", hidden_size, intermediate_size)
        else:
            self.gate_up_proj = linear(
                "gate_up_proj",
                hidden_size,
                2 * intermediate_size,
                weight_mode=WeightMode.FUSED_GATE_UP_LINEAR,
                parts=("gate_proj", "up_proj"),
            )
        self.down_proj = linear("down_proj", intermediate_size, hidden_size)
        self._maybe_share_gate_up_quantize: bool = split_gate_up and quant_group.calibrated(
            self._gate_up()
        )
        self._fused_takes_fp8: bool = not split_gate_up and quant_group.calibrated(
            {"gate_up_proj": self.gate_up_proj}
        )
        self._maybe_emit_fp8: bool = quant_group.calibrated(self._down())

    def forward(self, x: torch.Tensor, lora_params: dict | None = None) -> torch.Tensor:
        """Run the MLP.

        Args:
            x: [..., hidden_size], 16 bit, FP32, or FP8 already quantised for these projections.
            lora_params: Not implemented; anything but None is refused.

        Returns:
            [..., hidden_size] in the projections' dtype.

        Raises:
            NotImplementedError: "LoRA is not supported", "requires SwiGLU".
        """
        self._refuse_unsupported(lora_params)
        quant = {}
        if self._maybe_emit_fp8 and quant_group.accept_fp8(self._down()):
            quant = {"quant_scale": self.down_proj.input_scale, "quant_type": torch.float8_e4m3fn}
        if self.split_gate_up:
            if self._can_share_gate_up_quantization(x):
                x = quant_group.quantize_once(self._gate_up(), x)
            hidden = swiglu_2in(self.gate_proj(x), self.up_proj(x), **quant, **self._swiglu_args)
        else:
            hidden = swiglu(self.gate_up_proj(x), **quant, **self._swiglu_args)
        return self.down_proj(hidden)

    def fp8_input_scale(self) -> torch.Tensor | None:
        """The scale with which a caller may quantise the input; None where it must stay 16 bit.

        See ``Attention.fp8_input_scale``.
        """
        if self.split_gate_up:
            group, takes_fp8 = self._gate_up(), self._maybe_share_gate_up_quantize
        else:
            group, takes_fp8 = {"gate_up_proj": self.gate_up_proj}, self._fused_takes_fp8
        return quant_group.shared_scale(group) if takes_fp8 else None

    def post_load_weights(self) -> None:
        """Check the loaded scales and confirm that the activation can be shared.

        Does nothing for the fused projection and for recipes without calibrated scales.

        Raises:
            ValueError: "same calibrated input_scale", when gate and up differ.
        """
        if self.split_gate_up:
            self._maybe_share_gate_up_quantize = quant_group.confirm_calibrated(
                self._gate_up(), self._where()
            )

    def _can_share_gate_up_quantization(self, x: torch.Tensor) -> bool:
        return (
            self._maybe_share_gate_up_quantize
            and x.dtype != torch.float8_e4m3fn
            and quant_group.accept_fp8(self._gate_up())
        )

    def _gate_up(self) -> quant_group.Group:
        return {"gate_proj": self.gate_proj, "up_proj": self.up_proj}

    def _down(self) -> quant_group.Group:
        return {"down_proj": self.down_proj}

    def _refuse_unsupported(self, lora_params: dict | None) -> None:
        if lora_params is not None:
            raise NotImplementedError(
                describe_error(
                    "LoRA is not supported",
                    where=self._where(),
                    expected="lora_params=None",
                    found=type(lora_params).__name__,
                    remedy="merge the adapter into the weights before loading",
                )
            )
        if self.activation is not F.silu:
            raise NotImplementedError(
                describe_error(
                    "GatedMLP requires SwiGLU",
                    where=self._where(),
                    expected="activation=torch.nn.functional.silu",
                    found=repr(self.activation),
                    remedy="build it with activation=torch.nn.functional.silu",
                )
            )

    def _where(self) -> str:
        if self.module_name is not None:
            return self.module_name
        return "GatedMLP" if self.layer_idx is None else f"GatedMLP of layer {self.layer_idx}"
