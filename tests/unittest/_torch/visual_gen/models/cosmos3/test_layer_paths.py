# SPDX-License-Identifier: Apache-2.0
"""Paths of the generation layers: FP8 attention by step, CUDA graphs, compiled halves, on the CPU.

FP8 attention is played by a backend that dequantises its operands, a CUDA graph by a capture that
runs again.
"""

import pytest
import torch
from safetensors.torch import load_file

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.attention_backend import VanillaAttention
from tensorrt_llm._torch.visual_gen.config_fields import CudaGraphConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3 import layer_graphs, precision_policy, towers
from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import Captured, LayerGraphs
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import (
    Cosmos3VFMTransformer,
)
from tensorrt_llm._torch.visual_gen.modules.attention import Attention
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.visual_gen import VisualGenArgs
from tests.support.fp8_modules import assert_bit_equal, quantize, relative_error
from tests.support.fp8_oracle import copy_checkpoint, policy

pytestmark = pytest.mark.cosmos3

STEPS = 10
EDGE, MIDDLE = 0, 5


class FP8Attention(VanillaAttention):
    """FP8 attention by its meaning: attends over the operands' dequantised values.

    As the contract says, ``v_mean`` is not in the result.
    """

    quantizes = True

    def __init__(self):
        self.calls = []

    def forward(self, q, k, v, **options):
        self.calls.append(q.dtype)
        return super().forward(q, k, v, **options)

    def forward_e4m3(self, operands, *, lengths):
        self.calls.append(operands.q.dtype)
        heads = operands.q.shape[2] // operands.k.shape[2]
        scales = operands.q_descale.repeat_interleave(heads, 1)
        q = operands.q.float() * scales[:, None, :, None]
        k = operands.k.float() * operands.k_descale[:, None, :, None]
        v = operands.v.float() * operands.v_descale[:, None, :, None]
        return super().forward(q, k, v, lengths=lengths).bfloat16()


def load(path, **options) -> Cosmos3VFMTransformer:
    args = VisualGenArgs(model=str(path), **options)
    return PipelineLoader(args, device="cpu").load(skip_warmup=True).transformer


@pytest.fixture(scope="module")
def checkpoint(tiny_fp8_checkpoint, tmp_path_factory):
    return copy_checkpoint(
        tiny_fp8_checkpoint, tmp_path_factory.mktemp("paths") / "fp8", policy(3, 3, "a16")
    )


@pytest.fixture
def transformer(checkpoint):
    return load(checkpoint)


def request(seed=0, texts=((5, 6, 7, 8), (9, 10)), frames=2):
    """Arguments of one call for each prompt."""
    generator = torch.Generator().manual_seed(seed)
    length, branches = max(map(len, texts)), len(texts)
    ids, mask = torch.zeros(2, branches, length, dtype=torch.int64)
    for i, tokens in enumerate(texts):
        ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens), 1
    shape = (frames, 4, 6)
    latents = torch.randn(branches, 48, *shape, generator=generator)
    raw = torch.full((branches,), 500.0)
    return latents, raw / 1000, ids, mask, shape, raw, 24.0


@torch.no_grad()
def velocity(transformer, given, step):
    transformer.set_denoising_step(step, STEPS)
    try:
        return transformer(*given).video
    finally:
        transformer.reset_denoising_step()


# --- FP8 attention ------------------------------------------------------------------------------


def use_fp8_attention(transformer, backend=None) -> FP8Attention:
    backend = FP8Attention() if backend is None else backend
    for layer in transformer.gen_layers:
        layer.attention.backend = backend
    return backend


class Nothing(FP8Attention):
    """Attends to nothing, and keeps the value means."""

    def forward_e4m3(self, operands, *, lengths):
        self.calls.append(operands.v_mean)
        return torch.zeros(operands.q.shape, dtype=torch.bfloat16)


def test_to_out_gets_what_attention_gave_with_the_value_mean_of_each_key_head(transformer):
    backend, seen = use_fp8_attention(transformer, Nothing()), []
    linears = [layer.attention.to_out[0] for layer in transformer.gen_layers]
    for linear in linears:
        linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    velocity(transformer, request(), MIDDLE)
    assert len(seen) == len(backend.calls) == len(linears)
    for linear, codes, v_mean in zip(linears, seen, backend.calls, strict=True):
        assert v_mean.abs().min() > 0
        heads = codes.shape[-1] // (v_mean.shape[1] * v_mean.shape[2])
        per_head = v_mean.repeat_interleave(heads, 1).flatten(1)[:, None].bfloat16()
        expected = quantize(per_head.expand(codes.shape), linear.input_scale)
        assert_bit_equal(codes, expected)


def test_quantised_with_the_mean_or_by_to_out_itself_are_the_same_bits(transformer, monkeypatch):
    use_fp8_attention(transformer)
    given = request()
    expected = velocity(transformer, given, MIDDLE)
    monkeypatch.setattr(Attention, "fp8_output_scale", lambda self: None)
    seen = []
    to_out = transformer.gen_layers[0].attention.to_out[0]
    to_out.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    assert_bit_equal(velocity(transformer, given, MIDDLE), expected)
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("step, dtype", [(EDGE, "bf16"), (MIDDLE, "fp8"), (STEPS - 1, "bf16")])
def test_attention_is_fp8_on_fp8_steps_alone(transformer, step, dtype):
    backend = use_fp8_attention(transformer)
    transformer.set_denoising_step(step, STEPS)
    reported = transformer.attention_precision
    velocity(transformer, request(), step)
    expected = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[dtype]
    assert backend.calls == [expected] * len(transformer.gen_layers)
    assert reported == dtype


def test_fp8_attention_changes_fp8_steps_a_little_and_16_bit_steps_not_at_all(checkpoint):
    plain, fp8 = load(checkpoint), load(checkpoint)
    use_fp8_attention(fp8)
    given = request()
    assert_bit_equal(velocity(plain, given, EDGE), velocity(fp8, given, EDGE))
    error = relative_error(velocity(fp8, given, MIDDLE), velocity(plain, given, MIDDLE).double())
    assert 1e-4 < error < 0.1


def test_a_model_without_a_16_bit_step_attends_in_fp8_throughout(tiny_fp8_checkpoint, tmp_path):
    transformer = load(copy_checkpoint(tiny_fp8_checkpoint, tmp_path / "fp8", None))
    backend = use_fp8_attention(transformer)
    velocity(transformer, request(), EDGE)
    assert set(backend.calls) == {torch.float8_e4m3fn}
    assert transformer.attention_precision == "fp8"


def test_the_understanding_tower_never_attends_in_fp8(transformer):
    backend = FP8Attention()
    for layer in transformer.language_model.layers:
        layer.attention.backend = backend
    velocity(transformer, request(), MIDDLE)
    assert set(backend.calls) == {torch.bfloat16}


# --- CUDA graphs --------------------------------------------------------------------------------


def capture(run):
    first = run()
    with torch.inference_mode(False):  # a graph's output is written by no operation of torch
        output = torch.full_like(first, float("nan"))
    return Captured(first, output, lambda: output.copy_(run()))


def use_graphs(transformer) -> LayerGraphs:
    transformer._graphs = LayerGraphs(transformer._run_tokens, any_length=False, capture=capture)
    transformer._captures = lambda hidden: True
    return transformer._graphs


@pytest.mark.parametrize(
    "enable, rows, any_length, captures",
    [
        (None, 2, True, True),
        (None, layer_graphs.MAX_SHORT_ROWS // 2 + 1, True, False),
        (None, 2, False, False),
        (True, 2, False, True),
        (True, 100_000, True, True),
        (False, 2, True, False),
    ],
)
def test_by_default_short_steps_are_captured_where_one_graph_serves_every_prompt(
    transformer, monkeypatch, enable, rows, any_length, captures
):
    class Tokens:
        shape, is_cuda = (2, rows, 64), True

    backend = transformer.gen_layers[0].attention.backend
    monkeypatch.setattr(backend, "reads_lengths_on_device", any_length)
    transformer.model_config.cuda_graph = CudaGraphConfig(enable=enable)
    assert transformer._captures(Tokens) is captures
    Tokens.is_cuda = False
    assert not transformer._captures(Tokens)


def test_both_modes_through_graphs_are_bit_equal_to_the_layers_themselves(checkpoint):
    plain, graphed = load(checkpoint), load(checkpoint)
    graphs = use_graphs(graphed)
    for seed in (0, 1):
        for step in (EDGE, MIDDLE, EDGE + 1, MIDDLE + 1):
            given = request(seed)
            assert_bit_equal(velocity(graphed, given, step), velocity(plain, given, step))
    assert len(graphs) == 2


def test_another_prompt_and_another_size_through_graphs(checkpoint):
    plain, graphed = load(checkpoint), load(checkpoint)
    use_graphs(graphed)
    for texts, frames in ((((5, 6), (7,)), 1), (((8, 9), (7,)), 1), (((8,),), 2), (((5, 6),), 1)):
        given = request(texts=texts, frames=frames)
        assert_bit_equal(velocity(graphed, given, MIDDLE), velocity(plain, given, MIDDLE))


def test_a_step_that_fails_leaves_the_next_request_as_it_was(transformer, monkeypatch):
    graphs = use_graphs(transformer)
    given = request()
    before = {step: velocity(transformer, given, step).clone() for step in (EDGE, MIDDLE)}
    transformer.end_request()

    def fail(self, x):
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Linear, "forward", fail)
        with pytest.raises(RuntimeError, match="lost"):
            velocity(transformer, request(1), EDGE)
    transformer.end_request()
    assert len(graphs) == 2
    for step, expected in before.items():
        assert_bit_equal(velocity(transformer, given, step), expected)


def test_forgetting_the_text_forgets_the_graphs(transformer):
    graphs = use_graphs(transformer)
    velocity(transformer, request(), MIDDLE)
    transformer.end_request()
    assert len(graphs) == 1
    transformer.reset_cache()
    assert len(graphs) == 0


# --- memory -------------------------------------------------------------------------------------


def test_many_rows_go_through_the_mlp_in_even_parts_with_the_same_result(checkpoint, monkeypatch):
    whole, parted = load(checkpoint), load(checkpoint)
    given = request()
    seen = []
    for layer in parted.gen_layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    monkeypatch.setattr(towers, "MAX_MLP_ROWS", 10_000)
    expected = {step: velocity(whole, given, step) for step in (EDGE, MIDDLE)}
    monkeypatch.setattr(towers, "MAX_MLP_ROWS", 5)
    for step in (EDGE, MIDDLE):
        assert relative_error(velocity(parted, given, step), expected[step].double()) < 2e-3
    # 2 branches of 2 x 2 x 3 tokens: 24 rows in five parts.
    assert set(seen) == {5, 4} and sum(seen) == 24 * 2 * len(parted.gen_layers)


def test_no_layer_keeps_the_tensors_of_the_one_before_alive(transformer):
    streams = []
    hidden = torch.zeros(1, 2, 4)
    stream = towers.ResidualStream(hidden)
    assert stream.take() == (hidden, None)
    streams.append(stream._tensors)
    stream.put(hidden, hidden)
    assert stream.take()[1] is hidden and stream._tensors is None
    assert streams == [None]


# --- what outlives a request --------------------------------------------------------------------


def test_the_text_of_the_last_branches_outlives_a_request_and_gives_the_same_bits(transformer):
    given, encoded = request(), []
    before = velocity(transformer, given, MIDDLE)
    handle = transformer.language_model.register_forward_hook(lambda *_: encoded.append(1))
    transformer.end_request()
    assert_bit_equal(velocity(transformer, request(), MIDDLE), before)
    assert not encoded
    transformer.reset_cache()
    assert_bit_equal(velocity(transformer, request(), MIDDLE), before)
    handle.remove()
    assert len(encoded) == 2


def test_another_reasoner_in_the_policy_takes_effect_on_a_known_prompt(
    tiny_fp8_checkpoint, tmp_path
):
    a16, native = (
        load(copy_checkpoint(tiny_fp8_checkpoint, tmp_path / mode, policy(3, 3, mode)))
        for mode in ("a16", "native")
    )
    expected = velocity(native, request(), MIDDLE)
    assert not torch.equal(velocity(a16, request(), MIDDLE), expected)
    a16.model_config.pretrained_config.quantization_config = (
        native.model_config.pretrained_config.quantization_config
    )
    a16._maybe_install_step_precision()
    assert_bit_equal(velocity(a16, request(), MIDDLE), expected)


def test_a_policy_that_is_gone_is_uninstalled_with_its_text(
    checkpoint, tiny_fp8_checkpoint, tmp_path
):
    plain = load(copy_checkpoint(tiny_fp8_checkpoint, tmp_path / "plain", None))
    transformer = load(checkpoint)
    velocity(transformer, request(), EDGE)
    transformer.model_config.pretrained_config.quantization_config = (
        plain.model_config.pretrained_config.quantization_config
    )
    transformer._maybe_install_step_precision()
    assert transformer.step_precision_controller is None
    for step in (EDGE, MIDDLE):
        assert_bit_equal(velocity(transformer, request(), step), velocity(plain, request(), step))
    assert (transformer.gen_precision, transformer.und_precision) == ("w8a8", "w8a8")


def test_loading_other_weights_forgets_what_the_old_ones_made(checkpoint):
    weights = {}
    for file in (checkpoint / "transformer").glob("*.safetensors"):
        weights |= load_file(file)
    (name,) = (name for name in weights if "embed_tokens" in name)
    weights[name] = -weights[name]
    fresh, used = load(checkpoint), load(checkpoint)
    before = velocity(used, request(), MIDDLE)
    for transformer in (fresh, used):
        transformer.load_weights(weights)
    expected = velocity(fresh, request(), MIDDLE)
    assert not torch.equal(expected, before)
    assert_bit_equal(velocity(used, request(), MIDDLE), expected)


@torch.no_grad()
def test_another_frame_rate_in_one_request_has_tables_of_its_own(transformer):
    given = request()
    transformer.set_denoising_step(MIDDLE, STEPS)
    slow, fast = (transformer(*given[:-1], fps).video for fps in (24.0, 12.0))
    assert not torch.equal(slow, fast)
    assert_bit_equal(transformer(*given[:-1], 24.0).video, slow)
    transformer.reset_denoising_step()


def test_a_dynamic_recipe_takes_one_scale_for_all_rows(tiny_bf16_checkpoint, monkeypatch):
    transformer = load(tiny_bf16_checkpoint, quant_config={"quant_algo": "FP8"})
    whole = velocity(transformer, request(), EDGE)
    monkeypatch.setattr(towers, "MAX_MLP_ROWS", 5)
    assert_bit_equal(velocity(transformer, request(), EDGE), whole)


def test_fp8_attention_that_could_never_run_is_refused(tiny_fp8_checkpoint):
    transformer = load(tiny_fp8_checkpoint)
    precision_policy.refuse_idle_fp8_attention(transformer)
    use_fp8_attention(transformer)
    precision_policy.refuse_idle_fp8_attention(transformer)
    for layer in transformer.gen_layers:
        layer.attention._maybe_share_qkv_quantize = False
    with pytest.raises(NotImplementedError, match="FP8 q, k and v"):
        precision_policy.refuse_idle_fp8_attention(transformer)


def test_a_first_call_in_inference_mode_does_not_spoil_the_next(transformer):
    use_graphs(transformer)
    with torch.inference_mode():
        before = velocity(transformer, request(), MIDDLE).clone()
    transformer.end_request()
    assert_bit_equal(velocity(transformer, request(), MIDDLE), before)


def test_loading_weights_forgets_the_text_that_others_made(transformer):
    velocity(transformer, request(), MIDDLE)
    transformer.post_load_weights()
    assert not transformer._cache._branches
