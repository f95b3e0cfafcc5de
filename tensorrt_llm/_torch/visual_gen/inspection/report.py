# SPDX-License-Identifier: Apache-2.0
"""The whole inspection of a checkpoint, as data.

`inspect_checkpoint` gives a `Report`; ``Report.to_json`` is what ``trtllm-inspect --json`` prints,
and `render.render_text` what it prints without. The keys of the JSON form are documented in
``docs/source/inspect.md``; `SCHEMA_VERSION` changes when one is renamed or removed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from tensorrt_llm._torch.visual_gen.checkpoints.components import (
    plan_sound_tokenizer,
    plan_vae,
)
from tensorrt_llm._torch.visual_gen.checkpoints.source import CheckpointSource
from tensorrt_llm._torch.visual_gen.config import DiffusionPipelineConfig
from tensorrt_llm._torch.visual_gen.inspection.contents import Contents, describe_contents
from tensorrt_llm._torch.visual_gen.inspection.fidelity import (
    FUSIONS,
    Group,
    measure_groups,
    read_groups,
    relative_error,
    shards_of,
)
from tensorrt_llm._torch.visual_gen.inspection.memory import (
    Need,
    WeightSizes,
    device_memory,
    request_need,
    vision_tokens,
)
from tensorrt_llm._torch.visual_gen.inspection.notices import notices
from tensorrt_llm._torch.visual_gen.models.cosmos3.checkpoint_traits import CheckpointTraits
from tensorrt_llm._torch.visual_gen.models.cosmos3.defaults import resolve_request
from tensorrt_llm._torch.visual_gen.models.cosmos3.resolved_request import ResolvedRequest
from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import Cosmos3VFMTransformer
from tensorrt_llm._torch.visual_gen.models.cosmos3.vae_decoding import decoder_channels
from tensorrt_llm._torch.visual_gen.pipeline_loader import (
    LoadPlan,
    PipelineLoader,
    check_memory,
)
from tensorrt_llm._utils import describe_error
from tensorrt_llm.visual_gen.args import VisualGenArgs
from tensorrt_llm.visual_gen.params import VisualGenParams

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Memory:
    """What a request needs on the device, against what the device has.

    Attributes:
        request: The request.
        tokens: Vision tokens of one branch.
        need: Bytes.
        device: (name, free bytes, total bytes) of the CUDA device; None without one.
        largest_num_frames: The most frames, up to the request's, that fit at its size; None
            without a device, 0 where not even one does.
    """

    request: ResolvedRequest
    tokens: int
    need: Need
    device: tuple[str, int, int] | None
    largest_num_frames: int | None

    @property
    def fits(self) -> bool | None:
        """Whether the request fits the free memory; None without a CUDA device."""
        return None if self.device is None else self.need.total <= self.device[1]


@dataclass(frozen=True)
class Report:
    """One inspected checkpoint.

    Attributes:
        source: Where it lies, and its commit.
        refusal: What a load would raise; None where it would load.
        notices: What keeps requests from running although it loads.
        contents: What it is.
        memory: None where config.json describes no model that could be sized.
        groups: What a fused engine would merge, with scales; errors only if measured.
        left_out: Groups that could not be judged, and why.
        measured: Whether the weights were read.
    """

    source: CheckpointSource
    refusal: Exception | None
    notices: tuple[str, ...]
    contents: Contents
    memory: Memory | None
    groups: tuple[Group, ...]
    left_out: dict[str, str]
    measured: bool

    def to_json(self) -> dict[str, Any]:
        """The report as plain data with stable keys; sizes in bytes."""
        refusal = self.refusal
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.source.model,
            "revision": self.source.revision,
            "commit": self.source.commit,
            "path": str(self.source.path),
            "verdict": {
                "loads": refusal is None,
                "error": None if refusal is None else type(refusal).__name__,
                "message": None if refusal is None else str(refusal),
                "notices": list(self.notices),
            },
            "contents": asdict(self.contents),
            "memory": None if self.memory is None else _memory_json(self.memory),
            "fidelity": self._fidelity_json(),
        }

    def _fidelity_json(self) -> dict[str, Any]:
        return {
            "measured": self.measured,
            "fusions": {name: fusion_summary(self.groups, name) for name in FUSIONS},
            "groups": [_group_json(group) for group in self.groups],
            "left_out": self.left_out,
        }


def inspect_checkpoint(
    source: CheckpointSource,
    params: VisualGenParams | None = None,
    *,
    device: torch.device | str | None = None,
    measure: bool = False,
    progress: bool = False,
) -> Report:
    """Inspect a checkpoint: read headers and scales, and its weights only to measure.

    Args:
        source: From ``resolve_source``.
        params: The request whose memory is estimated; the defaults are those of the checkpoint.
        device: Where it would run; CUDA when there is a device, else CPU.
        measure: Read the weights of all groups and measure what fusing would cost.
        progress: Show a bar on stderr while measuring.

    Raises:
        ValueError: the request can't be served, whatever the checkpoint's state.
    """
    contents, weights = describe_contents(source.path)
    request = _request(contents, VisualGenParams() if params is None else params)
    args = VisualGenArgs(model=str(source.path))
    loader = PipelineLoader(args, device)
    plan, refusal = None, None
    try:
        plan = loader.plan(source)
        check_memory(plan.transformer, loader.device)
    except Exception as error:  # whatever a load would raise is the verdict
        refusal = error
    groups, left_out = ((), {}) if weights is None else read_groups(weights)
    if measure and weights is not None:
        try:
            groups = measure_groups(groups, weights, progress)
        except ValueError as error:  # NaN in a weight, which the probe at load would find
            measure, refusal = False, refusal or error
    models = _models(source, args) if plan is None else _Models.planned(plan)
    memory = None if models is None else _memory(models, request, loader.device)
    told = notices(plan.index) if refusal is None else ()
    return Report(source, refusal, told, contents, memory, groups, left_out, measure)


def fusion_summary(groups: tuple[Group, ...], fusion: str) -> dict[str, Any]:
    """Totals of one fusion over all groups that it merges."""
    merged = [group for group in groups if fusion in group.fusions]
    shards = list(shards_of(groups, fusion))
    widest = max(merged, key=lambda group: group.spread, default=None)
    return {
        "description": FUSIONS[fusion],
        "groups": len(merged),
        "shards": len(shards),
        "rounded_twice": sum(shard.rounded_twice for shard in shards),
        "groups_by_rounded_shards": {
            str(count): number for count, number in sorted(_by_rounded(merged).items())
        },
        "widest_group": None if widest is None else widest.name,
        "widest_spread": None if widest is None else widest.spread,
        "relative_error": relative_error(shards) if shards else None,
    }


def _request(contents: Contents, params: VisualGenParams) -> ResolvedRequest:
    """The request as this checkpoint would run it; a distilled build has one branch alone.

    Memory depends on sizes and branches, not on the task. So the tasks of the base build stand in
    for those of a distilled one, which has none from text to video.
    """
    if contents.build == "distilled":
        if params.guidance_scale not in (None, 1):
            raise ValueError(
                describe_error(
                    "Guidance for a distilled build",
                    where="guidance",
                    expected="1, since its steps have no guidance",
                    found=params.guidance_scale,
                    remedy="leave --guidance out, or give 1",
                )
            )
        params = params.model_copy(update={"guidance_scale": 1.0})
    traits = CheckpointTraits(
        family="super" if contents.family == "super" else "nano",
        build="base",
        has_sound=False,
        default_use_system_prompt=False,
        requires_guardrails=False,
        video_negative_prompt="",
        fixed_sigmas=None,
    )
    return resolve_request("An inspection.", params, traits)


def _by_rounded(groups: list[Group]) -> Counter[int]:
    return Counter(sum(shard.rounded_twice for shard in group.shards) for group in groups)


@dataclass(frozen=True)
class _Models:
    """The parts of a checkpoint that go to the device, on meta."""

    transformer: Cosmos3VFMTransformer
    vae: nn.Module
    sound_tokenizer: nn.Module | None

    @classmethod
    def planned(cls, plan: LoadPlan) -> "_Models":
        return cls(plan.transformer, plan.vae, plan.sound_tokenizer)


def _models(source: CheckpointSource, args: VisualGenArgs) -> _Models | None:
    """The models of a refused checkpoint, as far as its configurations go."""
    try:
        config = DiffusionPipelineConfig.from_pretrained(source.path, args=args)
        with torch.device("meta"):
            transformer = Cosmos3VFMTransformer(config.primary_model_config)
        return _Models(transformer, plan_vae(source.path), plan_sound_tokenizer(source.path))
    except Exception:  # the plan was refused, so its reason is told already
        return None


def _memory(models: _Models, request: ResolvedRequest, device: torch.device) -> Memory:
    transformer, vae = models.transformer, models.vae
    # VAE and sound tokenizer run in BF16, beside an FP32 transformer in FP32 (pipeline_loader).
    itemsize = 4 if transformer.dtype == torch.float32 else 2

    def elements(module: nn.Module | None) -> int:
        return 0 if module is None else sum(t.numel() for t in module.state_dict().values())

    sizes = WeightSizes(
        transformer=sum(t.numel() * t.element_size() for t in transformer.state_dict().values()),
        vae=itemsize * elements(vae),
        sound_tokenizer=itemsize * elements(models.sound_tokenizer),
        vae_itemsize=itemsize,
        decoder_channels=decoder_channels(vae.config),
    )

    def need(frames: int) -> Need:
        changed = replace(request, num_frames=frames)
        return request_need(transformer.model_config, sizes, changed)

    has, frames = device_memory(device), request.num_frames
    return Memory(
        request=request,
        tokens=vision_tokens(transformer.arch, request),
        need=need(frames),
        device=has,
        largest_num_frames=None
        if has is None
        else largest_num_frames(lambda frames: need(frames).total, frames, has[1]),
    )


def largest_num_frames(need: Callable[[int], int], num_frames: int, free: int) -> int:
    """The most frames, 4 k + 1 and up to ``num_frames``, whose need in bytes is free; 0 if none."""
    fitting = (frames for frames in range(num_frames, 0, -4) if need(frames) <= free)
    return next(fitting, 0)


def _memory_json(memory: Memory) -> dict[str, Any]:
    request, need, device = memory.request, memory.need, memory.device
    return {
        "request": {
            "height": request.height,
            "width": request.width,
            "num_frames": request.num_frames,
            "guidance_scale": request.guidance_scale,
            "branches": 2 if request.is_guided else 1,
            "tokens_per_branch": memory.tokens,
        },
        "bytes": {**asdict(need), "total": need.total},
        "device": None
        if device is None
        else dict(zip(("name", "free", "total"), device, strict=True)),
        "fits": memory.fits,
        "largest_num_frames_that_fits": memory.largest_num_frames,
    }


def _group_json(group: Group) -> dict[str, Any]:
    return {
        "layer": group.layer,
        "tower": group.tower,
        "kind": group.kind,
        "fusions": list(group.fusions),
        "spread": group.spread,
        "relative_error": relative_error(group.shards),
        "shards": [
            {
                "name": shard.name,
                "weight_scale": shard.scale,
                "rounded_twice": shard.rounded_twice,
                "relative_error": relative_error([shard]),
            }
            for shard in group.shards
        ],
    }
