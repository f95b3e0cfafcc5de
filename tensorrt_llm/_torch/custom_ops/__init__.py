# SPDX-License-Identifier: Apache-2.0
"""The ``trtllm`` custom ops; importing this package registers them, without Triton or a GPU."""

from tensorrt_llm._torch.custom_ops import torch_custom_ops  # noqa: F401
