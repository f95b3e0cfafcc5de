# SPDX-License-Identifier: Apache-2.0
"""The attention kernels of this machine, called directly: SDPA, and fa3-fwd in two forms.

"VANILLA" is PyTorch's own (its cuDNN kernel on CUDA), "FA3" the package fa3-fwd in 16 bit,
"FA3_FP8" the same with q, k and v in FP8 and a scale a key head.
"""

import importlib
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tensorrt_llm._torch.custom_ops  # noqa: F401
from benchmarks.common import FP8

NAMES = ("VANILLA", "FA3", "FA3_FP8")
E4M3_MAX = 448.0
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def why_missing(name: str, device: torch.device) -> str | None:
    """Why a kernel can't run here, or None."""
    if name == "VANILLA":
        return None
    if device.type != "cuda":
        return "fa3-fwd needs a Hopper GPU, and this run is on the CPU"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"fa3-fwd needs sm_90, and this is {torch.cuda.get_device_name(device)}"
    try:
        importlib.import_module("fa3_fwd_interface")
    except ImportError as error:
        return f"the package fa3-fwd can't be imported: {error}"
    return None


def precision_of(name: str, mode: str) -> str:
    """ "fp8" or "bf16": the precision in which a backend attends on a step of this mode."""
    return "fp8" if name == "FA3_FP8" and mode == "w8a8" else "bf16"


def fastest_16_bit(device: torch.device) -> str:
    """The kernel that stands for 16-bit attention on this machine."""
    return "VANILLA" if why_missing("FA3", device) else "FA3"


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[B, N, heads, D] each to [B, N, heads, D], through PyTorch's cuDNN kernel on CUDA."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.is_cuda:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def fa3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    descales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """[B, N, heads, D] each, 16 bit, or FP8 with the [B, key heads] scales of q, k and v."""
    interface = importlib.import_module("fa3_fwd_interface")
    scales = {}
    if descales is not None:
        scales = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    out = interface.flash_attn_func(q, k, v, **scales)
    return out[0] if isinstance(out, tuple) else out


def bound_call(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """A call of one kernel on these 16-bit tensors, its inputs made beforehand."""
    if name == "VANILLA":
        return lambda: sdpa(q, k, v)
    if name == "FA3":
        return lambda: fa3(q, k, v)
    quantized = quantize_qkv(q, k, v)
    return lambda: fa3(*quantized.codes, quantized.descales)


class Quantized:
    """q, k and v in FP8, the scale [B, key heads] FP32 of each, and what was taken from v.

    A scale is amax / 448 over what one key head serves: k and v of that head, q of its group of
    query heads. Where the mean key of a head is subtracted, softmax gives the same; the mean value
    (``v_mean`` [B, key heads, D] FP32, zero where it was kept) is missing in attention's output.
    """

    def __init__(
        self,
        codes: tuple[torch.Tensor, ...],
        descales: tuple[torch.Tensor, ...],
        v_mean: torch.Tensor,
    ) -> None:
        self.codes = codes
        self.descales = descales
        self.v_mean = v_mean

    def complete(self, attended: torch.Tensor) -> torch.Tensor:
        """Attention's output over the codes with the mean value back in it, as the model adds it.

        The sum is FP32 and rounded to the dtype of ``attended``.
        """
        return torch.ops.trtllm.add_value_mean(attended.contiguous(), self.v_mean)

    def values(self) -> tuple[torch.Tensor, ...]:
        """What the codes stand for, FP32, without the means that were subtracted."""
        groups = self.codes[0].shape[2] // self.codes[1].shape[2]
        q_scale = self.descales[0].repeat_interleave(groups, 1)
        scales = (q_scale, *self.descales[1:])
        return tuple(
            code.float() * scale[:, None, :, None]
            for code, scale in zip(self.codes, scales, strict=True)
        )


def quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    keep_key_mean: bool = False,
    keep_value_mean: bool = False,
) -> Quantized:
    """Quantise q [B, N, heads, D] and k, v [B, L, key heads, D] with scales from the data.

    The arithmetic is that of ``trtllm::qkv_norm_rope_e4m3``, which subtracts both means.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        keep_key_mean: Round the keys with their mean in them.
        keep_value_mean: Round the values with their mean in them.
    """
    key_heads = k.shape[2]
    k, v = k.float(), v.float()
    v_mean = torch.zeros_like(v[:, 0]) if keep_value_mean else v.mean(dim=1)
    v = v - v_mean[:, None]
    if not keep_key_mean:
        k = k - k.mean(dim=1, keepdim=True)
    codes, descales = [], []
    for x in (q.float(), k, v):
        amax = x.abs().amax(dim=(1, 3)).unflatten(1, (key_heads, -1)).amax(dim=2)
        scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
        per_head = scale.repeat_interleave(x.shape[2] // key_heads, 1)[:, None, :, None]
        codes.append((x / per_head).clamp(-E4M3_MAX, E4M3_MAX).to(FP8))
        descales.append(scale.contiguous())
    return Quantized(tuple(codes), tuple(descales), v_mean)
