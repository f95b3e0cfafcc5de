# SPDX-License-Identifier: Apache-2.0
"""The ops around attention on a CUDA device against the unfused torch form on that device.

Compiled, captured and huge calls go through the norm ops too.
"""

import pytest
import torch

import tensorrt_llm._torch.custom_ops  # noqa: F401
from tensorrt_llm._torch.custom_ops import attention_ops
from tests.support.fp8_modules import assert_bit_equal, bits, quantize
from tests.support.qkv_inputs import (
    centred,
    poisoned,
    qkv_inputs,
    rms_norm,
    unfused,
    valid_rows,
)

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPS = torch.ops.trtllm
QK, E4M3, ADD = OPS.qk_norm_rope, OPS.qkv_norm_rope_e4m3, OPS.add_value_mean
DEVICE = "cuda"
EPS = 1e-6
NANO, SUPER, ODD = (32, 8, 128), (64, 8, 128), (12, 3, 16)
CASES = [  # heads, rows (B, N, L), lengths, dtype, views of one tensor
    (NANO, (3, 777, 1600), [900, 7, 1600], BF16, False),
    (NANO, (2, 65, 40), [1, 0], BF16, True),
    (NANO, (1, 1, 0), [0], BF16, False),
    (SUPER, (2, 130, 9), [9, 4], BF16, True),
    (ODD, (3, 37, 9), [9, 0, 4], FP16, True),
]


def normal(*shape, dtype=BF16, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).mul_(2).to(dtype)


def weight_of(shape, dtype):
    return (normal(shape[-1], dtype=FP32, seed=2) * 0.1 + 1).to(dtype)


def scale_of(value=0.0123):
    return torch.tensor(value, device=DEVICE)


def cases_on_gpu(random=False):
    for heads, rows, lengths, dtype, fused in CASES:
        inputs = qkv_inputs(heads, rows, lengths, dtype=dtype, device=DEVICE, fused=fused)
        if random:
            inputs.q.copy_(normal(*inputs.q.shape, dtype=dtype, seed=3))
            inputs.k.copy_(normal(*inputs.k.shape, dtype=dtype, seed=4) + 1)
        yield inputs


def test_rows_whose_squares_sum_exactly_are_bit_equal_to_the_unfused_steps():
    for inputs in cases_on_gpu():
        expected = unfused(inputs)
        for found, wanted in zip(QK(*inputs), expected, strict=True):
            assert_bit_equal(found, wanted)


def test_rotation_launches_write_every_element_with_any_number_of_warps():
    from tensorrt_llm._torch.custom_ops import attention_kernels

    inputs = next(cases_on_gpu())
    expected = unfused(inputs)
    for num_warps in (2, 4, 8):
        found = [poisoned(x) for x in expected]
        attention_kernels.launch_qk_norm_rope(inputs, *found, num_warps=num_warps)
        for one, wanted in zip(found, expected, strict=True):
            assert_bit_equal(one, wanted)


def test_random_rows_are_near_the_unfused_steps_and_text_and_values_are_exact():
    for inputs in cases_on_gpu(random=True):
        q, keys, values = unfused(inputs)
        found_q, found_keys, found_values = QK(*inputs)
        assert_bit_equal(found_values, values)
        pairs = [(found_q, q, inputs.q, inputs.q_weight)]
        for branch, length in enumerate(inputs.text_lengths.tolist()):
            media = slice(length, length + inputs.media_rows)
            text = torch.ones(keys.shape[1], dtype=torch.bool)
            text[media] = False
            assert_bit_equal(found_keys[branch, text], keys[branch, text])
            one = slice(branch, branch + 1)
            pairs.append((found_keys[one, media], keys[one, media], inputs.k[one], inputs.k_weight))
        step = {BF16: 2**-7, FP16: 2**-10}[q.dtype]  # of numbers from 1 to 2
        for found, expected, x, weight in pairs:
            normed = rms_norm(x.unflatten(-1, (-1, weight.numel())), weight, EPS).float().abs()
            # Two units of each half before the products, then three roundings.
            bound = 6 * step * (normed + normed.roll(weight.numel() // 2, -1))
            assert ((found.float() - expected.float()).abs() <= bound).all()
            assert (bits(found) != bits(expected)).float().mean() < 1e-2


def test_lengths_outside_the_text_are_cut_to_it():
    inputs = qkv_inputs(NANO, (2, 5, 4), [0, 4], device=DEVICE)
    expected = [*QK(*inputs), *E4M3(*inputs)]
    outside = inputs._replace(text_lengths=inputs.text_lengths.new_tensor([-5, 1000]))
    for found, wanted in zip([*QK(*outside), *E4M3(*outside)], expected, strict=True):
        assert_bit_equal(found, wanted)


def launched_e4m3(inputs):
    """(codes, descales, means of K and V) of the launches, into poisoned outputs."""
    from tensorrt_llm._torch.custom_ops import attention_kernels, attention_scale_kernels

    op = attention_ops
    outputs = E4M3(*inputs)
    codes, descales = ([poisoned(x) for x in part] for part in (outputs[:3], outputs[3:6]))
    means = [poisoned(outputs[6]) for _ in range(2)]
    block = op.statistics_block(inputs.batch, inputs.media_rows)
    partials = attention_scale_kernels.launch_qkv_statistics(
        inputs, block=block, **op._STATISTICS_LAUNCH
    )
    attention_scale_kernels.launch_qkv_descales(
        inputs, partials, *means, *descales, **op._DESCALES_LAUNCH
    )
    attention_kernels.launch_qkv_quantize(inputs, *codes, *means, *descales, **op._QUANTIZE_LAUNCH)
    return codes, descales, means


def over_448(amax):
    # torch divides by a number on CUDA through its reciprocal; on the CPU it divides.
    scale = amax.cpu() / 448
    return torch.where(scale == 0, 1.0, scale).to(DEVICE)


def assert_e4m3_form(inputs):
    """Codes and descales from the op's own 16-bit rows, which must have the same bits here."""
    q, keys, values = (x.float() for x in QK(*inputs))
    codes, descales, means = launched_e4m3(inputs)
    for found, again in zip([*codes, *descales, means[1]], E4M3(*inputs), strict=True):
        assert_bit_equal(found, again)
    group = inputs.query_heads // inputs.kv_heads
    amax = q.abs().amax((1, 3)).unflatten(1, (inputs.kv_heads, group)).amax(2)
    assert_bit_equal(descales[0], over_448(amax))
    q_scale = descales[0][:, None, :, None].repeat_interleave(group, 2)
    assert_bit_equal(codes[0], quantize(q, q_scale))
    parts = zip((keys, values), codes[1:], descales[1:], means, strict=True)
    for joined, coded, descale, mean in parts:
        rest, scale = centred(inputs, joined, mean), descale[:, None, :, None]
        assert_bit_equal(descale, over_448(rest.abs().amax((1, 3))))
        assert_bit_equal(coded, quantize(rest, scale))
        for branch, end in enumerate(valid_rows(inputs)):
            used = joined[branch, :end]
            exact, spread = used.double().mean(0), used.double().abs().amax(0)
            assert ((mean[branch].double() - exact).abs() <= 1e-5 * spread + 1e-30).all()
            assert not bits(coded[branch, end:]).any()
            restored = (coded.float() * scale)[branch, :end] + mean[branch]
            bound = rest[branch, :end].abs() * 2**-4 + scale[branch] * 2**-10
            assert ((restored - used).abs() <= 1.01 * bound + 1e-6 * spread).all()


def test_codes_and_descales_are_those_of_the_16_bit_rows():
    for inputs in cases_on_gpu():
        assert_e4m3_form(inputs)


def test_scales_beyond_the_shared_reciprocal_divide_exactly_too():
    inputs = qkv_inputs(NANO, (2, 65, 40), [30, 0], device=DEVICE)
    v, text_v = inputs.v.clone(), inputs.text_v.clone()
    v[0, :, :128] *= 2.0**-110
    text_v[0, :, 0] *= 2.0**-110
    v[1, :, 256:384] *= 2.0**110
    v[1, :, 384:512] = 0
    assert_e4m3_form(inputs._replace(v=v, text_v=text_v))


def test_fp8_form_of_random_rows_is_deterministic_and_near_the_cpu():
    inputs = qkv_inputs(NANO, (2, 5000, 1600), [900, 7], device=DEVICE)
    inputs.q.copy_(normal(*inputs.q.shape, seed=3))
    inputs.k.copy_(normal(*inputs.k.shape, seed=4) + 1)
    first = E4M3(*inputs)
    for _ in range(2):
        for found, again in zip(E4M3(*inputs), first, strict=True):
            assert_bit_equal(found, again)
    rows = slice(0, 50)
    small = inputs._replace(
        **{name: getattr(inputs, name)[:, rows].contiguous() for name in ("q", "k", "v")},
        **{name: getattr(inputs, name)[:, rows].contiguous() for name in ("cos", "sin")},
    )
    on_cpu = E4M3(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in small))
    on_gpu = [x.cpu() for x in E4M3(*small)]
    for found, expected in zip(on_gpu[:3], on_cpu[:3], strict=True):
        assert (bits(found) != bits(expected)).float().mean() < 1e-2
    for found, expected in zip(on_gpu[3:6], on_cpu[3:6], strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=0)  # one unit of BF16
    torch.testing.assert_close(on_gpu[6], on_cpu[6], rtol=1e-5, atol=1e-5)


def test_padding_of_the_text_changes_no_bit_of_the_fp8_form():
    # A captured graph has room for 4,096 tokens of text, an eager step as many as there are.
    inputs = qkv_inputs(NANO, (2, 1024, 300), [300, 170], device=DEVICE)
    inputs = inputs._replace(q=torch.randn_like(inputs.q), k=torch.randn_like(inputs.k))
    room = torch.full((2, 3796, *inputs.text_k.shape[2:]), float("nan"), dtype=BF16, device=DEVICE)
    text_k, text_v = (torch.cat((x, room), 1) for x in (inputs.text_k, inputs.text_v))
    found = E4M3(*inputs._replace(text_k=text_k, text_v=text_v))
    for padded, expected in zip(found, E4M3(*inputs), strict=True):
        if padded.shape != expected.shape:
            padded = padded[:, : expected.shape[1]].contiguous()
        assert_bit_equal(padded, expected)


def test_nan_stays_in_its_head_and_out_of_the_padding():
    inputs = qkv_inputs(NANO, (2, 65, 40), [30, 0], device=DEVICE)
    nan = float("nan")
    q, k, text_v = inputs.q.clone(), inputs.k.clone(), inputs.text_v.clone()
    q[0, 3, 5 * 128 + 1] = nan  # query head 5, key head 1
    k[0, 64, 2 * 128] = nan
    text_v[0, 29, 3, 7] = nan
    q8, k8, v8, *descales, v_mean = E4M3(*inputs._replace(q=q, k=k, text_v=text_v))
    assert v_mean.isnan().nonzero().tolist() == [[0, 3, 7]]
    for descale, head in zip(descales, (1, 2, 3), strict=True):
        assert descale.isnan().nonzero().tolist() == [[0, head]]
    is_nan = [(bits(codes) & 0x7F) == 0x7F for codes in (q8, k8, v8)]
    assert is_nan[0][0, :, 4:8].all() and is_nan[0].sum() == 65 * 4 * 128
    for found, head in ((is_nan[1], 2), (is_nan[2], 3)):
        assert found[0, :95, head].all() and found.sum() == 95 * 128


def value_mean_inputs(heads, rows, dtype=BF16):
    """Attention's output of (Hq, Hk, D) heads and (B, N) rows, and means that most codes hold."""
    query_heads, kv_heads, head_dim = heads
    attended = normal(*rows, query_heads, head_dim, dtype=dtype, seed=7)
    return attended, normal(rows[0], kv_heads, head_dim, dtype=FP32, seed=8)


def with_mean(attended, v_mean):
    group = attended.shape[2] // v_mean.shape[1]
    total = attended.float() + v_mean.repeat_interleave(group, 1)[:, None]
    return total.to(attended.dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("heads", [NANO, SUPER, (6, 2, 16), (3, 1, 5)], ids=str)
@pytest.mark.parametrize("rows", [(3, 777), (1, 1)], ids=str)
def test_adding_the_value_mean_has_the_bits_of_the_torch_form(heads, rows, dtype):
    attended, v_mean = value_mean_inputs(heads, rows, dtype)
    found, codes = ADD(attended, v_mean), ADD(attended, v_mean, scale_of())
    assert_bit_equal(found, with_mean(attended, v_mean))
    assert_bit_equal(codes, OPS.quantize_e4m3_static(found, scale_of()))


def test_value_mean_launches_write_every_element_of_several_rows_a_program():
    from tensorrt_llm._torch.custom_ops import value_mean_kernels

    attended, v_mean = value_mean_inputs(NANO, (2, 37))
    expected, codes = with_mean(attended, v_mean), poisoned(attended.to(FP8))
    for block, num_warps in ((1, 8), (5, 4), (8, 8)):
        found, launch = poisoned(attended), {"block": block, "num_warps": num_warps}
        value_mean_kernels.launch_add_value_mean(attended, v_mean, found, None, **launch)
        assert_bit_equal(found, expected)
        value_mean_kernels.launch_add_value_mean(attended, v_mean, codes, scale_of(), **launch)
        assert_bit_equal(codes, OPS.quantize_e4m3_static(expected, scale_of()))


def test_nan_and_saturation_of_a_value_mean_are_those_of_the_cpu():
    attended, v_mean = value_mean_inputs(NANO, (2, 3))
    v_mean[0, 1, 5], v_mean[1, 0, :2] = float("nan"), torch.tensor([1e30, -float("inf")])
    attended[1, 2, 31, 127] = float("nan")
    for scale in (None, scale_of()):
        on_cpu = ADD(attended.cpu(), v_mean.cpu(), None if scale is None else scale.cpu())
        # A NaN's payload may differ between devices.
        found = ADD(attended, v_mean, scale).cpu().float()
        torch.testing.assert_close(found, on_cpu.float(), rtol=0, atol=0, equal_nan=True)


def test_nothing_attended_launches_nothing():
    for shape in ((0, 3, 4, 16), (2, 0, 4, 16)):
        attended, v_mean = normal(*shape), normal(shape[0], 2, 16, dtype=FP32)
        assert ADD(attended, v_mean, scale_of()).shape == shape


def test_opcheck_passes():
    inputs = qkv_inputs(NANO, (2, 3, 4), [4, 4], device=DEVICE, fused=True)
    for op in (QK, E4M3):
        torch.library.opcheck(op.default, tuple(inputs))
    for scale in (None, scale_of()):
        torch.library.opcheck(ADD.default, (*value_mean_inputs(NANO, (2, 3)), scale))


def chain(fused, residual, weight, scale, inputs):
    """Every op, fed by views and arithmetic that a compiler may fuse and lay out anew."""
    q, k, v = (fused * 2).split([inputs.q.shape[-1], *[inputs.k.shape[-1]] * 2], dim=-1)
    inputs = inputs._replace(q=q, k=k, v=v, text_k=inputs.text_k + 1)
    codes, total = OPS.add_rms_norm(q, residual, weight, EPS, scale)
    rotated, quantised = QK(*inputs), E4M3(*inputs)
    added = [ADD(rotated[0] * 2, quantised[6], s) for s in (None, scale)]
    return codes, total, OPS.rms_norm(total + 1, weight, EPS), *rotated, *quantised, *added


def chain_inputs(rows, seed=0):
    inputs = qkv_inputs(NANO, (2, rows, 40), [30, 3], device=DEVICE, seed=seed)
    fused = torch.cat((inputs.q, inputs.k, inputs.v), -1)
    residual = normal(*inputs.q.shape, seed=seed + 1)
    return fused, residual, weight_of(residual.shape, BF16), scale_of(), inputs


def test_compiled_fullgraph_equals_eager_bit_for_bit():
    compiled = torch.compile(chain, fullgraph=True)
    for rows in (37, 64):
        args = chain_inputs(rows)
        for found, expected in zip(compiled(*args), chain(*args), strict=True):
            assert_bit_equal(found, expected)


def test_captured_cuda_graph_replays_with_other_lengths_and_rows_bit_for_bit():
    args = chain_inputs(37)
    inputs = args[-1]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain(*args)  # compiles and loads the kernels, which capture does not allow
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(*args)
    for lengths, seed in (([0, 40], 1), ([17, 17], 2)):
        args[0].copy_(chain_inputs(37, seed)[0])
        for text in (inputs.text_k, inputs.text_v):
            text.copy_(normal(*text.shape, seed=seed))
        inputs.text_lengths.copy_(torch.tensor(lengths))
        graph.replay()
        for found, expected in zip(captured, chain(*args), strict=True):
            assert_bit_equal(found, expected)


def test_other_row_counts_compile_nothing():
    from tensorrt_llm._torch.custom_ops import (
        attention_kernels,
        attention_scale_kernels,
        value_mean_kernels,
    )
    from tensorrt_llm._torch.custom_ops.norm_kernels import _rms_norm_kernel

    kernels = (
        _rms_norm_kernel,
        attention_kernels._write_kernel,
        attention_scale_kernels._statistics_kernel,
        attention_scale_kernels._join_kernel,
        value_mean_kernels._add_value_mean_kernel,
    )

    def run(batch, media, text):
        inputs = qkv_inputs(NANO, (batch, media, text), [text] * batch, device=DEVICE)
        ADD(QK(*inputs)[0], E4M3(*inputs)[6], scale_of())
        OPS.rms_norm(inputs.q, weight_of(inputs.q.shape, BF16), EPS)
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    before = run(2, 5, 3)
    assert min(before) >= 1
    for rows in ((2, 16, 16), (1, 1, 1), (2, 1000, 0), (1, 64, 33)):
        assert run(*rows) == before


def test_offsets_beyond_32_bits_reach_the_right_rows():
    rows = 2**19 + 5  # q has 2^31 + 20,480 elements
    inputs = qkv_inputs(NANO, (1, rows, 3), [2], device=DEVICE)
    names = ("q", "k", "v", "cos", "sin")
    tail = inputs._replace(**{name: getattr(inputs, name)[:, -8:].contiguous() for name in names})
    found, expected = QK(*inputs), QK(*tail)
    assert_bit_equal(found[0][:, -8:], expected[0])
    for one, wanted in zip(found[1:], expected[1:], strict=True):
        assert_bit_equal(one[:, -9:], wanted[:, -9:])
    codes, _, _, q_descale, _, _, v_mean = E4M3(*inputs)
    scale = q_descale.repeat_interleave(4, 1)[:, None, :, None]
    assert_bit_equal(codes[:, -8:], quantize(expected[0], scale))
    del found, codes
    attended = inputs.q.unflatten(2, (32, 128))
    assert_bit_equal(ADD(attended, v_mean)[:, -8:], with_mean(attended[:, -8:], v_mean))
    weight = weight_of((4096,), BF16)
    normed, total = OPS.add_rms_norm(inputs.q, inputs.q, weight, EPS)
    assert_bit_equal(total[:, -8:], tail.q + tail.q)
    assert_bit_equal(normed[:, -8:], OPS.rms_norm(tail.q + tail.q, weight, EPS))


def test_what_the_kernels_can_not_take_is_refused():
    attended, v_mean = value_mean_inputs(NANO, (1, 3))
    with pytest.raises(ValueError, match="same device.*v_mean"):
        ADD(attended, v_mean.cpu())
    inputs = qkv_inputs(NANO, (1, 3, 4), [2], device=DEVICE)
    with pytest.raises(ValueError, match="same device.*text_lengths"):
        QK(*inputs._replace(text_lengths=inputs.text_lengths.cpu()))
    for head_dim in (8, 48):
        odd = qkv_inputs((4, 2, head_dim), (1, 3, 4), [2], device=DEVICE)
        for op in (QK, E4M3):
            with pytest.raises(ValueError, match="64, 128 or another power of two"):
                op(*odd)
