# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's recipe decides for the whole transformer: topology, steps, FP8 attention."""

from typing import TYPE_CHECKING

from torch import nn

from tensorrt_llm._torch.visual_gen.config import DiffusionModelConfig
from tensorrt_llm._torch.visual_gen.models.cosmos3.step_precision import (
    StepPrecisionController,
    StepPrecisionPolicy,
    install_step_precision,
    parse_diffusion_step_policy,
    uninstall_step_precision,
)
from tensorrt_llm._utils import describe_error
from tensorrt_llm.logger import logger

if TYPE_CHECKING:
    from tensorrt_llm._torch.visual_gen.models.cosmos3.transformer_cosmos3 import (
        Cosmos3VFMTransformer,
    )


def uses_static_fp8(model_config: DiffusionModelConfig) -> bool:
    """Whether the checkpoint's own calibrated FP8 weights and activation scales are served.

    The one predicate behind the split topology, shared activation quantisation and step precision.
    """
    return (
        model_config.quant_config.quant_mode.has_fp8_qdq()
        and not model_config.dynamic_weight_quant
        and not model_config.force_dynamic_quantization
    )


def requested_step_policy(model_config: DiffusionModelConfig) -> StepPrecisionPolicy | None:
    """The step policy to follow: the checkpoint's, unless the caller's recipe replaced its own.

    Raises:
        TypeError, ValueError: a malformed policy, also where it would be dropped.
    """
    policy = _own_step_policy(model_config)
    return None if _recipe_is_replaced(model_config) else policy


def follow_step_policy(
    model_config: DiffusionModelConfig,
    generation: nn.ModuleList,
    understanding: nn.ModuleList,
    current: StepPrecisionController | None,
) -> StepPrecisionController | None:
    """Put both towers under the checkpoint's step policy, or free them where there is none.

    Args:
        model_config: Of the transformer.
        generation: Layers of the generation tower, which follow the steps.
        understanding: Layers of the understanding tower, whose precision is one for good.
        current: The controller that governs them now.

    Returns:
        The controller that governs them from now on, or None without a policy.

    Raises:
        TypeError, ValueError: a malformed policy, or one that the weights can't serve.
    """
    policy = _own_step_policy(model_config)
    if policy is not None and _recipe_is_replaced(model_config):
        logger.warning(
            "The checkpoint's diffusion_step_policy is dropped: the caller's quant_config "
            "replaced the recipe that it was made for."
        )
        policy = None
    if policy is None:
        if current is not None:
            uninstall_step_precision(generation)
            uninstall_step_precision(understanding)
        return None
    controller = StepPrecisionController(policy.first_steps, policy.last_steps)
    static = uses_static_fp8(model_config)
    governed = install_step_precision(generation, controller) if static else 0
    if governed == 0:
        raise ValueError(
            describe_error(
                "diffusion_step_policy can't be served by the loaded weights",
                where="transformer/config.json, quantization_config.runtime",
                expected="static FP8 weights with calibrated input scales",
                found=f"quant_algo {model_config.quant_config.quant_algo}, static: {static}",
                remedy="use the checkpoint's fp8 revision as published, or pass a "
                "quant_config of your own, which drops the policy",
            )
        )
    if policy.reasoner_high_precision:
        install_step_precision(understanding, controller, always_high=True)
    else:
        uninstall_step_precision(understanding)
    logger.info(
        "Step precision: the first %d and last %d steps run %d linears in 16 bit; the "
        "understanding tower is %s.",
        policy.first_steps,
        policy.last_steps,
        governed,
        "16 bit" if policy.reasoner_high_precision else "native",
    )
    return controller


def refuse_idle_fp8_attention(transformer: "Cosmos3VFMTransformer") -> None:
    """Refuse FP8 attention where it would never run: the recipe leaves q, k and v in 16 bit.

    Raises:
        NotImplementedError: no generation layer's q, k, v are static FP8 beside such a backend.
    """
    attentions = [layer.attention for layer in transformer.gen_layers]
    backend = attentions[0].backend
    if backend.quantizes and not any(a.may_attend_in_fp8 for a in attentions):
        raise NotImplementedError(
            describe_error(
                "FP8 attention follows FP8 q, k and v, which this checkpoint does not have",
                where=f"attention_config.backend {backend.name!r}",
                expected="a recipe that quantises the generation tower's q, k and v",
                found="one that excludes them",
                remedy='use the backend "FA3" for this checkpoint',
            )
        )


def _own_step_policy(model_config: DiffusionModelConfig) -> StepPrecisionPolicy | None:
    recipe = getattr(model_config.pretrained_config, "quantization_config", None)
    return parse_diffusion_step_policy(recipe)


def _recipe_is_replaced(model_config: DiffusionModelConfig) -> bool:
    return getattr(model_config, "quant_config_overridden", False)
