# SPDX-License-Identifier: Apache-2.0
"""The layers of the two towers of Cosmos3, in reading order.

One layer number stands for a pair of layers. The understanding layer (``language_model.layers.N``)
is causal over the text alone; the generation layer (``gen_layers.N``) lets every media token attend
to the text's keys and values of the same layer and to all media tokens. Text never sees media, so
the understanding tower runs once per prompt branch (``branch_cache.py``) and a denoising step runs
the generation tower only.

``uses_static_fp8`` decides the topology. Static ModelOpt FP8 keeps q, k, v and gate, up separate,
each with its own calibrated scale; every other checkpoint fuses what reads one activation.
"""

import math

import torch
from torch import nn

from tensorrt_llm._torch.modules.embedding import Embedding
from tensorrt_llm._torch.modules.gated_mlp import GatedMLP
from tensorrt_llm._torch.modules.rms_norm import RMSNorm
from tensorrt_llm._torch.visual_gen.attention_backend import E4M3Operands, KeyLengths
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.architecture import Cosmos3Architecture
from tensorrt_llm._torch.visual_gen.models.cosmos3.branch_cache import TextKeys
from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_policy import uses_static_fp8
from tensorrt_llm._torch.visual_gen.models.cosmos3.rope import (
    apply_rotary,
    rotary_tables,
    text_positions,
)
from tensorrt_llm._torch.visual_gen.modules.attention import Attention, QKVMode

MAX_MLP_ROWS = 49_152
"""Rows that go through an MLP at once. Both branches of 720p x 189 frames are 88,320: two parts
halve the MLP's tensors, 2.5 GiB of Nano, for one copy of its output, 0.3 % of the step."""


def mlp_parts(rows: int, dynamic: bool) -> int:
    """Even parts in which the generation tower's MLPs take so many rows.

    Args:
        rows: Media tokens of all branches.
        dynamic: Whether activations are quantised dynamically: all rows share one scale then.
    """
    return 1 if dynamic else max(1, math.ceil(rows / MAX_MLP_ROWS))


class _DecoderLayer(nn.Module):
    """Pre-norm attention and gated MLP. Subclasses name the attention and what it attends to."""

    attention_name: str

    def __init__(
        self, arch: Cosmos3Architecture, config: DiffusionModelConfig, name: str, qkv_mode: QKVMode
    ) -> None:
        super().__init__()
        static = uses_static_fp8(config)
        dtype = config.torch_dtype
        self.input_layernorm = RMSNorm(arch.hidden_size, eps=arch.rms_norm_eps, dtype=dtype)
        attention = Attention(
            hidden_size=arch.hidden_size,
            num_attention_heads=arch.num_attention_heads,
            num_key_value_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            qkv_mode=qkv_mode,
            eps=arch.rms_norm_eps,
            bias=arch.attention_bias,
            config=config,
            module_name=f"{name}.{self.attention_name}",
            share_qkv_input_quant=static,
        )
        self.add_module(self.attention_name, attention)
        self.post_attention_layernorm = RMSNorm(
            arch.hidden_size, eps=arch.rms_norm_eps, dtype=dtype
        )
        self.mlp = GatedMLP(
            hidden_size=arch.hidden_size,
            intermediate_size=arch.intermediate_size,
            bias=False,
            dtype=dtype,
            config=config,
            module_name=f"{name}.mlp",
            split_gate_up=static,
        )

    @property
    def attention(self) -> Attention:
        return getattr(self, self.attention_name)


class UnderstandingLayer(_DecoderLayer):
    """One causal layer over the text of one branch. It runs once a request, so it is plain."""

    attention_name = "self_attn"

    def __init__(self, arch: Cosmos3Architecture, config: DiffusionModelConfig, index: int) -> None:
        super().__init__(arch, config, f"language_model.layers.{index}", QKVMode.SEPARATE_QKV)

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden [1, L, H] to the layer's output and its keys and values [1, L, kv_heads, D]."""
        attention = self.attention
        q, k, v = (self._heads(x) for x in attention.get_qkv(self.input_layernorm(hidden)))
        q = apply_rotary(attention.norm_q(q), cos, sin)
        k = apply_rotary(attention.norm_k(k), cos, sin)
        attended = attention.backend.forward(q, k, v, is_causal=True).flatten(2)
        hidden = hidden + attention.to_out[0](attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), k, v

    def keys_values(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values alone: all that generation reads of the last layer."""
        attention = self.attention
        k, v = (self._heads(x) for x in attention.get_kv(self.input_layernorm(hidden)))
        return apply_rotary(attention.norm_k(k), cos, sin), v

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.attention.head_dim))


class UnderstandingTower(nn.Module):
    """Token embedding and the causal layers. The checkpoint's final norm and head feed only the
    text output, which generation has no use for, so they are not built."""

    def __init__(self, arch: Cosmos3Architecture, config: DiffusionModelConfig) -> None:
        super().__init__()
        self.arch = arch
        self.embed_tokens = Embedding(arch.vocab_size, arch.hidden_size, dtype=config.torch_dtype)
        self.layers = nn.ModuleList(
            UnderstandingLayer(arch, config, i) for i in range(arch.num_hidden_layers)
        )

    def forward(self, token_ids: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Ids [1, L] to per-layer keys and values, each [1, L, kv_heads, D]."""
        hidden = self.embed_tokens(token_ids)
        positions = text_positions(token_ids.shape[1], token_ids.device)
        cos, sin = (t[None] for t in rotary_tables(self.arch, positions, hidden.dtype))
        keys, values = [], []
        *inner, last = self.layers
        for layer in inner:
            hidden, k, v = layer(hidden, cos, sin)
            keys.append(k)
            values.append(v)
        k, v = last.keys_values(hidden, cos, sin)
        return [*keys, k], [*values, v]


class ResidualStream:
    """The media tokens between two layers: [B, N, H] and, not yet added, [B, N, H] or None.

    A layer takes them out, so that nobody keeps the tensors of the layer before alive: 1.4 GiB of
    720p video.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        self._tensors: tuple[torch.Tensor, torch.Tensor | None] | None = (hidden, None)

    def put(self, hidden: torch.Tensor, delta: torch.Tensor) -> None:
        """Leave the stream and what the next layer has to add to it."""
        self._tensors = (hidden, delta)

    def take(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Take out what was left, once."""
        tensors, self._tensors = self._tensors, None
        return tensors


class GenerationLayer(_DecoderLayer):
    """One layer over the media tokens, which attend to the branch's text and to each other.

    A layer leaves its residual stream and, not yet added, what its MLP gave: the next layer adds it
    in the pass that norms, and where the projections behind the norm take FP8 the same pass
    quantises for all of them (``trtllm::add_rms_norm``).

    ``project`` and ``finish`` stand before and behind attention. Only attention depends on the text
    length, so compiling these two alone keeps one graph for every prompt.
    """

    attention_name = "cross_attention"

    def __init__(self, arch: Cosmos3Architecture, config: DiffusionModelConfig, index: int) -> None:
        mode = QKVMode.SEPARATE_QKV if uses_static_fp8(config) else QKVMode.FUSE_QKV
        super().__init__(arch, config, f"gen_layers.{index}", mode)
        self.index = index

    def forward(
        self,
        stream: ResidualStream,
        cos: torch.Tensor,
        sin: torch.Tensor,
        text: TextKeys,
        lengths: KeyLengths,
    ) -> None:
        """Run the layer: take [B, N, H] out of the stream, and leave the result in it.

        Args:
            stream: The media tokens.
            cos: Rotary table [B, N, D], like sin.
            sin: Rotary table.
            text: Keys and values of the B branches.
            lengths: Keys of each branch, text and media: ``text.lengths.plus(N)``.
        """
        rotary = (cos, sin, text.keys[self.index], text.values[self.index], text.lengths.device)
        fp8 = self.attention.attends_in_fp8()
        hidden, *operands = self.project(*stream.take(), *rotary, fp8)
        backend = self.attention.backend
        if fp8:
            operands = E4M3Operands(*operands)
            attended = backend.forward_e4m3(operands, lengths=lengths)
            attended = torch.ops.trtllm.add_value_mean(
                attended, operands.v_mean, self.attention.fp8_output_scale()
            )
        else:
            attended = backend.forward(*operands, lengths=lengths)
        del operands  # a third of what the MLP needs next
        output = self.attention.to_out[0](attended.flatten(2))
        del attended
        norm, scale = self.post_attention_layernorm, self.mlp.fp8_input_scale()
        normed, hidden = add_norm(norm, output, hidden, scale)
        del output
        stream.put(hidden, self._run_mlp(normed))

    def project(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        text_keys: torch.Tensor,
        text_values: torch.Tensor,
        text_lengths: torch.Tensor,
        fp8: bool,
    ) -> tuple[torch.Tensor, ...]:
        """The half before attention: the residual stream with delta added, and q, k, v.

        q is [B, N, heads, D], normed and rotated; k and v are [B, L + N, kv_heads, D], the media's
        rows behind the valid text rows of each branch. For FP8 attention the fields of
        ``E4M3Operands`` stand in their place.
        """
        attention = self.attention
        normed, hidden = add_norm(self.input_layernorm, delta, hidden, attention.fp8_input_scale())
        norm_q, norm_k = attention.norm_q, attention.norm_k
        lay_out = torch.ops.trtllm.qkv_norm_rope_e4m3 if fp8 else torch.ops.trtllm.qk_norm_rope
        operands = lay_out(
            *attention.get_qkv(normed),
            *(norm_q.weight, norm_k.weight, norm_q.eps, cos, sin),
            *(text_keys, text_values, text_lengths),
        )
        return hidden, *operands

    def finish(self, normed: torch.Tensor) -> torch.Tensor:
        """The MLP over any rows [..., H] of the normed stream."""
        return self.mlp(normed)

    def _run_mlp(self, normed: torch.Tensor) -> torch.Tensor:
        """``finish`` over [B, N, H], in even parts of at most ``MAX_MLP_ROWS`` rows."""
        rows = normed.shape[0] * normed.shape[1]
        parts = mlp_parts(rows, self.mlp.down_proj.force_dynamic_quantization)
        if parts == 1:
            return self.finish(normed)
        rows = normed.flatten(0, 1)
        out = torch.empty(rows.shape, dtype=self.input_layernorm.weight.dtype, device=rows.device)
        for source, target in zip(rows.chunk(parts), out.chunk(parts), strict=True):
            target.copy_(self.finish(source))
        return out.view(normed.shape)


def add_norm(
    norm: RMSNorm, delta: torch.Tensor | None, hidden: torch.Tensor, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``hidden + delta`` normed (FP8 codes where a scale is given), and the sum itself."""
    if delta is None:
        return torch.ops.trtllm.rms_norm(hidden, norm.weight, norm.eps, scale), hidden
    return torch.ops.trtllm.add_rms_norm(delta, hidden, norm.weight, norm.eps, scale)
