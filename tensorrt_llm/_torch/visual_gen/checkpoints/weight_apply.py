# SPDX-License-Identifier: Apache-2.0
"""Carrying out a weight plan."""

from collections.abc import Mapping

import torch
from tqdm import tqdm

from tensorrt_llm._torch.modules.linear import Linear
from tensorrt_llm._torch.visual_gen.checkpoints.weight_plan import WeightPlan


def apply_plan(
    plan: WeightPlan, weights: Mapping[str, torch.Tensor], progress: bool = False
) -> None:
    """Copy every planned tensor to its place.

    Args:
        plan: From ``plan_weights`` on the same weights.
        weights: The tensors.
        progress: Show a progress bar in bytes.
    """
    with tqdm(
        total=plan.num_bytes, unit="B", unit_scale=True, desc="Loading", disable=not progress
    ) as bar:
        for destination in plan.destinations:
            shards = [
                {key: weights[name] for key, name in shard.items()} for shard in destination.shards
            ]
            if isinstance(destination.module, Linear):
                plan.loader.load_linear_weights(destination.module, destination.name, shards)
            else:
                for key, tensor in shards[0].items():
                    destination.module.get_parameter(key).data.copy_(tensor)
            bar.update(sum(t.numel() * t.itemsize for shard in shards for t in shard.values()))
