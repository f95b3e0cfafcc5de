# SPDX-License-Identifier: Apache-2.0
"""The public API of visual generation; the names load on first use, without torch before that."""

from importlib import import_module

_EXPORTS = {
    "AttentionConfig": "tensorrt_llm.visual_gen.args",
    "CompilationConfig": "tensorrt_llm.visual_gen.args",
    "CudaGraphConfig": "tensorrt_llm.visual_gen.args",
    "ExtraParamSchema": "tensorrt_llm.visual_gen.params",
    "ParallelConfig": "tensorrt_llm.visual_gen.args",
    "RequestBlockedError": "tensorrt_llm.visual_gen.output",
    "RequestCancelledError": "tensorrt_llm.visual_gen.output",
    "TorchCompileConfig": "tensorrt_llm.visual_gen.args",
    "VisualGen": "tensorrt_llm.visual_gen.visual_gen",
    "VisualGenArgs": "tensorrt_llm.visual_gen.args",
    "VisualGenMetrics": "tensorrt_llm.visual_gen.output",
    "VisualGenOutput": "tensorrt_llm.visual_gen.output",
    "VisualGenParams": "tensorrt_llm.visual_gen.params",
    "VisualGenProgress": "tensorrt_llm.visual_gen.output",
    "VisualGenResult": "tensorrt_llm.visual_gen.visual_gen",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
