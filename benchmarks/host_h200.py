# SPDX-License-Identifier: Apache-2.0
"""Where the host's time goes in one eager step of a picture, whose kernels are short.

``python -m benchmarks.host_h200`` prints the functions by their own time, and the seconds of a step
with and without waiting for the device.
"""

import cProfile
import pstats
import time

import torch

from benchmarks.attention_kernels import fastest_16_bit
from benchmarks.common import CASES, FAMILIES, device_of
from benchmarks.random_model import MODES, Inputs, Variant, random_transformer

STEPS = 10
LINES = 40


@torch.no_grad()
def main() -> None:
    device, family = device_of("cuda"), FAMILIES["nano"]
    model = random_transformer(family, device, Variant("eager", fastest_16_bit(device)))
    inputs = Inputs(family, CASES["image"], device)
    for mode in MODES:
        for _ in range(2):
            inputs.step(model, mode)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            inputs.step(model, mode)
        launched = time.perf_counter() - begin
        torch.cuda.synchronize()
        done = time.perf_counter() - begin
        print(f"{mode}: {launched / STEPS:.4f} s to launch a step, {done / STEPS:.4f} s to do it")
    inputs.step(model, "w8a8")
    torch.cuda.synchronize()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(STEPS):
        inputs.step(model, "w8a8")
    profile.disable()
    torch.cuda.synchronize()
    pstats.Stats(profile).sort_stats("tottime").print_stats(LINES)


if __name__ == "__main__":
    main()
