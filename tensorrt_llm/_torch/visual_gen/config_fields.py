# SPDX-License-Identifier: Apache-2.0
"""The option groups that the public arguments and the model configuration share.

Importing this module does not import torch. Unknown fields are refused, and so are values of
another type than the field's: nothing is converted.
"""

from pydantic import ConfigDict, PositiveInt

from tensorrt_llm.mapping import refuse_parallel_axes
from tensorrt_llm.strict_model import StrictModel


class _OptionGroup(StrictModel):
    # Strict: True is no size and "yes" no switch. YAML has integers and booleans of its own.
    model_config = ConfigDict(validate_assignment=True, strict=True)


class AttentionConfig(_OptionGroup):
    """Attention.

    Attributes:
        backend: "AUTO" takes FA3 where it is installed and serves the model, else VANILLA, and logs
            which; "VANILLA" is PyTorch's own; "FA3" is FlashAttention-3 (extra ``hopper``);
            "FA3_FP8" is FA3 on FP8 operands in the FP8 steps of a static FP8 checkpoint.
    """

    backend: str = "AUTO"


class TorchCompileConfig(_OptionGroup):
    """torch.compile of the generation layers.

    Attributes:
        enable: None means on for CUDA and off on CPU.
        enable_fullgraph: Raise instead of splitting a layer into several graphs.
    """

    enable: bool | None = None
    enable_fullgraph: bool = False


class CudaGraphConfig(_OptionGroup):
    """CUDA graphs of the generation layers, one per precision mode and size.

    They save the host's time between kernels, which counts where kernels are short, as for a
    picture of 1024x1024. They keep the memory of one step, and each size room for the text.

    Attributes:
        enable: None captures short steps on CUDA where one graph serves every prompt (backend FA3);
            True captures every step, and needs a CUDA device; False none.
    """

    enable: bool | None = None


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


def refuse_unbuilt_options(parallel: ParallelConfig) -> None:
    """Refuse the options that have names but no implementation yet.

    Raises:
        NotImplementedError: a parallel axis above 1 (the message names it).
    """
    refuse_parallel_axes(parallel.model_dump(), where="parallel_config")
