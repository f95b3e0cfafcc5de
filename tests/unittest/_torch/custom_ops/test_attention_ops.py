# SPDX-License-Identifier: Apache-2.0
"""The ops around attention on the CPU: the unfused steps' bits, the FP8 form, the contract."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tensorrt_llm._torch.custom_ops import attention_ops
from tensorrt_llm._torch.custom_ops.attention_arguments import check_cuda_head_dim
from tensorrt_llm._torch.custom_ops.attention_ops import statistics_block
from tensorrt_llm._torch.custom_ops.registration import device_guard
from tests.support.fp8_modules import assert_bit_equal, bits, quantize, relative_error
from tests.support.qkv_inputs import centred, qkv_inputs, unfused, valid_rows

FP8 = torch.float8_e4m3fn
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QK, E4M3 = torch.ops.trtllm.qk_norm_rope, torch.ops.trtllm.qkv_norm_rope_e4m3
ADD = torch.ops.trtllm.add_value_mean
HEADS, ROWS, LENGTHS = (8, 2, 16), (3, 10, 6), [0, 4, 6]


def inputs_of(dtype=BF16, **changes):
    return qkv_inputs(HEADS, ROWS, LENGTHS, dtype=dtype)._replace(**changes)


def normal(*shape, dtype=BF16, seed=9):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_short_sequences_have_programs_of_few_rows_and_no_length_leaves_too_many():
    sizes = ((2, 1024), (1, 8192), (2, 8192), (2, 44_160))
    assert [statistics_block(*size) for size in sizes] == [12, 16, 32, 64]
    for rows in range(1, 100_000, 997):
        block = statistics_block(1, rows)
        assert 12 <= block <= 64
        # Enough for 132 SMs as soon as there are rows for them.
        assert rows / block > 132 or rows < 132 * 64


def test_the_rows_of_a_program_do_not_follow_from_the_padding_of_the_text(monkeypatch):
    kernels = mock.Mock()
    monkeypatch.setattr(attention_ops, "_kernels", lambda: (kernels,) * 3)
    monkeypatch.setattr(attention_ops, "device_guard", lambda _: contextlib.nullcontext())
    for text_rows in (6, 40_000):
        inputs = qkv_inputs((8, 2, 16), (3, 10, text_rows), LENGTHS)
        attention_ops._qkv_norm_rope_e4m3_cuda(*inputs)
    few, many = (call.kwargs for call in kernels.launch_qkv_statistics.call_args_list)
    assert few == many and few["block"] == statistics_block(3, 10)


@pytest.mark.parametrize("here", [True, False], ids=["current device", "another device"])
def test_a_launch_switches_the_device_where_another_is_current(monkeypatch, here):
    switched = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: contextlib.nullcontext(switched.append(device))
    )
    tensor = mock.Mock(device="cuda:0", get_device=lambda: int(here))
    with device_guard(tensor):
        assert switched == ([] if here else ["cuda:0"])


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "views"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(
    ("heads", "rows", "lengths"),
    [
        (HEADS, ROWS, LENGTHS),
        ((4, 4, 16), (1, 5, 3), [2]),
        ((6, 3, 10), (2, 1, 0), [0, 0]),
        ((1, 1, 2), (2, 4, 3), [3, 1]),
    ],
    ids=str,
)
def test_results_have_the_bits_of_the_unfused_steps(heads, rows, lengths, dtype, fused):
    inputs = qkv_inputs(heads, rows, lengths, dtype=dtype, fused=fused)
    # Real activations: what is summed is no small integer.
    for x, seed in ((inputs.q, 1), (inputs.k, 2)):
        x.copy_(normal(*x.shape, dtype=dtype, seed=seed))
    assert inputs.q.is_contiguous() != fused or rows[1] == 1
    for found, expected in zip(QK(*inputs), unfused(inputs), strict=True):
        assert found.is_contiguous()
        assert_bit_equal(found, expected)


def test_padding_is_zero_whatever_lies_in_the_text_behind_its_length():
    inputs = inputs_of()
    assert inputs.text_k.isnan().any() and inputs.text_v.isnan().any()
    _, keys, values = QK(*inputs)
    for branch, end in enumerate(valid_rows(inputs)):
        for joined in (keys, values):
            assert not joined[branch, :end].isnan().any()
            assert not bits(joined[branch, end:]).any()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_descales_are_amax_over_448_per_branch_and_key_head(dtype):
    inputs = inputs_of(dtype)
    q, keys, values = QK(*inputs)
    *_, q_descale, k_descale, v_descale, _ = E4M3(*inputs)
    grouped = q.float().unflatten(2, (HEADS[1], HEADS[0] // HEADS[1]))
    assert_bit_equal(q_descale, grouped.abs().amax((1, 3, 4)) / 448)
    for descale, joined in ((k_descale, keys), (v_descale, values)):
        expected = centred(inputs, joined).abs().amax((1, 3)) / 448
        torch.testing.assert_close(descale.double(), expected, rtol=1e-5, atol=0)
    for descale in (q_descale, k_descale, v_descale):
        assert descale.shape == (3, 2) and descale.unique().numel() > 3


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_v_mean_is_the_mean_of_each_head_s_valid_values(dtype):
    inputs = inputs_of(dtype)
    values, v_mean = QK(*inputs)[2].double(), E4M3(*inputs)[6]
    assert v_mean.dtype == FP32 and v_mean.shape == (3, 2, 16)
    for branch, end in enumerate(valid_rows(inputs)):
        expected = values[branch, :end].mean(0)
        torch.testing.assert_close(v_mean[branch].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_codes_are_the_quantised_q_and_centred_keys_and_values(dtype):
    inputs = inputs_of(dtype)
    q, keys, values = QK(*inputs)
    q8, k8, v8, q_descale, k_descale, v_descale, v_mean = E4M3(*inputs)
    per_head = q_descale.repeat_interleave(HEADS[0] // HEADS[1], dim=1)
    assert_bit_equal(q8, quantize(q, per_head[:, None, :, None]))
    assert_bit_equal(v8, quantize(centred(inputs, values, v_mean), v_descale[:, None, :, None]))
    for codes, descale, joined in ((k8, k_descale, keys), (v8, v_descale, values)):
        scale = descale.double()[:, None, :, None]
        expected = centred(inputs, joined)
        # Half a unit in the last place of E4M3 (3 fraction bits), or of its subnormals, 2^-9.
        step = expected.abs() * 2**-4 + scale * 2**-10
        assert ((codes.double() * scale - expected).abs() <= step * 1.001).all()
        for branch, end in enumerate(valid_rows(inputs)):
            assert not bits(codes[branch, end:]).any()


def attention(inputs, q, keys, values):
    """FP32 attention of each branch over its valid rows."""
    results = []
    for branch, end in enumerate(valid_rows(inputs)):
        operands = (q[branch], keys[branch, :end], values[branch, :end])
        q1, k1, v1 = (x.float().transpose(0, 1) for x in operands)
        attended = F.scaled_dot_product_attention(q1, k1, v1, enable_gqa=True)
        results.append(attended.transpose(0, 1))
    return torch.stack(results)


def attention_over_codes(inputs):
    """FP32 attention over the codes, and their v_mean."""
    q8, k8, v8, *descales, v_mean = E4M3(*inputs)
    q_scale, k_scale, v_scale = (scale[:, None, :, None] for scale in descales)
    q = q8.float() * q_scale.repeat_interleave(q8.shape[2] // k8.shape[2], dim=2)
    return attention(inputs, q, k8.float() * k_scale, v8.float() * v_scale), v_mean


def test_attention_over_the_codes_is_attention_over_the_16_bit_rows_less_v_mean():
    inputs = inputs_of()
    exact = attention(inputs, *QK(*inputs))
    attended, v_mean = attention_over_codes(inputs)
    less = exact - v_mean.repeat_interleave(HEADS[0] // HEADS[1], 1)[:, None]
    # Three factors of relative error up to 2^-4 each, less where they average.
    assert relative_error(attended, less) < 0.06
    assert relative_error(ADD(attended, v_mean), exact) < 0.06
    assert relative_error(attended, exact) > 0.5


def test_a_large_mean_value_takes_nothing_from_what_the_codes_resolve():
    inputs = qkv_inputs((4, 2, 16), (2, 200, 40), [40, 7], dtype=FP32)
    inputs.v.copy_(normal(*inputs.v.shape, dtype=FP32) + 30)
    inputs.text_v.add_(29)
    q, keys, values = QK(*inputs)
    exact = attention(inputs, q, keys, values)
    attended, v_mean = attention_over_codes(inputs)
    error = relative_error(ADD(attended, v_mean), exact)
    scale = (values.abs().amax((1, 3)) / 448)[:, None, :, None]
    kept = attention(inputs, q, keys, quantize(values, scale).float() * scale)
    assert error < 4e-4
    assert 5 * error < relative_error(kept, exact)


def test_the_mean_is_subtracted_before_the_scale_is_taken():
    inputs = inputs_of()
    shifted = inputs._replace(text_k=inputs.text_k * 0 + 3.0, text_v=inputs.text_v * 0 + 5.0)
    media_k = inputs.k * 0 + 1.0
    shifted = shifted._replace(k=media_k, cos=inputs.cos * 0 + 3.0, sin=inputs.sin * 0)
    shifted = shifted._replace(k_weight=inputs.k_weight * 0 + 1.0, v=inputs.v * 0 + 5.0)
    # Every key is 3 and every value 5: nothing is left, and the scale of nothing is 1.
    _, k8, v8, _, k_descale, v_descale, v_mean = E4M3(*shifted)
    assert (k_descale == 1.0).all() and not bits(k8).any()
    assert (v_descale == 1.0).all() and not bits(v8).any() and (v_mean == 5.0).all()


def test_query_heads_share_the_scale_of_their_key_head_alone():
    inputs = inputs_of()
    before = E4M3(*inputs)[3]
    q = inputs.q.clone()
    q[1] = 0
    after = E4M3(*inputs._replace(q=q))[3]
    assert (after[1] == 1.0).all()
    assert_bit_equal(after[[0, 2]], before[[0, 2]])
    head = slice(5 * 16, 6 * 16)  # of the second key head
    q = inputs.q.clone()
    q[0, :, head] = float("nan")
    q8, _, _, nan, *_ = E4M3(*inputs._replace(q=q))
    assert nan.isnan().tolist() == [[False, True], [False, False], [False, False]]
    assert (bits(q8)[0, :, 4:] == 0x7F).all() and (bits(q8)[0, :, :4] & 0x7F != 0x7F).all()


def test_nan_and_zeros_stay_in_their_head_and_out_of_the_padding():
    inputs = inputs_of()
    text_v = torch.nan_to_num(inputs.text_v)
    text_v[1, 2, 0, 3] = float("nan")
    v = inputs.v.clone()
    v[2, :, 16:] = 0
    text_v[2, :, 1] = 0
    _, _, v8, _, _, v_descale, v_mean = E4M3(*inputs._replace(v=v, text_v=text_v))
    assert v_descale.isnan().tolist() == [[False, False], [True, False], [False, False]]
    assert v_mean.isnan().nonzero().tolist() == [[1, 0, 3]]
    end = valid_rows(inputs)[1]
    assert (bits(v8)[1, :end, 0] == 0x7F).all() and not bits(v8)[1, end:].any()
    assert v_descale[2, 1] == 1.0 and not bits(v8)[2, :, 1].any() and not v_mean[2, 1].any()
    k = inputs.k.clone()
    k[0, 3, 2] = float("nan")
    _, k8, _, _, k_descale, *_ = E4M3(*inputs._replace(k=k))
    assert k_descale.isnan().tolist() == [[True, False], [False, False], [False, False]]
    end = valid_rows(inputs)[0]
    assert (bits(k8)[0, :end, 0] == 0x7F).all() and not bits(k8)[0, end:].any()


def test_inputs_are_not_changed_and_results_are_new():
    inputs = inputs_of(FP32)
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    kept = [x.clone() for x in tensors]
    results = [*QK(*inputs), *E4M3(*inputs)]
    addresses = {x.data_ptr() for x in tensors} | {x.data_ptr() for x in results}
    assert len(addresses) == len(tensors) + len(results)
    assert all(torch.equal(bits(x), bits(before)) for x, before in zip(tensors, kept, strict=True))


@pytest.mark.parametrize("op", [QK, E4M3], ids=str)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": normal(3, 10, 128).double()}, "q.*float64"),
        ({"q": normal(3, 10, 130)}, r"q does not fit.*heads \* 16.*130"),
        ({"q": normal(30, 128)}, r"q does not fit.*\(30, 128\)"),
        ({"q": normal(3, 0, 128)}, r"q does not fit.*\(3, 0, 128\)"),
        ({"q": normal(3, 10, 48)}, "k does not fit.*divides q's 3.*2 heads"),
        ({"k": normal(3, 10, 0)}, "k does not fit"),
        ({"k": normal(3, 9, 32)}, r"k does not fit.*\(3, 10, 32\).*\(3, 9, 32\)"),
        ({"v": normal(3, 10, 16)}, r"v does not fit.*\(3, 10, 32\)"),
        ({"q_weight": normal(15)}, "q_weight does not fit.*even D"),
        ({"q_weight": normal(1, 16)}, "q_weight does not fit.*even D"),
        ({"k_weight": normal(8)}, "k_weight does not fit"),
        ({"cos": normal(3, 10, 8)}, r"cos does not fit.*\(3, 10, 16\)"),
        ({"sin": normal(10, 16)}, "sin does not fit"),
        ({"text_k": normal(3, 6, 32)}, r"text_k does not fit.*\[B, L, Hk, D\]"),
        ({"text_k": normal(3, 6, 4, 16)}, r"text_k does not fit.*\(3, 6, 2, 16\)"),
        ({"text_v": normal(3, 5, 2, 16)}, "text_v does not fit"),
        ({"text_lengths": torch.tensor([1, 2], dtype=torch.int32)}, "text_lengths does not fit"),
        ({"text_lengths": torch.tensor([0, 4, 6])}, "text_lengths.*int32.*int64"),
        ({"k": normal(3, 10, 32, dtype=FP16)}, "k does not fit.*bfloat16.*float16"),
        ({"cos": normal(3, 10, 16, dtype=FP32)}, "cos does not fit.*bfloat16.*float32"),
        ({"q": normal(3, 10, 256)[..., ::2]}, "q does not fit.*contiguous rows.*strides"),
        ({"v": normal(3, 32, 10).transpose(1, 2)}, "v does not fit.*contiguous rows"),
        ({"sin": normal(3, 10, 32)[..., ::2]}, "contiguous.*sin"),
        ({"text_v": normal(3, 6, 16, 2).transpose(2, 3)}, "contiguous.*text_v"),
        ({"text_k": normal(3, 6, 2, 16).to("meta")}, "same device.*text_k"),
        ({"text_lengths": torch.tensor([0, 4, 7], dtype=torch.int32)}, r"lengths\[2\].*0 to 6.*7"),
        ({"text_lengths": torch.tensor([0, -1, 6], dtype=torch.int32)}, r"lengths\[1\].*found -1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_are_refused_by_what_differs(op, changes, message):
    with pytest.raises(ValueError, match=message):
        op(*inputs_of(**changes))


def test_cuda_takes_heads_of_a_power_of_two_and_the_error_names_them():
    for head_dim in (16, 64, 128, 256):
        check_cuda_head_dim("op", head_dim)
    for head_dim in (2, 8, 80, 96):
        with pytest.raises(ValueError, match=rf"64, 128 or another power of two.*found {head_dim}"):
            check_cuda_head_dim("op", head_dim)


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "views"])
@pytest.mark.parametrize("op", [QK, E4M3], ids=str)
def test_opcheck_passes(op, fused):
    inputs = qkv_inputs((4, 2, 16), (2, 3, 4), [4, 2], fused=fused)
    # NaN text would differ from itself where opcheck compares inputs before and after.
    inputs = inputs._replace(text_k=inputs.text_k.nan_to_num(), text_v=inputs.text_v.nan_to_num())
    torch.library.opcheck(op.default, tuple(inputs))


def test_compiled_fullgraph_equals_eager_bit_for_bit():
    def forward(inputs):
        inputs = inputs._replace(q=inputs.q * 2, text_k=inputs.text_k + 1)
        quantised = E4M3(*inputs)
        return *QK(*inputs), *quantised, ADD(inputs.q.unflatten(2, (-1, 16)), quantised[6])

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, lengths in (((2, 5, 4), [4, 2]), ((2, 9, 7), [0, 5])):
        inputs = qkv_inputs(HEADS, rows, lengths, fused=True)
        for found, expected in zip(compiled(inputs), forward(inputs), strict=True):
            assert_bit_equal(found, expected)


# ---- add_value_mean ----


def mean_of(*shape, seed=3):
    return 3 * normal(*shape, dtype=FP32, seed=seed)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(32, 8, 128), (6, 2, 16), (3, 1, 5)])
def test_v_mean_is_added_in_fp32_and_rounded_once_before_it_is_quantised(dtype, heads, kv_heads, d):
    attended, v_mean = normal(2, 7, heads, d, dtype=dtype), mean_of(2, kv_heads, d)
    before, scale = attended.clone(), torch.tensor(0.0123)
    total = attended.float() + v_mean.repeat_interleave(heads // kv_heads, 1)[:, None]
    found, codes = ADD(attended, v_mean), ADD(attended, v_mean, scale)
    assert_bit_equal(found, total.to(dtype))
    assert_bit_equal(codes, quantize(total.to(dtype), scale))
    assert found.is_contiguous() and codes.is_contiguous()
    assert_bit_equal(attended, before)


def test_a_query_head_takes_the_mean_of_its_key_head_and_branch():
    v_mean = torch.arange(2 * 3 * 4, dtype=FP32).view(2, 3, 4)
    found = ADD(torch.zeros(2, 5, 6, 4), v_mean)
    for branch in range(2):
        for head in range(6):
            assert (found[branch, :, head] == v_mean[branch, head // 2]).all()


def test_codes_saturate_and_nan_stays_in_its_dimension():
    attended, v_mean = torch.zeros(1, 2, 4, 2), torch.tensor([[[1e30, -1e30], [1.0, 2.0]]])
    v_mean[0, 1, 1] = attended[0, 1, 0, 0] = float("nan")
    codes = bits(ADD(attended, v_mean, torch.tensor(0.5)))
    assert codes[0, 0].tolist() == [[0x7E, 0xFE]] * 2 + [[0x40, 0x7F]] * 2
    assert codes[0, 1].tolist() == [[0x7F, 0xFE], [0x7E, 0xFE]] + [[0x40, 0x7F]] * 2


@pytest.mark.parametrize("shape", [(0, 3, 4, 16), (2, 0, 4, 16), (2, 3, 0, 16), (2, 3, 4, 0)])
def test_nothing_attended_gives_nothing(shape):
    v_mean = torch.zeros(shape[0], 2, shape[3])
    assert ADD(torch.zeros(shape, dtype=BF16), v_mean).shape == shape
    assert ADD(torch.zeros(shape, dtype=BF16), v_mean, torch.tensor(1.0)).dtype == FP8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attended": normal(2, 3, 4, 16).to(FP8)}, "attended.*float8_e4m3fn"),
        ({"attended": normal(2, 3, 4, 16).double()}, "attended.*float64"),
        ({"attended": normal(2, 3, 64)}, r"attended does not fit.*\[B, N, Hq, D\].*\(2, 3, 64\)"),
        ({"attended": normal(2, 3, 4, 8)}, r"v_mean does not fit.*\[2, Hk, 8\].*\(2, 2, 16\)"),
        ({"attended": normal(1, 3, 4, 16)}, r"v_mean does not fit.*\[1, Hk, 16\]"),
        ({"attended": normal(2, 3, 5, 16)}, "v_mean does not fit.*an Hk that divides 5"),
        ({"attended": normal(2, 3, 16, 4).transpose(2, 3)}, "contiguous.*attended"),
        ({"v_mean": mean_of(2, 0, 16)}, r"v_mean does not fit.*\(2, 0, 16\)"),
        ({"v_mean": mean_of(2, 32)}, r"v_mean does not fit.*\(2, 32\)"),
        ({"v_mean": mean_of(2, 1, 2, 16)}, r"v_mean does not fit.*\(2, 1, 2, 16\)"),
        ({"v_mean": mean_of(2, 2, 16).bfloat16()}, "v_mean does not fit.*float32.*bfloat16"),
        ({"v_mean": mean_of(2, 16, 2).transpose(1, 2)}, "contiguous.*v_mean"),
        ({"v_mean": mean_of(2, 2, 16).to("meta")}, "same device.*v_mean"),
        ({"scale": torch.ones(1)}, r"scale.*0-d.*\(1,\)"),
        ({"scale": torch.tensor(1.0, dtype=BF16)}, "scale.*float32.*bfloat16"),
        ({"scale": torch.tensor(1.0, device="meta")}, "same device.*scale"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_mean_that_does_not_fit_is_refused_by_what_differs(changes, message):
    arguments = {"attended": normal(2, 3, 4, 16), "v_mean": mean_of(2, 2, 16), "scale": None}
    ADD(**arguments)
    with pytest.raises(ValueError, match=message):
        ADD(**arguments | changes)


@pytest.mark.parametrize("scale", [None, torch.tensor(0.01)], ids=["wide", "codes"])
def test_opcheck_of_add_value_mean_passes(scale):
    torch.library.opcheck(ADD.default, (normal(2, 3, 4, 16), mean_of(2, 2, 16), scale))
