# SPDX-License-Identifier: Apache-2.0
"""Carrying out a weight plan: every byte goes from its file to its place once.

From a folder the weights are streamed (``byte_stream.py``): a fused destination is filled row block
by row block, in place; FP8 codes are copied as bytes; high-precision weights of an FP8 linear are
quantised on the device as they arrive, one linear at a time. All scales go to the device in one
copy while weights move, and none is read back before they have arrived.

On a CPU, too, the bytes are copied, into memory of the model's own. Parameters that are views of
the mapped file would load in no time, but a file that is replaced or cut while the model lives
would change its weights, or end the process with SIGBUS.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.modules.linear_methods import FP8, keeps_codes
from tensorrt_llm._torch.modules.weight_copy import check_materialized
from tensorrt_llm._torch.visual_gen.checkpoints.byte_stream import ByteStream, Target, Transfer
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import (
    SafetensorsFolder,
    TensorSpec,
)
from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import Destination, WeightPlan
from tensorrt_llm._torch.visual_gen.checkpoints.weight_targets import (
    Converted,
    JointQuantization,
    Rescaled,
    StoredBytes,
)
from tensorrt_llm.quantization.scales import MODELOPT_KEYS, SCALE_KEYS, check_scale

_SCALES = frozenset(SCALE_KEYS + MODELOPT_KEYS)
Report = Callable[[int], object]
"""Takes the number of bytes that were loaded since the last call."""

# PyTorch, CUDACachingAllocator: sizes are rounded up to 512 bytes, and from 1 MiB on they are cut
# out of a cached block that is large enough.
_ROUNDED_TO, _CUT_FROM = 512, 2**20


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give a planned model parameters on a device, uninitialised.

    On CUDA the driver is asked for memory once: torch would ask it for each of the 504 matrices of
    Nano. A block of the size of all of them, given back to torch's allocator at once, is what the
    parameters are then cut out of.

    Args:
        model: On meta.
        device: Where its weights are going.

    Raises:
        torch.OutOfMemoryError: they don't fit.
    """
    if device.type == "cuda":
        sizes = [parameter.numel() * parameter.itemsize for parameter in model.parameters()]
        cut = sum(-(-size // _ROUNDED_TO) * _ROUNDED_TO for size in sizes if size > _CUT_FROM)
        torch.empty(cut, dtype=torch.uint8, device=device)
    model.to_empty(device=device)


def apply_plan(
    plan: WeightPlan, weights: Mapping[str, torch.Tensor], progress: bool = False
) -> None:
    """Copy every planned tensor to its place.

    Args:
        plan: From ``plan_weights`` on the same weights. The model is on one device.
        weights: The tensors: a folder, or tensors in memory by their checkpoint names.
        progress: Show a progress bar in bytes.

    Raises:
        ValueError: before anything is changed: a parameter on the meta device. Later, when the
            model is part old and part new: a file that ended early; a weight to be quantised here
            that has values which are not finite.
        OSError: a file can't be read.
    """
    # disable=None: no bar where stderr is no terminal.
    hidden = None if progress else True
    with tqdm(
        total=plan.num_bytes, unit="B", unit_scale=True, desc="Loading", disable=hidden
    ) as bar:
        if isinstance(weights, SafetensorsFolder):
            _stream(plan, weights, bar.update)
        else:
            _copy(plan, weights, bar.update)


def _copy(plan: WeightPlan, weights: Mapping[str, torch.Tensor], report: Report) -> None:
    """Hand tensors that are in memory already to their modules."""
    for destination in plan.destinations:
        shards = [
            {key: weights[name] for key, name in shard.items()} for shard in destination.shards
        ]
        if isinstance(destination.module, Linear):
            plan.loader.load_linear_weights(destination.module, destination.name, shards)
        else:
            for key, tensor in shards[0].items():
                destination.module.get_parameter(key).data.copy_(tensor)
        report(sum(t.numel() * t.itemsize for shard in shards for t in shard.values()))


def _stream(plan: WeightPlan, folder: SafetensorsFolder, report: Report) -> None:
    """Stream a folder's tensors to their places. The plan has checked all that headers tell."""
    for destination in plan.destinations:
        for name, parameter in destination.module.named_parameters(recurse=False):
            check_materialized(parameter, f"{destination.name}.{name}")
    device = next(plan.destinations[0].module.parameters()).device
    scales = {
        destination.name: _Scales(destination, plan, folder)
        for destination in plan.destinations
        if isinstance(destination.module, Linear) and destination.module.has_fp8_qdq
    }
    jobs = [job for d in plan.destinations for job in _jobs(d, folder, scales.get(d.name))]
    # In the order of the files, as far as tensors that are quantised together allow it.
    jobs.sort(key=lambda job: min((spec.file, spec.offset) for spec in job.specs))
    moved = 0

    def count(num_bytes: int) -> None:
        nonlocal moved
        moved += num_bytes
        report(num_bytes)

    transfers = (transfer for job in jobs for transfer in job.transfers(folder.folder))
    with ByteStream(transfers, device, plan.num_bytes) as stream:
        _fill_scales(scales.values(), device)
        stream.wait(count)
    if device.type == "cuda" and any(each.made_here for each in scales.values()):
        # Weights were gathered in memory of the staging stream, which nobody uses from here on.
        torch.cuda.empty_cache()
    _check_scales_made_here(scales.values())
    report(plan.num_bytes - moved)  # the scales


class _Scales:
    """The scales of one FP8 linear as its shards have them, on the host; the plan resolved them.

    Attributes:
        made_here: The weights are stored in high precision and give their scale when they arrive.
    """

    def __init__(
        self, destination: Destination, plan: WeightPlan, folder: SafetensorsFolder
    ) -> None:
        self.name = destination.name
        self.linear: Linear = destination.module
        self.made_here = folder.spec(destination.shards[0]["weight"]).dtype != FP8
        resolved = [plan.scales.get(shard["weight"], (None, None)) for shard in destination.shards]
        self._weight = [weight_scale for weight_scale, _ in resolved]
        self._input = [input_scale for _, input_scale in resolved]

    def rescaling(self, shard: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A shard's own scale and the fused one; None where its codes stay as they are."""
        if len(self._weight) == 1 or self.made_here:
            return None
        own, fused = self._weight[shard], _largest(self._weight)
        return None if keeps_codes(own, fused) else (own, fused)

    def values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters of the linear and their 0-d values, as far as the file tells them."""
        if not self.made_here:
            yield self.linear.weight_scale, _largest(self._weight)
        if self.linear.input_scale is not None:
            yield self.linear.input_scale, _largest(self._input)


@dataclass(frozen=True)
class _Job:
    """Tensors that are transferred one after another; their targets are made when they begin."""

    specs: Sequence[TensorSpec]
    targets: Callable[[], Sequence[Target]]

    def transfers(self, folder: Path) -> Iterator[Transfer]:
        for spec, target in zip(self.specs, self.targets(), strict=True):
            yield Transfer(folder / spec.file, spec.offset, spec.num_bytes, target)


def _jobs(
    destination: Destination, folder: SafetensorsFolder, scales: _Scales | None
) -> Iterator[_Job]:
    """How the tensors of one destination, its scales apart, become its parameters."""
    for key in destination.shards[0]:
        if key in _SCALES:
            continue
        parameter = destination.module.get_parameter(key)
        specs = [folder.spec(shard[key]) for shard in destination.shards]
        if scales is not None and scales.made_here and key == "weight":
            yield _Job(specs, partial(_joint_targets, scales.linear, specs))
            continue
        blocks = [parameter]
        if len(specs) > 1:
            blocks = parameter.detach().split([spec.shape[0] for spec in specs])
        for index, (spec, block) in enumerate(zip(specs, blocks, strict=True)):
            rescaling = scales.rescaling(index) if scales is not None and key == "weight" else None
            yield _Job([spec], partial(_own_target, block, spec.dtype, rescaling))


def _joint_targets(linear: Linear, specs: Sequence[TensorSpec]) -> Sequence[Target]:
    return JointQuantization(linear, specs).targets


def _own_target(
    block: torch.Tensor,
    stored: torch.dtype,
    rescaling: tuple[torch.Tensor, torch.Tensor] | None,
) -> Sequence[Target]:
    if rescaling is not None:
        return [Rescaled(block, *rescaling)]
    return [StoredBytes(block) if stored == block.dtype else Converted(block, stored)]


def _largest(scales: Sequence[torch.Tensor]) -> torch.Tensor:
    return scales[0] if len(scales) == 1 else torch.stack(list(scales)).amax()


def _fill_scales(all_scales: Iterable[_Scales], device: torch.device) -> None:
    """Fill the scales of all linears with one copy to the device."""
    pairs = [pair for scales in all_scales for pair in scales.values()]
    if not pairs:
        return
    parameters, values = zip(*pairs, strict=True)
    on_device = torch.stack(values).to(device)
    torch._foreach_copy_([parameter.detach() for parameter in parameters], on_device.unbind())


def _check_scales_made_here(all_scales: Iterable[_Scales]) -> None:
    """Refuse scales of weights that are not finite: one read for all linears."""
    made = [scales for scales in all_scales if scales.made_here]
    if made:
        values = torch.stack([scales.linear.weight_scale.detach() for scales in made]).cpu()
        for scales, value in zip(made, values.unbind(), strict=True):
            check_scale(value, f"{scales.name}.weight_scale")
