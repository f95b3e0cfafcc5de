# SPDX-License-Identifier: Apache-2.0
"""Planning a load: every tensor is matched and judged before anything is allocated or changed.

``plan_weights`` reads names, dtypes and shapes, and the scalar scales, but no weight. Every problem
of a checkpoint is found there and reported in one error; nothing of the model has changed then.
``weight_apply.apply_plan`` copies, and has no decision left to take.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tensorrt_llm._torch.modules import quant_group
from tensorrt_llm._torch.modules.gated_mlp import GatedMLP
from tensorrt_llm._torch.modules.linear import Linear, WeightMode
from tensorrt_llm._torch.visual_gen.checkpoints.linear_judge import (
    LinearJudge,
    Scales,
    check_exact,
)
from tensorrt_llm._torch.visual_gen.checkpoints.problems import FOREIGN, POLICY, SURPLUS, Problems
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._torch.visual_gen.checkpoints.tensor_table import TensorTable
from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.precision_policy import (
    requested_step_policy,
    uses_static_fp8,
)
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import static_fp8_linears
from tensorrt_llm._torch.visual_gen.models.cosmos3.weight_names import (
    is_unused,
    source_prefixes,
    unmatched_patterns,
)
from tensorrt_llm._torch.visual_gen.modules.attention import Attention
from tensorrt_llm._torch.visual_gen.quantization.foreign_tensors import foreign_scheme
from tensorrt_llm._torch.visual_gen.quantization.loader import DynamicLinearWeightLoader
from tensorrt_llm.logger import logger


@dataclass(frozen=True)
class Destination:
    """One module and the checkpoint tensors that fill it.

    Attributes:
        name: The module's name inside the transformer.
        module: The module; for the transformer itself its directly held parameters are meant.
        shards: Per source, in fused order: key inside the module -> name in the weights.
    """

    name: str
    module: nn.Module
    shards: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class WeightPlan:
    """Everything that a load will do; made by ``plan_weights``, carried out by ``apply_plan``.

    Attributes:
        destinations: Each module with its tensors.
        loader: Fills the linears.
        num_bytes: Size of all tensors that are loaded.
        scales: The scales of the linears' weights, by the weight's name in the weights: what the
            file tells, resolved and checked, 0-d FP32 on the CPU. A weight that is stored in high
            precision has no weight_scale, a dynamic recipe may have no input_scale.
    """

    destinations: tuple[Destination, ...]
    loader: DynamicLinearWeightLoader
    num_bytes: int
    scales: Mapping[str, Scales]


def plan_weights(
    transformer: nn.Module,
    weights: Mapping[str, torch.Tensor],
    device: torch.device | None = None,
) -> WeightPlan:
    """Match every tensor of a checkpoint with its destination, and judge all of them.

    Args:
        transformer: A Cosmos3VFMTransformer, on any device, meta included.
        weights: Tensors by checkpoint name, all with or without a leading ``model.``; a
            SafetensorsFolder is judged by its headers.
        device: Where the weights are going, for what depends on it; None leaves that out.

    Raises:
        ValueError: listing, kind by kind (``problems.py``), the first few and the count of all that
            is wrong with tensors, scales and the step policy; or a malformed step policy.
        TypeError: a malformed step policy.
    """
    config = transformer.model_config
    problems = Problems()
    servable = uses_static_fp8(config) and static_fp8_linears(transformer.gen_layers)
    if requested_step_policy(config) is not None and not servable:
        problems.add(POLICY, _describe_recipe(config))
    table = TensorTable(weights, problems)
    own_recipe = getattr(config.pretrained_config, "quantization_config", None)
    judge = LinearJudge(
        table,
        problems,
        quantize_here=config.dynamic_weight_quant,
        keeps_calibration=own_recipe is not None and not config.quant_config_overridden,
        device=device,
    )
    destinations = tuple(
        _destination(transformer, name, module, table, judge, problems)
        for name, module in transformer.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    )
    judge.check_sources()
    _check_groups(transformer, judge)
    _check_leftovers(table, problems)
    folder = weights.folder if isinstance(weights, SafetensorsFolder) else "transformer weights"
    problems.raise_if_any(
        "The checkpoint doesn't fit the model that its config.json describes",
        folder,
        "a source for every module, a module for every tensor, and scales that can be used",
    )
    if config.quant_config_overridden:
        _warn_of_idle_patterns(transformer, table)
    return WeightPlan(
        destinations,
        DynamicLinearWeightLoader(config),
        table.num_bytes,
        {table.stored_name(f"{prefix}.weight"): scales for prefix, scales in judge.scales.items()},
    )


def _describe_recipe(config: DiffusionModelConfig) -> str:
    recipe = config.quant_config.quant_algo or "no quantisation"
    if config.dynamic_weight_quant or config.force_dynamic_quantization:
        recipe += " with scales measured here"
    return f"static FP8 in the generation tower expected, {recipe} found there"


def _destination(
    transformer: nn.Module,
    name: str,
    module: nn.Module,
    table: TensorTable,
    judge: LinearJudge,
    problems: Problems,
) -> Destination:
    prefixes = source_prefixes(name)
    if isinstance(module, Linear):
        rows = _shard_rows(transformer, module)
        return Destination(name, module, judge.claim(module, prefixes, rows))
    (prefix,) = prefixes
    shard = {}
    for key, parameter in module.named_parameters(recurse=False):
        source = f"{prefix}.{key}" if prefix else key
        stored = table.take(source)
        if stored is not None:
            shard[key] = stored
            check_exact(table, problems, source, tuple(parameter.shape), parameter.dtype)
    return Destination(name, module, (shard,))


def _shard_rows(transformer: nn.Module, linear: Linear) -> tuple[int, ...]:
    """Output features of each shard of a linear, in fused order."""
    mode = linear.weights_loading_config.weight_mode
    if mode is WeightMode.FUSED_QKV_LINEAR:
        arch = transformer.arch
        heads = (arch.num_attention_heads, arch.num_key_value_heads, arch.num_key_value_heads)
        return tuple(count * arch.head_dim for count in heads)
    return (linear.out_features // len(mode.shard_names),) * len(mode.shard_names)


def _check_groups(transformer: nn.Module, judge: LinearJudge) -> None:
    for name, module in transformer.named_modules():
        if isinstance(module, Attention) and module.share_qkv_input_quant:
            members = ("to_q", "to_k", "to_v")
        elif isinstance(module, GatedMLP) and module.split_gate_up:
            members = ("gate_proj", "up_proj")
        else:
            continue
        linears = {member: getattr(module, member) for member in members}
        if quant_group.calibrated(linears):
            judge.check_group([source_prefixes(f"{name}.{member}")[0] for member in members])


def _check_leftovers(table: TensorTable, problems: Problems) -> None:
    """Every tensor has a destination or is on the list of unused ones."""
    for name in table.unclaimed():
        if is_unused(name):
            continue
        scheme = foreign_scheme(name)
        if scheme is None:
            problems.add(SURPLUS, name)
        else:
            problems.add(FOREIGN, f"{name}: {scheme}")


def _warn_of_idle_patterns(transformer: nn.Module, table: TensorTable) -> None:
    modules = [name for name, _ in transformer.named_modules()]
    stored = [name.rpartition(".")[0] for name in table.names()]
    idle = unmatched_patterns(transformer.model_config.quant_config, [*modules, *stored])
    if idle:
        logger.warning(
            "No module has a name that these patterns of quant_config's ignore list match: %s",
            ", ".join(idle),
        )
