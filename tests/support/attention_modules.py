# SPDX-License-Identifier: Apache-2.0
"""Small Attention modules and checkpoint tensors for them."""

from types import SimpleNamespace

import torch

from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.modules import Attention, QKVMode
from tensorrt_llm.models.modeling_utils import QuantConfig
from tests.support.fp8_modules import shard

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 16
Q_SIZE, KV_SIZE = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
SCALE, OUT_SCALE = 0.01, 0.004
BF16 = torch.bfloat16
QKV = ("to_q", "to_k", "to_v")


def config_of(quant="static", dtype="bfloat16", exclude=None, **kwargs):
    return DiffusionModelConfig(
        pretrained_config=SimpleNamespace(dtype=dtype),
        quant_config=QuantConfig(
            quant_algo=None if quant is None else "FP8", exclude_modules=exclude
        ),
        force_dynamic_quantization=quant == "dynamic",
        **kwargs,
    )


def build(mode=QKVMode.SEPARATE_QKV, quant="static", share=None, config=None, **kwargs):
    if share is None:
        share = mode is QKVMode.SEPARATE_QKV and quant != "dynamic"
    options = {
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "bias": False,
        "config": config or config_of(quant),
        "share_qkv_input_quant": share,
    }
    return Attention(HIDDEN, HEADS, qkv_mode=mode, **options | kwargs)


def shards(quant="static", bias=False, scales=(SCALE, SCALE, SCALE), dtype=BF16):
    """Tensors of to_q, to_k, to_v, to_out; the weight scales of q, k, v go about 1 : 2 : 4."""
    fp8 = quant is not None
    tensors = {
        name: shard(
            rows, HIDDEN, seed=i, gain=2.0**i, input_scale=scales[i] if fp8 else None,
            bias=bias, dtype=dtype,
        )
        for i, (name, rows) in enumerate(zip(QKV, (Q_SIZE, KV_SIZE, KV_SIZE), strict=True))
    }  # fmt: skip
    tensors["to_out"] = shard(
        HIDDEN, Q_SIZE, seed=9, input_scale=OUT_SCALE if fp8 else None, bias=bias, dtype=dtype
    )
    return tensors


def load(attention, tensors, norms=True):
    if attention.qkv_mode is QKVMode.FUSE_QKV:
        attention.qkv_proj.load_weights([tensors[name] for name in QKV])
    else:
        for name in QKV:
            getattr(attention, name).load_weights([tensors[name]])
    attention.to_out[0].load_weights([tensors["to_out"]])
    for i, norm in enumerate((attention.norm_q, attention.norm_k)):
        if norm is not None:
            generator = torch.Generator().manual_seed(20 + i)
            norm.weight.copy_(torch.rand(HEAD_DIM, generator=generator) + 0.5)
    attention.post_load_weights()
    return attention


def activation(*shape, seed=7, dtype=BF16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, 5, HIDDEN)), generator=generator).to(dtype)


def members(attention):
    return [attention.to_q, attention.to_k, attention.to_v, attention.to_out[0]]
