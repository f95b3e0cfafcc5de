# SPDX-License-Identifier: Apache-2.0
"""The ceilings of one machine at the sizes of a step: copy, GEMMs, attention, and their mix.

``python -m benchmarks.ceilings --family nano --cases 720p 480p image --out FILE.json``

A step can't be faster than its linears and its attention, plus the time in which a plain copy moves
the bytes of everything else (``counted_work.py``). Linears and attention are not taken from bursts:
the card is limited by power, so ``FloorMix`` runs them in the step's own order for some seconds,
with a plain copy of the counted bytes wherever the step has its other kernels, and takes their
times from there. The ceiling of a step is

    linears + attention, both in that mix  +  counted bytes / copy bandwidth.

A small case is replayed from CUDA graphs, so that the host does not enter.
"""

import functools
import statistics
from collections.abc import Callable

import torch
from torch.nn import functional as F

from benchmarks.attention_kernels import (
    NAMES,
    bound_call,
    fastest_16_bit,
    precision_of,
    why_missing,
)
from benchmarks.common import (
    BF16,
    CASES,
    FAMILIES,
    FP8,
    Case,
    Clock,
    Family,
    Record,
    common_parser,
    device_of,
    interleave,
    median_row,
    say,
    time_calls,
)
from benchmarks.counted_work import counted_bytes, other_bytes

# Elements of the copy, 2 bytes each: 4.3 GB read and written, far beyond any cache.
_COPY_ELEMENTS = {"cuda": 2**30, "cpu": 2**20}
# Below this many rows a kernel is shorter than its launch from the host may take.
GRAPH_ROWS = 8192
# What is measured: (mode, backend whose precision is meant).
MIXES = (("w8a8", "FA3"), ("w8a8", "FA3_FP8"), ("w8a16", "FA3"))


def copy_bandwidth(device: torch.device, record: Record, rounds: int = 30) -> float:
    """GB/s of a plain device copy, bytes read and written."""
    elements = _COPY_ELEMENTS[device.type]
    source = torch.randn(elements, device=device, dtype=BF16)
    target = torch.empty_like(source)
    samples = time_calls(device, {"copy": lambda: target.copy_(source)}, rounds)["copy"]
    size = 4 * elements
    gb_per_s = size / statistics.median(samples) / 1e6
    record.add(
        "copy",
        name="copy",
        shape=[elements],
        bytes=size,
        gb_s=gb_per_s,
        **median_row(samples, "ms"),
    )
    say(f"copy {gb_per_s:.0f} GB/s")
    return gb_per_s


class StepTensors:
    """Inputs and weights of one layer's kernels at one size, random, with the model's own spread.

    The codes of weights and activations are spread as in the random models: the power that a GEMM
    draws depends on its data.
    """

    def __init__(self, family: Family, case: Case, device: torch.device) -> None:
        self.family, self.case, self.device = family, case, device
        self.one = torch.ones((), device=device)
        self.weights = {
            name: (64 * self._normal(n_out, n_in)).to(FP8)
            for name, (n_in, n_out) in family.linears.items()
        }
        self.inputs16 = {
            width: self._normal(case.rows, width)
            for width in {n_in for n_in, _ in family.linears.values()}
        }
        # As a scale of 4 / 448 makes codes of values of unit size; beyond 448 there is only NaN.
        self.inputs8 = {
            width: (112 * x).clamp(-448, 448).to(FP8) for width, x in self.inputs16.items()
        }
        self._scratch = torch.empty(
            max(w.numel() for w in self.weights.values()), device=device, dtype=BF16
        )
        self._moved: dict[str, torch.Tensor] = {}

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=BF16)

    def linear(self, name: str, mode: str) -> torch.Tensor:
        """One linear: the FP8 GEMM, or the weight to 16 bit in a scratch buffer and that GEMM."""
        weight = self.weights[name]
        width = self.family.linears[name][0]
        if mode == "w8a8":
            return torch._scaled_mm(
                self.inputs8[width],
                weight.t(),
                scale_a=self.one,
                scale_b=self.one,
                out_dtype=BF16,
                use_fast_accum=True,
            )
        weight16 = self._scratch[: weight.numel()].view(weight.shape)
        return F.linear(self.inputs16[width], weight16.copy_(weight))

    def attention(self, name: str) -> list[Callable[[], torch.Tensor]]:
        """One call a branch: its media tokens against its text and media."""
        family, tokens = self.family, self.case.tokens
        calls = []
        for text in self.case.text:
            q = self._normal(1, tokens, family.heads, family.head_dim)
            k, v = (
                self._normal(1, tokens + text, family.kv_heads, family.head_dim) for _ in range(2)
            )
            calls.append(bound_call(name, q, k, v))
        return calls

    def move(self, size: int) -> None:
        """A plain copy that reads and writes ``size`` bytes together."""
        for name in ("from", "to"):
            if name not in self._moved or self._moved[name].numel() < size // 2:
                self._moved[name] = torch.randint(
                    0, 127, (size // 2,), device=self.device, dtype=torch.uint8
                )
        self._moved["to"][: size // 2].copy_(self._moved["from"][: size // 2])


class FloorMix:
    """The kernels of one step in their order; ``run`` is one of ``common.interleave``'s runs.

    Args:
        tensors: Of the family and case.
        mode: "w8a8" or "w8a16".
        attention: Name of the attention kernel.
    """

    def __init__(self, tensors: StepTensors, mode: str, attention: str) -> None:
        family, case = tensors.family, tensors.case
        self.layers, self.device = family.layers, tensors.device
        self.mode, self.attention = mode, attention
        precision = precision_of(attention, mode)
        counted = counted_bytes(family, case, mode, precision)
        layer = {name: size // family.layers for name, size in counted.items()}

        def linears(*names: str) -> tuple[str, Callable[[], object]]:
            return "linears", lambda: [tensors.linear(name, mode) for name in names]

        def others(*sizes: int) -> tuple[str, Callable[[], object]]:
            return "others", lambda: [tensors.move(size) for size in sizes if size]

        calls = tensors.attention(attention)
        norm = layer["norm_residual"] // 2
        others(max(layer.values()))[1]()  # the buffers at their largest, before any graph
        self._layer = [
            others(norm),
            linears("to_q", "to_k", "to_v"),
            others(layer["qk_norm_rope"], layer.get("attention_fp8", 0)),
            ("attention", lambda: [call() for call in calls]),
            others(layer.get("quantize_attended", 0)),
            linears("to_out"),
            others(norm),
            linears("gate_proj", "up_proj"),
            others(layer["swiglu"]),
            linears("down_proj"),
        ]
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        if self.device.type == "cuda" and case.rows < GRAPH_ROWS:
            for label, kinds in (("linears", {"linears"}), ("both", {"linears", "attention"})):
                self._graphs[label] = self._capture(kinds)

    def _step(self, kinds: set[str]) -> None:
        for _ in range(self.layers):
            for label, call in self._layer:
                if label in kinds:
                    call()

    def _capture(self, kinds: set[str]) -> torch.cuda.CUDAGraph:
        self._step(kinds)  # warm: handles, workspaces
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(kinds)
        return graph

    def run(self, clock: Clock, count: int) -> None:
        """``count`` steps; marks "linears", "attention" or "both", and "others"."""
        clock.mark(None)
        for label, graph in self._graphs.items():
            for _ in range(count):
                graph.replay()
            clock.mark(label)
        if self._graphs:
            return
        for _ in range(count):
            for _ in range(self.layers):
                for label, call in self._layer:
                    call()
                    clock.mark(label)


def kernel_seconds(sample: dict[str, float]) -> tuple[float, float]:
    """(linears, attention) of one sample of a mix."""
    linears = sample["linears"]
    if "both" in sample:
        return linears, sample["both"] - linears
    return linears, sample["attention"]


def ceiling_row(
    record: Record,
    family: Family,
    case: Case,
    mix: FloorMix,
    samples: list[dict[str, float]],
    copy_gb_s: float,
    card: dict[str, str],
    count: Callable[[Family, Case, str, str], int] = other_bytes,
) -> dict:
    """Record the ceiling that the samples of a mix give.

    Args:
        record: Gets the row.
        family: Sizes of the transformer.
        case: Size of the request.
        mix: What was sampled.
        samples: Seconds of one pass by label.
        copy_gb_s: The copy bandwidth of this run.
        card: State of the card during the last sample.
        count: Bytes that a pass moves outside linears and attention, by family, case, mode and
            precision of attention.

    Returns:
        The row, of section "ceiling"; seconds.
    """
    precision = precision_of(mix.attention, mix.mode)
    size = count(family, case, mix.mode, precision)
    moving = size / copy_gb_s / 1e9
    pairs = [kernel_seconds(sample) for sample in samples]
    ceilings = [linears + attention + moving for linears, attention in pairs]
    row = record.add(
        "ceiling",
        family=family.name,
        case=case.name,
        mode=mix.mode,
        attention=precision,
        kernel=mix.attention,
        linears_s=statistics.median(linears for linears, _ in pairs),
        attention_s=statistics.median(attention for _, attention in pairs),
        other_bytes=size,
        others_s=moving,
        copy_gb_s=copy_gb_s,
        **median_row(ceilings, "s"),
        parts_s=samples,
        card=card,
    )
    say(
        f"ceiling {case.name:6} {mix.mode:6}{precision:5}{row['median_s']:9.4f} s: linears "
        f"{row['linears_s']:.4f}, attention {row['attention_s']:.4f}, others {moving:.4f}"
    )
    return row


def make_mixes(tensors: StepTensors, modes: set[str], backends: set[str]) -> dict[str, FloorMix]:
    """The mixes that the given modes and attention backends need, by "mode/precision"."""
    mixes = {}
    for mode, name in MIXES:
        if mode not in modes or (name == "FA3_FP8" and name not in backends):
            continue
        kernel = name if name == "FA3_FP8" else fastest_16_bit(tensors.device)
        mixes[f"{mode}/{precision_of(name, mode)}"] = FloorMix(tensors, mode, kernel)
    return mixes


def bursts(tensors: StepTensors, record: Record, rounds: int = 5) -> None:
    """Record each GEMM and each attention kernel on its own: short bursts, unlike the mix."""
    family, case, device = tensors.family, tensors.case, tensors.device
    where = {"family": family.name, "case": case.name}
    for mode in ("w8a8", "w8a16"):
        calls = {name: functools.partial(tensors.linear, name, mode) for name in family.linears}
        for name, samples in time_calls(device, calls, rounds).items():
            shape = [case.rows, *family.linears[name]]
            flops = 2 * shape[0] * shape[1] * shape[2]
            row = record.add(
                "gemm", **where, name=name, mode=mode, shape=shape, **median_row(samples, "ms")
            )
            row["tflop_s"] = flops / row["median_ms"] / 1e9
    for name in NAMES:
        reason = why_missing(name, device)
        if reason is not None:
            record.skip(f"attention {name}, {case.name}", reason)
            continue
        branches = dict(zip(case.text, tensors.attention(name), strict=True))
        for text, samples in time_calls(device, branches, rounds).items():
            shape = [case.tokens, case.tokens + text, family.heads, family.kv_heads]
            flops = 4 * shape[0] * shape[1] * family.heads * family.head_dim
            row = record.add("attention", **where, name=name, shape=shape)
            row |= median_row(samples, "ms")
            row["tflop_s"] = flops / row["median_ms"] / 1e9
            say(f"attention {name:8}{case.name:6} {row['median_ms']:9.3f} ms {row['tflop_s']:.0f}")


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = common_parser(__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    device, family = device_of(options.device), FAMILIES[options.family]
    torch.manual_seed(0)
    record = Record(options.out, device, family=family.name)
    with record.part("copy"):
        copy = copy_bandwidth(device, record)
    for name in options.cases:
        with record.part(f"ceilings of {name}"):
            case = CASES[name]
            tensors = StepTensors(family, case, device)
            bursts(tensors, record)
            backends = {n for n in NAMES if why_missing(n, device) is None}
            mixes = make_mixes(tensors, {"w8a8", "w8a16"}, backends)
            runs = {key: mix.run for key, mix in mixes.items()}
            samples, cards = interleave(device, runs, options.repeats, options.settle)
            for key, mix in mixes.items():
                ceiling_row(record, family, case, mix, samples[key], copy, cards[key])


if __name__ == "__main__":
    main()
