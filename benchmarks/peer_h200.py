# SPDX-License-Identifier: Apache-2.0
"""Our denoising step beside diffusers with ModelOpt FP8: the same weights, tokens and noise.

``python -m benchmarks.peer_h200 --out benchmarks/results/peer_nano_h200.json``

Both sides hold the same FP8 codes and scales (``peer_models.py``) and run every linear W8A8, since
diffusers 0.42.1 labels the towers' attention otherwise on mixed steps. They take turns in one
process. A side's memory is what its weights occupy and what its first call allocates beyond them;
that is its peak alone, since the other side's memory is in neither number. The peer's attention is
SDPA, which picks cuDNN by itself; ours runs with each backend that is there, and with SDPA once for
its velocities, so that the difference has a part that is not the attention kernel's.
"""

import functools
import gc
from collections.abc import Callable

import torch

from benchmarks.attention_kernels import NAMES, precision_of, why_missing
from benchmarks.common import (
    Clock,
    Record,
    Run,
    add_case,
    case_of,
    common_parser,
    device_of,
    interleave,
    median_row,
    peak_of,
    relative_l2,
    say,
)
from benchmarks.peer_models import (
    build_ours,
    export_state,
    model_config,
    our_velocity,
    pack_for_peer,
    peer_velocity,
    random_evaluation,
    random_peer,
)
from benchmarks.random_model import on_parameters_of
from tensorrt_llm._torch.visual_gen.config_fields import AttentionConfig

PEER = "diffusers + ModelOpt FP8"
_PEER_SIZES = {"nano": "nano", "super": "super", "small": "tiny"}


class Side:
    """One implementation: how it is called, and what its weights occupy."""

    def __init__(
        self, name: str, attention: str, call: Callable[[], torch.Tensor], weight_bytes: int
    ) -> None:
        self.name, self.attention, self.call = name, attention, call
        self.weight_bytes = weight_bytes
        self.peak_bytes = 0
        self.velocity: torch.Tensor | None = None

    def first(self, device: torch.device) -> None:
        """The first call: velocities, and memory beyond the weights."""

        def keep() -> None:
            self.velocity = self.call()

        self.peak_bytes = peak_of(device, keep)

    def run(self, clock: Clock, count: int) -> None:
        clock.mark(None)
        for _ in range(count):
            self.call()
        clock.mark("step")


def allocated(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    parser = common_parser(__doc__.splitlines()[0])
    add_case(parser, default="720p")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    device, case = device_of(options.device), case_of(options)
    record = Record(options.out, device, family=options.family, case=case.name)
    with record.part("building"):
        start = allocated(device)
        peer = random_peer(_PEER_SIZES[options.family], device)
        peer_bytes = allocated(device) - start
        step = random_evaluation(peer, case.latent_shape, case.text)
        packed = pack_for_peer(peer, step)
        start = allocated(device)
        config = model_config(peer, attention=AttentionConfig(backend="VANILLA"))
        base = build_ours(export_state(peer), config, device)
        our_bytes = allocated(device) - start
        say(f"built: peer {peer_bytes / 2**30:.1f} GiB, ours {our_bytes / 2**30:.1f} GiB")
    call = functools.partial(peer_velocity, peer, step, packed)
    sides = [Side(PEER, "bf16", call, peer_bytes)]
    models = {}
    for name in NAMES:
        reason = why_missing(name, device)
        if reason is not None:
            record.skip(f"ours with {name}", reason)
            continue
        config = model_config(peer, attention=AttentionConfig(backend=name))
        model = base if name == "VANILLA" else on_parameters_of(base, config)
        if model is not base:
            model.post_load_weights()
            model.eval()
        models[name] = model
        call = functools.partial(our_velocity, model, step)
        sides.append(Side(f"ours, {name}", precision_of(name, "w8a8"), call, our_bytes))
    with record.part("velocities"):
        for side in sides:
            side.first(device)
            say(f"{side.name}: {relative_l2(side.velocity, sides[0].velocity):.2e} from the peer")
        if device.type == "cuda":
            # What the velocities' allocations left in the allocator belongs to no side.
            torch.cuda.empty_cache()
    # SDPA is compared, not timed, where the fast kernel is there.
    timed = [side for side in sides if side.name != "ours, VANILLA" or len(models) == 1]
    with record.part("steps"):
        runs: dict[str, Run] = {side.name: side.run for side in timed}
        samples, cards = interleave(device, runs, options.repeats, options.settle)
        peer_median = None
        for side in sides:
            row = record.add(
                "peer",
                name=side.name,
                size=[case.height, case.width, case.frames],
                text_tokens=list(case.text),
                mode="w8a8",
                attention=side.attention,
                weights_gib=side.weight_bytes / 2**30,
                peak_gib=(side.weight_bytes + side.peak_bytes) / 2**30,
                velocity_error=relative_l2(side.velocity, sides[0].velocity),
            )
            if side not in timed:
                continue
            row |= median_row([sample["step"] for sample in samples[side.name]], "s")
            row["card"] = cards[side.name]
            peer_median = peer_median or row["median_s"]
            row["speedup"] = peer_median / row["median_s"]
            say(
                f"{side.name:28}{row['median_s']:8.3f} s  {row['speedup']:5.2f}x  "
                f"{row['peak_gib']:6.1f} GiB"
            )


if __name__ == "__main__":
    main()
