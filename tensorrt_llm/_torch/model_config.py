# SPDX-License-Identifier: Apache-2.0
"""ModelConfig: what a module needs to know of its model to build its linears."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tensorrt_llm._utils import describe_error
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

    def get_fused_quant_config(self, name: str, parts: Sequence[str]) -> QuantConfig:
        """Return the recipe of a Linear that merges several projections.

        A checkpoint names the projections, so excluding all of them excludes the merged one.

        Args:
            name: Dotted name of the merged Linear.
            parts: Last names of the projections, which stand where it stands.

        Raises:
            ValueError: the recipe excludes some of the projections and not all.
        """
        if self.get_quant_config(name).quant_algo is None:
            return self.get_quant_config(name)
        parent, dot, _ = name.rpartition(".")
        recipes = {part: self.get_quant_config(f"{parent}{dot}{part}") for part in parts}
        if len({recipe.quant_algo for recipe in recipes.values()}) > 1:
            raise ValueError(
                describe_error(
                    "A fused projection can't merge parts of different precision",
                    where=name,
                    expected=f"all of {', '.join(parts)} excluded from quantisation, or none",
                    found=", ".join(
                        f"{part}: {recipe.quant_algo or 'excluded'}"
                        for part, recipe in recipes.items()
                    ),
                    remedy="exclude all of them or none in the recipe's ignore list",
                )
            )
        return recipes[parts[0]]
