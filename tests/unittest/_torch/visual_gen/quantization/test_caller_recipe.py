# SPDX-License-Identifier: Apache-2.0
"""``VisualGenArgs.quant_config``: every key of the caller's recipe has its effect or is refused."""

import copy
import json

import pytest

from tensorrt_llm._torch.visual_gen.config import DiffusionPipelineConfig
from tensorrt_llm._torch.visual_gen.pipeline_loader import PipelineLoader
from tensorrt_llm.models.modeling_utils import QuantConfig
from tensorrt_llm.visual_gen import VisualGenArgs
from tensorrt_llm.visual_gen.tiny_fp8 import STEP_POLICY

SPEC = {"dynamic": False, "num_bits": 8, "type": "float"}
GROUPS = {"group_0": {"weights": SPEC, "input_activations": SPEC, "targets": ["Linear"]}}
DYNAMIC_GROUPS = {
    "group_0": {key: SPEC | {"dynamic": True} for key in ("weights", "input_activations")}
}
RUNTIME = {"diffusion_step_policy": STEP_POLICY}
COPY = {
    "quant_method": "modelopt",
    "quant_type": "FP8_FP8",
    "quant_algo": "FP8",
    "weight_only": False,
    "config_groups": GROUPS,
    "ignore": ["proj_in", "lm_head"],
    "producer": {"name": "modelopt", "version": "0.44.0"},
    "modelopt_config": {"quant_cfg": [{"quantizer_name": "*", "enable": False}]},
}
"""A published checkpoint's own recipe, without its step policy."""


def read(tmp_path, recipe, own=None, make_args=VisualGenArgs):
    """What a caller's recipe makes of a checkpoint, whose own recipe is ``own``."""
    folder = tmp_path / "transformer"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": own}))
    args = make_args(model="m", quant_config=recipe)
    return DiffusionPipelineConfig.from_pretrained(tmp_path, args=args).primary_model_config


UNKNOWN = [
    ({"quant_alg": "FP8"}, "quant_alg", "'quant_algo' instead of 'quant_alg'"),
    ({"quant_algo": "FP8", "ignored": ["gen_layers"]}, "ignored", "'ignore' instead of 'ignored'"),
    ({"quant_algo": "FP8", "exclude_module": ["a"]}, "exclude_module", "'exclude_modules'"),
    ({"foo": 1}, "foo", "leave 'foo' out"),
    *(
        ({"quant_algo": "FP8", key: ["gen_layers"]}, key, f"names of '{key}' as patterns")
        for key in ("modules_to_not_convert", "ignored_layers")
    ),
    ({"quant_algo": "FP8", "foo": None}, "foo", "leave 'foo' out"),
    ({"quant_algo": "FP8", 1: 2}, "1", "leave '1' out"),
]


@pytest.mark.parametrize(("recipe", "key", "remedy"), UNKNOWN, ids=[key for _, key, _ in UNKNOWN])
def test_an_unknown_key_is_refused_by_name_before_anything_is_downloaded(recipe, key, remedy):
    with pytest.raises(ValueError, match=r"quant_config\): expected .*quant_algo") as error:
        VisualGenArgs(model="org/name", quant_config=recipe)
    assert f"'{key}'" in str(error.value) and remedy in str(error.value)


def test_an_unknown_key_that_was_set_later_is_refused_by_the_load(tmp_path):
    def make_args(quant_config, **options):
        args = VisualGenArgs(**options)
        args.quant_config = quant_config
        return args

    with pytest.raises(ValueError, match="quant_alg"):
        read(tmp_path, {"quant_alg": "FP8"}, make_args=make_args)


def test_every_unknown_key_is_named_at_once():
    with pytest.raises(ValueError, match=r"\['bar', 'foo'\]"):
        VisualGenArgs(quant_config={"quant_algo": "FP8", "foo": 1, "bar": 2})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weight_block_size", [128, 128]),
        ("activation_scheme", "static"),
        ("activation_scheme", "token"),
        ("fmt", "e5m2"),
        ("granularity", "block"),
        ("per_channel", True),
        ("quant_type", "INT8_INT8"),
        ("group_size", 128),
        ("quantization", {"quant_algo": "FP8"}),
    ],
)
def test_a_key_with_a_meaning_that_is_not_served_is_refused_by_name(tmp_path, key, value):
    with pytest.raises(ValueError) as error:
        read(tmp_path, {"quant_algo": "FP8", key: value})
    message = str(error.value)
    assert f"quant_config.{key}" in message and "quantization_config" not in message
    assert repr(value) in message and "Remedy" in message


@pytest.mark.parametrize("own", [None, COPY], ids=["16-bit checkpoint", "without a policy"])
@pytest.mark.parametrize(
    "runtime", [RUNTIME, {"diffusion_step_policy": 8}, {"foo": 1}, "a16"], ids=repr
)
def test_a_step_policy_of_the_callers_own_is_refused(tmp_path, own, runtime):
    with pytest.raises(ValueError, match="belongs to the checkpoint") as error:
        read(tmp_path, COPY | {"runtime": runtime}, own)
    assert "quant_config.runtime" in str(error.value) and "leave runtime out" in str(error.value)


def test_a_step_policy_other_than_the_checkpoints_is_refused(tmp_path):
    other = {"diffusion_step_policy": STEP_POLICY | {"reasoner": "native"}}
    with pytest.raises(ValueError, match="belongs to the checkpoint"):
        read(tmp_path, COPY | {"runtime": other}, COPY | {"runtime": RUNTIME})


def test_a_copy_of_the_checkpoints_recipe_with_its_policy_is_read_like_the_original(tmp_path):
    own = COPY | {"runtime": RUNTIME}
    config = read(tmp_path, copy.deepcopy(own), own)
    assert config.quant_config == QuantConfig(quant_algo="FP8", exclude_modules=COPY["ignore"])
    assert not config.dynamic_weight_quant and config.quant_config_overridden


def test_a_copy_with_the_policy_is_told_once_that_the_policy_is_dropped(
    tiny_fp8_checkpoint, caplog
):
    file = tiny_fp8_checkpoint / "transformer" / "config.json"
    recipe = json.loads(file.read_text())["quantization_config"]
    assert recipe["runtime"]["diffusion_step_policy"]
    args = VisualGenArgs(model=str(tiny_fp8_checkpoint), quant_config=recipe)
    args.compilation_config.skip_warmup = True
    transformer = PipelineLoader(args, "cpu").load().transformer
    assert transformer.step_precision_controller is None
    assert caplog.text.count("diffusion_step_policy is dropped") == 1


@pytest.mark.parametrize(
    "recipe",
    [
        {"dynamic": True},
        {"ignore": ["gen_layers"]},
        {"quant_method": "modelopt"},
        {"ignore": [], "quant_method": "modelopt", "producer": {"name": "modelopt"}},
        {"runtime": None},
        QuantConfig(exclude_modules=["gen_layers"]),
    ],
    ids=repr,
)
def test_a_recipe_that_names_no_algorithm_is_refused(tmp_path, recipe):
    with pytest.raises(ValueError, match="names no algorithm") as error:
        read(tmp_path, recipe)
    assert 'add "quant_algo": "FP8"' in str(error.value) and "{}" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ignore", ["gen_layers"]),
        ("exclude_modules", ["gen_layers"]),
        ("dynamic", True),
        ("quant_type", "FP8_FP8"),
        ("fmt", "e4m3"),
        ("modelopt_config", {"algorithm": "max"}),
    ],
)
def test_what_describes_a_quantisation_is_refused_beside_no_algorithm(tmp_path, key, value):
    with pytest.raises(ValueError, match="quant_algo is None") as error:
        read(tmp_path, {"quant_algo": None, key: value})
    assert repr(key) in str(error.value)


@pytest.mark.parametrize(
    "recipe",
    [
        *({}, QuantConfig(), {"quant_algo": None}),
        {"quant_algo": None, "ignore": [], "producer": {"name": "modelopt"}},
    ],
    ids=repr,
)
def test_no_quantisation_can_be_asked_for_in_so_many_words(tmp_path, recipe):
    config = read(tmp_path, recipe, COPY)
    assert config.quant_config == QuantConfig() and config.quant_config_overridden


EXPORTERS_OWN = {
    "modules_to_not_convert": ["time_embedder"],
    "channel_quantize": None,
    "calib_cfg": {"method": "max"},
}


def test_a_copy_of_the_loaded_checkpoints_recipe_may_hold_whatever_it_holds(tmp_path):
    recipe = COPY | EXPORTERS_OWN
    config = read(tmp_path, recipe, own=recipe)
    assert config.quant_config.quant_algo == "FP8" and not config.dynamic_weight_quant


@pytest.mark.parametrize("own", [COPY, None])
def test_what_the_loaded_checkpoints_recipe_does_not_hold_is_no_copy(tmp_path, own):
    with pytest.raises(ValueError, match=r"\['calib_cfg', 'modules_to_not_convert'\]") as error:
        read(tmp_path, COPY | EXPORTERS_OWN, own=own)
    assert "write the names of 'modules_to_not_convert' as patterns" in str(error.value)


HF_QUANT_CONFIG = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}


@pytest.mark.parametrize(
    ("recipe", "dynamic"),
    [
        (COPY, False),
        (COPY | {"runtime": {}}, False),
        (COPY | {"runtime": None, "version": "0.44.0"}, False),
        (COPY | {"activation_scheme": "static", "fmt": "e4m3", "granularity": "tensor"}, False),
        (COPY | {"dynamic": False, "modules_to_not_convert": []}, False),
        (HF_QUANT_CONFIG, True),
        ({"quant_algo": "FP8", "dynamic": True, "activation_scheme": "dynamic"}, True),
        ({"quant_algo": "FP8", "config_groups": DYNAMIC_GROUPS}, True),
        ({"quant_algo": "FP8", "per_channel": False, "weight_block_size": None}, True),
    ],
    ids=range(9),
)
def test_what_says_no_more_than_is_done_is_accepted(tmp_path, recipe, dynamic):
    config = read(tmp_path, recipe)
    assert config.quant_config.quant_algo == "FP8"
    assert (config.dynamic_weight_quant, config.force_dynamic_quantization) == (dynamic, dynamic)


@pytest.mark.parametrize("groups", [None, DYNAMIC_GROUPS], ids=["no groups", "dynamic groups"])
def test_a_modelopt_config_is_refused_where_the_weights_are_quantised_here(tmp_path, groups):
    quant_cfg = [{"quantizer_name": "*gen_layers*", "enable": False}]
    recipe = {"quant_algo": "FP8", "modelopt_config": {"quant_cfg": quant_cfg}}
    with pytest.raises(ValueError, match="quant_config.modelopt_config") as error:
        read(tmp_path, recipe | ({} if groups is None else {"config_groups": groups}))
    assert "as ignore" in str(error.value)


def test_dynamic_false_beside_dynamic_groups_is_refused(tmp_path):
    recipe = {"quant_algo": "FP8", "config_groups": DYNAMIC_GROUPS, "dynamic": False}
    with pytest.raises(ValueError, match="dynamic contradicts config_groups"):
        read(tmp_path, recipe)
