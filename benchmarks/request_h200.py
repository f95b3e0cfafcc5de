# SPDX-License-Identifier: Apache-2.0
"""Time a whole default text-to-video request of full size, and show that a failure leaves no trace.

``python -m benchmarks.request_h200 --out benchmarks/results/request_nano_h200.json``

The pipeline (``request_components.py``) is warmed up at the request's shape; the next request is
timed from its text to its MP4. Steps are timed by device events that are recorded after each, so
nothing waits between them. A step is settled when it starts 10 s or more after the loop: until then
the card cools down from the warm-up's power limit or runs up to it. A settled step is set against
the median of the settled steps of its precision.

Then four shorter requests of the same size, without guidance to halve their time: one, one that is
cancelled in the middle, one that fails inside a step, and the first once more, whose latents have
to be the same bits.
"""

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from benchmarks.attention_kernels import NAMES, fastest_16_bit
from benchmarks.common import (
    FAMILIES,
    Case,
    Clock,
    Record,
    add_case,
    card_state,
    case_of,
    common_parser,
    device_of,
    say,
    synchronize,
)
from benchmarks.random_model import Variant
from benchmarks.request_components import prompt_of, random_pipeline
from tensorrt_llm._torch.visual_gen.models.cosmos3.loop_inputs import Cosmos3Request
from tensorrt_llm._torch.visual_gen.models.cosmos3.pipeline_cosmos3 import Cosmos3OmniMoTPipeline
from tensorrt_llm.visual_gen.output import RequestCancelledError
from tensorrt_llm.visual_gen.params import VisualGenParams

SETTLING_SECONDS = 10.0
SEED = 1


class PlannedFailureError(Exception):
    """Raised by this benchmark inside a step."""


def make_request(
    pipeline: Cosmos3OmniMoTPipeline, case: Case, steps: int | None, guidance: float | None = None
) -> Cosmos3Request:
    """The text-to-video request at this size; None are the default's 35 steps and its guidance."""
    params = VisualGenParams(
        height=case.height,
        width=case.width,
        num_frames=case.frames,
        num_inference_steps=steps,
        guidance_scale=guidance,
        seed=SEED,
    )
    return pipeline.prepare_request(prompt_of(pipeline, case.text[0]), params)


def marked(clock: Clock, label: str, call: Callable) -> Callable:
    """The call, with its time on the clock."""

    def run(*arguments, **options):
        clock.mark(None)
        result = call(*arguments, **options)
        clock.mark(label)
        return result

    return run


def step_rows(modes: list[str], seconds: list[float], settling: float) -> list[dict]:
    """Each step with its precision, its start in the loop, and its ratio to its mode's median."""
    starts = [sum(seconds[:i]) for i in range(len(seconds))]
    settled = [start >= settling for start in starts]
    medians = {}
    for mode in set(modes):
        known = [s for s, m, ok in zip(seconds, modes, settled, strict=True) if ok and m == mode]
        if known:
            medians[mode] = statistics.median(known)
    return [
        {
            "step": i,
            "mode": mode,
            "seconds": seconds[i],
            "start_s": starts[i],
            "settled": settled[i],
            "of_median": seconds[i] / medians[mode] if settled[i] else None,
        }
        for i, mode in enumerate(modes)
    ]


def measure_request(
    pipeline: Cosmos3OmniMoTPipeline, request: Cosmos3Request, device: torch.device, record: Record
) -> None:
    """Run, time and record one request from its text to its file."""
    clock = Clock(device)
    transformer = pipeline.transformer
    encode_text = marked(clock, "text", transformer.encode_text)
    decode = marked(clock, "decode", pipeline.decode)
    cards = []

    def on_step(done: int, total: int) -> None:
        clock.mark("step")
        if done == total:
            cards.append(card_state(device))  # the card still has steps to run

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with (
        mock.patch.object(transformer, "encode_text", encode_text),
        mock.patch.object(pipeline, "decode", decode),
    ):
        output = pipeline.generate(request, on_step=on_step)
    intervals = clock.intervals()
    trace = output.metadata["precision_trace"]
    steps = [seconds for label, seconds in intervals if label == "step"]
    rows = step_rows([entry["generation"] for entry in trace], steps, SETTLING_SECONDS)
    settled = [row["of_median"] for row in rows if row["settled"]]
    phases = {
        "text": sum(seconds for label, seconds in intervals if label == "text"),
        "denoise": sum(steps),
        "decode": sum(seconds for label, seconds in intervals if label == "decode"),
    }
    phases["rest"] = output.metrics.generation - sum(phases.values())
    if importlib.util.find_spec("av") is None:
        record.skip("the MP4", "the package av is not installed")
    else:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            path = output.save(Path(folder) / "clip.mp4")
            phases["mp4"] = time.perf_counter() - started
            mp4_bytes = path.stat().st_size
            say(f"{mp4_bytes} bytes of MP4")
    values = request.values
    record.add(
        "request",
        size=[values.height, values.width, values.num_frames],
        steps=len(rows),
        text_tokens=[len(request.prompt_ids), len(request.negative_ids or ())],
        first_after_warm_up=True,
        phases_s=phases,
        total_s=sum(phases.values()),
        settling_s=SETTLING_SECONDS,
        settled_steps=len(settled),
        slowest_of_median=max(settled) if settled else None,
        peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0,
        card=cards[0],
    )
    for row in rows:
        record.add("request_step", **row)
    say(", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items()))
    say(f"slowest settled step: {max(settled) if settled else 'none'} of its mode's median")


def lifecycle(
    pipeline: Cosmos3OmniMoTPipeline, request: Cosmos3Request, device: torch.device, record: Record
) -> None:
    """Run, cancel, fail, run: record whether the last run gives the bits of the first."""
    transformer = pipeline.transformer
    stop_at = request.values.num_inference_steps // 2
    done = 0

    def on_step(count: int, _: int) -> None:
        nonlocal done
        done = count

    def fail(*_: object) -> None:
        if done == stop_at:
            raise PlannedFailureError

    def final_latents() -> torch.Tensor:
        return pipeline.denoise(request).latents

    def state() -> dict:
        synchronize(device)
        used = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        return {"precision": transformer.gen_precision, "allocated_bytes": used}

    first = final_latents()
    before = state()
    ended = {}
    try:
        pipeline.denoise(request, on_step=on_step, should_cancel=lambda: done == stop_at)
    except RequestCancelledError:
        pass
    else:
        raise RuntimeError("the request was to be cancelled, and was not")
    ended["cancelled"] = state()  # not before: the traceback holds the step's tensors
    done = 0
    # Behind the layers, in front of the output projection: the step is half done.
    hook = transformer.llm2vae.register_forward_pre_hook(fail)
    try:
        pipeline.denoise(request, on_step=on_step)
    except PlannedFailureError:
        pass
    else:
        raise RuntimeError("the request was to fail, and did not")
    finally:
        hook.remove()
    ended["failed"] = state()
    again = final_latents()
    row = record.add(
        "lifecycle",
        size=[request.values.height, request.values.width, request.values.num_frames],
        steps=request.values.num_inference_steps,
        stopped_at_step=stop_at,
        before=before,
        after=ended,
        bit_identical=torch.equal(first, again),
        largest_difference=(first - again).abs().max().item(),
    )
    say(f"after a cancelled and a failed request: bit-identical {row['bit_identical']}")


def build_parser() -> argparse.ArgumentParser:
    parser = common_parser(__doc__.splitlines()[0])
    add_case(parser, default="720p")
    parser.add_argument("--attention", choices=NAMES, help="default: the fastest 16-bit backend")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs of the layers")
    parser.add_argument("--steps", type=int, help="of the timed request; default: its own, 35")
    parser.add_argument(
        "--lifecycle-steps", type=int, default=7, help="of the four requests behind it; 0: none"
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    device, family = device_of(options.device), FAMILIES[options.family]
    attention = options.attention or fastest_16_bit(device)
    record = Record(
        options.out, device, family=family.name, attention=attention, graphs=options.graphs
    )
    case = case_of(options)
    with record.part("warm-up"):
        started = time.perf_counter()
        pipeline = random_pipeline(
            family, device, Variant("request", attention, graphs=options.graphs)
        )
        built = time.perf_counter()
        pipeline.warmup([(case.height, case.width)], [case.frames])
        synchronize(device)
        seconds = time.perf_counter() - built
        record.add("warm-up", build_s=built - started, seconds=seconds)
        say(f"built in {built - started:.1f} s, warm in {seconds:.1f} s")
    with record.part("request"):
        measure_request(pipeline, make_request(pipeline, case, options.steps), device, record)
    if options.lifecycle_steps:
        with record.part("lifecycle"):
            request = make_request(pipeline, case, options.lifecycle_steps, guidance=1.0)
            lifecycle(pipeline, request, device, record)


if __name__ == "__main__":
    main()
