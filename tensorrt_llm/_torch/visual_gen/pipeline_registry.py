# SPDX-License-Identifier: Apache-2.0
"""Pipelines by the class name that a checkpoint's ``model_index.json`` carries."""

import importlib
from dataclasses import dataclass

from tensorrt_llm._utils import describe_error


@dataclass(frozen=True)
class PipelineEntry:
    """Where a pipeline class lives and which published models it serves.

    Attributes:
        module: Import path; imported when the pipeline is built, not before.
        class_name: Name of the class in that module.
        models: Hub ids known to fit.
    """

    module: str
    class_name: str
    models: tuple[str, ...]

    def load_class(self) -> type:
        """Import and return the pipeline class."""
        return getattr(importlib.import_module(self.module), self.class_name)


_COSMOS3 = PipelineEntry(
    module="tensorrt_llm._torch.visual_gen.models.cosmos3.pipeline_cosmos3",
    class_name="Cosmos3OmniMoTPipeline",
    models=("nvidia/Cosmos3-Nano", "nvidia/Cosmos3-Super"),
)

# The first two are written by diffusers, the last is TensorRT-LLM's own name for the pipeline.
PIPELINES = {
    "Cosmos3OmniPipeline": _COSMOS3,
    "Cosmos3OmniDiffusersPipeline": _COSMOS3,
    "Cosmos3OmniMoTPipeline": _COSMOS3,
}


def find_pipeline(class_name: object) -> PipelineEntry:
    """Return the entry for ``_class_name`` of a model_index.json.

    Raises:
        ValueError: an unknown class name.
    """
    if class_name not in PIPELINES:
        raise ValueError(
            describe_error(
                "Unknown pipeline class",
                where="model_index.json, _class_name",
                expected=f"one of {sorted(PIPELINES)}",
                found=repr(class_name),
                remedy="pass a Cosmos3 checkpoint in the diffusers layout",
            )
        )
    return PIPELINES[class_name]


def supported_models() -> list[str]:
    """Hub ids of the published models that a pipeline here serves."""
    return sorted({model for entry in PIPELINES.values() for model in entry.models})
