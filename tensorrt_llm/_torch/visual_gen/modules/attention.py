# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention with grouped keys and values, fused or separate projections.

Separate, q, k and v are linears of their own that keep their FP8 codes and scales as the checkpoint
has them; with ``share_qkv_input_quant`` the activation they read is quantised once for all three.

A model with positions of its own uses the pieces: ``get_qkv``, then ``norm_q`` and ``norm_k`` per
head and its rotary embedding, ``backend``, ``to_out[0]``. ``forward`` does it without positions.
"""

from enum import Enum
from functools import partial

import torch
from torch import nn

from tensorrt_llm._torch.model_config import ModelConfig
from tensorrt_llm._torch.modules import quant_group
from tensorrt_llm._torch.modules.linear import WeightMode, linear_of
from tensorrt_llm._torch.modules.rms_norm import RMSNorm
from tensorrt_llm._torch.visual_gen.attention_backend import create_attention_backend
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._utils import describe_error
from tensorrt_llm.mapping import refuse_parallel_axes


class QKVMode(Enum):
    """How the query, key and value projections are built."""

    FUSE_QKV = "fuse_qkv"
    SEPARATE_QKV = "separate"


class Attention(nn.Module):
    """See the module's docstring.

    Args:
        hidden_size: Width of input and output.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads, a divisor of the query heads; equal by default.
        head_dim: Width of a head; hidden_size / num_attention_heads by default.
        qkv_mode: One ``qkv_proj``, or ``to_q``, ``to_k``, ``to_v``.
        qk_norm: RMSNorm over head_dim, ``norm_q`` and ``norm_k`` (None without).
        eps: Epsilon of these norms.
        bias: Whether the projections have one.
        config: Recipe, runtime flags, attention backend, and the dtype of weights and results; a
            plain ModelConfig has no say in the last two: AUTO and bfloat16, as without a config.
        layer_idx: Named in errors.
        module_name: Full name of this module, by which the recipe may exclude its linears.
        enable_sequence_parallel: Refused where more than one GPU would split the sequence; False
            computes the whole sequence on every GPU.
        share_qkv_input_quant: Quantise the common input of q, k and v once. Takes effect where the
            recipe of all three is static FP8.

    Raises:
        ValueError: head counts that don't divide; share_qkv_input_quant with FUSE_QKV
            ("SEPARATE_QKV") or with "force_dynamic_quantization"; a recipe that excludes only some
            of the projections that FUSE_QKV merges.
        NotImplementedError: sequence parallelism over more than one GPU; an unknown backend.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        qkv_mode: QKVMode = QKVMode.FUSE_QKV,
        qk_norm: bool = True,
        eps: float = 1e-6,
        bias: bool = True,
        config: ModelConfig | None = None,
        layer_idx: int | None = None,
        module_name: str | None = None,
        enable_sequence_parallel: bool = True,
        share_qkv_input_quant: bool = False,
    ) -> None:
        super().__init__()
        config = DiffusionModelConfig.completed(ModelConfig() if config is None else config)
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = (
            num_attention_heads if num_key_value_heads is None else num_key_value_heads
        )
        self.qkv_mode = QKVMode(qkv_mode)
        self.layer_idx = layer_idx
        self.module_name = module_name
        self.share_qkv_input_quant = share_qkv_input_quant
        self._refuse_unsupported(config, hidden_size, head_dim, enable_sequence_parallel)
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim

        q_size = self.num_attention_heads * self.head_dim
        kv_size = self.num_key_value_heads * self.head_dim

        linear = partial(linear_of, config, module_name, bias=bias, dtype=config.torch_dtype)
        if self.qkv_mode is QKVMode.SEPARATE_QKV:
            self.to_q = linear("to_q", hidden_size, q_size)
            self.to_k = linear("to_k", hidden_size, kv_size)
            self.to_v = linear("to_v", hidden_size, kv_size)
        else:
            self._split_sizes = [q_size, kv_size, kv_size]
            self.qkv_proj = linear(
                "qkv_proj",
                hidden_size,
                q_size + 2 * kv_size,
                weight_mode=WeightMode.FUSED_QKV_LINEAR,
                parts=("to_q", "to_k", "to_v"),
            )
        self.to_out = nn.ModuleList([linear("to_out.0", q_size, hidden_size)])
        self.norm_q = RMSNorm(self.head_dim, eps, config.torch_dtype) if qk_norm else None
        self.norm_k = RMSNorm(self.head_dim, eps, config.torch_dtype) if qk_norm else None
        self.backend = create_attention_backend(config.attention.backend)
        self._maybe_share_qkv_quantize: bool = self._shares_qkv_input_quant()
        self._out_takes_fp8: bool = quant_group.calibrated({"to_out.0": self.to_out[0]})
        self._fused_takes_fp8: bool = self.qkv_mode is QKVMode.FUSE_QKV and quant_group.calibrated(
            {"qkv_proj": self.qkv_proj}
        )

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Full (non-causal) attention without position embedding.

        Args:
            hidden_states: [batch, length, hidden_size], the queries' source.
            encoder_hidden_states: [batch, other length, hidden_size], the source of keys and
                values; hidden_states by default.

        Returns:
            [batch, length, hidden_size].

        Raises:
            ValueError: an encoder tensor with FUSE_QKV.
        """
        q, k, v = (
            x.unflatten(-1, (-1, self.head_dim))
            for x in self.get_qkv(hidden_states, encoder_hidden_states)
        )
        if self.norm_q is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        return self.to_out[0](self.backend.forward(q, k, v).flatten(2))

    def get_qkv(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project to queries, keys and values, before any norm.

        Args:
            hidden_states: [..., hidden_size], 16 bit, FP32, or FP8 already quantised for these
                projections.
            encoder_hidden_states: Source of keys and values, as in ``forward``.

        Returns:
            q [..., heads * head_dim], k and v [..., kv_heads * head_dim].

        Raises:
            ValueError: an encoder tensor with FUSE_QKV.
        """
        if self.qkv_mode is QKVMode.FUSE_QKV:
            if encoder_hidden_states is not None:
                raise ValueError(
                    describe_error(
                        "qkv_proj reads one tensor, so FUSE_QKV takes no encoder_hidden_states",
                        where=self._where(),
                        expected="encoder_hidden_states=None",
                        found=f"a tensor of shape {tuple(encoder_hidden_states.shape)}",
                        remedy="build the attention with QKVMode.SEPARATE_QKV",
                    )
                )
            return self.qkv_proj(hidden_states).split(self._split_sizes, dim=-1)
        if self._can_share_qkv_quantize(hidden_states, encoder_hidden_states):
            hidden_states = quant_group.quantize_once(self._qkv(), hidden_states)
            encoder_hidden_states = None
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        return self.to_q(hidden_states), self.to_k(source), self.to_v(source)

    def get_kv(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Project to keys and values alone, for a caller that has no use for queries.

        With FUSE_QKV the queries are computed all the same, since one GEMM makes all three.
        """
        if self.qkv_mode is QKVMode.FUSE_QKV:
            return self.get_qkv(hidden_states)[1:]
        if self._can_share_qkv_quantize(hidden_states, None):
            hidden_states = quant_group.quantize_once(self._qkv(), hidden_states)
        return self.to_k(hidden_states), self.to_v(hidden_states)

    def fp8_input_scale(self) -> torch.Tensor | None:
        """The scale with which a caller may quantise the input for q, k and v; None for 16 bit.

        An operation that makes the input can then emit FP8 at once, which ``get_qkv`` passes
        through. None on a 16-bit step, for recipes without calibrated scales, and without sharing.
        """
        if self.qkv_mode is QKVMode.FUSE_QKV:
            group, takes_fp8 = {"qkv_proj": self.qkv_proj}, self._fused_takes_fp8
        else:
            group, takes_fp8 = self._qkv(), self._maybe_share_qkv_quantize
        return quant_group.shared_scale(group) if takes_fp8 else None

    def fp8_output_scale(self) -> torch.Tensor | None:
        """The scale with which a caller may quantise the input of ``to_out``; None for 16 bit."""
        group = {"to_out.0": self.to_out[0]}
        return quant_group.shared_scale(group) if self._out_takes_fp8 else None

    @property
    def may_attend_in_fp8(self) -> bool:
        """Whether some step's attention runs on FP8 operands: what ``attends_in_fp8`` can be."""
        takes_fp8 = self._maybe_share_qkv_quantize or self._fused_takes_fp8
        return self.backend.quantizes and takes_fp8

    def attends_in_fp8(self) -> bool:
        """Whether this step's attention runs on FP8 operands: the backend does, the step may."""
        return self.backend.quantizes and self.fp8_input_scale() is not None

    def post_load_weights(self) -> None:
        """Check the loaded scales and confirm that the input can be shared.

        Does nothing without sharing, and for recipes without calibrated scales.

        Raises:
            ValueError: "same calibrated input_scale", when q, k and v differ.
        """
        if self.share_qkv_input_quant:
            self._maybe_share_qkv_quantize = quant_group.confirm_calibrated(
                self._qkv(), self._where()
            )

    def _shares_qkv_input_quant(self) -> bool:
        return self.share_qkv_input_quant and quant_group.calibrated(self._qkv())

    def _can_share_qkv_quantize(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None
    ) -> bool:
        return (
            self._maybe_share_qkv_quantize
            and (encoder_hidden_states is None or encoder_hidden_states is hidden_states)
            and hidden_states.dtype != torch.float8_e4m3fn
            and quant_group.accept_fp8(self._qkv())
        )

    def _qkv(self) -> quant_group.Group:
        return {"to_q": self.to_q, "to_k": self.to_k, "to_v": self.to_v}

    def _refuse_unsupported(
        self,
        config: DiffusionModelConfig,
        hidden_size: int,
        head_dim: int | None,
        enable_sequence_parallel: bool,
    ) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads or (head_dim is None and hidden_size % heads):
            raise ValueError(
                describe_error(
                    "Head counts don't divide",
                    where=self._where(),
                    expected="num_key_value_heads dividing num_attention_heads, and the latter "
                    "dividing hidden_size unless head_dim is given",
                    found=f"hidden_size {hidden_size}, heads {heads}, kv heads {kv_heads}",
                    remedy="choose num_key_value_heads that divides num_attention_heads, or pass "
                    "head_dim",
                )
            )
        if self.share_qkv_input_quant and self.qkv_mode is not QKVMode.SEPARATE_QKV:
            raise ValueError(
                describe_error(
                    "share_qkv_input_quant needs QKVMode.SEPARATE_QKV",
                    where=self._where(),
                    expected=QKVMode.SEPARATE_QKV,
                    found=self.qkv_mode,
                    remedy="leave it off: qkv_proj quantises its input once anyway",
                )
            )
        if self.share_qkv_input_quant and config.force_dynamic_quantization:
            raise ValueError(
                describe_error(
                    "share_qkv_input_quant can't be combined with force_dynamic_quantization",
                    where=self._where(),
                    expected="a static FP8 recipe, or none",
                    found="force_dynamic_quantization=True",
                    remedy="leave one of the two off",
                )
            )
        if enable_sequence_parallel:
            axes = config.parallel.model_dump(include={"ulysses_size", "ring_size"})
            refuse_parallel_axes(axes, where=f"{self._where()}, enable_sequence_parallel")

    def _where(self) -> str:
        if self.module_name is not None:
            return self.module_name
        return "Attention" if self.layer_idx is None else f"Attention of layer {self.layer_idx}"
