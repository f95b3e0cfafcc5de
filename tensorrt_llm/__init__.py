# SPDX-License-Identifier: Apache-2.0
"""Cosmos3 pictures and video from static FP8 checkpoints, under TensorRT-LLM's names.

The public names below load on first use, so that ``import tensorrt_llm`` costs neither torch nor a
CUDA context.
"""

from importlib import import_module, metadata

from tensorrt_llm.version import __version__

# NVIDIA's distribution of the same import name; this one is called tensorrt-llm-cosmos3.
_UPSTREAM_DISTRIBUTION = "tensorrt_llm"

_EXPORTS = {
    "ExtraParamSchema": "tensorrt_llm.visual_gen.params",
    "QuantConfig": "tensorrt_llm.models.modeling_utils",
    "VisualGen": "tensorrt_llm.visual_gen.visual_gen",
    "VisualGenArgs": "tensorrt_llm.visual_gen.args",
    "VisualGenMetrics": "tensorrt_llm.visual_gen.output",
    "VisualGenOutput": "tensorrt_llm.visual_gen.output",
    "VisualGenParams": "tensorrt_llm.visual_gen.params",
    "VisualGenResult": "tensorrt_llm.visual_gen.visual_gen",
}

__all__ = [*_EXPORTS, "__version__"]


def _refuse_upstream_distribution() -> None:
    """Two distributions that own one import name overwrite each other's files: stop at once."""
    from tensorrt_llm._utils import describe_error

    try:
        version = metadata.version(_UPSTREAM_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        describe_error(
            "NVIDIA's own TensorRT-LLM is installed here and owns the same import name",
            where="import tensorrt_llm",
            expected="one of the distributions tensorrt_llm and tensorrt-llm-cosmos3",
            found=f"both, tensorrt_llm {version}",
            remedy="install tensorrt-llm-cosmos3 in an environment of its own",
        )
    )


_refuse_upstream_distribution()


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
