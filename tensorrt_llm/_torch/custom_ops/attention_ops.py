# SPDX-License-Identifier: Apache-2.0
"""What stands between the q, k, v projections and attention, as ops of namespace ``trtllm``.

``qk_norm_rope`` normalises and rotates q and k, and writes K and V as attention reads them: the
text's rows, then the media's. ``qkv_norm_rope_e4m3`` does the same and quantises all three to FP8
with scales of their own data. Both take

========================= ======================================================================
q                         [B, N, Hq * D], B branches of N media tokens
k, v                      [B, N, Hk * D]; Hk divides Hq
q_weight, k_weight, eps   [D], the RMSNorm over each head (``modules/rms_norm.py``)
cos, sin                  [B, N, D], the rotary tables (``models/cosmos3/rope.py``)
text_k, text_v            [B, L, Hk, D], the text's keys and values; row b holds text_lengths[b] of
                          them, and what lies behind is never used. L may be 0.
text_lengths              int32 [B], each in [0, L], on the inputs' device
========================= ======================================================================

of one dtype, BF16, FP16 or FP32. Rows of q, k and v are contiguous but may lie apart (views of a
fused projection); all else is contiguous. D is even on the CPU, and a power of two of 16 or more
on CUDA. The contract of ``torch_custom_ops`` holds; the lengths are never read by the host on CUDA,
where one outside [0, L] is cut to it; the CPU refuses it.

``qk_norm_rope`` returns q [B, N, Hq, D], normalised per head and rotated, and K, V [B, L + N, Hk,
D]: the text's rows [0, length), the media's [length, length + N) with k normalised and rotated,
then zeros. The CPU computes exactly the torch arithmetic of the two modules. On CUDA text rows, V
and the zeros have the same bits; the norms differ as ``norm_ops`` says, every later operation
rounds as on the CPU.

``qkv_norm_rope_e4m3`` returns (q8, k8, v8, q_descale, k_descale, v_descale, v_mean): codes
(float8_e4m3fn) of the shapes above, FP32 scales [B, Hk], one a branch and key head, and FP32 means
[B, Hk, D]. Of K and V each head's mean over text and media (FP32, per dimension) is subtracted
first. For K that adds one number to all of a query's scores and leaves softmax alone; for V it
takes v_mean from the attention's output, since a query's probabilities add up to 1: the caller adds
it back (``add_value_mean``). FP8 attention over values with a mean of their own, as layers have
them, was measured a third off without it (benchmarks/results/attention_error_h200.json).
descale is amax / 448 (1.0 where that is zero) of what is left of K and V, and of q over the query
heads that share the key head. codes = clamp(float32(x) / descale, -448, 448); rows behind the keys
have code 0. Equal inputs give equal bits on CUDA; against the CPU a mean's sum is ordered
otherwise. NaN in a head makes that head's descale and codes NaN.

``add_value_mean(attended, v_mean, scale=None)`` takes attention's output [B, N, Hq, D], 16 bit or
FP32, and returns it with each head's v_mean added in FP32 and rounded to its dtype; with a 0-d FP32
scale that result as codes, as ``quantize_e4m3_static`` makes them: the input of the projection
behind attention, in the pass that it needs anyway.
"""

import functools
from types import ModuleType

import torch

from tensorrt_llm._torch.custom_ops import torch_custom_ops
from tensorrt_llm._torch.custom_ops.attention_arguments import (
    QkvInputs,
    check_cuda_head_dim,
    check_qkv,
    check_value_mean,
)
from tensorrt_llm._torch.custom_ops.norm_ops import rms_norm_formula
from tensorrt_llm._torch.custom_ops.op_arguments import FP8
from tensorrt_llm._torch.custom_ops.registration import device_guard, register_op
from tensorrt_llm._utils import describe_error
from tensorrt_llm.quantization.scales import E4M3_MAX

# Launches for every SM version and head count; measured on an H200 with both branches of 44,160
# tokens, 32 and 64 query heads (benchmarks/results/ops_h200.json).
# 4 warps: 0.549 and 0.916 ms, 0.96 and 0.95 of the copy bandwidth; 8: 0.590 and 0.902.
_QK_NORM_ROPE_LAUNCH = {"num_warps": 4}
# Rows a program, fewest and most, and about how many programs. 64 rows: 0.356 and 0.552 ms; 12:
# 0.390 and 0.597. A picture of 1,024 tokens, 32 heads: 0.037 and 0.020.
_STATISTICS_LAUNCH = {"num_warps": 4}
_STATISTICS_ROWS = (12, 64)
_STATISTICS_PROGRAMS = 512
# 4 warps: 0.547 and 1.005 ms, 0.73 and 0.65 of the copy; 2: 0.569 and 1.152.
_QUANTIZE_LAUNCH = {"num_warps": 4}
# Partials a program reads at a time, and its warps. Of 64 rows each (128, 8): 0.025 ms, (64, 8)
# 0.063; of a picture, 12 rows each: 0.016 and 0.027.
_DESCALES_LAUNCH = {"block": 128, "num_warps": 8}
# To FP8 (4, 4): 0.280 and 0.633 ms, 0.91 and 0.81 of the copy; (1, 4) 0.293 and 0.629.
_ADD_VALUE_MEAN_LAUNCH = {"block": 4, "num_warps": 4}


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType, ModuleType]:
    torch_custom_ops._kernels()  # whose error says what to do where Triton does not import
    from tensorrt_llm._torch.custom_ops import (
        attention_kernels,
        attention_scale_kernels,
        value_mean_kernels,
    )

    return attention_kernels, attention_scale_kernels, value_mean_kernels


# ---- qk_norm_rope ----


def _qk_norm_rope_cpu(*args):
    inputs = QkvInputs(*args)
    check_qkv("trtllm::qk_norm_rope", inputs)
    q, keys, values, _ = _joined("trtllm::qk_norm_rope", inputs)
    return q, keys, values


def _qk_norm_rope_cuda(*args):
    inputs = QkvInputs(*args)
    outputs = _qk_norm_rope_fake(*args)
    check_cuda_head_dim("trtllm::qk_norm_rope", inputs.head_dim)
    with device_guard(inputs.q):
        _kernels()[0].launch_qk_norm_rope(inputs, *outputs, **_QK_NORM_ROPE_LAUNCH)
    return outputs


def _qk_norm_rope_fake(*args):
    inputs = QkvInputs(*args)
    check_qkv("trtllm::qk_norm_rope", inputs)
    return _empty_outputs(inputs, inputs.q.dtype)


def _empty_outputs(inputs: QkvInputs, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    head_dim, rows = inputs.head_dim, inputs.text_rows + inputs.media_rows
    queries = (inputs.batch, inputs.media_rows, inputs.query_heads, head_dim)
    keys = (inputs.batch, rows, inputs.kv_heads, head_dim)
    return tuple(inputs.q.new_empty(shape, dtype=dtype) for shape in (queries, keys, keys))


def _joined(
    op: str, inputs: QkvInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """The plain torch form: q, K, V and the number of text rows of each branch."""
    heads = (inputs.batch, inputs.media_rows, -1, inputs.head_dim)
    q = rms_norm_formula(inputs.q.view(heads), inputs.q_weight, inputs.eps)
    k = rms_norm_formula(inputs.k.view(heads), inputs.k_weight, inputs.eps)
    q, k = (rotary_formula(x, inputs.cos, inputs.sin).contiguous() for x in (q, k))
    v = inputs.v.view(heads)
    _, keys, values = _empty_outputs(inputs, inputs.q.dtype)
    lengths = inputs.text_lengths.tolist()
    for branch, length in enumerate(lengths):
        if not 0 <= length <= inputs.text_rows:
            raise ValueError(
                describe_error(
                    "A text length is not within the text's rows",
                    where=f"{op}, text_lengths[{branch}]",
                    expected=f"0 to {inputs.text_rows}",
                    found=length,
                    remedy="pass the number of rows of text_k that hold text",
                )
            )
        end = length + inputs.media_rows
        for joined, text, media in ((keys, inputs.text_k, k), (values, inputs.text_v, v)):
            joined[branch, :length] = text[branch, :length]
            joined[branch, length:end] = media[branch]
            joined[branch, end:] = 0
    return q, keys, values, lengths


def rotary_formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., N, heads, D] rotated by tables [..., N, D] of its dtype, in plain torch operations.

    Halves are paired (NeoX); each operation rounds to x's dtype.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


# ---- qkv_norm_rope_e4m3 ----


def statistics_block(batch: int, media_rows: int) -> int:
    """Rows that one program of the statistics reads, for ``batch`` branches of ``media_rows``.

    Few enough that a picture fills the GPU, many enough that a video leaves few partials to join.
    The order of the sums follows from it, so it is a function of these sizes alone: neither of the
    GPU, nor of the text's padding, which a captured graph has more of.
    """
    fewest, most = _STATISTICS_ROWS
    return min(most, max(fewest, batch * media_rows // _STATISTICS_PROGRAMS))


def _qkv_norm_rope_e4m3_cpu(*args):
    inputs = QkvInputs(*args)
    check_qkv("trtllm::qkv_norm_rope_e4m3", inputs)
    q, keys, values, lengths = _joined("trtllm::qkv_norm_rope_e4m3", inputs)
    grouped = (inputs.batch, inputs.media_rows, inputs.kv_heads, -1)
    codes, descales = [], []
    keys, values = keys.float(), values.float()
    v_mean = values.new_empty((inputs.batch, inputs.kv_heads, inputs.head_dim))
    for branch, length in enumerate(lengths):
        end = length + inputs.media_rows
        v_mean[branch] = values[branch, :end].mean(0)
        values[branch, :end] -= v_mean[branch]
        keys[branch, :end] -= keys[branch, :end].mean(0)
    for x, shape in ((q, grouped), (keys, keys.shape), (values, values.shape)):
        grouped_x = x.float().reshape(shape)
        descale = grouped_x.abs().amax((1, 3)) / E4M3_MAX
        descale = torch.where(descale == 0, 1.0, descale)
        coded = torch_custom_ops._to_e4m3_cpu(grouped_x, descale[:, None, :, None])
        codes.append(coded.view(x.shape))
        descales.append(descale)
    # Zero over NaN is NaN, and padding has code 0 whatever the scale.
    for branch, length in enumerate(lengths):
        for coded in codes[1:]:
            coded[branch, length + inputs.media_rows :] = 0
    return *codes, *descales, v_mean


def _qkv_norm_rope_e4m3_cuda(*args):
    inputs = QkvInputs(*args)
    outputs = _qkv_norm_rope_e4m3_fake(*args)
    check_cuda_head_dim("trtllm::qkv_norm_rope_e4m3", inputs.head_dim)
    codes, descales, v_mean = outputs[:3], outputs[3:6], outputs[6]
    k_mean = torch.empty_like(v_mean)
    kernels, scale_kernels, _ = _kernels()
    with device_guard(inputs.q):
        block = statistics_block(inputs.batch, inputs.media_rows)
        partials = scale_kernels.launch_qkv_statistics(inputs, block=block, **_STATISTICS_LAUNCH)
        means = (k_mean, v_mean)
        scale_kernels.launch_qkv_descales(inputs, partials, *means, *descales, **_DESCALES_LAUNCH)
        kernels.launch_qkv_quantize(inputs, *codes, *means, *descales, **_QUANTIZE_LAUNCH)
    return outputs


def _qkv_norm_rope_e4m3_fake(*args):
    inputs = QkvInputs(*args)
    check_qkv("trtllm::qkv_norm_rope_e4m3", inputs)
    shape = (inputs.batch, inputs.kv_heads)
    descales = tuple(inputs.q.new_empty(shape, dtype=torch.float32) for _ in range(3))
    v_mean = inputs.q.new_empty((*shape, inputs.head_dim), dtype=torch.float32)
    return *_empty_outputs(inputs, FP8), *descales, v_mean


# ---- add_value_mean ----


def _add_value_mean_cpu(attended, v_mean, scale=None):
    check_value_mean("trtllm::add_value_mean", attended, v_mean, scale)
    grouped = attended.float().unflatten(2, (v_mean.shape[1], -1))
    total = (grouped + v_mean[:, None, :, None]).flatten(2, 3).to(attended.dtype)
    return total if scale is None else torch_custom_ops._to_e4m3_cpu(total, scale)


def _add_value_mean_cuda(attended, v_mean, scale=None):
    out = _add_value_mean_fake(attended, v_mean, scale)
    if out.numel() > 0:
        with device_guard(attended):
            _kernels()[2].launch_add_value_mean(
                attended, v_mean, out, scale, **_ADD_VALUE_MEAN_LAUNCH
            )
    return out


def _add_value_mean_fake(attended, v_mean, scale=None):
    check_value_mean("trtllm::add_value_mean", attended, v_mean, scale)
    return attended.new_empty(attended.shape, dtype=attended.dtype if scale is None else FP8)


# ---- Registration ----

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, float eps, "
    "Tensor cos, Tensor sin, Tensor text_k, Tensor text_v, Tensor text_lengths"
)
register_op(
    f"qk_norm_rope({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _qk_norm_rope_cpu,
    _qk_norm_rope_cuda,
    _qk_norm_rope_fake,
)
register_op(
    f"qkv_norm_rope_e4m3({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _qkv_norm_rope_e4m3_cpu,
    _qkv_norm_rope_e4m3_cuda,
    _qkv_norm_rope_e4m3_fake,
)
register_op(
    "add_value_mean(Tensor attended, Tensor v_mean, Tensor? scale=None) -> Tensor",
    _add_value_mean_cpu,
    _add_value_mean_cuda,
    _add_value_mean_fake,
)
