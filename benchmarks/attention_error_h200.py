# SPDX-License-Identifier: Apache-2.0
"""The error of FP8 attention against BF16, layer by layer, on what the model's layers compute.

``python -m benchmarks.attention_error_h200 --out benchmarks/results/attention_error_h200.json``

A random model runs one step at several noise levels on structured latents: a smooth clip of low
spatial and temporal frequency, mixed with noise as the flow schedule does. Every call of attention
over the media is caught with its q, k and v, and attention is computed again in BF16 and in FP8 in
three ways (``WAYS``): as the model does it, with each head's mean key and mean value subtracted
before they are rounded and the mean value added to the result; with the mean value kept in the
codes; with the mean key kept in them. The weights are random, so the model's own attention is
nearly flat; synthetic queries that lean towards some keys show the peaked kind, over values with
and without a mean of their own.

Where fa3-fwd can't run, the FP8 codes are multiplied in FP32: what rounding q, k and v costs,
without what the kernel rounds and cuts inside. The row says which of the two it is.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from benchmarks.attention_kernels import fa3, quantize_qkv, why_missing
from benchmarks.common import (
    BF16,
    FAMILIES,
    Case,
    Family,
    Record,
    add_case,
    case_of,
    common_parser,
    device_of,
    relative_l2,
    say,
)
from benchmarks.random_model import Inputs, Variant, random_transformer

SIGMAS = (0.9, 0.5, 0.15)
# FP8 attention follows the FP8 steps.
MODE = "w8a8"
# How strongly a synthetic query leans towards one key, in multiples of that key.
PEAKS = (0.0, 1.0, 2.0)
# How far the mean of a column of synthetic values lies from zero, in standard deviations of the
# values: the factor of normally distributed means.
VALUE_MEANS = (0.0, 3.0)
# The errors of a row, and what is kept in the codes for each.
WAYS = {
    "error": {},
    "error_value_mean_kept": {"keep_value_mean": True},
    "error_key_mean_kept": {"keep_key_mean": True},
}
# Periods of the smooth clip along time, height and width, at most.
_WAVES = 4


class MediaAttention(TorchFunctionMode):
    """Hands q, k, v [1, N, heads, D] of every attention over the media to a function.

    The backend VANILLA calls ``scaled_dot_product_attention``, and the text's calls are causal.

    Args:
        see: Called with q, k and v, before the call itself runs.
    """

    def __init__(self, see: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not kwargs.get("is_causal", False):
            q, k, v = (x.transpose(1, 2) for x in args[:3])
            if kwargs.get("attn_mask") is not None or len(args) > 3:
                raise RuntimeError("attention with a mask: its padded keys are no operands here")
            for row in range(q.shape[0]):
                self._see(*(x[row : row + 1] for x in (q, k, v)))
        return func(*args, **kwargs)


def structured_latents(noise: torch.Tensor, sigma: float, seed: int) -> torch.Tensor:
    """(1 - sigma) * a smooth clip of unit size + sigma * noise, both branches alike."""
    generator = torch.Generator(noise.device).manual_seed(seed)
    _, channels, *sizes = noise.shape
    coarse = [min(_WAVES, size) for size in sizes]
    smooth = torch.randn(1, channels, *coarse, generator=generator, device=noise.device)
    smooth = F.interpolate(smooth, size=tuple(sizes), mode="trilinear", align_corners=True)
    smooth = smooth / smooth.std()
    return (1 - sigma) * smooth + sigma * noise


def attention_errors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: str
) -> dict[str, float]:
    """Relative L2 error of FP8 attention in each of ``WAYS``."""
    reference = _exact(q, k, v) if kernel == "FP32 on the codes" else fa3(q, k, v)
    errors = {}
    for name, kept in WAYS.items():
        quantized = quantize_qkv(q, k, v, **kept)
        if kernel == "FP32 on the codes":
            attended = _exact(*quantized.values())
        else:
            attended = fa3(*quantized.codes, quantized.descales)
        errors[name] = relative_l2(quantized.complete(attended), reference)
    return errors


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def kernel_here(device: torch.device) -> str:
    """What computes FP8 attention in this run."""
    return "FP32 on the codes" if why_missing("FA3_FP8", device) else "FA3_FP8"


def measure_layers(
    family: Family, case: Case, device: torch.device, record: Record, kernel: str
) -> None:
    """Record the error of every layer and branch at every noise level."""
    model = random_transformer(family, device, Variant("error", "VANILLA"))
    inputs = Inputs(family, case, device)
    noise = inputs.latents.clone()
    inputs.step(model, MODE)  # the text runs now, not under the mode below
    for sigma in SIGMAS:
        inputs.latents = structured_latents(noise, sigma, seed=2)
        inputs.raw.fill_(1000 * sigma)
        seen: list[dict[str, float]] = []
        with MediaAttention(lambda *qkv: seen.append(attention_errors(*qkv, kernel))):  # noqa: B023
            inputs.step(model, MODE)
        if len(seen) != 2 * family.layers:
            raise RuntimeError(f"{len(seen)} calls of attention instead of 2 a layer")
        for index, errors in enumerate(seen):
            record.add(
                "layer",
                family=family.name,
                case=case.name,
                mode=MODE,
                sigma=sigma,
                layer=index // 2,
                branch=index % 2,
                kernel=kernel,
                **errors,
            )
        worst = ", ".join(f"{name} {max(errors[name] for errors in seen):.4f}" for name in WAYS)
        say(f"sigma {sigma}: {len(seen)} calls, at most {worst}")
    model.reset_denoising_step()
    model.reset_cache()


def measure_peaked(
    family: Family, case: Case, device: torch.device, record: Record, kernel: str
) -> None:
    """Record the error on queries that lean towards some key, which have a mean of their own."""
    heads, key_heads, d = family.heads, family.kv_heads, family.head_dim
    tokens, keys = case.tokens, case.tokens + case.text[0]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=BF16)

    k = normal(1, keys, key_heads, d) + 1.5 * normal(1, 1, key_heads, d)
    plain_v, mean_v = normal(1, keys, key_heads, d), normal(1, 1, key_heads, d)
    towards = k[:, torch.randint(0, keys, (tokens,), device=device)]
    plain = normal(1, tokens, heads, d)
    for peak in PEAKS:
        q = plain + peak * towards.repeat_interleave(heads // key_heads, 2)
        for value_mean in VALUE_MEANS:
            errors = attention_errors(q, k, plain_v + value_mean * mean_v, kernel)
            inputs = {"peak": peak, "value_mean": value_mean}
            record.add("peaked", case=case.name, **inputs, kernel=kernel, **errors)
            found = ", ".join(f"{name} {value:.4f}" for name, value in errors.items())
            say(f"peak {peak}, value mean {value_mean}: {found}")


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = common_parser(__doc__.splitlines()[0])
    add_case(parser, default="480p")
    options = parser.parse_args(arguments)
    device, family, case = device_of(options.device), FAMILIES[options.family], case_of(options)
    kernel = kernel_here(device)
    record = Record(options.out, device, family=family.name, kernel=kernel)
    if kernel != "FA3_FP8":
        record.skip("the FP8 kernel", why_missing("FA3_FP8", device))
    torch.manual_seed(0)
    with record.part("peaked"):
        measure_peaked(family, case, device, record, kernel)
    with record.part("layers"):
        measure_layers(family, case, device, record, kernel)


if __name__ == "__main__":
    main()
