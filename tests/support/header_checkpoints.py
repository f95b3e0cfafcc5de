# SPDX-License-Identifier: Apache-2.0
"""Full-size FP8 checkpoints that cost no disk: real headers and scales, holes for weights.

Names and shapes are those of cosmos3.md B.4, written out here from its table. The weights are holes
in sparse files, so that the inspection and the plan see a checkpoint of its published size.

The published pattern (failure_cases.md 3, cosmos3.md D.3) is a count of shards whose weight scale
is not the largest of the group that upstream's fused topology merges: 141 of Nano's 252, 252 of
Super's 448. With three different scales in every q, k, v and two in every gate, up these would be
4 a layer, 144 and 256. So all but a few scales differ: ``NANO`` has three shards, ``SUPER`` four
that share the largest scale of their group, and each has its published widest group.
"""

import json
import math
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.fp8_oracle import POLICY

WEIGHTS = "diffusion_pytorch_model"
GENERATION_QKV = tuple(f"self_attn.add_{part}_proj" for part in "qkv")
GENERATION_GATE_UP = ("mlp_moe_gen.gate_proj", "mlp_moe_gen.up_proj")
UNDERSTANDING_QKV = tuple(f"self_attn.to_{part}" for part in "qkv")
UNDERSTANDING_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
GROUPS = (GENERATION_QKV, GENERATION_GATE_UP, UNDERSTANDING_GATE_UP, UNDERSTANDING_QKV)
# All different: the first is the largest.
_RATIOS = {3: (1.0, 0.5, 0.75), 2: (1.0, 0.625)}
_SCALE, _INPUT_SCALE = 2.0**-9, 0.03125


@dataclass(frozen=True)
class Pattern:
    """Sizes of a model, and which of its groups have other scales than the usual ratios.

    ``exceptions`` maps (layer, group) to the ratios of its members' scales to the largest.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    sections: tuple[int, int, int]
    exceptions: Mapping[tuple[int, tuple[str, ...]], tuple[float, ...]] = field(
        default_factory=dict
    )
    equal: bool = False

    def scale(self, layer: int, name: str) -> float:
        """Weight scale of a linear of a layer; groups differ, so that none passes for another."""
        base = _SCALE * (1 + layer / 1024)
        for group in GROUPS:
            if name in group and not self.equal:
                ratios = self.exceptions.get((layer, group), _RATIOS[len(group)])
                return base * ratios[group.index(name)]
        return base


NANO = Pattern(
    *(4096, 36, 32, 8, 128, 12288, 151936, (24, 20, 20)),
    exceptions={
        (5, GENERATION_GATE_UP): (1.0, 1.0),
        (17, UNDERSTANDING_GATE_UP): (1.0, 1.0),
        (20, GENERATION_QKV): (1.0, 0.5, 1.0),
        (32, GENERATION_QKV): (1 / 4.67, 1.0, 0.5),
    },
)
SUPER = Pattern(
    *(5120, 64, 64, 8, 128, 25600, 151936, (24, 20, 20)),
    exceptions={
        (3, GENERATION_GATE_UP): (1.0, 1.0),
        (11, UNDERSTANDING_GATE_UP): (1.0, 1.0),
        (40, UNDERSTANDING_GATE_UP): (1.0, 1.0),
        (50, GENERATION_QKV): (0.5, 1.0, 1.0),
        (7, GENERATION_GATE_UP): (1.0, 1 / 6.10),
    },
)
SMALL = Pattern(64, 3, 4, 2, 16, 128, 6144, (4, 2, 2))
EQUAL = Pattern(64, 3, 4, 2, 16, 128, 6144, (4, 2, 2), equal=True)


def write_header_checkpoint(
    root: Path, pattern: Pattern, other_components: Path, shards: int = 4
) -> Path:
    """Write a checkpoint of the pattern.

    Args:
        root: Folder to make.
        pattern: Sizes and scales.
        other_components: A checkpoint whose VAE, scheduler, tokenizer and model_index.json are
            used.
        shards: Files of the transformer.
    """
    skip = shutil.ignore_patterns("transformer")
    shutil.copytree(other_components, root, ignore=skip)
    folder = root / "transformer"
    folder.mkdir()
    config = json.loads((other_components / "transformer/config.json").read_text())
    config |= {
        "hidden_size": pattern.hidden,
        "num_hidden_layers": pattern.layers,
        "num_attention_heads": pattern.heads,
        "num_key_value_heads": pattern.kv_heads,
        "head_dim": pattern.head_dim,
        "intermediate_size": pattern.intermediate,
        "vocab_size": pattern.vocab,
        "rope_axes_dim": list(pattern.sections),
        "rope_scaling": {"mrope_section": list(pattern.sections), "rope_type": "default"},
    }
    config["quantization_config"]["runtime"] = {"diffusion_step_policy": POLICY}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _tensors(pattern, config["sound_dim"])
    names = list(tensors)
    weight_map = {}
    for index in range(shards):
        file = f"{WEIGHTS}-{index + 1:05d}-of-{shards:05d}.safetensors"
        members = names[index::shards]
        _write_sparse(folder / file, {name: tensors[name] for name in members}, pattern)
        weight_map |= dict.fromkeys(members, file)
    (folder / f"{WEIGHTS}.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    return root


def _tensors(p: Pattern, sound: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape): the table of cosmos3.md B.4 with its FP8 linears' scales (D.4)."""
    hidden, query, key = p.hidden, p.heads * p.head_dim, p.kv_heads * p.head_dim
    found = {
        "embed_tokens.weight": ("BF16", (p.vocab, hidden)),
        "lm_head.weight": ("BF16", (p.vocab, hidden)),
        "norm.weight": ("BF16", (hidden,)),
        "norm_moe_gen.weight": ("BF16", (hidden,)),
        "audio_modality_embed": ("BF16", (hidden,)),
    }
    boundary = {"proj_in": (hidden, 192), "proj_out": (192, hidden)}
    boundary |= {"audio_proj_in": (hidden, sound), "audio_proj_out": (sound, hidden)}
    for name, shape in boundary.items():
        found[f"{name}.weight"] = ("BF16", shape)
        found[f"{name}.bias"] = ("BF16", shape[:1])
    for name, width in (("linear_1", 256), ("linear_2", hidden)):
        found[f"time_embedder.{name}.weight"] = ("F32", (hidden, width))
        found[f"time_embedder.{name}.bias"] = ("F32", (hidden,))
    linears = {}
    for q, k, v, out in (
        ("to_q", "to_k", "to_v", "to_out"),
        ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    ):
        rows = {q: query, k: key, v: key}
        linears |= {f"self_attn.{name}": (count, hidden) for name, count in rows.items()}
        linears[f"self_attn.{out}"] = (hidden, query)
    for mlp in ("mlp", "mlp_moe_gen"):
        linears |= {f"{mlp}.{name}_proj": (p.intermediate, hidden) for name in ("gate", "up")}
        linears[f"{mlp}.down_proj"] = (hidden, p.intermediate)
    norms = {
        f"{name}{suffix}": hidden
        for name in ("input_layernorm", "post_attention_layernorm")
        for suffix in ("", "_moe_gen")
    }
    names = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    norms |= {f"self_attn.{name}": p.head_dim for name in names}
    for layer in range(p.layers):
        prefix = f"layers.{layer}"
        found |= {f"{prefix}.{n}.weight": ("BF16", (size,)) for n, size in norms.items()}
        for name, shape in linears.items():
            found[f"{prefix}.{name}.weight"] = ("F8_E4M3", shape)
            found[f"{prefix}.{name}.weight_scale"] = ("F32", ())
            found[f"{prefix}.{name}.input_scale"] = ("F32", ())
    return found


def _write_sparse(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], pattern: Pattern
) -> None:
    """One safetensors file: the scales' bytes first, then a hole in which all other tensors lie."""
    ordered = sorted(tensors, key=lambda name: not name.endswith("_scale"))
    sizes = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
    header, data, end = {}, b"", 0
    for name in ordered:
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * sizes[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        if name.endswith("_scale"):
            data += struct.pack("<f", _scale(name, pattern))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
        file.truncate(8 + len(text) + end)


def _scale(name: str, pattern: Pattern) -> float:
    if name.endswith(".input_scale"):
        return _INPUT_SCALE
    _, layer, linear = name.removesuffix(".weight_scale").split(".", 2)
    return pattern.scale(int(layer), linear)
