# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' peer: it holds our codes and scales, and its velocities are explained.

On a CPU ModelOpt has no FP8 GEMM, so its own formula is put in place of one.
"""

import contextlib
from types import MethodType

import pytest
import torch
from diffusers import Cosmos3OmniTransformer
from torch import nn
from torch.nn import functional as F

from benchmarks import peer_models
from tests.support.checkpoint_dialects import bits
from tests.support.diffusers_oracle import relative_error

mtq = pytest.importorskip("modelopt.torch.quantization")

FP8 = torch.float8_e4m3fn


@pytest.fixture
def peer():
    return peer_models.random_peer("tiny", torch.device("cpu"))


def velocities(peer, device="cpu"):
    """Relative error of ours against the peer's velocities, at two frame rates."""
    device = torch.device(device)
    ours = peer_models.build_ours(
        peer_models.export_state(peer), peer_models.model_config(peer), device
    )
    assert (ours.gen_precision, ours.und_precision) == ("w8a8", "w8a8")
    errors = []
    for seed, fps in ((1, 24.0), (2, 16.0)):
        step = peer_models.random_evaluation(peer, (3, 5, 6), (17, 9), seed=seed, fps=fps)
        packed = peer_models.pack_for_peer(peer, step)
        found = peer_models.our_velocity(ours, step)
        expected = peer_models.peer_velocity(peer, step, packed)
        assert found.shape == expected.shape == step.latents.shape
        assert found.dtype == expected.dtype == torch.bfloat16
        assert not torch.equal(expected[0], expected[1])
        ours.reset_cache()
        errors.append(relative_error(found, expected))
    return errors


def test_peer_and_ours_hold_the_same_codes_and_scales(peer):
    state = peer_models.export_state(peer)
    names = [name for name, _ in peer_models.quantised_linears(peer)]
    assert len(names) == 28 and not any("_quantizer" in name for name in state)
    for name in names:
        assert state[f"{name}.weight"].dtype == FP8
        assert type(state[f"{name}.weight"]) is torch.Tensor
    ours = peer_models.build_ours(state, peer_models.model_config(peer), torch.device("cpu"))
    linear = ours.gen_layers[1].cross_attention.to_k
    source = "layers.1.self_attn.add_k_proj"
    for key in ("weight", "weight_scale", "input_scale"):
        assert bits(linear.get_parameter(key)) == bits(state[f"{source}.{key}"]), key
    assert ours.time_embedder.mlp.linear_1.weight.dtype == torch.float32


def test_with_one_gemm_and_one_swiglu_peer_and_ours_give_equal_bits(peer, monkeypatch):
    """What is left of the difference is those two: everything else is the same arithmetic."""
    from modelopt.torch.quantization.backends.gemm_registry import gemm_registry

    def gemm(linear, x, weight, *_args):
        """ModelOpt's W8A8 formula, in FP32."""
        scales = [getattr(linear, f"{k}_quantizer").amax.float() / 448 for k in ("input", "weight")]
        codes = (x.float() / scales[0]).clamp(-448, 448).to(FP8).float()
        product = F.linear(codes, weight.data.as_subclass(torch.Tensor).float())
        return (product * (scales[0] * scales[1])).bfloat16()

    def swiglu(mlp, x):
        gate, up = mlp.gate_proj(x).float(), mlp.up_proj(x).float()
        return mlp.down_proj(gate * torch.sigmoid(gate) * up)

    entry = {"gemm_func": gemm, "availability_check": lambda *_: True}
    monkeypatch.setattr(gemm_registry, "_registry", [entry])
    # ModelOpt marks a range around its GEMM, which torch's CPU build has no library for.
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda _: contextlib.nullcontext())
    assert all(5e-3 < error < 1.5e-2 for error in velocities(peer))  # 9.2e-3 to 1.03e-2
    for layer in peer.layers:
        for mlp in (layer.mlp, layer.mlp_moe_gen):
            mlp.forward = MethodType(swiglu, mlp)
    assert velocities(peer) == [0.0, 0.0]


def test_on_a_cpu_modelopt_dequantises_and_the_velocities_stay_near(peer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert all(5e-3 < error < 2.5e-2 for error in velocities(peer))  # 1.44e-2 to 1.54e-2


@pytest.mark.parametrize("part", ["*", ".input_quantizer"])
def test_a_linear_that_modelopt_does_not_quantise_whole_is_refused(monkeypatch, part):
    quantize = mtq.quantize

    def skip_one(model, config, forward_loop):
        off = {"quantizer_name": f"*layers.1.mlp.down_proj{part}", "enable": False}
        return quantize(model, config | {"quant_cfg": [*config["quant_cfg"], off]}, forward_loop)

    monkeypatch.setattr(mtq, "quantize", skip_one)
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.down_proj"):
        peer_models.random_peer("tiny", torch.device("cpu"))


@pytest.mark.gpu
def test_peer_and_ours_agree_on_a_gpu():
    peer = peer_models.random_peer("tiny", torch.device("cuda"))
    assert all(error < 3e-2 for error in velocities(peer, "cuda"))
    # Its FP8 GEMM ran, not the fallback.
    assert all(m._real_quant_gemm_impl is not None for _, m in peer_models.quantised_linears(peer))


def test_the_sizes_are_those_of_the_published_checkpoints():
    with torch.device("meta"):
        counts = {
            size: sum(1 for m in model.layers.modules() if isinstance(m, nn.Linear))
            for size, model in (
                (size, Cosmos3OmniTransformer(**peer_models.SIZES[size]))
                for size in ("nano", "super")
            )
        }
    assert counts == {"nano": 2 * 252, "super": 2 * 448}  # cosmos3.md D.3
