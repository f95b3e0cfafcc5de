# SPDX-License-Identifier: Apache-2.0
"""Runs the Triton launch functions on CPU tensors in Triton's interpreter; saves what came out.

A program of its own, since the interpreter must be chosen before triton is imported:
``TRITON_INTERPRET=1 python triton_interpreter_cases.py OUT.pt``. ``test_triton_kernels.py`` starts
it once and compares. The interpreter rounds BF16 and FP8 wrongly, so outputs are FP32 and FP16.
"""

import itertools
import sys

import torch

from tensorrt_llm._torch.custom_ops import triton_kernels

GUARD = 512  # elements around each output that must stay untouched
UNTOUCHED = -12345.0
SHAPES = [(1,), (1, 1), (8, 4), (13, 257), (2, 3, 70), (5, 512)]
SWIGLU = [  # limit, alpha, beta, scale
    (None, 1.0, 0.0, None),
    (0.7, 1.702, 1.0, None),
    (None, 1.0, 0.0, 0.0037),
    (0.7, 1.702, 1.0, 0.0037),
]
LAUNCHES = [(128, 1, torch.float32), (256, 4, torch.float16)]  # block, warps, output


def guarded(shape, dtype):
    """Return (buffer, output): the output is poisoned with NaN and lies inside the buffer."""
    numel = torch.Size(shape).numel()
    buffer = torch.full((numel + 2 * GUARD,), UNTOUCHED, dtype=dtype)
    out = buffer[GUARD : GUARD + numel].view(shape)
    out.fill_(float("nan"))
    return buffer, out


def check_guard(buffer, case):
    if not ((buffer[:GUARD] == UNTOUCHED).all() and (buffer[-GUARD:] == UNTOUCHED).all()):
        raise RuntimeError(f"{case}: wrote outside its output")


def tensor(value):
    return None if value is None else torch.tensor(value)


def swiglu_cases(inputs):
    for (name, gate, up), options, (block, warps, dtype) in itertools.product(
        inputs, SWIGLU, LAUNCHES
    ):
        limit, alpha, beta, scale = options
        case = (name, options, block, dtype)
        launch = {"block": block, "num_warps": warps}
        results = []
        for function, sources in (
            (triton_kernels.launch_silu_and_mul_2in, (gate, up)),
            (triton_kernels.launch_silu_and_mul, (torch.cat([gate, up], -1),)),
        ):
            buffer, out = guarded(gate.shape, dtype)
            function(*sources, out, tensor(scale), limit, alpha, beta, **launch)
            check_guard(buffer, case)
            results.append(out.clone())
        yield {"gate": gate, "up": up, "options": options, "two": results[0], "one": results[1]}


def conversion_cases(x):
    for shape, (block, warps, _) in itertools.product(SHAPES, LAUNCHES):
        part = x[: torch.Size(shape).numel()].view(shape)
        launch = {"block": block, "num_warps": warps}
        scale, amax = torch.tensor(0.0371), part.abs().amax()
        static_buffer, static = guarded(shape, torch.float32)
        triton_kernels.launch_quantize_e4m3_static(part, static, scale, **launch)
        dynamic_buffer, dynamic = guarded(shape, torch.float32)
        found_scale = torch.full((), float("nan"))
        triton_kernels.launch_quantize_e4m3_dynamic(part, dynamic, amax, found_scale, **launch)
        back_buffer, back = guarded(shape, torch.float16)
        triton_kernels.launch_dequantize_e4m3(part, back, scale, **launch)
        for buffer in (static_buffer, dynamic_buffer, back_buffer):
            check_guard(buffer, shape)
        yield {
            "x": part,
            "scale": scale,
            "static": static.clone(),
            "dynamic": dynamic.clone(),
            "dynamic_scale": found_scale,
            "back": back.clone(),
        }


def special_cases():
    """NaN, infinities, signed zeros and values past 448 * scale, at scales of every kind."""
    x = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 447.0, 449.0, 3e38, -3e38])
    x = torch.cat([x, torch.tensor([float("nan"), float("inf"), -float("inf")])])
    for value in (1.0, 0.037, 1e-30, 1e30, 0.0, float("inf"), float("nan")):
        out, scale = torch.full_like(x, 777.0), torch.tensor(value)
        triton_kernels.launch_quantize_e4m3_static(x, out, scale, block=32, num_warps=1)
        yield {"x": x, "scale": scale, "static": out}


def zero_amax_scale():
    out, scale = torch.full((3,), 777.0), torch.full((), 777.0)
    triton_kernels.launch_quantize_e4m3_dynamic(
        torch.zeros(3), out, torch.zeros(()), scale, block=32, num_warps=1
    )
    return scale


def main(path):
    generator = torch.Generator().manual_seed(0)

    def normal(shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).mul(2).to(dtype)

    inputs = []
    for index, shape in enumerate(SHAPES):
        dtype = (torch.float32, torch.float16)[index % 2]
        inputs.append((shape, normal(shape, dtype), normal(shape, dtype)))
    nan, inf = float("nan"), float("inf")
    edges = torch.tensor([nan, 1.0, 3.0, 1e30, 1e30, inf, -inf, -200.0])
    inputs.append(("edges", edges, torch.tensor([1.0, nan, nan, 1e5, -1e5, 1.0, 1.0, 1.0])))
    torch.save(
        {
            "swiglu": list(swiglu_cases(inputs)),
            "conversion": list(conversion_cases(normal(13 * 257))),
            "special": list(special_cases()),
            "zero_amax_scale": zero_amax_scale(),
        },
        path,
    )


if __name__ == "__main__":
    main(sys.argv[1])
