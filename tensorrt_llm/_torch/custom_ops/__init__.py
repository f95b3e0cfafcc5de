# SPDX-License-Identifier: Apache-2.0
"""The ``trtllm`` custom ops; importing this package registers them, without Triton or a GPU."""

from tensorrt_llm._torch.custom_ops import (  # noqa: F401
    attention_ops,
    norm_ops,
    torch_custom_ops,
    w8a16_ops,
)
