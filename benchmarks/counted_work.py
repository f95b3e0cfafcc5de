# SPDX-License-Identifier: Apache-2.0
"""The bytes and operations that a denoising step can't do without, by kernel family.

Bytes are counted as if each kernel read every input once and wrote every output once, in the form
in which the step has it; a kernel that reads twice, or a pass that could have been joined with
another one, shows as a ratio below 1. Weights and activations of the linears and of attention are
not counted: these kernels have measured ceilings of their own.

With M rows (tokens of both branches), H hidden, I intermediate, Q = heads * head_dim, K = key heads
* head_dim, T text tokens of both branches and e bytes an element of a linear's input (FP8 1 in
"w8a8", else 2), a layer moves

================== =======================================================================
norm_residual      twice: read x and the residual, write their sum (2 bytes each) and the
                   normalised input of the next linears (e)
qk_norm_rope       read q, k, v (2 each), cos and sin; write q, k, v in the form that
                   attention reads (2, or 1 for FP8 attention); copy the text's k and v
attention_fp8      FP8 attention alone: q, k, v, cos, sin and the text once more, for the
                   scales, which depend on all of them
quantize_attended  read the attention output (2 Q), write it as FP8 (1 Q); "w8a8" alone.
                   With FP8 attention the same pass adds the mean values, which are few
swiglu             read gate and up (2 I each), write e I
dequantize         read the FP8 weights (1), write them in 16 bit (2); "w8a16" alone, and part
                   of the ceiling of the linears, not of ``other_bytes``
================== =======================================================================

The first norm of a step has no residual, and the last layer's sum goes through the final norm. Once
a step the input projection writes M x H, the time embedding is added to it, and the output
projection reads it ("boundary").
"""

from dataclasses import replace

from benchmarks.common import Case, Family

DEQUANTIZE = "dequantize"


def counted_bytes(family: Family, case: Case, mode: str, attention: str) -> dict[str, int]:
    """Bytes of one step by kernel family, all layers together.

    Args:
        family: Sizes of the transformer.
        case: Size of the request.
        mode: "w8a8" or "w8a16".
        attention: "bf16" or "fp8", the precision of attention.
    """
    m, hidden, layers = case.rows, family.hidden, family.layers
    q_size, kv_size = family.heads * family.head_dim, family.kv_heads * family.head_dim
    qkv_size = q_size + 2 * kv_size
    text = sum(case.text) * 2 * kv_size
    tables = m * 2 * family.head_dim * 2
    e = 1 if mode == "w8a8" else 2
    attended = 1 if attention == "fp8" else 2
    counted = {
        # 2 L norms: the first without residual, the other 2 L - 1 with; then the final one, whose
        # result stays 16 bit and whose sum nobody reads.
        "norm_residual": m * hidden * ((2 + e) + (2 * layers - 1) * (6 + e) + 6),
        "qk_norm_rope": layers * (m * qkv_size * (2 + attended) + tables + text * (2 + attended)),
        "swiglu": layers * m * family.intermediate * (4 + e),
        "boundary": m * hidden * 8,
    }
    if mode == "w8a8":
        counted["quantize_attended"] = layers * m * q_size * 3
    else:
        counted[DEQUANTIZE] = layers * 3 * linear_weights(family)
    if attention == "fp8":
        counted["attention_fp8"] = layers * (2 * m * qkv_size + tables + 2 * text)
    return counted


def other_bytes(family: Family, case: Case, mode: str, attention: str) -> int:
    """What the step moves outside linears and attention."""
    counted = counted_bytes(family, case, mode, attention)
    return sum(size for name, size in counted.items() if name != DEQUANTIZE)


def layer_bytes(family: Family, case: Case, mode: str, attention: str) -> int:
    """What one layer moves outside linears and attention: what one more adds to a step."""
    longer = replace(family, layers=family.layers + 1)
    return other_bytes(longer, case, mode, attention) - other_bytes(family, case, mode, attention)


def linear_weights(family: Family) -> int:
    """Weights of one generation layer."""
    return sum(n_in * n_out for n_in, n_out in family.linears.values())


def linear_flops(family: Family, case: Case) -> int:
    """Operations of a step's linears, two a multiplication with its addition."""
    return 2 * case.rows * linear_weights(family) * family.layers


def attention_flops(family: Family, case: Case) -> int:
    """Operations of a step's attention: every media token sees its branch's text and media."""
    pairs = sum(case.tokens * (case.tokens + text) for text in case.text)
    return 4 * pairs * family.heads * family.head_dim * family.layers
