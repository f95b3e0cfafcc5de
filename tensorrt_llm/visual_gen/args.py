# SPDX-License-Identifier: Apache-2.0
"""How a ``VisualGen`` is built: the checkpoint and the runtime options. No torch on import."""

import os
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, StrictBool, StrictInt, field_validator, model_validator

from tensorrt_llm._torch.visual_gen.checkpoints.source import refuse_revision_of_folder
from tensorrt_llm._torch.visual_gen.config_fields import (
    AttentionConfig,
    CudaGraphConfig,
    ParallelConfig,
    TorchCompileConfig,
)
from tensorrt_llm._torch.visual_gen.quantization.caller_recipe import refuse_unknown_keys
from tensorrt_llm._utils import describe_error
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.strict_model import StrictModel

__all__ = [
    "AttentionConfig",
    "CompilationConfig",
    "CudaGraphConfig",
    "ParallelConfig",
    "TorchCompileConfig",
    "VisualGenArgs",
]

_Side = Annotated[StrictInt, Field(ge=16, multiple_of=16)]
_Frames = Annotated[StrictInt, Field(ge=1)]


class CompilationConfig(StrictModel):
    """What is run once at load, in every precision mode, so that no request pays for it.

    Attributes:
        resolutions: (height, width) pairs in pixels, multiples of 16.
        num_frames: Frame counts 4k + 1, each tried at each resolution; 1 is an image.
        skip_warmup: Load without trying anything; the first request then finds what is missing.
    """

    resolutions: list[tuple[_Side, _Side]] = Field([(256, 256)], min_length=1)
    num_frames: list[_Frames] = Field([1, 5], min_length=1)
    skip_warmup: StrictBool = False

    @model_validator(mode="after")
    def _check_frames(self) -> "CompilationConfig":
        odd = [n for n in self.num_frames if n % 4 != 1]
        if odd:
            raise ValueError(
                describe_error(
                    "Bad warm-up frame count",
                    where="compilation_config.num_frames",
                    expected="numbers of the form 4k + 1",
                    found=odd,
                    remedy="round each up to 4k + 1: 1, 5, 9, 13, ...",
                )
            )
        return self


class VisualGenArgs(StrictModel):
    """The options of ``VisualGen``; every one of them has an effect or is refused at load.

    Step precision is not among them: the policy belongs to the checkpoint.

    Attributes:
        model: A local checkpoint folder or a Hub id; ``VisualGen(model)`` fills it in.
        revision: Branch, tag or commit of a Hub repository, for every file. Not for a local folder.
        quant_config: Replaces the checkpoint's recipe: a QuantConfig, or a dictionary in ModelOpt's
            style such as ``{"quant_algo": "FP8"}`` (quantise a 16-bit checkpoint while loading);
            ``{}`` means 16 bit. Unknown keys are refused.
        compilation_config: Shapes to warm up.
        torch_compile_config: torch.compile; by default on for CUDA and off on CPU.
        cuda_graph_config: CUDA graphs.
        attention_config: The attention backend.
        parallel_config: Sizes of the parallel axes.
    """

    model: str | None = None
    revision: str | None = None
    # A dictionary stays one: its keys are ModelOpt's, and the loader reads what they say.
    quant_config: dict[str, Any] | QuantConfig | None = Field(None, union_mode="left_to_right")
    compilation_config: CompilationConfig = Field(default_factory=CompilationConfig)
    torch_compile_config: TorchCompileConfig = Field(default_factory=TorchCompileConfig)
    cuda_graph_config: CudaGraphConfig = Field(default_factory=CudaGraphConfig)
    attention_config: AttentionConfig = Field(default_factory=AttentionConfig)
    parallel_config: ParallelConfig = Field(default_factory=ParallelConfig)

    @model_validator(mode="before")
    @classmethod
    def _accept_path_objects(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("model"), os.PathLike):
            data = {**data, "model": os.fspath(data["model"])}
        return data

    @field_validator("quant_config", mode="before")
    @classmethod
    def _check_quant_config(cls, recipe: Any) -> Any:
        if recipe is not None and not isinstance(recipe, dict | QuantConfig):
            raise ValueError(
                describe_error(
                    "The recipe is of another kind",
                    where="VisualGenArgs.quant_config",
                    expected="a QuantConfig, or a dictionary in ModelOpt's style",
                    found=type(recipe).__name__,
                    remedy='pass {"quant_algo": "FP8"} to quantise while loading, or leave it out',
                )
            )
        if isinstance(recipe, dict):
            # Here already, so that a slip of the pen shows before a checkpoint is downloaded.
            refuse_unknown_keys(recipe)
        return recipe

    @model_validator(mode="after")
    def _check_revision(self) -> "VisualGenArgs":
        if self.model is not None:
            refuse_revision_of_folder(self.model, self.revision)
        return self

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], **overrides: Any) -> "VisualGenArgs":
        """Read the arguments from a YAML mapping.

        Args:
            path: The file.
            overrides: Whole fields that replace the file's.

        Raises:
            ValueError: no such file, not YAML, not a mapping, or an unknown or bad field.
        """
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(
                describe_error(
                    "Can't read the arguments",
                    where=path,
                    expected="a YAML file in UTF-8",
                    found=error,
                    remedy="correct the path, or the line of the file that is named here",
                )
            ) from error
        data = {} if data is None else data
        if not isinstance(data, dict):
            raise ValueError(
                describe_error(
                    "The arguments are no mapping",
                    where=path,
                    expected="field names and values",
                    found=type(data).__name__,
                    remedy="write one `field: value` a line, as in examples/visual_gen/configs",
                )
            )
        return cls(**{**data, **overrides})
