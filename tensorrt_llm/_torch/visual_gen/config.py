# SPDX-License-Identifier: Apache-2.0
"""Configuration of a diffusion model: the checkpoint's own, its recipe, the caller's options."""

import json
import os
from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.visual_gen.config_fields import (
    AttentionConfig,
    CudaGraphConfig,
    ParallelConfig,
    TorchCompileConfig,
    refuse_unbuilt_options,
)
from tensorrt_llm._torch.visual_gen.quantization.caller_recipe import parse_callers_recipe
from tensorrt_llm._torch.visual_gen.quantization.recipe import parse_quant_recipe
from tensorrt_llm._utils import describe_error
from tensorrt_llm.mapping import Mapping
from tensorrt_llm.models.modeling_utils import QuantConfig

if TYPE_CHECKING:
    from tensorrt_llm.visual_gen.args import VisualGenArgs

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(kw_only=True)
class DiffusionModelConfig(ModelConfig):
    """A ModelConfig with the checkpoint's configuration and the caller's options.

    Attributes:
        pretrained_config: ``transformer/config.json`` as a mutable namespace (nested objects stay
            dicts), or None. Its ``dtype`` "float32" gives an FP32 model.
        attention: Attention backend.
        torch_compile: torch.compile.
        cuda_graph: CUDA graphs.
        parallel: Sizes of the parallel axes.
        quant_config_overridden: The caller's recipe replaced the checkpoint's.
        checkpoint_names: The names that a module, or for a fused one its parts, have in the
            checkpoint: a recipe may exclude it by them too. None where they are its own.

    Raises:
        NotImplementedError: a parallel axis above 1.
    """

    pretrained_config: SimpleNamespace | None = None
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    torch_compile: TorchCompileConfig = field(default_factory=TorchCompileConfig)
    cuda_graph: CudaGraphConfig = field(default_factory=CudaGraphConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    quant_config_overridden: bool = False
    checkpoint_names: Callable[[str], Sequence[str]] | None = None

    def __post_init__(self) -> None:
        refuse_unbuilt_options(self.parallel)

    @classmethod
    def completed(cls, config: ModelConfig) -> "DiffusionModelConfig":
        """``config`` if it is one already, else one with its fields and defaults for the rest."""
        if isinstance(config, cls):
            return config
        return cls(**{f.name: getattr(config, f.name) for f in fields(ModelConfig)})

    def get_quant_config(self, name: str | None = None) -> QuantConfig:
        """Return the recipe of one module: the model's, or none where the recipe excludes it.

        Args:
            name: Dotted module name in this package; None gives the model's recipe. The recipe's
                patterns may match it or, all of them, its names in the checkpoint.
        """
        recipe = super().get_quant_config(name)
        if name is None or recipe.quant_algo is None or self.checkpoint_names is None:
            return recipe
        sources = self.checkpoint_names(name)
        if all(map(recipe.is_module_excluded_from_quantization, sources)):
            return QuantConfig()
        return recipe

    @property
    def torch_dtype(self) -> torch.dtype:
        """``pretrained_config.dtype``; bfloat16 where the configuration names none.

        Raises:
            ValueError: a dtype that the model is not built in.
        """
        name = getattr(self.pretrained_config, "dtype", None) or "bfloat16"
        dtype = _DTYPES.get(str(name).removeprefix("torch."))
        if dtype is None:
            raise ValueError(
                describe_error(
                    "The model is not built in this dtype",
                    where="transformer/config.json: dtype",
                    expected=f"one of {list(_DTYPES)}",
                    found=repr(name),
                    remedy='set dtype to "bfloat16", which the published checkpoints have',
                )
            )
        return dtype


@dataclass
class DiffusionPipelineConfig:
    """Configuration of a pipeline.

    Attributes:
        primary_model_config: That of the transformer.
    """

    primary_model_config: DiffusionModelConfig

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], args: "VisualGenArgs | None" = None
    ) -> "DiffusionPipelineConfig":
        """Read a checkpoint's configuration and apply the caller's options.

        Args:
            path: Root folder of the checkpoint; ``transformer/config.json`` is read.
            args: The caller's options; their ``quant_config`` replaces the checkpoint's recipe,
                and is judged more strictly: none of its keys may be without effect.

        Raises:
            ValueError: the file is missing or no JSON object, or the recipe is refused.
            NotImplementedError: an option that is not built yet.
        """
        pretrained = _read_json_object(Path(path) / "transformer" / "config.json")
        override = None if args is None else args.quant_config
        recipe = pretrained.get("quantization_config")
        quant_config, _, dynamic_weight, dynamic_activation = (
            cls.load_diffusion_quant_config(recipe)
            if override is None
            else parse_callers_recipe(override, recipe)
        )
        options = {}
        if args is not None:
            options = {
                "attention": args.attention_config,
                "torch_compile": args.torch_compile_config,
                "cuda_graph": args.cuda_graph_config,
                "parallel": args.parallel_config,
            }
        return cls(
            DiffusionModelConfig(
                pretrained_config=SimpleNamespace(**pretrained),
                mapping=Mapping(),
                quant_config=quant_config,
                dynamic_weight_quant=dynamic_weight,
                force_dynamic_quantization=dynamic_activation,
                quant_config_overridden=override is not None,
                **options,
            )
        )

    @staticmethod
    def load_diffusion_quant_config(
        recipe: MappingABC[str, Any] | None,
    ) -> tuple[QuantConfig, dict[str, QuantConfig] | None, bool, bool]:
        """Read a ModelOpt-style quantisation dict.

        Every group of ``config_groups`` is read: all have to be FP8 (8-bit float) for weights and
        activations, with one scale a tensor, and to agree on ``dynamic``. Without groups
        ``{"quant_algo": "FP8"}`` means that weights are quantised while they load and activations
        at run time. ``ignore`` becomes ``exclude_modules``. Keys at the top level that nobody here
        knows are left alone, as a checkpoint's own recipe may have them; `from_pretrained` refuses
        them in a caller's.

        Args:
            recipe: The dict; None, ``{}`` and one without algorithm and groups mean none.

        Returns:
            ``(quant_config, layer_config, dynamic_weight, dynamic_activation)``. ``layer_config``
            would hold recipes of single layers; it is None, since mixed recipes are refused.

        Raises:
            ValueError: an unknown or unverified algorithm (named), another quant_method than
                "modelopt", weight-only, per-channel or block scales, groups that differ, keys that
                contradict the algorithm or each other.
        """
        return parse_quant_recipe(recipe)


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            describe_error(
                "The transformer's configuration can't be read",
                where=path,
                expected="a JSON file of the diffusers layout",
                found=f"{type(error).__name__}: {error}",
                remedy=(
                    "give the checkpoint's root folder, the one with model_index.json; if it is "
                    "that, download the file again"
                ),
            )
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            describe_error(
                "The transformer's configuration is no JSON object",
                where=path,
                expected="an object",
                found=type(content).__name__,
                remedy="restore transformer/config.json from the published checkpoint",
            )
        )
    return content
