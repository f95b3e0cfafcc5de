# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint tensors feed which module: the diffusers names of a Cosmos3 transformer.

One table of renames, read from our side: a module's name gives the name, or for a fused module the
names, of its sources. Scales and ModelOpt's buffers follow their weight, because a source is a
prefix and everything under it belongs to the same module.
"""

import re
from collections.abc import Iterable

from tensorrt_llm.models.modeling_utils import QuantConfig

# Our name (without the tower's layer prefix) to the checkpoint's, inside one layer.
_UNDERSTANDING = {
    "input_layernorm": ["input_layernorm"],
    "post_attention_layernorm": ["post_attention_layernorm"],
    "self_attn.to_q": ["self_attn.to_q"],
    "self_attn.to_k": ["self_attn.to_k"],
    "self_attn.to_v": ["self_attn.to_v"],
    "self_attn.to_out.0": ["self_attn.to_out"],
    "self_attn.norm_q": ["self_attn.norm_q"],
    "self_attn.norm_k": ["self_attn.norm_k"],
    "mlp.gate_proj": ["mlp.gate_proj"],
    "mlp.up_proj": ["mlp.up_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down_proj": ["mlp.down_proj"],
}
_GENERATION = {
    "input_layernorm": ["input_layernorm_moe_gen"],
    "post_attention_layernorm": ["post_attention_layernorm_moe_gen"],
    "cross_attention.to_q": ["self_attn.add_q_proj"],
    "cross_attention.to_k": ["self_attn.add_k_proj"],
    "cross_attention.to_v": ["self_attn.add_v_proj"],
    "cross_attention.qkv_proj": [
        "self_attn.add_q_proj",
        "self_attn.add_k_proj",
        "self_attn.add_v_proj",
    ],
    "cross_attention.to_out.0": ["self_attn.to_add_out"],
    "cross_attention.norm_q": ["self_attn.norm_added_q"],
    "cross_attention.norm_k": ["self_attn.norm_added_k"],
    "mlp.gate_proj": ["mlp_moe_gen.gate_proj"],
    "mlp.up_proj": ["mlp_moe_gen.up_proj"],
    "mlp.gate_up_proj": ["mlp_moe_gen.gate_proj", "mlp_moe_gen.up_proj"],
    "mlp.down_proj": ["mlp_moe_gen.down_proj"],
}
_OUTSIDE_LAYERS = {
    "": [""],
    "language_model.embed_tokens": ["embed_tokens"],
    "norm_moe_gen": ["norm_moe_gen"],
    "vae2llm": ["proj_in"],
    "llm2vae": ["proj_out"],
    "audio2llm": ["audio_proj_in"],
    "llm2audio": ["audio_proj_out"],
    "time_embedder.mlp.linear_1": ["time_embedder.linear_1"],
    "time_embedder.mlp.linear_2": ["time_embedder.linear_2"],
}

UNUSED_TENSORS = {
    r"lm_head\..*": "head of the text output",
    r"norm\.weight": "final norm of the text output",
    r"action_.*": "the action modality, which is not built",
    r"visual\..*": "vision encoder of the reasoner's chat mode",
}
"""Pattern of the tensors that a checkpoint may hold and that generation doesn't read -> what they
are. Names without the ``model.`` prefix."""

_UNUSED = re.compile("|".join(UNUSED_TENSORS))
# Modules of those tensors, which an ignore list may name though this checkpoint has none of them.
_UNUSED_MODULES = ("lm_head", "norm", "action_proj_in", "action_proj_out", "visual.block")
_LAYER = re.compile(r"(language_model\.layers|gen_layers)\.(\d+)\.(.+)")


def source_prefixes(module_name: str) -> list[str]:
    """Checkpoint prefixes of one module, in the order of its fused shards.

    Args:
        module_name: Dotted name inside Cosmos3VFMTransformer; "" for the model's own parameters.

    Raises:
        KeyError: a module that no checkpoint tensor feeds.
    """
    match = _LAYER.fullmatch(module_name)
    if match is None:
        return _OUTSIDE_LAYERS[module_name]
    tower, index, inside = match.groups()
    names = _GENERATION if tower == "gen_layers" else _UNDERSTANDING
    return [f"layers.{index}.{name}" for name in names[inside]]


def is_unused(tensor_name: str) -> bool:
    """Whether a checkpoint tensor is on the list of those that generation doesn't read."""
    return _UNUSED.fullmatch(tensor_name) is not None


def unmatched_patterns(quant_config: QuantConfig, names: Iterable[str]) -> list[str]:
    """Patterns of a recipe's ignore list that match neither a name nor a part of Cosmos3.

    Args:
        quant_config: The recipe.
        names: Module names, ours or the checkpoint's.
    """
    known = [*names, *_UNUSED_MODULES]
    return [
        pattern
        for pattern in quant_config.exclude_modules or ()
        if not any(
            map(QuantConfig(exclude_modules=[pattern]).is_module_excluded_from_quantization, known)
        )
    ]
