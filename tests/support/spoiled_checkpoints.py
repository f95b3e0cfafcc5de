# SPDX-License-Identifier: Apache-2.0
"""Spoiled checkpoints: how each is made of a tiny one, and what its refusal has to say.

Numbers are those of the project's table of failures that people reported of such systems.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.support.checkpoint_dialects import FP8, Tensors, is_scale, write_weights
from tests.support.fp8_oracle import policy, read_tensors

DOWN = "layers.1.mlp_moe_gen.down_proj"
QUERY = "layers.0.self_attn.to_q"
INDEX = "diffusion_pytorch_model.safetensors.index.json"


@dataclass(frozen=True)
class Spoiled:
    """One case.

    Attributes:
        spoil: Changes the checkpoint at a root.
        found: What the message has to say, beside the folder or field concerned.
        error: Its type.
        args: Of VisualGenArgs.
        source: The checkpoint that is spoiled.
    """

    spoil: Callable[[Path], object]
    found: tuple[str, ...]
    error: type[Exception] = ValueError
    args: dict = field(default_factory=dict)
    source: str = "fp8"


def tensors_changed(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        tensors = read_tensors(root)
        change(tensors)
        write_weights(root / "transformer", tensors, "index")

    return spoil


def put(name: str, value: torch.Tensor):
    return tensors_changed(lambda tensors: tensors.__setitem__(name, value))


def dropped(*names: str):
    return tensors_changed(lambda tensors: [tensors.pop(name) for name in names])


def scaled(names: tuple[str, ...], factor: float):
    return tensors_changed(
        lambda tensors: [tensors.__setitem__(name, tensors[name] * factor) for name in names]
    )


def json_changed(file: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        content = json.loads((root / file).read_text())
        change(content)
        (root / file).write_text(json.dumps(content))

    return spoil


def config(*path: str, value: object):
    """Set a key of transformer/config.json; None removes it."""

    def change(content: dict) -> None:
        *parents, last = path
        for key in parents:
            content = content.setdefault(key, {})
        if value is None:
            del content[last]
        else:
            content[last] = value

    return json_changed("transformer/config.json", change)


def recipe(*path: str, value: object):
    return config("quantization_config", *path, value=value)


def step_policy(value: object):
    return recipe("runtime", value={"diffusion_step_policy": value})


def file_changed(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda root: (root / file).write_bytes(change((root / file).read_bytes()))


def first_shard(root: Path) -> Path:
    return sorted((root / "transformer").glob("*.safetensors"))[0]


def removed(file: str) -> Callable[[Path], None]:
    return lambda root: (root / file).unlink()


def scales_left_behind(root: Path) -> None:
    """A rename that covered the weights alone."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if is_scale(name) and name.startswith("layers.0.")]:
            tensors[f"transformer.{name}"] = tensors.pop(name)

    tensors_changed(change)(root)


def as_nvfp4(tensors: Tensors) -> None:
    out_features, in_features = tensors[f"{DOWN}.weight"].shape
    tensors[f"{DOWN}.weight"] = torch.zeros(out_features, in_features // 2, dtype=torch.uint8)
    tensors[f"{DOWN}.weight_scale"] = torch.ones(out_features, in_features // 16).to(FP8)
    tensors[f"{DOWN}.weight_scale_2"] = torch.tensor(1.0)


def static_recipe(root: Path) -> None:
    config("quantization_config", value=copy.deepcopy(STATIC_RECIPE))(root)


FP8_SPEC = {"dynamic": False, "num_bits": 8, "type": "float"}
STATIC_GROUP = {"weights": FP8_SPEC, "input_activations": FP8_SPEC, "targets": ["Linear"]}
STATIC_RECIPE = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "config_groups": {"group_0": STATIC_GROUP},
}
FP4_GROUP = STATIC_GROUP | {"weights": FP8_SPEC | {"num_bits": 4}}
INPUTS = tuple(
    f"layers.0.self_attn.add_k_proj.{key}" for key in ("input_scale", "input_quantizer._amax")
)

CASES = {
    # ---- recipe and weights ----
    "2 quantization_config removed": Spoiled(
        config("quantization_config", value=None),
        (
            "FP8 weights for a module that its configuration leaves in high precision",
            "layers.0.self_attn.to_q.weight: bfloat16 expected, float8_e4m3fn found",
            "keep the quantization_config of the published transformer/config.json",
        ),
    ),
    "2 quantization_config replaced by the caller's": Spoiled(
        lambda root: None,
        (".weight: bfloat16 expected, float8_e4m3fn found", "pass no quant_config"),
        args={"quant_config": {}},
    ),
    "2 another quant_method": Spoiled(
        recipe("quant_method", value="compressed-tensors"),
        ("quantization_config.quant_method", "'modelopt'", "compressed-tensors"),
    ),
    "4 static recipe on BF16 weights": Spoiled(
        static_recipe,
        (
            "layers.0.self_attn.to_q.weight: float8_e4m3fn expected, bfloat16 found, "
            "appears to be unquantized",
            "(28 in all)",
            "fp8 revision",
            'quant_config={"quant_algo": "FP8"}',
        ),
        source="bf16",
    ),
    "4 the caller's static recipe on BF16 weights": Spoiled(
        lambda root: None,
        ("appears to be unquantized", "fp8 revision"),
        args={"quant_config": STATIC_RECIPE},
        source="bf16",
    ),
    "a recipe without groups on calibrated weights": Spoiled(
        recipe("config_groups", value=None),
        (
            "calibrated FP8 weights under a recipe that quantises while loading",
            "layers.0.self_attn.to_q.weight",
            "restore config_groups",
        ),
    ),
    "5 FP8 in the embedding": Spoiled(
        tensors_changed(
            lambda t: t.__setitem__("embed_tokens.weight", t["embed_tokens.weight"].to(FP8))
        ),
        ("wrong dtypes: embed_tokens.weight: bfloat16 expected, float8_e4m3fn found",),
    ),
    "5 BF16 in a quantised linear": Spoiled(
        put(f"{DOWN}.weight", torch.zeros(64, 128, dtype=torch.bfloat16)),
        (f"{DOWN}.weight: float8_e4m3fn expected, bfloat16 found",),
    ),
    "6 scales that did not follow their weights": Spoiled(
        scales_left_behind,
        (
            "missing tensors: layers.0.mlp.down_proj.weight_scale;",
            "(28 in all)",
            "tensors that nothing consumes: transformer.layers.0.",
        ),
    ),
    "a weight that would have to be rounded": Spoiled(
        put("norm_moe_gen.weight", torch.full((64,), 1 / 3)),
        ("wrong dtypes: norm_moe_gen.weight: bfloat16 expected, float32 found",),
    ),
    # ---- scales ----
    "8 dialects that disagree": Spoiled(
        scaled((f"{DOWN}.weight_scale",), 1.05),
        ("disagree", f"{DOWN}.weight_scale", f"{DOWN}.weight_quantizer._amax"),
    ),
    "41 two elements": Spoiled(
        put(f"{DOWN}.weight_scale", torch.ones(2)),
        (f"{DOWN}.weight_scale", "shape (2,)", "per-channel scales"),
    ),
    "per-channel scales": Spoiled(
        put(f"{DOWN}.weight_scale", torch.ones(64, 1)), ("shape (64, 1), per-channel scales",)
    ),
    "block scales": Spoiled(
        put(f"{DOWN}.weight_scale", torch.ones(64, 8)), ("shape (64, 8), block scales",)
    ),
    "NaN": Spoiled(
        put(f"{DOWN}.weight_scale", torch.tensor(torch.nan)), (f"{DOWN}.weight_scale", "nan found")
    ),
    "infinite": Spoiled(
        put(f"{DOWN}.input_quantizer._amax", torch.tensor(torch.inf, dtype=torch.bfloat16)),
        (f"{DOWN}.input_quantizer._amax", "inf found"),
    ),
    "zero": Spoiled(
        put(f"{DOWN}.input_scale", torch.tensor(0.0)), (f"{DOWN}.input_scale", "0.0 found")
    ),
    "negative": Spoiled(
        put(f"{DOWN}.input_scale", torch.tensor(-1.0)), (f"{DOWN}.input_scale", "-1.0 found")
    ),
    "an integer": Spoiled(
        put(f"{DOWN}.input_scale", torch.tensor(1)), (f"{DOWN}.input_scale", "torch.int64 found")
    ),
    "unequal input scales in q, k, v": Spoiled(
        scaled(INPUTS, 2.0),
        (
            "without the same calibrated input_scale",
            "layers.0.self_attn.add_q_proj.input_scale",
            "layers.0.self_attn.add_k_proj.input_scale",
            "input quantizers of each group tied",
        ),
    ),
    "no weight_scale": Spoiled(
        dropped(
            f"{DOWN}.weight_scale", *(f"{DOWN}.weight_quantizer.{k}" for k in ("_amax", "_scale"))
        ),
        (f"missing tensors: {DOWN}.weight_scale",),
    ),
    "no input_scale": Spoiled(
        dropped(f"{DOWN}.input_scale", f"{DOWN}.input_quantizer._amax"),
        (f"missing tensors: {DOWN}.input_scale",),
    ),
    # ---- other quantisations ----
    "unknown algorithm": Spoiled(recipe("quant_algo", value="NVFP4"), ("quant_algo", "'NVFP4'")),
    "algorithm whose layout is not verified": Spoiled(
        recipe("quant_algo", value="W8A8_SQ_PER_CHANNEL"), ("fails closed for unverified algos",)
    ),
    "block scales in the recipe": Spoiled(
        recipe("config_groups", "group_0", "weights", "block_sizes", value={"-1": 16}),
        ("config_groups.group_0.weights.block_sizes", "{'-1': 16}"),
    ),
    "mixed groups": Spoiled(
        recipe("config_groups", "group_1", value=FP4_GROUP), ("config_groups.group_1.weights",)
    ),
    "SmoothQuant": Spoiled(
        put(f"{DOWN}.pre_quant_scale", torch.ones(128)),
        ("a quantisation that is not supported", f"{DOWN}.pre_quant_scale: SmoothQuant"),
    ),
    "SmoothQuant in ModelOpt's own name": Spoiled(
        put(f"{DOWN}.input_quantizer._pre_quant_scale", torch.ones(128)),
        (f"{DOWN}.input_quantizer._pre_quant_scale: SmoothQuant",),
    ),
    "NVFP4": Spoiled(
        tensors_changed(as_nvfp4),
        (f"{DOWN}.weight: uint8, 4-bit codes", "NVFP4", f"{DOWN}.weight_scale_2"),
    ),
    "INT8": Spoiled(
        put(f"{DOWN}.weight", torch.zeros(64, 128, dtype=torch.int8)),
        (f"{DOWN}.weight: int8, INT8 codes",),
    ),
    "quantised attention": Spoiled(
        put("layers.0.self_attn.q_bmm_quantizer._amax", torch.tensor(1.0)),
        ("q_bmm_quantizer._amax: quantised attention",),
    ),
    "quantised boundary layer": Spoiled(
        put("proj_in.input_quantizer._amax", torch.tensor(1.0)),
        ("nothing consumes: proj_in.input_quantizer._amax",),
    ),
    # ---- files ----
    "44 a shard is missing": Spoiled(
        lambda root: first_shard(root).unlink(),
        ("missing files: diffusion_pytorch_model-00001-of-00003.safetensors (with action_",),
    ),
    "44 keys are missing": Spoiled(
        dropped(
            *(f"layers.{i}.input_layernorm{s}.weight" for i in (0, 1) for s in ("", "_moe_gen"))
        ),
        (
            "missing tensors: ",
            "layers.0.input_layernorm.weight",
            "layers.1.input_layernorm_moe_gen.weight",
        ),
    ),
    "a shard cut short": Spoiled(
        lambda root: first_shard(root).write_bytes(first_shard(root).read_bytes()[:-1]),
        ("files that can't be read: diffusion_pytorch_model-00001", "cut short"),
    ),
    "a shard that is an LFS pointer": Spoiled(
        lambda root: first_shard(root).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        ("Git LFS pointer",),
    ),
    "a corrupt header": Spoiled(
        lambda root: first_shard(root).write_bytes(b"\x10" + b"\0" * 7 + b"{" * 64),
        ("its header is no JSON",),
    ),
    "an index of other shards": Spoiled(
        json_changed(
            f"transformer/{INDEX}", lambda index: index["weight_map"].pop("norm_moe_gen.weight")
        ),
        ("has beside them norm_moe_gen.weight",),
    ),
    "a tensor stored twice": Spoiled(
        put(f"model.{QUERY}.weight", torch.zeros(64, 64).to(FP8)),
        (f"tensors stored twice: {QUERY}.weight",),
    ),
    "weights of another size": Spoiled(
        config("intermediate_size", value=256),
        ("wrong shapes: ", "(256, 64) expected, (128, 64) found"),
    ),
    "a surplus tensor": Spoiled(
        put("layers.0.mlp.extra.weight", torch.ones(2)), ("nothing consumes: layers.0.mlp.extra",)
    ),
    # ---- step policy ----
    "17 policy with BF16 weights": Spoiled(
        step_policy(policy(3, 3)),
        ("diffusion_step_policy can't be served", "no quantisation found", "fp8 revision"),
        source="bf16",
    ),
    "17 policy with per-channel scales": Spoiled(
        tensors_changed(
            lambda t: t.update(
                {n: v.expand(64).clone() for n, v in t.items() if n.endswith("k_proj.weight_scale")}
            )
        ),
        ("per-channel scales",),
    ),
    "17 policy on a generation tower that is left out": Spoiled(
        recipe("ignore", value=["gen_layers"]), ("diffusion_step_policy can't be served",)
    ),
    "17 policy that is no mapping": Spoiled(
        step_policy([3, 3]), ("diffusion_step_policy must be a mapping",), error=TypeError
    ),
    "17 policy with an unknown field": Spoiled(
        step_policy(policy(3, 3) | {"middle": 1}), ("Unknown diffusion_step_policy fields",)
    ),
    "17 policy of another schema": Spoiled(
        step_policy(policy(3, 3) | {"schema_version": 2}), ("schema_version",)
    ),
    # ---- the parts beside the transformer ----
    "no VAE configuration": Spoiled(removed("vae/config.json"), ("vae/config.json",)),
    "no VAE weights": Spoiled(
        removed("vae/diffusion_pytorch_model.safetensors"), ("vae", "missing files")
    ),
    "VAE weights cut short": Spoiled(
        file_changed("vae/diffusion_pytorch_model.safetensors", lambda content: content[:-1]),
        ("vae", "cut short"),
    ),
    "VAE of another size": Spoiled(
        json_changed("vae/config.json", lambda content: content.update(base_dim=16)),
        ("fp8/vae)", "encoder.conv_in.weight: (16,"),
    ),
    "no scheduler": Spoiled(
        removed("scheduler/scheduler_config.json"), ("scheduler/scheduler_config.json",)
    ),
    "no tokenizer configuration": Spoiled(
        removed("text_tokenizer/tokenizer_config.json"), ("text_tokenizer/tokenizer_config.json",)
    ),
    "no vocabulary": Spoiled(removed("text_tokenizer/tokenizer.json"), ("text_tokenizer",)),
}
