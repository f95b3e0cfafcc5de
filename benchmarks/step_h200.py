# SPDX-License-Identifier: Apache-2.0
"""Time one denoising step of a full-size random static FP8 transformer, both guidance branches.

``python benchmarks/step_h200.py --family nano --out FILE.json`` runs every case in both precision
modes, eager and compiled, in turns in one process, and writes all samples with the device and the
versions. Speed does not depend on the weights' values; random ones stand in for the published.
"""

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import torch
import triton

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer
from tensorrt_llm._torch.visual_gen.pipeline_loader import compile_generation_layers
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.quantization.mode import QuantAlgo

# Sizes: cosmos3.md A.2. Cases: (height, width, frames) in pixels.
FAMILIES = {
    "nano": {},
    "super": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25600,
    },
}
CASES = {"480p": (480, 832, 189), "720p": (720, 1280, 189), "image": (1024, 1024, 1)}
POLICY = {
    "schema_version": 1,
    "type": "first_last_n",
    "index_space": "denoising_loop_iteration",
    "scope": ["transformer"],
    "default_mode": "native",
    "first_steps": {"count": 3, "mode": "a16"},
    "last_steps": {"count": 3, "mode": "a16"},
    "overlap": "a16",
    "reasoner": "a16",
}
STEPS = 35
MODES = {"w8a8": STEPS // 2, "w8a16": 0}  # a step of the schedule that runs in this mode
TEXT_TOKENS = (1600, 900)


def random_transformer(family: str) -> Cosmos3VFMTransformer:
    """A static FP8 transformer on the GPU with random codes, activations of order one inside."""
    config = FAMILIES[family] | {
        "dtype": "bfloat16",
        "quantization_config": {"runtime": {"diffusion_step_policy": POLICY}},
    }
    with torch.device("meta"):
        model = Cosmos3VFMTransformer(
            DiffusionModelConfig(
                pretrained_config=SimpleNamespace(**config),
                quant_config=QuantConfig(quant_algo=QuantAlgo.FP8),
            )
        )
    model.to_empty(device="cuda")
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, Linear):
            codes = torch.randn(module.weight.shape, device="cuda", dtype=torch.bfloat16) * 64
            module.weight.data.copy_(codes.to(torch.float8_e4m3fn))
            module.weight_scale.data.fill_(module.in_features**-0.5 / 64)
            module.input_scale.data.fill_(4.0 / 448)
        else:
            for name, parameter in module.named_parameters(recurse=False):
                if "norm" in type(module).__name__.lower():
                    parameter.data.uniform_(0.9, 1.1)
                else:
                    parameter.data.normal_(std=0.02 if name == "weight" else 0.01)
    model.post_load_weights()
    return model.eval()


class Case:
    """Inputs of one size, made once, as the pipeline does."""

    def __init__(self, height: int, width: int, frames: int) -> None:
        self.shape = ((frames - 1) // 4 + 1, height // 16, width // 16)
        generator = torch.Generator("cuda").manual_seed(1)
        self.latents = torch.randn(2, 48, *self.shape, generator=generator, device="cuda")
        self.raw = torch.full((2,), 500.0, device="cuda")
        length = max(TEXT_TOKENS)
        ids = torch.randint(0, 150_000, (2, length), generator=generator, device="cuda")
        self.ids = ids
        self.mask = torch.zeros_like(ids)
        for row, tokens in enumerate(TEXT_TOKENS):
            self.mask[row, :tokens] = 1

    def run(self, model: Cosmos3VFMTransformer, step: int) -> torch.Tensor:
        model.set_denoising_step(step, STEPS)
        call = (self.latents, self.raw / 1000, self.ids, self.mask, self.shape, self.raw, 24.0)
        return model(*call).video


@torch.inference_mode()
def measure(model: Cosmos3VFMTransformer, case: Case, repeats: int) -> dict[str, list[float]]:
    """Seconds per step, modes in turns, after one warm-up of each."""
    samples: dict[str, list[float]] = {mode: [] for mode in MODES}
    model.reset_cache()
    for repeat in range(repeats + 1):
        for mode, step in MODES.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            velocity = case.run(model, step)
            end.record()
            torch.cuda.synchronize()
            if repeat == 0:
                if not bool(torch.isfinite(velocity).all()):
                    raise RuntimeError(f"velocities of {mode} are not finite")
                continue
            samples[mode].append(start.elapsed_time(end) / 1000)
    model.reset_denoising_step()
    model.reset_cache()
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default="nano")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true", help="measure eager alone")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    started = time.perf_counter()
    model = random_transformer(arguments.family)
    print(f"built {arguments.family} in {time.perf_counter() - started:.1f} s", flush=True)
    rows = []
    for variant in ("eager",) if arguments.no_compile else ("eager", "compiled"):
        if variant == "compiled":
            compile_generation_layers(model, fullgraph=True)
        for name in arguments.cases:
            torch.cuda.reset_peak_memory_stats()
            samples = measure(model, Case(*CASES[name]), arguments.repeats)
            peak = torch.cuda.max_memory_allocated() / 2**30
            for mode, seconds in samples.items():
                median = statistics.median(seconds)
                rows.append(
                    {
                        "variant": variant,
                        "case": name,
                        "size": CASES[name],
                        "mode": mode,
                        "median_s": median,
                        "samples_s": seconds,
                        "peak_gib": peak,
                    }
                )
                print(f"{variant:9}{name:7}{mode:7}{median:9.4f} s {peak:7.1f} GiB", flush=True)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "family": arguments.family,
        "branches": 2,
        "text_tokens": TEXT_TOKENS,
        "attention": "VANILLA",
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
