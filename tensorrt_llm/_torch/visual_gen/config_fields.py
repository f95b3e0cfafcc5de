# SPDX-License-Identifier: Apache-2.0
"""The option groups that the public arguments and the model configuration share.

Importing this module does not import torch. Unknown fields are refused.
"""

from pydantic import BaseModel, ConfigDict, PositiveInt

from tensorrt_llm._utils import describe_error
from tensorrt_llm.mapping import refuse_parallel_axes


class _OptionGroup(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class AttentionConfig(_OptionGroup):
    """Attention.

    Attributes:
        backend: Name of the attention backend; "VANILLA" is PyTorch's own.
    """

    backend: str = "VANILLA"


class TorchCompileConfig(_OptionGroup):
    """torch.compile of the generation layers.

    Attributes:
        enable: None means on for CUDA and off on CPU.
        enable_fullgraph: Raise instead of splitting a layer into several graphs.
    """

    enable: bool | None = None
    enable_fullgraph: bool = False


class CudaGraphConfig(_OptionGroup):
    """CUDA graphs. Not built yet: `refuse_unbuilt_options` refuses ``enable=True``."""

    enable: bool = False


class ParallelConfig(_OptionGroup):
    """GPUs along each parallel axis. Not built yet: `refuse_unbuilt_options` refuses more than 1.

    Attributes:
        cfg_size: Guidance branches on different GPUs.
        ulysses_size: Sequence parallelism over heads.
        ring_size: Sequence parallelism over keys.
        tp_size: Tensor parallelism.
        parallel_vae_size: GPUs that share the VAE's work.
    """

    cfg_size: PositiveInt = 1
    ulysses_size: PositiveInt = 1
    ring_size: PositiveInt = 1
    tp_size: PositiveInt = 1
    parallel_vae_size: PositiveInt = 1


def refuse_unbuilt_options(parallel: ParallelConfig, cuda_graph: CudaGraphConfig) -> None:
    """Refuse the options that have names but no implementation yet.

    Raises:
        NotImplementedError: a parallel axis above 1 (the message names it), or CUDA graphs.
    """
    refuse_parallel_axes(parallel.model_dump(), where="parallel_config")
    if cuda_graph.enable:
        raise NotImplementedError(
            describe_error(
                "CUDA graphs are not built yet",
                where="cuda_graph_config.enable",
                expected=False,
                found=True,
                remedy="leave cuda_graph_config.enable off",
            )
        )
