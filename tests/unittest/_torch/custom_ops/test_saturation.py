# SPDX-License-Identifier: Apache-2.0
"""FP8 output saturates by a clamp of its own, whatever the installed torch's cast does.

Some versions of torch saturate when they cast to float8_e4m3fn, and some give NaN. The clamp must
not rely on the former, so here the casts inside the ops are made to do the latter.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tensorrt_llm._torch.custom_ops  # noqa: F401
from tests.support.fp8_modules import bits

FP8 = torch.float8_e4m3fn
OPS = torch.ops.trtllm
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# The largest FP32 value that rounds to 448, to nearest even: half way to the next step, 480.
LARGEST_TO_448 = 464.0
ONE = torch.tensor(1.0)


class CastsWithoutSaturation(TorchDispatchMode):
    """Casts to FP8 turn what lies beyond 448 into NaN, also inside the package's own CPU ops."""

    def __init__(self) -> None:
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "trtllm":
            with self:  # the op's own kernel, watched as well
                return func.redispatch(CPU, *args, **kwargs)
        result = func(*args, **kwargs)
        casts = isinstance(result, torch.Tensor) and result.dtype == FP8
        if casts and args[0].dtype in (torch.float32, torch.bfloat16, torch.float16):
            self.casts += 1
            codes = result.view(torch.uint8)
            codes[args[0].abs() > LARGEST_TO_448] = 0x7F
        return result


def test_a_bare_cast_gives_nan_here():
    with CastsWithoutSaturation() as watch:
        codes = torch.tensor([1.0, 448.0, 464.0, 465.0, -1e9, torch.inf]).to(FP8)
    assert bits(codes).tolist() == [0x38, 0x7E, 0x7E, 0x7F, 0x7F, 0x7F] and watch.casts == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 0.01, 2.0**-20])
def test_static_quantisation_clamps_before_it_casts(dtype, scale):
    limit = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    x = torch.stack([limit, -limit, limit * torch.inf, -limit * torch.inf, limit * 0.5])
    with CastsWithoutSaturation() as watch:
        codes = OPS.quantize_e4m3_static(x, torch.tensor(scale))
    assert bits(codes).tolist() == [0x7E, 0xFE, 0x7E, 0xFE, 0x7E] and watch.casts == 1


@pytest.mark.parametrize("fused", [False, True])
def test_swiglu_with_fp8_output_clamps_before_it_casts(fused):
    gate = torch.full((2, 16), 100.0, dtype=torch.bfloat16)
    up = torch.full((2, 16), 100.0, dtype=torch.bfloat16)
    up[1] = -100.0
    with CastsWithoutSaturation() as watch:
        if fused:
            codes = OPS.silu_and_mul(torch.cat((gate, up), dim=-1), ONE, FP8)
        else:
            codes = OPS.silu_and_mul_2in(gate, up, ONE, FP8)
    assert set(bits(codes)[0].tolist()) == {0x7E} and set(bits(codes)[1].tolist()) == {0xFE}
    assert watch.casts == 1
