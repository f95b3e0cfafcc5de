# SPDX-License-Identifier: Apache-2.0
"""Quantisation recipes by name. Importing this package does not import torch."""

from tensorrt_llm.quantization.mode import QuantAlgo, QuantMode

__all__ = ["QuantAlgo", "QuantMode"]
