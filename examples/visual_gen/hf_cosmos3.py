# SPDX-License-Identifier: Apache-2.0
"""The reference: Cosmos3 in FP8 with diffusers 0.42.1 and ModelOpt 0.44, checked before it runs.

``python hf_cosmos3.py --model nvidia/Cosmos3-Nano --prompt "..."``. Three steps have to be taken in
order, ``load_pipeline`` takes them, and each that was left out shows itself late. Each is checked
where it is taken; what the checks refuse, and what diffusers would have done instead, is in
docs/source/peer.md. Nothing of this project's engine is used, its error format apart.
"""

import pickle
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import click
import torch
from diffusers import Cosmos3OmniPipeline, Cosmos3OmniTransformer, ModelMixin
from diffusers.pipelines.cosmos.mixed_precision import Cosmos3MixedPrecisionConfig
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import nn

from tensorrt_llm._utils import describe_error

FP8 = torch.float8_e4m3fn
FPS = 24.0
STATE_FILE = "modelopt_state.pth"
DOCS = "docs/source/peer.md"
OUTPUT_FILES = {"latent": "safetensors", "image": "png", "video": "mp4"}
# ModelOpt's scale is amax / 448, rounded to BF16 (an error of 2^-9 at most).
E4M3_MAX, SCALE_TOLERANCE = 448.0, 2**-8
GEMM_ROWS = 16


def load_pipeline(model: str, revision: str | None = "fp8") -> Cosmos3OmniPipeline:
    """Load a static FP8 checkpoint in the one order that works, on the CPU.

    Args:
        model: Folder in the diffusers layout, or Hub id.
        revision: Branch, tag or commit of a Hub id; official FP8 weights are on "fp8".

    Returns:
        The pipeline; every FP8 linear of its transformer is ModelOpt's, with calibrated scales.

    Raises:
        ImportError: ModelOpt is missing.
        ValueError: a step had no effect, or the checkpoint lacks what diffusers restores it from.
    """
    # 1. Importing this module registers the FP8 GEMM. Nothing else imports it. Without it the
    #    linears of a W8A8 step fall back to fake quantisation, which real FP8 weights refuse, and
    #    under the published policy three 16-bit steps run before the first such step.
    try:
        import modelopt.torch.quantization.backends.fp8_per_tensor_gemm  # noqa: F401
        from modelopt.torch.opt import enable_huggingface_checkpointing
    except ImportError as error:
        raise ImportError(
            describe_error(
                "ModelOpt can't be imported",
                where="modelopt.torch.quantization.backends.fp8_per_tensor_gemm",
                expected="nvidia-modelopt 0.44",
                found=f"{type(error).__name__}: {error}",
                remedy="pip install nvidia-modelopt==0.44.0",
            )
        ) from error
    check_gemm_registered()
    # 2. From here on from_pretrained rebuilds ModelOpt's linears from modelopt_state.pth before it
    #    loads weights. Without it the FP8 codes land in plain torch.nn.Linear, without a scale.
    enable_huggingface_checkpointing()
    check_restore_enabled()
    check_checkpoint(model, revision)
    # 3. Only now the weights.
    default_dtype = torch.get_default_dtype()
    try:
        pipeline = Cosmos3OmniPipeline.from_pretrained(
            model, revision=revision, dtype=torch.bfloat16
        )
    except (EOFError, LookupError, pickle.UnpicklingError) as error:
        raise ValueError(
            describe_error(
                "ModelOpt's state can't be read",
                where=f"{model}/transformer/{STATE_FILE}",
                expected="what modelopt's save_pretrained wrote",
                found=f"{type(error).__name__}: {error}",
                remedy="download the file again, or save the quantised transformer once more",
            )
        ) from error
    finally:
        torch.set_default_dtype(default_dtype)  # diffusers leaves bfloat16 when it fails
    check_linears(pipeline.transformer)
    return pipeline


def check_gemm_registered() -> None:
    """Raise ValueError unless ModelOpt's FP8 GEMM is in its registry."""
    from modelopt.torch.quantization.backends import fp8_per_tensor_gemm
    from modelopt.torch.quantization.backends.gemm_registry import gemm_registry

    if fp8_per_tensor_gemm.Fp8PerTensorLinear.apply not in gemm_registry:
        raise ValueError(
            describe_error(
                "ModelOpt's FP8 GEMM is not registered",
                where="modelopt.torch.quantization.backends.gemm_registry",
                expected="Fp8PerTensorLinear.apply",
                found="no such entry",
                remedy="import modelopt.torch.quantization.backends.fp8_per_tensor_gemm in this "
                "process, before the first generation",
            )
        )


def check_restore_enabled() -> None:
    """Raise ValueError unless ModelOpt has taken over diffusers' from_pretrained."""
    from modelopt.torch.opt.plugins.huggingface import _PATCHED_CLASSES

    if ModelMixin not in _PATCHED_CLASSES:
        raise ValueError(
            describe_error(
                "diffusers' from_pretrained would not restore ModelOpt's linears",
                where="diffusers.ModelMixin",
                expected="a class that enable_huggingface_checkpointing() has patched",
                found="an unpatched one",
                remedy="call modelopt.torch.opt.enable_huggingface_checkpointing() before "
                "from_pretrained, with diffusers importable when modelopt is imported",
            )
        )


def check_checkpoint(model: str, revision: str | None) -> None:
    """Raise ValueError for a checkpoint that diffusers 0.42.1 can't restore. Reads no weights.

    Of a Hub id it fetches ``transformer/config.json`` and ``transformer/modelopt_state.pth``: the
    pipeline's own download leaves the latter out, and would then load plain layers.
    """
    where = f"{model}/transformer"
    config = Cosmos3OmniTransformer.load_config(model, subfolder="transformer", revision=revision)
    recipe = config.get("quantization_config")
    declared = recipe if isinstance(recipe, dict) else {}
    algorithm = declared.get("quant_algo") or declared.get("quant_type")
    if declared.get("quant_method") != "modelopt" or "FP8" not in str(algorithm):
        raise ValueError(
            describe_error(
                "The checkpoint declares no ModelOpt FP8 weights",
                where=f"{where}/config.json, quantization_config",
                expected='quant_method "modelopt" with an FP8 quant_algo or quant_type',
                found=f"{declared.get('quant_method')!r} with {algorithm!r}",
                remedy='use the checkpoint\'s revision "fp8"',
            )
        )
    if not recipe.get("modelopt_config"):
        raise ValueError(
            describe_error(
                "diffusers 0.42.1 can't read this recipe with ModelOpt 0.44",
                where=f"{where}/config.json, quantization_config",
                expected="a modelopt_config",
                found=f"keys {sorted(recipe)}",
                remedy="add the config that the weights were quantised with as modelopt_config",
            )
        )
    if not _has_state_file(model, revision):
        raise ValueError(
            describe_error(
                "The checkpoint has nothing to restore ModelOpt's linears from",
                where=where,
                expected=STATE_FILE,
                found="no such file",
                remedy="save the quantised transformer once with save_pretrained after "
                f"enable_huggingface_checkpointing(), which writes the file; see {DOCS}",
            )
        )


def _has_state_file(model: str, revision: str | None) -> bool:
    folder = Path(model) / "transformer"
    if folder.is_dir():
        return (folder / STATE_FILE).is_file()
    try:
        hf_hub_download(model, STATE_FILE, subfolder="transformer", revision=revision)
    except EntryNotFoundError:
        return False
    return True


def fp8_linears(transformer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every linear with FP8 weights."""
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and module.weight.dtype == FP8:
            yield name, module


def check_linears(transformer: nn.Module) -> None:
    """Raise ValueError unless the FP8 weights are in ModelOpt's linears, with calibrated scales."""
    linears = dict(fp8_linears(transformer))
    judged = ((name, linear_problem(linear)) for name, linear in linears.items())
    problems = [f"{name}: {problem}" for name, problem in judged if problem is not None]
    for name, tensor in chain(transformer.named_parameters(), transformer.named_buffers()):
        if tensor.is_meta:
            problems.append(f"{name}: was not loaded")
    if linears and not problems:
        return
    found = f"{len(linears)} FP8 linears, {len(problems)} problems ({'; '.join(problems[:3])})"
    raise ValueError(
        describe_error(
            "The FP8 linears were not restored",
            where=getattr(transformer.config, "_name_or_path", None) or "transformer",
            expected="float8_e4m3fn weights in ModelOpt's quantised linears with their scales",
            found=found if linears else "no FP8 weight at all",
            remedy="call enable_huggingface_checkpointing() first and use a checkpoint with "
            f"{STATE_FILE} and ModelOpt's own buffers; see {DOCS}",
        )
    )


def linear_problem(linear: nn.Module) -> str | None:
    """Why an FP8 linear can't serve both precision modes, or None."""
    quantizers = [getattr(linear, f"{kind}_quantizer", None) for kind in ("weight", "input")]
    if None in quantizers or not hasattr(linear, "_should_run_real_quant_gemm"):
        return f"a plain {type(linear).__name__}"
    if not all(quantizer.is_enabled for quantizer in quantizers):
        return "a quantiser is off"
    if not linear._should_run_real_quant_gemm:
        return "its FP8 GEMM is switched off"
    weight, inputs = quantizers
    scales = {
        "weight_quantizer._amax": getattr(weight, "_amax", None),
        "weight_quantizer._scale": getattr(weight, "_scale", None),
        "input_quantizer._amax": getattr(inputs, "_amax", None),
    }
    for name, value in scales.items():
        # A buffer that the file does not have stays on meta, or is memory that nobody wrote.
        if value is None or value.is_meta or value.numel() != 1:
            return f"{name} was not loaded"
        if not (torch.isfinite(value).all() and (value > 0).all()):
            return f"{name} is {float(value)}"
    ratio = float(weight._scale) * E4M3_MAX / float(weight._amax)
    if abs(ratio - 1) > SCALE_TOLERANCE:
        return f"weight_quantizer._scale is {ratio:.3g} times _amax / {E4M3_MAX:g}"
    return None


def needs_fp8_gemm(transformer: nn.Module, num_inference_steps: int) -> bool:
    """Whether any linear runs W8A8 at any step of a request of this length."""
    precision = Cosmos3MixedPrecisionConfig.resolve(transformer)
    if not precision.enabled or precision.reasoner_policy != "high_precision":
        return True
    return not all(
        precision.use_high_precision(step, num_inference_steps)
        for step in range(num_inference_steps)
    )


@torch.no_grad()
def check_fp8_gemm(transformer: nn.Module) -> None:
    """Try the FP8 GEMM of every shape once, where the transformer is.

    Raises:
        ValueError: a linear for which ModelOpt finds none, or one that fails.
    """
    from modelopt.torch.quantization.backends.gemm_registry import gemm_registry

    device = next(transformer.parameters()).device
    tried = set()
    for name, linear in fp8_linears(transformer):
        problem = None
        if device.type != "cuda" or gemm_registry.find_match(linear, None) is None:
            problem = f"ModelOpt has no FP8 GEMM for it on {device}"
        elif linear.weight.shape not in tried:
            tried.add(linear.weight.shape)
            shape = (GEMM_ROWS, linear.in_features)
            try:
                output = linear(torch.ones(shape, dtype=torch.bfloat16, device=device))
                if not bool(torch.isfinite(output).all()):
                    problem = "it gives values that are not finite"
            except (RuntimeError, ValueError, AssertionError) as error:
                problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            raise ValueError(
                describe_error(
                    "A step of this request runs W8A8, and the FP8 GEMM for it does not work",
                    where=name,
                    expected="CUDA with sm_89 or newer, and scales for both operands",
                    found=problem,
                    remedy="run on such a GPU; without one, take few enough steps that the "
                    "checkpoint's policy makes all of them W8A16 (2 to 6 of the published one)",
                )
            )


def prepare(
    model: str, revision: str | None, num_inference_steps: int, device: torch.device
) -> Cosmos3OmniPipeline:
    """Load a pipeline on a device, with everything tried that this many steps will need."""
    pipeline = load_pipeline(model, revision).to(device)
    if needs_fp8_gemm(pipeline.transformer, num_inference_steps):
        check_fp8_gemm(pipeline.transformer)
    return pipeline


def resolve_output(
    output_type: str, output_path: Path | None, num_frames: int | None
) -> tuple[Path, int]:
    """Name of the file and number of frames; raises ValueError where the options contradict."""
    suffix = OUTPUT_FILES[output_type]
    path = output_path or Path(f"hf_cosmos3_output.{suffix}")
    frames = num_frames or (1 if output_type == "image" else 189)
    rules = [
        ("--output_path", path.suffix == f".{suffix}", f"a name that ends in .{suffix}", path),
        ("--output_path", path.parent.is_dir(), "a file in an existing folder", path),
        ("--num_frames", (frames == 1) or output_type != "image", "1 for an image", frames),
    ]
    for where, holds, expected, found in rules:
        if not holds:
            raise ValueError(
                describe_error(
                    f"The options don't fit --output_type {output_type}",
                    where=where,
                    expected=expected,
                    found=found,
                    remedy=f"correct {where}, or leave it out",
                )
            )
    return path, frames


def save(video: Any, output_type: str, path: Path) -> None:
    """Write what the pipeline returned: latents, or PIL frames."""
    if output_type == "latent":
        from safetensors.torch import save_file

        save_file({"latents": video.contiguous().cpu()}, path)
    elif output_type == "image":
        video[0].save(path)
    else:
        from diffusers.utils import encode_video

        encode_video(video, fps=int(FPS), output_path=str(path))


@click.command(context_settings={"show_default": True})
@click.option("--model", required=True, help="Checkpoint folder or Hub id.")
@click.option("--revision", default="fp8", help="Branch, tag or commit of a Hub id.")
@click.option("--prompt", required=True)
@click.option("--negative_prompt", default="")
@click.option("--output_path", type=click.Path(path_type=Path), help="safetensors, png or mp4.")
@click.option("--height", type=int, default=720)
@click.option("--width", type=int, default=1280)
@click.option("--num_frames", type=click.IntRange(min=1), help="[default: 189, of an image 1]")
@click.option("--num_inference_steps", type=click.IntRange(min=1), default=35)
@click.option("--guidance_scale", type=float, default=6.0)
@click.option("--seed", type=int, default=0)
@click.option("--output_type", type=click.Choice(list(OUTPUT_FILES)), default="video")
def main(
    model: str,
    revision: str,
    output_path: Path | None,
    num_frames: int | None,
    num_inference_steps: int,
    seed: int,
    output_type: str,
    **request: Any,
) -> None:
    """Generate with diffusers and ModelOpt FP8, after checking that both are set up."""
    try:
        path, frames = resolve_output(output_type, output_path, num_frames)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        pipeline = prepare(model, revision, num_inference_steps, device)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    output = pipeline(
        num_frames=frames,
        num_inference_steps=num_inference_steps,
        fps=FPS,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent" if output_type == "latent" else "pil",
        **request,
    )
    # What diffusers calls generation, which is not the generation tower: see DOCS.
    click.echo(f"Steps, by diffusers' labels: {' '.join(pipeline._mixed_precision_trace)}")
    save(output.video, output_type, path)
    click.echo(f"Saved {path}")


if __name__ == "__main__":
    main()
