# SPDX-License-Identifier: Apache-2.0
"""Time the load of a full-size static FP8 transformer against moving the same bytes to the device.

``python benchmarks/load_h200.py --out FILE.json [--size nano|small] [--folder PATH]`` writes a
random checkpoint (16 GB for Nano, 15 of them loaded), then measures with its files in the page
cache, in turns in one process:

* the reference: threads that read the loaded byte ranges, nothing else, into pinned buffers and
  copy them asynchronously into one device buffer; no names, no dtypes, no checks. Its number of
  threads and buffer size are the best of those tried first;
* our load, phase by phase, with the functions that PipelineLoader calls;
* for comparison, once each: safetensors' own load_file, and our copy with other constants.

An untimed load is watched for its peak memory, and every loaded tensor is compared with its file.
Without a CUDA device the small size runs on the CPU, as a test of this script.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import safetensors
import torch
from load_reference import Range, read_and_copy
from random_checkpoint import SIZES, write_checkpoint
from safetensors.torch import load_file

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.checkpoints import byte_stream
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._torch.visual_gen.checkpoints.weight_apply import allocate, apply_plan
from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import WeightPlan, plan_weights
from tensorrt_llm._torch.visual_gen.config import DiffusionPipelineConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer

MIB, GIB = 2**20, 2**30
GOAL = 1.2
SCALE_KEYS = ("weight_scale", "input_scale")
TRIED = [(4, 4), (4, 8), (8, 4), (8, 8), (8, 16), (16, 8), (16, 32)]  # threads, MiB a buffer
PHASES = ("open", "build", "plan", "allocate", "apply", "post_load")


class Clock:
    """Seconds of consecutive phases; each ends when the device is idle."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        synchronize(self._device)
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now


class MemoryWatch:
    """Peak of this process's anonymous memory and of the device's used memory, sampled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.anonymous_before = self.anonymous_peak = status_bytes("RssAnon")
        self.device_before = self.device_peak = used_device_bytes(device)
        self.samples = 0

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.anonymous_peak = max(self.anonymous_peak, status_bytes("RssAnon"))
            self.device_peak = max(self.device_peak, used_device_bytes(self._device))
            self.samples += 1


def status_bytes(field: str) -> int:
    """One of the memory fields of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def disk_bytes() -> int:
    """Bytes that this process has had read from storage so far; the page cache counts none."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/io has no read_bytes")


def used_device_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give freed memory back, so that every round allocates anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    synchronize(device)


def load(root: Path, device: torch.device) -> tuple[Cosmos3VFMTransformer, WeightPlan, Clock]:
    """The steps of PipelineLoader for the transformer, timed one by one."""
    model_config = DiffusionPipelineConfig.from_pretrained(root).primary_model_config
    clock = Clock(device)
    weights = SafetensorsFolder(root / "transformer")
    clock.end("open")
    with torch.device("meta"):
        transformer = Cosmos3VFMTransformer(model_config)
    clock.end("build")
    plan = plan_weights(transformer, weights, device)
    clock.end("plan")
    allocate(transformer, device)
    clock.end("allocate")
    apply_plan(plan, weights)
    clock.end("apply")
    transformer.post_load_weights()
    transformer.eval()
    clock.end("post_load")
    return transformer, plan, clock


def planned_ranges(root: Path) -> list[Range]:
    """The byte ranges that a load reads, neighbours joined, in file order."""
    model_config = DiffusionPipelineConfig.from_pretrained(root).primary_model_config
    with torch.device("meta"):
        transformer = Cosmos3VFMTransformer(model_config)
    weights = SafetensorsFolder(root / "transformer")
    plan = plan_weights(transformer, weights)
    names = [name for d in plan.destinations for shard in d.shards for name in shard.values()]
    ranges: list[Range] = []
    for spec in sorted(map(weights.spec, names), key=lambda spec: (spec.file, spec.offset)):
        path = weights.folder / spec.file
        last = ranges[-1] if ranges else None
        if last is not None and last.path == path and last.offset + last.size == spec.offset:
            ranges[-1] = Range(path, last.offset, last.size + spec.num_bytes)
        else:
            ranges.append(Range(path, spec.offset, spec.num_bytes))
    return ranges


def count_differences(plan: WeightPlan, root: Path) -> dict:
    """Compare every loaded tensor with its file, bit for bit, through safetensors' own reader."""
    files = sorted((root / "transformer").glob("*.safetensors"))
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    compared = different = 0
    for destination in plan.destinations:
        for shard in destination.shards:
            for key, name in shard.items():
                parameter = dict(destination.module.named_parameters(recurse=False)).get(key)
                if parameter is None:  # ModelOpt's buffers, which stand beside the scales
                    continue
                expected = stored[name].to(parameter.device)
                same = expected.dtype == parameter.dtype and torch.equal(
                    expected.reshape(-1).view(torch.uint8),
                    parameter.detach().reshape(-1).view(torch.uint8),
                )
                compared += 1
                different += not same
    return {"tensors": compared, "different": different}


def timed(device: torch.device, call: Callable[[], object]) -> float:
    release(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    seconds = time.perf_counter() - start
    del result
    return seconds


def try_constants(root: Path, device: torch.device) -> list[dict]:
    """Seconds of our copy with other numbers of threads and sizes of slots."""
    own = (byte_stream.READERS, byte_stream.SLOT_BYTES)
    rows = []
    for threads, mib in TRIED:
        byte_stream.READERS, byte_stream.SLOT_BYTES = threads, mib * MIB
        seconds = []
        for _ in range(2):
            release(device)
            seconds.append(load(root, device)[2].seconds["apply"])
        rows.append({"threads": threads, "mib": mib, "samples_s": seconds})
    byte_stream.READERS, byte_stream.SLOT_BYTES = own
    return rows


def measure(root: Path, device: torch.device, rounds: int) -> dict:
    """All measurements on a checkpoint whose files are in the page cache."""
    ranges = planned_ranges(root)
    num_bytes = sum(r.size for r in ranges)
    tried = []
    for threads, mib in TRIED:
        samples = [
            timed(device, lambda t=threads, m=mib: read_and_copy(ranges, device, t, m * MIB)[0])
            for _ in range(3)
        ]
        tried.append({"threads": threads, "mib": mib, "samples_s": samples})
    best = min(tried, key=lambda row: statistics.median(row["samples_s"]))

    load(root, device)  # warm: kernels, lazily loaded code
    on_disk = disk_bytes()
    reference: list[dict[str, float]] = []
    ours: list[dict[str, float]] = []
    for index in range(rounds):
        for turn in ("reference", "ours") if index % 2 == 0 else ("ours", "reference"):
            release(device)
            if turn == "reference":
                start = time.perf_counter()
                buffer, prepared = read_and_copy(ranges, device, best["threads"], best["mib"] * MIB)
                total = time.perf_counter() - start
                reference.append({"prepare": prepared, "total": total})
                del buffer
            else:
                clock = load(root, device)[2]
                ours.append(clock.seconds | {"total": sum(clock.seconds.values())})
    from_disk = disk_bytes() - on_disk

    release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with MemoryWatch(device) as watch:
        transformer, plan, _ = load(root, device)
    model_bytes = sum(p.numel() * p.itemsize for p in transformer.parameters())
    largest = max(f.stat().st_size for f in (root / "transformer").glob("*.safetensors"))
    memory = {
        "model_bytes": model_bytes,
        "largest_shard_bytes": largest,
        "anonymous_before": watch.anonymous_before,
        "anonymous_peak": watch.anonymous_peak,
        "anonymous_after": status_bytes("RssAnon"),
        "device_used_growth": watch.device_peak - watch.device_before,
        "samples": watch.samples,
        "vm_hwm": status_bytes("VmHWM"),
    }
    if device.type == "cuda":
        memory["torch_peak_allocated"] = torch.cuda.max_memory_allocated(device)
        memory["torch_peak_reserved"] = torch.cuda.max_memory_reserved(device)
    differences = count_differences(plan, root)
    linears = sum(isinstance(module, Linear) for module in transformer.modules())
    del transformer, plan

    files = sorted({r.path for r in ranges})
    target = str(device)
    return {
        "num_bytes": num_bytes,
        "fp8_linears": linears,
        "rounds": rounds,
        "read_from_disk_in_rounds": from_disk,
        "reference": {**best, "tried": tried, "rounds_s": reference},
        "load": {"rounds_s": ours, "tried_apply": try_constants(root, device)},
        "load_file_s": timed(device, lambda: [load_file(file, device=target) for file in files]),
        "memory": memory,
        "bit_for_bit": differences,
    }


def summarize(record: dict) -> dict:
    """Medians and ratios; `ratio` is the one that the goal is about."""

    def median(rows: list[dict[str, float]], *keys: str) -> float:
        return statistics.median(sum(row[key] for key in keys) for row in rows)

    reference, ours = record["reference"]["rounds_s"], record["load"]["rounds_s"]
    whole = median(reference, "total")
    total = median(ours, "total")
    return {
        "reference_s": whole,
        "reference_gb_per_s": record["num_bytes"] / whole / 1e9,
        "reference_transfer_alone_s": whole - median(reference, "prepare"),
        "load_s": total,
        "phases_s": {phase: median(ours, phase) for phase in PHASES},
        "ratio": total / whole,
        "ratio_from_plan_on": median(ours, "plan", "allocate", "apply", "post_load") / whole,
        "ratio_apply_alone": median(ours, "apply") / whole,
        "goal": GOAL,
    }


def print_table(record: dict) -> None:
    summary, memory = record["summary"], record["memory"]
    size = record["num_bytes"] / 1e9
    print(f"{record['device']}, torch {record['torch']}: {size:.2f} GB loaded")
    best = record["reference"]
    print(
        f"reference, {best['threads']} threads x {best['mib']} MiB: {summary['reference_s']:.3f} s "
        f"({summary['reference_gb_per_s']:.1f} GB/s)"
    )
    for phase, seconds in summary["phases_s"].items():
        print(f"  load, {phase:10s} {seconds:8.3f} s")
    print(f"load, in all      {summary['load_s']:8.3f} s")
    for name in ("ratio", "ratio_from_plan_on", "ratio_apply_alone"):
        print(f"{name:20s} {summary[name]:.3f} (goal for ratio: {GOAL})")
    for row in record["load"]["tried_apply"]:
        print(f"  apply, {row['threads']} x {row['mib']} MiB: {min(row['samples_s']):.3f} s")
    print(f"safetensors' load_file: {record['load_file_s']:.3f} s")
    anonymous = memory["anonymous_peak"] - memory["anonymous_before"]
    print(
        f"anonymous host memory: +{anonymous / GIB:.3f} GiB, peak "
        f"{memory['anonymous_peak'] / GIB:.3f} GiB; largest shard "
        f"{memory['largest_shard_bytes'] / GIB:.3f} GiB"
    )
    print(
        f"device memory: +{memory['device_used_growth'] / GIB:.3f} GiB for "
        f"{memory['model_bytes'] / GIB:.3f} GiB of model"
    )
    print(f"bit for bit: {record['bit_for_bit']}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--size", choices=SIZES, default="nano")
    parser.add_argument("--folder", type=Path, help="where to keep the checkpoint; reused if there")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.size == "nano" and device.type != "cuda":
        parser.error("the size nano needs a CUDA device; --size small runs anywhere")
    root = options.folder or Path(tempfile.mkdtemp(prefix="load_benchmark_"))
    try:
        started = time.perf_counter()
        if not (root / "transformer").exists():
            root.mkdir(parents=True, exist_ok=True)
            write_checkpoint(root, options.size, device)
        built = time.perf_counter() - started
        print(f"checkpoint in {root}: {built:.1f} s", flush=True)
        record = {
            "date": datetime.now(UTC).date().isoformat(),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "cpus": len(os.sched_getaffinity(0)),
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
            "kernel": os.uname().release,
            "size": options.size,
            "checkpoint_s": built,
            "readers": byte_stream.READERS,
            "slot_bytes": byte_stream.SLOT_BYTES,
            **measure(root, device, options.rounds),
        }
    finally:
        if options.folder is None:
            shutil.rmtree(root)
    record["summary"] = summarize(record)
    print_table(record)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if record["bit_for_bit"]["different"]:
        raise SystemExit("loaded tensors differ from their files")


if __name__ == "__main__":
    main()
