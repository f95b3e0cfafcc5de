# SPDX-License-Identifier: Apache-2.0
"""Runs the norm and attention launch functions in Triton's interpreter; saves what came out.

A program of its own like ``triton_interpreter_cases.py``, started once by
``test_norm_attention_kernels.py``. FP8 codes are written as FP32 and so not rounded: the
interpreter rounds BF16 and FP8 wrongly.
"""

import sys
from unittest import mock

import torch
import torch.nn.functional as F
from triton_interpreter_cases import check_guard, guarded

from tensorrt_llm._torch.custom_ops import (
    attention_kernels,
    attention_scale_kernels,
    norm_kernels,
    value_mean_kernels,
)
from tests.support.qkv_inputs import EPS, qkv_inputs

FP16, FP32 = torch.float16, torch.float32
SCALE = 0.0037
NORMS = [  # rows, hidden size, dtype, rows a program, warps
    (1, 1, FP32, 1, 1),
    (5, 64, FP16, 2, 4),
    (7, 80, FP32, 3, 1),
    (4, 100, FP16, 1, 2),
    (3, 5120, FP32, 2, 8),
]
ATTENTION = [  # heads (Hq, Hk, D), rows (B, N, L), lengths, dtype, views, rows a program
    ((4, 2, 16), (2, 9, 5), [2, 5], FP32, False, 4),
    ((8, 2, 32), (1, 3, 4), [0], FP16, True, 1),
    ((6, 3, 16), (3, 5, 7), [7, 0, 3], FP32, True, 2),
    ((1, 1, 64), (2, 4, 0), [0, 0], FP16, False, 8),
    ((4, 4, 16), (2, 2, 3), [-1, 9], FP32, False, 2),  # lengths are cut to [0, 3]
]
VALUE_MEANS = [  # heads (Hq, Hk, D), branches, media rows, dtype, rows a program
    ((32, 8, 16), 2, 3, FP16, 1),
    ((64, 8, 128), 1, 2, FP16, 1),
    ((32, 8, 128), 2, 2, FP32, 4),
    ((6, 2, 16), 3, 3, FP32, 2),  # 96 of 128 columns, and groups that are no power of two
    ((3, 1, 5), 2, 4, FP16, 3),
    ((2, 2, 8), 1, 1, FP32, 1),
]


def outputs(shapes, dtype):
    return zip(*(guarded(shape, dtype) for shape in shapes), strict=True)


def norm_cases(generator):
    for rows, size, dtype, block, warps in NORMS:
        x, residual, weight = (
            torch.randn(shape, generator=generator).mul(2).to(dtype)
            for shape in ((rows, size), (rows, size), (size,))
        )
        case = {"x": x, "residual": residual, "weight": weight}
        for name, scale, out_dtype in (("wide", None, dtype), ("codes", SCALE, FP32)):
            scale = None if scale is None else torch.tensor(scale)
            launch = {"block": block, "num_warps": warps}
            buffers, (out, added, total) = outputs([x.shape] * 3, out_dtype)
            if total.dtype != dtype:
                total_buffer, total = guarded(x.shape, dtype)
                buffers = (*buffers[:2], total_buffer)
            norm_kernels.launch_rms_norm(x, weight, out, scale, EPS, **launch)
            norm_kernels.launch_add_rms_norm(
                x, residual, weight, added, total, scale, EPS, **launch
            )
            for buffer in buffers:
                check_guard(buffer, (name, rows, size))
            case[name] = (out.clone(), added.clone(), total.clone())
        yield case


NEW_EMPTY = torch.Tensor.new_empty


def poisoned(self, *size, **kwargs):
    made = NEW_EMPTY(self, *size, **kwargs)
    return made.fill_(float("nan")) if made.is_floating_point() else made


def scales_of(inputs, block):
    """Means and descales, and the buffers they lie in; partials that are not written are NaN."""
    with mock.patch.object(torch.Tensor, "new_empty", poisoned):
        partials = attention_scale_kernels.launch_qkv_statistics(inputs, block=block, num_warps=4)
    per_head = (inputs.batch, inputs.kv_heads)
    means = (*per_head, inputs.head_dim)
    buffers, scales = outputs([means, means, per_head, per_head, per_head], FP32)
    attention_scale_kernels.launch_qkv_descales(inputs, partials, *scales, block=2, num_warps=4)
    return buffers, scales


def with_padding(inputs, rows):
    """The same text with more rows behind it, as a captured graph has them."""
    padding = (0, 0, 0, 0, 0, rows)
    text = (F.pad(x, padding, value=float("nan")) for x in (inputs.text_k, inputs.text_v))
    text_k, text_v = text
    lengths = inputs.text_lengths.clamp(0, inputs.text_rows)
    return inputs._replace(text_k=text_k, text_v=text_v, text_lengths=lengths)


def attention_cases():
    for heads, rows, lengths, dtype, views, block in ATTENTION:
        query_heads, kv_heads, head_dim = heads
        batch, media, text = rows
        inputs = qkv_inputs(
            heads, rows, [min(max(n, 0), text) for n in lengths], dtype=dtype, fused=views
        )
        inputs.text_lengths.copy_(torch.tensor(lengths))
        queries = (batch, media, query_heads, head_dim)
        keys = (batch, text + media, kv_heads, head_dim)
        buffers, found = outputs([queries, keys, keys], dtype)
        attention_kernels.launch_qk_norm_rope(inputs, *found, num_warps=4)
        more, scales = scales_of(inputs, block)
        padded_more, padded = scales_of(with_padding(inputs, 3 * block + 1), block)
        last, codes = outputs([queries, keys, keys], FP32)
        attention_kernels.launch_qkv_quantize(inputs, *codes, *scales, num_warps=4)
        for buffer in (*buffers, *more, *padded_more, *last):
            check_guard(buffer, (heads, rows, lengths))
        yield {
            "inputs": tuple(inputs),
            "found": [x.clone() for x in found],
            "scales": [x.clone() for x in scales],
            "scales_with_padding": [x.clone() for x in padded],
            "codes": [x.clone() for x in codes],
        }


def head_scale_cases():
    """NaN, infinities, signed zeros and large values at scales of every kind, one a row."""
    nan, inf = float("nan"), float("inf")
    row = [0.0, -0.0, 1e-40, 447.0, -449.0, 3e38, nan, -inf]
    for scales in ([1.0, 0.037], [1.0, 1e-30], [1e30, 0.5], [0.0, inf], [nan, 1.0]):
        x, scale = torch.tensor([row, row]), torch.tensor(scales)
        # Values are a pass over V of one text row with two heads.
        inputs = qkv_inputs((2, 2, 8), (1, 1, 1), [1], dtype=FP32)
        inputs = inputs._replace(text_v=x.view(1, 1, 2, 8))
        buffer, out = guarded((1, 2, 2, 8), FP32)
        others = [torch.empty(1, n, 2, 8) for n in (1, 2)]
        one, mean = torch.ones(1, 2), torch.zeros(1, 2, 8)
        attention_kernels.launch_qkv_quantize(
            inputs, *others, out, mean, mean, one, one, scale[None], num_warps=1
        )
        check_guard(buffer, scales)
        yield {"x": x, "scale": scale, "codes": out[0, 0].clone()}


def value_mean_cases(generator):
    for heads, branches, rows, dtype, block in VALUE_MEANS:
        query_heads, kv_heads, head_dim = heads
        shape = (branches, rows, query_heads, head_dim)
        attended = torch.randn(shape, generator=generator).to(dtype)
        v_mean = torch.randn(branches, kv_heads, head_dim, generator=generator) * 3
        case = {"attended": attended, "v_mean": v_mean}
        for name, scale, out_dtype in (("wide", None, dtype), ("codes", torch.tensor(SCALE), FP32)):
            buffer, out = guarded(shape, out_dtype)
            value_mean_kernels.launch_add_value_mean(
                attended, v_mean, out, scale, block=block, num_warps=4
            )
            check_guard(buffer, (name, heads, rows))
            case[name] = out.clone()
        yield case


def main(path):
    torch.save(
        {
            "norm": list(norm_cases(torch.Generator().manual_seed(0))),
            "attention": list(attention_cases()),
            "head_scales": list(head_scale_cases()),
            "value_mean": list(value_mean_cases(torch.Generator().manual_seed(1))),
        },
        path,
    )


if __name__ == "__main__":
    main(sys.argv[1])
