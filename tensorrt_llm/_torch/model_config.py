# SPDX-License-Identifier: Apache-2.0
"""ModelConfig: what a module needs to know of its model to build its linears."""

from dataclasses import dataclass, field

from tensorrt_llm.mapping import Mapping
from tensorrt_llm.models.modeling_utils import QuantConfig


@dataclass(kw_only=True)
class ModelConfig:
    """The recipe of a model's linears. Mutable: it is read when modules are built and loaded.

    Attributes:
        mapping: Parallelism, or None for one process.
        quant_config: The quantisation recipe.
        dynamic_weight_quant: High-precision weights are quantised while they load.
        force_dynamic_quantization: FP8 activations take their scale from each input, also where the
            checkpoint has a calibrated one.
        skip_create_weights_in_init: Linears are built without parameters; the caller creates them.
    """

    mapping: Mapping | None = None
    quant_config: QuantConfig = field(default_factory=QuantConfig)
    dynamic_weight_quant: bool = False
    force_dynamic_quantization: bool = False
    skip_create_weights_in_init: bool = False

    def get_quant_config(self, name: str | None = None) -> QuantConfig:
        """Return the recipe of one module: the model's, or none where the recipe excludes its name.

        Args:
            name: Dotted module name; None gives the model's recipe.
        """
        if name is not None and self.quant_config.is_module_excluded_from_quantization(name):
            return QuantConfig()
        return self.quant_config
