# SPDX-License-Identifier: Apache-2.0
"""Time one layer of a full-size random static FP8 transformer, both guidance branches.

``python -m benchmarks.layer_h200 --family nano --out benchmarks/results/layer_nano_h200.json``

For each case the base variant (split, shared, the fastest 16-bit attention) runs in both precision
modes, and beside it FP8 attention, fused projections, and projections that quantise their input
each for themselves. The model has two layers. The second one is timed, on what it reads in a step:
like every layer but the first, it adds what the layer before left.

All of them and the ceilings (``ceilings.py``, a mix of one layer) take turns in one process, after
some seconds of load, so each ratio comes from one run. A ceiling counts the bytes that one more
layer adds to a step. Where a mix is replayed from CUDA graphs, the layer is too.

Last an understanding layer over the first prompt, which runs once a request and has no ceiling.
The file is written after every part.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from benchmarks.attention_kernels import precision_of
from benchmarks.ceilings import (
    GRAPH_ROWS,
    StepTensors,
    ceiling_row,
    copy_bandwidth,
    make_mixes,
)
from benchmarks.common import (
    CASES,
    FAMILIES,
    Clock,
    Family,
    Record,
    Run,
    common_parser,
    device_of,
    interleave,
    median_row,
    relative_l2,
    say,
)
from benchmarks.counted_work import layer_bytes
from benchmarks.random_model import MODES, STEPS, Inputs
from benchmarks.step_h200 import Models, PlannedCase, variants, what_runs
from tensorrt_llm._torch.visual_gen.attention_backend import KeyLengths
from tensorrt_llm._torch.visual_gen.models.cosmos3.branch_cache import TextKeys
from tensorrt_llm._torch.visual_gen.models.cosmos3.layer_graphs import CudaCapture
from tensorrt_llm._torch.visual_gen.models.cosmos3.towers import GenerationLayer, ResidualStream
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer

COMPARISONS = ("fp8_attention", "topology", "sharing")
DEFAULT_CASES = {"nano": ("720p", "480p", "image"), "super": ("480p",), "small": ("small",)}
_LAYERS = 2


def first_arguments(layer: nn.Module, run: Callable[[], object]) -> tuple:
    """What a layer is called with the first time while ``run`` runs.

    A generation layer's stream comes as the two tensors in it, (hidden, delta).
    """
    found: list[tuple] = []

    def keep(_: nn.Module, arguments: tuple) -> None:
        handle.remove()
        first, *others = arguments
        if isinstance(first, ResidualStream):
            tensors = first.take()
            first.put(*tensors)
            first = tensors
        found.append((first, *others))

    handle = layer.register_forward_pre_hook(keep)
    run()
    return found[0]


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What a generation layer behind another one reads in a step.

    Attributes:
        hidden: The stream, [2, N, H].
        delta: What the layer before left to be added to it, [2, N, H].
        cos: Rotary table [2, N, D], like sin.
        sin: Rotary table.
        text: Keys and values of both branches. Where a step runs as a CUDA graph they are the
            graph's own, with room for any prompt.
        lengths: Keys of each branch; without host numbers where the graph reads them on the device.
    """

    hidden: torch.Tensor
    delta: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    text: TextKeys
    lengths: KeyLengths

    @classmethod
    def of(cls, model: Cosmos3VFMTransformer, inputs: Inputs) -> "LayerInputs":
        """Those of the model's last layer in an FP8 step."""
        layer = model.gen_layers[-1]
        tensors, *others = first_arguments(layer, lambda: inputs.step(model, "w8a8"))
        return cls(*tensors, *others)

    def run(self, layer: GenerationLayer) -> torch.Tensor:
        """Run a layer on them; what its MLP gives, [2, N, H]."""
        stream = ResidualStream(self.hidden)
        stream.put(self.hidden, self.delta)
        layer(stream, self.cos, self.sin, self.text, self.lengths)
        return stream.take()[1]


class Timed:
    """A warm call, eager or captured; ``run`` is one of ``common.interleave``'s runs.

    Args:
        call: Runs one layer; gives a tensor that depends on all of it.
        capture: Captures the call in a CUDA graph; None leaves it eager.

    Raises:
        RuntimeError: a result that is not finite.
    """

    def __init__(self, call: Callable[[], torch.Tensor], capture: CudaCapture | None) -> None:
        # Held as a whole: a graph writes to tensors that nothing else keeps.
        self._captured = None if capture is None else capture(call)
        self._again = call if self._captured is None else self._captured.replay
        self.output = call() if self._captured is None else self._captured.first
        if not bool(torch.isfinite(self.output).all()):
            raise RuntimeError("the result of a layer is not finite")

    def run(self, clock: Clock, count: int) -> None:
        clock.mark(None)
        for _ in range(count):
            self._again()
        clock.mark("layer")


def layer_call(
    model: Cosmos3VFMTransformer, mode: str, inputs: LayerInputs
) -> Callable[[], torch.Tensor]:
    """A call of the model's last generation layer in this mode."""

    def call() -> torch.Tensor:
        model.set_denoising_step(MODES[mode], STEPS)
        return inputs.run(model.gen_layers[-1])

    return call


def captures(device: torch.device, rows: int) -> bool:
    """Whether a layer over this many rows is replayed from a CUDA graph, as its mix is."""
    return device.type == "cuda" and rows < GRAPH_ROWS


def measure_case(
    models: Models,
    family: Family,
    planned: PlannedCase,
    device: torch.device,
    record: Record,
    copy_gb_s: float,
    settle: float,
) -> None:
    """Warm, sample and record every variant of one case, with the ceilings in the same turns."""
    case = planned.case
    chosen = what_runs(planned, list(MODES), device, record)
    base = models.get(chosen[0][0])
    inputs = LayerInputs.of(base, Inputs(family, case, device))
    capture = CudaCapture() if planned.graphs else None
    timed = {
        f"{variant.name}/{mode}": Timed(layer_call(models.get(variant), mode, inputs), capture)
        for variant, mode in chosen
    }
    one = replace(family, layers=1)
    backends = {variant.attention for variant, _ in chosen}
    mixes = make_mixes(StepTensors(one, case, device), set(MODES), backends)
    runs: dict[str, Run] = {key: entry.run for key, entry in timed.items()}
    runs |= {f"ceiling {key}": mix.run for key, mix in mixes.items()}
    samples, cards = interleave(device, runs, planned.repeats, settle)

    ceilings = {}
    for key, mix in mixes.items():
        name = f"ceiling {key}"
        ceilings[key] = ceiling_row(
            record, one, case, mix, samples[name], copy_gb_s, cards[name], layer_bytes
        )
    for variant, mode in chosen:
        key = f"{variant.name}/{mode}"
        attention = precision_of(variant.attention, mode)
        ceiling = ceilings[f"{mode}/{attention}"]["median_s"]
        row = record.add(
            "layer",
            family=family.name,
            case=case.name,
            size=[case.height, case.width, case.frames],
            shape=list(inputs.hidden.shape),
            text_tokens=list(case.text),
            mode=mode,
            variant=variant.name,
            attention=attention,
            backend=variant.attention,
            topology=variant.topology,
            sharing=variant.sharing,
            graphs=variant.graphs,
            **median_row([sample["layer"] for sample in samples[key]], "s"),
            ceiling_s=ceiling,
            output_error=relative_l2(timed[key].output, timed[f"base/{mode}"].output),
            card=cards[key],
        )
        row["of_ceiling"] = row["median_s"] / ceiling
        say(
            f"{case.name:6}{key:20}{row['median_s'] * 1e3:9.3f} ms  {row['of_ceiling']:6.3f} of "
            f"the ceiling"
        )
    base.reset_cache()


def measure_text(
    models: Models, family: Family, planned: PlannedCase, device: torch.device, record: Record
) -> None:
    """Time and record an understanding layer over the first prompt, in its one precision."""
    case = planned.case
    graphs = captures(device, case.text[0])
    variant = variants(planned, device)[0]
    model = models.get(variant)
    inputs = Inputs(family, case, device)
    layer = model.language_model.layers[0]
    arguments = first_arguments(layer, lambda: model.encode_text(inputs.ids, inputs.mask))
    timed = Timed(lambda: layer(*arguments)[0], CudaCapture() if graphs else None)
    # Not settled: the cases have just put the card under load.
    samples, cards = interleave(device, {"text": timed.run}, planned.repeats, 0.0)
    row = record.add(
        "text_layer",
        family=family.name,
        shape=list(timed.output.shape),
        mode=model.und_precision,
        attention="bf16",
        backend=variant.attention,
        graphs=graphs,
        **median_row([sample["layer"] for sample in samples["text"]], "s"),
        card=cards["text"],
    )
    say(f"text  {row['shape'][1]} tokens, {row['mode']}{row['median_s'] * 1e3:9.3f} ms")


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = common_parser(__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, help="default: see DEFAULT_CASES")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    device, family = device_of(options.device), FAMILIES[options.family]
    torch.manual_seed(0)
    record = Record(options.out, device, family=family.name, branches=2)
    with record.part("copy"):
        copy = copy_bandwidth(device, record)
    built = replace(family, layers=_LAYERS)
    models = Models(built, device)
    for name in options.cases or DEFAULT_CASES[family.name]:
        case = CASES[name]
        planned = PlannedCase(case, options.repeats, COMPARISONS, captures(device, case.rows))
        with record.part(name):
            measure_case(models, built, planned, device, record, copy, options.settle)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    with record.part("text"):
        measure_text(models, built, planned, device, record)
    say(f"{options.out}: {len(record.content['rows'])} rows")


if __name__ == "__main__":
    main()
