# SPDX-License-Identifier: Apache-2.0
"""The diffusers + ModelOpt reference script: what it restores, and what it refuses beforehand.

The tiny FP8 checkpoint is what the published ones are, but for ``modelopt_state.pth``, which only
ModelOpt writes: the tests add it. On a CPU W8A16 steps run, W8A8 steps don't.
"""

import contextlib
import importlib.util
import json
import shutil
from pathlib import Path

import av
import pytest
import torch
from click.testing import CliRunner
from diffusers import Cosmos3OmniPipeline, Cosmos3OmniTransformer
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file

from tensorrt_llm.visual_gen.tiny_components import quiet_libraries
from tests.support.checkpoint_dialects import bits, in_dialect, write_weights
from tests.support.fp8_oracle import dequantised_transformer, read_tensors

mtq = pytest.importorskip("modelopt.torch.quantization")

ROOT = Path(__file__).resolve().parents[3]
STATE_FILE = "modelopt_state.pth"
REQUEST = ("--prompt", "A red tram.", "--num_frames", 5, "--height", 64, "--width", 96)


@pytest.fixture(scope="module", autouse=True)
def diffusers_is_left_unpatched():
    """enable_huggingface_checkpointing() has no inverse; other tests get the classes they had."""
    from modelopt.torch.opt.plugins import huggingface

    before = [
        (cls, name, vars(cls).get(name))
        for classes, methods in huggingface._LIBRARY_CLASSES_FOR_PATCHING.values()
        for cls, patches in zip(classes, methods, strict=True)
        for name in [*(name for name, _ in patches), "_modelopt_cache"]
    ]
    yield
    for cls, name, value in before:
        if value is not None:
            setattr(cls, name, value)
        elif name in vars(cls):
            delattr(cls, name)
    huggingface._PATCHED_CLASSES.clear()


@pytest.fixture(scope="module")
def script():
    path = ROOT / "examples" / "visual_gen" / "hf_cosmos3.py"
    spec = importlib.util.spec_from_file_location("hf_cosmos3", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def restorable(tiny_fp8_checkpoint, tmp_path_factory):
    """The tiny FP8 checkpoint with the file that ModelOpt restores its linears from."""
    import modelopt.torch.opt as mto

    folder = tmp_path_factory.mktemp("restorable") / "fp8"
    shutil.copytree(tiny_fp8_checkpoint, folder)
    config = json.loads((folder / "transformer" / "config.json").read_text())
    recipe = config.pop("quantization_config")
    with quiet_libraries():
        model = Cosmos3OmniTransformer.from_config(config).to(torch.bfloat16)
        mtq.quantize(model, recipe["modelopt_config"])
    for module in model.modules():
        quantizer = getattr(module, "input_quantizer", None)
        if quantizer is not None and quantizer.is_enabled:
            quantizer.amax = torch.ones((), dtype=torch.bfloat16)
    mtq.compress(model)
    # Names, shapes and dtypes of quantisers; values come from the checkpoint's tensors.
    torch.save(mto.modelopt_state(model), folder / "transformer" / STATE_FILE)
    return folder


@pytest.fixture
def changed(restorable, tmp_path):
    """A copy of the restorable checkpoint, for a test to spoil."""
    return Path(shutil.copytree(restorable, tmp_path / "changed"))


@pytest.fixture
def run(script, tmp_path, monkeypatch, request):
    """Invoke the script in an empty folder; without a GPU, unless the test is about one."""
    monkeypatch.chdir(tmp_path)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def invoke(*arguments):
        with quiet_libraries():
            return CliRunner().invoke(script.main, [str(argument) for argument in arguments])

    return invoke


def load(script, folder):
    with quiet_libraries():
        return script.load_pipeline(str(folder))


def edit_config(folder, change):
    file = folder / "transformer" / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def no_loading(*_args, **_options):
    pytest.fail("the weights were loaded before the check")


def test_every_fp8_linear_is_restored_with_the_files_bytes_and_scales(script, restorable):
    transformer = load(script, restorable).transformer
    tensors = read_tensors(restorable)
    linears = dict(script.fp8_linears(transformer))
    assert len(linears) == 28
    for name, linear in linears.items():
        assert bits(linear.weight) == bits(tensors[f"{name}.weight"]), name
        for key in ("weight_quantizer._amax", "weight_quantizer._scale", "input_quantizer._amax"):
            assert bits(linear.state_dict()[key]) == bits(tensors[f"{name}.{key}"]), (name, key)


def test_16_bit_steps_give_what_the_dequantised_weights_give(run, restorable, tiny_bf16_checkpoint):
    options = ("--num_inference_steps", 6, "--seed", 3, "--output_type", "latent")
    result = run("--model", restorable, *REQUEST, *options)
    assert result.exit_code == 0, result.output
    assert f"labels: {' '.join(['W8A16'] * 6)}" in result.output
    found = load_file("hf_cosmos3_output.safetensors")["latents"]
    with quiet_libraries():
        pipeline = Cosmos3OmniPipeline.from_pretrained(
            tiny_bf16_checkpoint,
            transformer=dequantised_transformer(tiny_bf16_checkpoint, restorable),
            dtype=torch.bfloat16,
        )
        pipeline.set_progress_bar_config(disable=True)
        expected = pipeline(
            "A red tram.",
            num_frames=5,
            height=64,
            width=96,
            num_inference_steps=6,
            guidance_scale=6.0,
            generator=torch.Generator().manual_seed(3),
            output_type="latent",
        ).video
    assert found.shape == (1, 48, 2, 4, 6) and torch.equal(found, expected)


@pytest.mark.parametrize(("output_type", "frames"), [("image", 1), ("video", 5)])
def test_pictures_and_videos_have_the_size_that_was_asked_for(run, restorable, output_type, frames):
    options = ("--num_inference_steps", 2, "--output_type", output_type, "--num_frames", frames)
    result = run("--model", restorable, *REQUEST, *options)
    assert result.exit_code == 0, result.output
    suffix = {"image": "png", "video": "mp4"}[output_type]
    with av.open(f"hf_cosmos3_output.{suffix}") as container:
        pictures = list(container.decode(video=0))
    assert [(picture.width, picture.height) for picture in pictures] == [(96, 64)] * frames


@pytest.mark.parametrize("steps", [1, 7])
def test_w8a8_steps_without_an_fp8_gemm_are_refused_before_the_first_step(
    run, restorable, monkeypatch, steps
):
    monkeypatch.setattr(Cosmos3OmniPipeline, "__call__", no_loading)
    result = run("--model", restorable, *REQUEST, "--num_inference_steps", steps)
    assert result.exit_code == 1
    assert "layers.0.self_attn.to_q" in result.output and "no FP8 GEMM for it on cpu" in (
        result.output
    )


def test_a_missing_gemm_backend_is_refused_before_loading(script, restorable, monkeypatch):
    from modelopt.torch.quantization.backends.gemm_registry import gemm_registry

    monkeypatch.setattr(gemm_registry, "_registry", [])
    monkeypatch.setattr(Cosmos3OmniPipeline, "from_pretrained", no_loading)
    with pytest.raises(ValueError, match="import modelopt.*fp8_per_tensor_gemm"):
        script.load_pipeline(str(restorable))


def test_checkpointing_that_was_not_enabled_is_refused_before_loading(
    script, restorable, monkeypatch
):
    import modelopt.torch.opt as mto

    monkeypatch.setattr(mto, "enable_huggingface_checkpointing", lambda: None)
    monkeypatch.setattr("modelopt.torch.opt.plugins.huggingface._PATCHED_CLASSES", set())
    monkeypatch.setattr(Cosmos3OmniPipeline, "from_pretrained", no_loading)
    with pytest.raises(ValueError, match=r"call .*enable_huggingface_checkpointing\(\)"):
        script.load_pipeline(str(restorable))


def test_a_missing_modelopt_is_named(script, restorable, monkeypatch):
    name = "modelopt.torch.quantization.backends.fp8_per_tensor_gemm"
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ImportError, match="pip install nvidia-modelopt"):
        script.load_pipeline(str(restorable))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda config: config.pop("quantization_config"), "None with None"),
        (lambda config: config["quantization_config"].update(quant_method="fp8"), "'fp8' with"),
        (lambda config: config["quantization_config"].update(quant_algo="NVFP4"), "'NVFP4'"),
        (lambda config: config["quantization_config"].pop("modelopt_config"), "a modelopt_config"),
    ],
)
def test_a_recipe_that_diffusers_cannot_restore_is_refused_before_loading(
    script, changed, monkeypatch, change, named
):
    edit_config(changed, change)
    monkeypatch.setattr(Cosmos3OmniPipeline, "from_pretrained", no_loading)
    with pytest.raises(ValueError, match=named):
        load(script, changed)


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x02."])
def test_a_state_that_is_none_is_refused_by_the_name_of_its_file(changed, run, content):
    (changed / "transformer" / STATE_FILE).write_bytes(content)
    result = run("--model", changed, *REQUEST)
    assert result.exit_code == 1, result.exception
    assert STATE_FILE in result.output and "Remedy" in result.output
    assert torch.get_default_dtype() == torch.float32


def test_the_tiny_checkpoint_has_no_modelopt_state_and_is_refused_before_loading(
    run, tiny_fp8_checkpoint, monkeypatch
):
    monkeypatch.setattr(Cosmos3OmniPipeline, "from_pretrained", no_loading)
    result = run("--model", tiny_fp8_checkpoint, *REQUEST)
    assert result.exit_code == 1 and f"expected {STATE_FILE}, found no such" in result.output


@pytest.mark.parametrize("there", [True, False])
def test_of_a_hub_id_the_state_is_fetched_because_the_pipeline_leaves_it_out(
    script, restorable, monkeypatch, there
):
    asked = []

    def fetch(*arguments, **options):
        asked.append((*arguments, options))
        if not there:
            raise EntryNotFoundError("no such file")

    config = json.loads((restorable / "transformer" / "config.json").read_text())
    monkeypatch.setattr(Cosmos3OmniTransformer, "load_config", lambda *_a, **_o: config)
    monkeypatch.setattr(script, "hf_hub_download", fetch)
    expectation = contextlib.nullcontext() if there else pytest.raises(ValueError, match=STATE_FILE)
    with expectation:
        script.check_checkpoint("owner/model", "fp8")
    options = {"subfolder": "transformer", "revision": "fp8"}
    assert asked == [("owner/model", STATE_FILE, options)]


def test_fp8_weights_in_plain_layers_are_refused(script, restorable):
    with quiet_libraries():
        # By subfolder ModelOpt looks for its file in the wrong folder and restores nothing.
        transformer = Cosmos3OmniTransformer.from_pretrained(
            restorable, subfolder="transformer", dtype=torch.bfloat16
        )
    with pytest.raises(
        ValueError, match=r"28 problems.*layers\.0\.self_attn\.to_q: a plain Linear"
    ):
        script.check_linears(transformer)


def test_buffers_that_the_file_does_not_have_are_refused(script, changed):
    write_weights(changed / "transformer", in_dialect(read_tensors(changed), "unified"), "single")
    with pytest.raises(ValueError, match=r"problems.*_quantizer\._(amax|scale)"):
        load(script, changed)


def test_a_weight_that_the_file_does_not_have_is_refused(script, changed):
    tensors = read_tensors(changed)
    del tensors["norm_moe_gen.weight"]
    write_weights(changed / "transformer", tensors, "single")
    with pytest.raises(ValueError, match=r" 1 problems \(norm_moe_gen\.weight: was not loaded"):
        load(script, changed)


def test_16_bit_weights_are_refused(script, tiny_bf16_checkpoint):
    with quiet_libraries():
        transformer = Cosmos3OmniTransformer.from_pretrained(tiny_bf16_checkpoint / "transformer")
    with pytest.raises(ValueError, match="no FP8 weight at all"):
        script.check_linears(transformer)


def spoil_scale(linear):
    linear.weight_quantizer._scale.mul_(1.05)


def spoil_amax(linear):
    linear.input_quantizer._amax.zero_()


def spoil_quantizer(linear):
    linear.input_quantizer.disable()


def spoil_gemm(linear):
    linear._use_real_quant_gemm = False


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (spoil_scale, "weight_quantizer._scale is 1.05 times"),
        (spoil_amax, "input_quantizer._amax is 0.0"),
        (spoil_quantizer, "a quantiser is off"),
        (spoil_gemm, "its FP8 GEMM is switched off"),
    ],
)
def test_one_linear_that_is_not_calibrated_is_named(script, restorable, spoil, named):
    transformer = load(script, restorable).transformer
    spoil(transformer.layers[1].mlp_moe_gen.up_proj)
    with pytest.raises(
        ValueError, match=rf" 1 problems .*layers\.1\.mlp_moe_gen\.up_proj: {named}"
    ):
        script.check_linears(transformer)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--output_type", "image", "--num_frames", 5), "1 for an image"),
        (("--output_type", "latent", "--output_path", "a.mp4"), "ends in .safetensors"),
        (("--output_path", "missing/a.mp4"), "existing folder"),
    ],
)
def test_options_that_contradict_are_refused_before_loading(run, monkeypatch, options, named):
    monkeypatch.setattr(Cosmos3OmniPipeline, "from_pretrained", no_loading)
    result = run("--model", "missing", "--prompt", "x", *options)
    assert result.exit_code == 1 and named in result.output, result.output


def test_diffusers_labels_of_the_attention_towers_are_swapped():
    from diffusers.pipelines.cosmos.mixed_precision import _classify_cosmos3_linear as label

    for name, reads_text in (("self_attn.to_q", True), ("self_attn.add_q_proj", False)):
        assert label(f"layers.0.{name}") == ("generation" if reads_text else "reasoner")
    assert label("layers.0.mlp.up_proj") == "reasoner"
    assert label("layers.0.mlp_moe_gen.up_proj") == "generation"


@pytest.mark.gpu
def test_fp8_steps_run_on_a_gpu(run, restorable):
    options = ("--num_inference_steps", 8, "--output_type", "latent")
    result = run("--model", restorable, *REQUEST, *options)
    assert result.exit_code == 0, result.output
    assert "W8A16 W8A16 W8A16 W8A8 W8A8 W8A16 W8A16 W8A16" in result.output
    assert torch.isfinite(load_file("hf_cosmos3_output.safetensors")["latents"]).all()
