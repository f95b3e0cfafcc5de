# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: sizes and cases, the record of a run, clocks, interleaved samples.

Every benchmark of this folder that writes JSON writes one object: ``date``, ``device``,
``sm_version``, the versions, ``command``, and ``rows``. A row has a ``section``, what was measured,
and all of its samples. ``benchmarks.report`` makes tables of these files and checks the goals.
"""

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
PACKAGES = ("triton", "fa3-fwd", "diffusers", "nvidia-modelopt", "transformers", "av")
# A sample of a short step is the mean of as many steps in a row as fill this time.
SAMPLE_SECONDS = 0.5
_MAX_INNER = 1_000


@dataclass(frozen=True)
class Family:
    """Sizes of one transformer; those of Nano and Super are the published ones (performance.md)."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 151_936
    rope_sections: tuple[int, int, int] = (24, 20, 20)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) features of the linears of one generation layer, in the order of use."""
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "to_q": (self.hidden, q_size),
            "to_k": (self.hidden, kv_size),
            "to_v": (self.hidden, kv_size),
            "to_out": (q_size, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }


@dataclass(frozen=True)
class Case:
    """One request size, both guidance branches; ``text`` has the tokens of each prompt."""

    name: str
    height: int
    width: int
    frames: int
    text: tuple[int, int] = (1600, 900)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(T, H, W) of the latents."""
        return (self.frames - 1) // 4 + 1, self.height // 16, self.width // 16

    @property
    def tokens(self) -> int:
        """Media tokens a branch: patches of 2 x 2, rounded up."""
        frames, height, width = self.latent_shape
        return frames * -(-height // 2) * -(-width // 2)

    @property
    def rows(self) -> int:
        """Rows of every linear: the tokens of both branches."""
        return 2 * self.tokens


FAMILIES = {
    "nano": Family("nano", 36, 4096, 12288, 32, 8),
    "super": Family("super", 64, 5120, 25600, 64, 8),
    "small": Family("small", 2, 64, 128, 4, 2, head_dim=16, vocab=6144, rope_sections=(4, 2, 2)),
}
CASES = {
    "480p": Case("480p", 480, 832, 189),
    "720p": Case("720p", 720, 1280, 189),
    "image": Case("image", 1024, 1024, 1),
    "small": Case("small", 64, 96, 9, (24, 16)),
}


def say(text: str) -> None:
    """Print a line of progress at once: a run that is cut off has still said where it was."""
    print(text, flush=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Labelled intervals on the device's own time line, read once the device is idle.

    The host never waits between two marks; on a CPU the marks are the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str | None, Any]] = []
        self.mark(None)

    def mark(self, label: str | None) -> None:
        """End an interval; None leaves it out."""
        if self._device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        else:
            moment = time.perf_counter()
        self._marks.append((label, moment))

    def intervals(self) -> list[tuple[str, float]]:
        """Label and seconds of every interval, in order. Waits for the device."""
        synchronize(self._device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [(label, _between(a, b)) for (_, a), (label, b) in pairs if label is not None]

    def totals(self) -> dict[str, float]:
        """Seconds by label."""
        totals: dict[str, float] = {}
        for label, seconds in self.intervals():
            totals[label] = totals.get(label, 0.0) + seconds
        return totals


def _between(begin: Any, end: Any) -> float:
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000


# Runs itself the given number of times and marks the clock behind each of its parts.
Run = Callable[[Clock, int], None]


def interleave(
    device: torch.device, runs: Mapping[str, Run], repeats: int, settle_s: float
) -> tuple[dict[str, list[dict[str, float]]], dict[str, dict[str, str]]]:
    """Sample every run in turns, so that the card's clock and temperature meet them alike.

    The runs have to be warm. Untimed rounds come first until the card has been under load for
    ``settle_s`` seconds: it is limited by power, and slower then than at the start. A sample of a
    short pass is preceded by as much of it untimed: the card's clock follows the power of what ran
    before for some tenths of a second, and each run has the same run before it in every round. With
    samples of 40 ms an H200 gave 0.80 ms to a layer after one neighbour and 0.85 to its equal after
    another.

    Returns:
        By name: the samples, seconds of one pass by label; and the card's state during the last
        sample, as nvidia-smi reports it.
    """
    order = list(runs)
    inner = {}
    started = time.perf_counter()
    for name in order:
        clock = Clock(device)
        runs[name](clock, 1)
        once = sum(clock.totals().values())
        inner[name] = max(1, min(_MAX_INNER, math.ceil(SAMPLE_SECONDS / once)))
    while time.perf_counter() - started < settle_s:
        for name in order:
            runs[name](Clock(device), inner[name])
        synchronize(device)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in order}
    states: dict[str, dict[str, str]] = {}
    for repeat in range(repeats):
        for index in range(len(order)):
            name = order[(index + repeat) % len(order)]
            if inner[name] > 1:
                runs[name](Clock(device), inner[name])
            clock = Clock(device)
            runs[name](clock, inner[name])
            if repeat == repeats - 1:
                states[name] = card_state(device)  # the card is at work while this asks
            totals = clock.totals()
            samples[name].append({label: s / inner[name] for label, s in totals.items()})
    return samples, states


def time_calls(
    device: torch.device, calls: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each call, in turns, after two untimed calls of each."""
    for call in (*calls.values(), *calls.values()):
        call()
    clock = Clock(device)
    for _ in range(rounds):
        for name, call in calls.items():
            clock.mark(None)
            call()
            clock.mark(name)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name, seconds in clock.intervals():
        samples[name].append(seconds * 1000)
    return samples


def card_state(device: torch.device) -> dict[str, str]:
    """Clock, power and what limits the clock, read from nvidia-smi; nothing is set."""
    if device.type != "cuda":
        return {}
    fields = ("clocks.sm", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    command += ["-i", _physical_index(device)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"unknown": f"nvidia-smi: {type(error).__name__}"}
    return dict(zip(fields, map(str.strip, found.stdout.split(",")), strict=False))


def _physical_index(device: torch.device) -> str:
    """What nvidia-smi calls a device that CUDA_VISIBLE_DEVICES may have renumbered."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = device.index or 0
    return visible.split(",")[index].strip() if visible else str(index)


def peak_of(device: torch.device, call: Callable[[], object]) -> int:
    """Bytes that a call needs beyond what is allocated before it; 0 where nothing counts them."""
    if device.type != "cuda":
        call()
        return 0
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def relative_l2(value: torch.Tensor, reference: torch.Tensor) -> float:
    """||value - reference|| / ||reference||, in FP32."""
    reference = reference.float()
    return ((value.float() - reference).norm() / reference.norm()).item()


def device_of(name: str) -> torch.device:
    """The device of a ``--device`` option.

    Raises:
        SystemExit: CUDA is asked for and torch sees none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device; a benchmark that has --device runs with --family small --device cpu"
        )
    return torch.device(name)


class Record:
    """The JSON file of one run, written anew after each section, so that a cut-off run keeps it.

    Args:
        out: File to write.
        device: Where the run is.
        facts: Further facts of the whole run.
    """

    def __init__(self, out: Path, device: torch.device, **facts: Any) -> None:
        self.out = out
        cuda = device.type == "cuda"
        sm_version = torch.cuda.get_device_capability(device) if cuda else (0, 0)
        self.content: dict[str, Any] = {
            "date": datetime.now(UTC).date().isoformat(),
            "device": torch.cuda.get_device_name(device) if cuda else "cpu",
            "sm_version": sm_version[0] * 10 + sm_version[1],
            "torch": torch.__version__,
            **{name.replace("-", "_"): _version(name) for name in PACKAGES},
            "command": shlex.join([Path(sys.argv[0]).name, *map(_without_folder, sys.argv[1:])]),
            **facts,
            "rows": [],
        }
        self._started = time.perf_counter()

    def add(self, section: str, **values: Any) -> dict[str, Any]:
        """Append a row and return it."""
        row = {"section": section, **values}
        self.content["rows"].append(row)
        return row

    def skip(self, what: str, reason: str) -> None:
        """Record what was not run, and why."""
        self.add("skipped", what=what, reason=reason)
        say(f"skipped {what}: {reason}")

    def write(self) -> None:
        """Write what is known so far."""
        self.content["seconds"] = round(time.perf_counter() - self._started, 1)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.out.with_name(f".{self.out.name}.part")
        partial.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.out)

    @contextlib.contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Run one part of a benchmark; a failure is recorded before it goes on up."""
        try:
            yield
        except BaseException as error:
            message = str(error).splitlines()
            self.add("failed", what=what, error=f"{type(error).__name__}: {(message or [''])[0]}")
            raise
        finally:
            self.write()


def _without_folder(argument: str) -> str:
    """A path's last part: where a file lay says nothing to whoever reads the record."""
    return Path(argument).name if argument.startswith("/") else argument


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def median_row(samples: list[float], unit: str) -> dict[str, Any]:
    """The fields that every timed row has: all samples and their median."""
    return {f"median_{unit}": statistics.median(samples), f"samples_{unit}": samples}


def common_parser(summary: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--family", choices=FAMILIES, default="nano")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds of load before timing")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser


def add_case(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--case``; ``case_of`` reads it."""
    parser.add_argument(
        "--case", choices=CASES, help=f"default: {default}; with --family small: small"
    )
    parser.set_defaults(full_size_case=default)


def case_of(options: argparse.Namespace) -> Case:
    """The case of ``--case``, or else the default for the family."""
    default = "small" if options.family == "small" else options.full_size_case
    return CASES[options.case or default]
