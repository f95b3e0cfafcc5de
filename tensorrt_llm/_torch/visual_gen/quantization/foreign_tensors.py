# SPDX-License-Identifier: Apache-2.0
"""Tensors that only other quantisations than per-tensor FP8 have, and what they belong to.

A checkpoint that holds one of them needs arithmetic that isn't built here, so it is refused under
the scheme's name instead of as a tensor that nothing consumes. Importing this module imports torch.
"""

import re

import torch

FOREIGN_NAMES = {
    r"(.*[._])?pre_quant_scale": "SmoothQuant or AWQ: its linear multiplies the activation by it",
    r"(.*\.)?(weight_scale_2|weight_quantizer\._double_scale)": "NVFP4: the scale of block scales",
    r"(.*\.)?(weight|input)_global_scale": "NVFP4: the scale of block scales",
    r"(.*\.)?weight_scale_inv": "block scales of 128 x 128 weights",
    r"(.*\.)?(weight_packed|qweight|qzeros|g_idx|scales)": "integer codes (GPTQ, AWQ)",
    r"(.*\.)?(weight|input)_zero_point": "zero points of an asymmetric quantisation",
    r"(.*\.)?[kv]_scale": "a quantised KV cache",
    r"(.*\.)?([qkvp]|softmax)_(bmm_)?quantizer\..*": "quantised attention",
    r"(.*\.)?(output_scale|output_quantizer\..*)": "quantised outputs",
}
"""Pattern of a tensor's name -> what such a tensor is part of."""

FOREIGN_WEIGHT_DTYPES = {
    torch.uint8: "4-bit codes, two a byte (NVFP4, MXFP4, INT4)",
    torch.float4_e2m1fn_x2: "4-bit codes (NVFP4, MXFP4)",
    torch.int8: "INT8 codes (SmoothQuant)",
    torch.int32: "integer codes, several a word (GPTQ, AWQ)",
}
"""Dtype of a linear's weight -> what stores weights like that."""

_FOREIGN = [(re.compile(pattern), scheme) for pattern, scheme in FOREIGN_NAMES.items()]


def foreign_scheme(name: str) -> str | None:
    """What a tensor of this name is part of, or None for a name that says nothing of the kind."""
    return next((scheme for pattern, scheme in _FOREIGN if pattern.fullmatch(name)), None)
