# SPDX-License-Identifier: Apache-2.0
"""Time one denoising step of a full-size random static FP8 transformer, both guidance branches.

``python -m benchmarks.step_h200 --family nano --out benchmarks/results/step_nano_h200.json``

A plan is a list of ``CASE[+graphs][*REPEATS]=COMPARISON,...``, such as ``480p=topology,sharing`` or
``image+graphs*3=fp8_attention``. For each case the base variant (split, shared, the fastest 16-bit
attention; eager, or with CUDA graphs as short steps run by default) runs in both precision modes;
each comparison adds a variant that differs in one thing:

* ``fp8_attention``, ``vanilla``: the attention backend;
* ``topology``: q, k, v and gate, up fused, as a checkpoint without static FP8 has them;
* ``sharing``: every projection quantises its input for itself;
* ``compile``, ``graphs``, ``eager``: torch.compile, CUDA graphs of the generation layers, neither.

All variants of a case and the ceilings (``ceilings.py``) take turns in one process, after some
seconds of load, so each ratio comes from one run. Then a profile of the base variant and of FP8
attention says where the time goes (``breakdown.py``). The file is written after every part.
"""

import re
from dataclasses import dataclass

import torch

from benchmarks.attention_kernels import fastest_16_bit, precision_of, why_missing
from benchmarks.breakdown import breakdown_rows, kernels_of
from benchmarks.ceilings import StepTensors, bursts, ceiling_row, copy_bandwidth, make_mixes
from benchmarks.common import (
    CASES,
    FAMILIES,
    Case,
    Clock,
    Family,
    Record,
    Run,
    common_parser,
    device_of,
    interleave,
    median_row,
    peak_of,
    relative_l2,
    say,
)
from benchmarks.random_model import (
    MODES,
    Inputs,
    Variant,
    parameter_bytes,
    random_transformer,
    variant_of,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer

BASE = "base"
PLANS = {
    "nano": (
        "720p*3=fp8_attention",
        "480p=fp8_attention,vanilla,topology,sharing",
        "image+graphs=fp8_attention,vanilla,topology,sharing,eager",
    ),
    "super": ("480p*3=fp8_attention",),
    "small": ("small*2=fp8_attention,vanilla,topology,sharing,graphs",),
}
COMPARISONS = ("fp8_attention", "vanilla", "topology", "sharing", "compile", "graphs", "eager")
# A variant that differs in what 16-bit steps don't have is measured on FP8 steps alone.
_FP8_STEPS_ALONE = ("fp8_attention", "vanilla", "sharing")


@dataclass(frozen=True)
class PlannedCase:
    """One entry of a plan."""

    case: Case
    repeats: int
    comparisons: tuple[str, ...]
    graphs: bool = False

    @classmethod
    def parse(cls, text: str) -> "PlannedCase":
        """Read ``CASE[+graphs][*REPEATS]=COMPARISON,...``.

        Raises:
            ValueError: another form, or an unknown name.
        """
        match = re.fullmatch(r"(\w+)(\+graphs)?(?:\*(\d+))?(?:=([\w,]*))?", text)
        names = tuple(filter(None, (match[4] or "").split(","))) if match else ()
        if match is None or match[1] not in CASES or set(names) - set(COMPARISONS):
            raise ValueError(
                f"{text!r} is no CASE[+graphs][*REPEATS]=COMPARISON,... with a case of "
                f"{list(CASES)} and comparisons of {list(COMPARISONS)}"
            )
        return cls(CASES[match[1]], int(match[3] or 5), names, match[2] is not None)


def variants(planned: PlannedCase, device: torch.device) -> list[Variant]:
    """The base variant and those that the comparisons add."""
    attention = fastest_16_bit(device)
    changes = {
        "fp8_attention": {"attention": "FA3_FP8"},
        "vanilla": {"attention": "VANILLA"},
        "topology": {"topology": "fused"},
        "sharing": {"sharing": False},
        "compile": {"compiled": True},
        "graphs": {"graphs": True},
        "eager": {"graphs": False},
    }
    base = {"attention": attention, "graphs": planned.graphs}
    made = [Variant(BASE, **base)]
    for name in planned.comparisons:
        made.append(Variant(name, **(base | changes[name])))
    return made


def why_left_out(variant: Variant, base: Variant, device: torch.device) -> str | None:
    """Why a variant isn't run here, or None."""
    if variant.graphs and device.type != "cuda":
        return "CUDA graphs need a CUDA device"
    if variant.name == "vanilla" and base.attention == variant.attention:
        return "VANILLA is the base variant's backend here"
    return why_missing(variant.attention, device)


def what_runs(
    planned: PlannedCase, modes: list[str], device: torch.device, record: Record
) -> list[tuple[Variant, str]]:
    """Each variant with each mode it is measured in, the base variant first.

    What can't run here is recorded as skipped.
    """
    base, *others = variants(planned, device)
    chosen = [(base, mode) for mode in modes]
    for variant in others:
        reason = why_left_out(variant, base, device)
        if reason is not None:
            record.skip(f"{variant.name}, {planned.case.name}", reason)
            continue
        for mode in modes:
            if mode != "w8a16" or variant.name not in _FP8_STEPS_ALONE:
                chosen.append((variant, mode))
    return chosen


class Entry:
    """A variant in one precision mode; ``run`` is one of ``common.interleave``'s runs."""

    def __init__(
        self, model: Cosmos3VFMTransformer, variant: Variant, mode: str, inputs: Inputs
    ) -> None:
        self.model, self.variant, self.mode, self.inputs = model, variant, mode, inputs
        self.key = f"{variant.name}/{mode}"
        self.peak_bytes = 0
        self.velocity: torch.Tensor | None = None

    def warm(self, device: torch.device) -> None:
        """Run once, for its peak memory and its velocities.

        Raises:
            RuntimeError: velocities that are not finite.
        """

        def first() -> None:
            self.velocity = self.inputs.step(self.model, self.mode)

        self.peak_bytes = peak_of(device, first)
        if not bool(torch.isfinite(self.velocity).all()):
            raise RuntimeError(f"the velocities of {self.key} are not finite")

    def step(self) -> torch.Tensor:
        return self.inputs.step(self.model, self.mode)

    def run(self, clock: Clock, count: int) -> None:
        clock.mark(None)
        for _ in range(count):
            self.step()
        clock.mark("step")


class Models:
    """The models of the variants seen so far, all on one set of weights."""

    def __init__(self, family: Family, device: torch.device) -> None:
        self._family, self._device = family, device
        self._made: dict[Variant, Cosmos3VFMTransformer] = {}

    def get(self, variant: Variant) -> Cosmos3VFMTransformer:
        if variant not in self._made:
            if not self._made:
                model = random_transformer(self._family, self._device, variant)
            else:
                model = variant_of(next(iter(self._made.values())), self._family, variant)
            self._made[variant] = model
        return self._made[variant]


def measure_case(
    models: Models,
    family: Family,
    planned: PlannedCase,
    modes: list[str],
    device: torch.device,
    record: Record,
    copy_gb_s: float,
    settle: float,
    breakdown: bool,
) -> None:
    """Warm, sample and record every variant of one case, with the ceilings in the same turns."""
    case = planned.case
    inputs = Inputs(family, case, device)
    entries = [
        Entry(models.get(variant), variant, mode, inputs)
        for variant, mode in what_runs(planned, modes, device, record)
    ]
    for entry in entries:
        entry.warm(device)
        say(f"warm {case.name} {entry.key}")
    tensors = StepTensors(family, case, device)
    bursts(tensors, record)
    mixes = make_mixes(tensors, set(modes), {e.variant.attention for e in entries})
    runs: dict[str, Run] = {entry.key: entry.run for entry in entries}
    runs |= {f"ceiling {key}": mix.run for key, mix in mixes.items()}
    samples, cards = interleave(device, runs, planned.repeats, settle)

    ceilings = {}
    for key, mix in mixes.items():
        name = f"ceiling {key}"
        ceilings[key] = ceiling_row(
            record, family, case, mix, samples[name], copy_gb_s, cards[name]
        )
    reference = {entry.mode: entry.velocity for entry in reversed(entries)}
    for entry in entries:
        variant = entry.variant
        attention = precision_of(variant.attention, entry.mode)
        ceiling = ceilings[f"{entry.mode}/{attention}"]["median_s"]
        weights = parameter_bytes(entry.model)
        row = record.add(
            "step",
            family=family.name,
            case=case.name,
            size=[case.height, case.width, case.frames],
            text_tokens=list(case.text),
            mode=entry.mode,
            variant=variant.name,
            attention=attention,
            backend=variant.attention,
            topology=variant.topology,
            sharing=variant.sharing,
            compiled=variant.compiled,
            graphs=variant.graphs,
            **median_row([sample["step"] for sample in samples[entry.key]], "s"),
            ceiling_s=ceiling,
            weights_gib=weights / 2**30,
            peak_gib=(weights + entry.peak_bytes) / 2**30,
            velocity_error=relative_l2(entry.velocity, reference[entry.mode]),
            card=cards[entry.key],
        )
        row["of_ceiling"] = row["median_s"] / ceiling
        say(
            f"{case.name:6}{entry.key:20}{row['median_s']:9.4f} s  {row['of_ceiling']:6.3f} of "
            f"the ceiling  {row['peak_gib']:6.1f} GiB"
        )
    record.write()
    for entry in entries if breakdown else ():
        if entry.variant.name in (BASE, "fp8_attention"):
            profile(entry, family, case, ceilings, device, record)
    for entry in entries:
        entry.model.reset_denoising_step()
        entry.model.reset_cache()


def profile(
    entry: Entry,
    family: Family,
    case: Case,
    ceilings: dict[str, dict],
    device: torch.device,
    record: Record,
) -> None:
    """Record where the time of one step goes."""
    what = {"family": family.name, "case": case.name, "mode": entry.mode}
    if device.type != "cuda":
        record.skip(f"breakdown of {entry.key}, {case.name}", "kernels are profiled on CUDA alone")
        return
    attention = precision_of(entry.variant.attention, entry.mode)
    kernels = kernels_of(device, entry.step)
    ceiling = ceilings[f"{entry.mode}/{attention}"]
    for row in breakdown_rows(kernels, family, case, entry.mode, attention, ceiling):
        record.add("breakdown", **what, attention=attention, variant=entry.variant.name, **row)
        ratio = f"{row['of_ceiling']:6.3f}" if "of_ceiling" in row else " " * 6
        say(f"  {row['kernel_family']:24}{row['seconds'] * 1e3:9.2f} ms {ratio}")


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = common_parser(__doc__.splitlines()[0])
    parser.add_argument("--plan", nargs="+", metavar="CASE[*N]=...", help="default: see PLANS")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--no-breakdown", action="store_true", help="leave the profiles out")
    options = parser.parse_args(arguments)
    device, family = device_of(options.device), FAMILIES[options.family]
    if device.type != "cuda" and any("+graphs" in text for text in options.plan or ()):
        parser.error("CUDA graphs need a CUDA device")
    try:
        plan = [PlannedCase.parse(text) for text in options.plan or PLANS[family.name]]
    except ValueError as error:
        parser.error(str(error))
    torch.manual_seed(0)
    record = Record(options.out, device, family=family.name, branches=2)
    with record.part("copy"):
        copy = copy_bandwidth(device, record)
    models = Models(family, device)
    for planned in plan:
        with record.part(planned.case.name):
            measure_case(
                models,
                family,
                planned,
                options.modes,
                device,
                record,
                copy,
                options.settle,
                not options.no_breakdown,
            )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    say(f"{options.out}: {len(record.content['rows'])} rows")


if __name__ == "__main__":
    main()
