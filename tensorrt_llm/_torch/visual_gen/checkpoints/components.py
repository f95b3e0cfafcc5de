# SPDX-License-Identifier: Apache-2.0
"""The parts beside the transformer, judged before anything large is read.

diffusers and transformers would find most of these faults only after the transformer is loaded, and
a VAE that lacks a tensor they fill with random values.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorrt_llm._torch.visual_gen.checkpoints.config_values import (
    FLAG,
    NUMBER,
    POSITIVE_INTEGER,
    POSITIVE_NUMBER,
    Rule,
    check_values,
    list_of,
    or_null,
)
from tensorrt_llm._torch.visual_gen.checkpoints.json_files import read_json_object, unreadable
from tensorrt_llm._torch.visual_gen.checkpoints.layout import missing_descriptions
from tensorrt_llm._torch.visual_gen.checkpoints.problems import (
    MISSING,
    MISSING_FILE,
    SHAPE,
    Problems,
)
from tensorrt_llm._torch.visual_gen.checkpoints.safetensors_folder import SafetensorsFolder
from tensorrt_llm._utils import describe_error

_SCHEDULERS = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")
# Of the 4-step builds, read by `Cosmos3SamplingPolicy`. diffusers' scheduler has no such arguments
# and would warn that they are ignored.
_FIXED_STEP_FIELDS = ("fixed_step_sampler_config", "fixed_step_requires_explicit_sigmas")
# What of a component's configuration this package computes with.
_SCHEDULER_RULES = {
    "num_train_timesteps": POSITIVE_INTEGER,
    "solver_order": POSITIVE_INTEGER,
    "flow_shift": POSITIVE_NUMBER,
    "shift": POSITIVE_NUMBER,
    "sigma_min": or_null(POSITIVE_NUMBER),
    "sigma_max": or_null(POSITIVE_NUMBER),
    "use_karras_sigmas": FLAG,
}
_VAE_RULES = {
    "z_dim": POSITIVE_INTEGER,
    "base_dim": POSITIVE_INTEGER,
    "decoder_base_dim": or_null(POSITIVE_INTEGER),
    "dim_mult": list_of(POSITIVE_INTEGER),
    "num_res_blocks": POSITIVE_INTEGER,
    "temperal_downsample": list_of(FLAG),
    "in_channels": POSITIVE_INTEGER,
    "out_channels": POSITIVE_INTEGER,
    "patch_size": or_null(POSITIVE_INTEGER),
    "latents_mean": list_of(NUMBER),
    "latents_std": list_of(POSITIVE_NUMBER),
}
_SOUND_RULES = {
    "sampling_rate": POSITIVE_INTEGER,
    "vocoder_input_dim": POSITIVE_INTEGER,
    "hop_size": or_null(POSITIVE_INTEGER),
    "dec_dim": POSITIVE_INTEGER,
    "dec_c_mults": list_of(POSITIVE_INTEGER),
    "dec_strides": list_of(POSITIVE_INTEGER),
    "dec_out_channels": POSITIVE_INTEGER,
}
# Pixels and frames of one latent cell, on which sizes and lengths of requests are built
# (cosmos3.md B.2).
_VAE_FACTORS = {"space": 16, "time": 4}


def check_files(root: Path) -> None:
    """Raise ValueError, naming all of them, if small files of the pipeline are missing.

    Weight files are judged, with the tensors that they should hold, by whoever opens them.
    """
    problems = Problems()
    for file in missing_descriptions(root):
        problems.add(MISSING_FILE, file)
    problems.raise_if_any("The checkpoint is incomplete", root, "every file of the pipeline")


def read_scheduler(root: Path) -> Any:
    """The checkpoint's scheduler object; UniPC where an older file names no class.

    Raises:
        ValueError: a scheduler of another family, values without sense, or a configuration that
            can't be read.
    """
    import diffusers

    path = root / "scheduler" / "scheduler_config.json"
    config = read_json_object(path)
    name = config.get("_class_name") or _SCHEDULERS[0]
    if name not in _SCHEDULERS:
        raise ValueError(
            describe_error(
                "Unknown scheduler",
                where=f"{path}, _class_name",
                expected=f"one of {_SCHEDULERS}",
                found=repr(name),
                remedy="restore the scheduler folder that was published with the checkpoint",
            )
        )
    check_values(config, _SCHEDULER_RULES, path)
    _check_sigmas(config, path)
    try:
        known = {key: value for key, value in config.items() if key not in _FIXED_STEP_FIELDS}
        scheduler = getattr(diffusers, name).from_config(known)
    except Exception as error:  # whatever diffusers makes of bad fields
        raise unreadable(path, f"a configuration of {name}", error) from error
    scheduler.register_to_config(**{key: config[key] for key in config.keys() - known.keys()})
    return scheduler


def plan_vae(root: Path) -> nn.Module:
    """Match the VAE's files with the model that its configuration describes, by headers alone.

    Returns:
        The VAE on the meta device.

    Raises:
        ValueError: a configuration that can't be used; all missing tensors and wrong shapes.
        NotImplementedError: a VAE of another compression than the family's.
    """
    folder = root / "vae"
    vae = _plan_module(folder, "AutoencoderKLWan", _VAE_RULES)
    config, path = vae.config, folder / "config.json"
    statistics = {name: getattr(config, name) for name in ("latents_mean", "latents_std")}
    check_values(statistics, dict.fromkeys(statistics, list_of(NUMBER, config.z_dim)), path)
    found = {
        "space": 2 ** (len(config.dim_mult) - 1) * (config.patch_size or 1),
        "time": 2 ** sum(config.temperal_downsample),
    }
    if found != _VAE_FACTORS:
        raise NotImplementedError(
            describe_error(
                "A VAE of this compression is not supported",
                where=f"{path}, dim_mult, patch_size and temperal_downsample",
                expected=f"{_VAE_FACTORS['space']} pixels and {_VAE_FACTORS['time']} frames a cell",
                found=f"{found['space']} pixels and {found['time']} frames",
                remedy="use the vae folder that was published with the checkpoint",
            )
        )
    return vae


def plan_sound_tokenizer(root: Path) -> nn.Module | None:
    """The same for the sound tokenizer; None for a checkpoint without one.

    Its encoder may be missing as a whole: generation only decodes.
    """
    folder = root / "sound_tokenizer"
    if not folder.is_dir():
        return None
    return _plan_module(folder, "Cosmos3AVAEAudioTokenizer", _SOUND_RULES, optional="encoder.")


def _check_sigmas(config: dict[str, Any], path: Path) -> None:
    """Raise ValueError where the schedule's noise levels run the wrong way."""
    low, high = config.get("sigma_min"), config.get("sigma_max")
    if low is not None and high is not None and low >= high:
        raise ValueError(
            describe_error(
                "The scheduler's noise levels run the wrong way",
                where=f"{path}, sigma_min and sigma_max",
                expected="sigma_min below sigma_max",
                found=f"{low} and {high}",
                remedy="restore this file from the published checkpoint",
            )
        )


def _plan_module(
    folder: Path, class_name: str, rules: dict[str, Rule], optional: str | None = None
) -> nn.Module:
    """Tensors that the model has no place for do no harm and are left alone, as diffusers does.

    Args:
        folder: Holds config.json and the weights.
        class_name: Of diffusers.
        rules: What its configuration's values have to be.
        optional: Names with this prefix may all be missing.
    """
    import diffusers

    config = read_json_object(folder / "config.json")
    check_values(config, rules, folder / "config.json")
    weights = SafetensorsFolder(folder)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # diffusers normalises the sound decoder's weights in a way that torch calls old.
            warnings.simplefilter("ignore", FutureWarning)
            module = getattr(diffusers, class_name).from_config(config)
    except Exception as error:  # whatever diffusers makes of bad fields
        path = folder / "config.json"
        raise unreadable(path, f"a configuration of {class_name}", error) from error
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    if optional is not None and not any(name.startswith(optional) for name in weights):
        wanted = {n: shape for n, shape in wanted.items() if not n.startswith(optional)}
    problems = Problems()
    for name, shape in wanted.items():
        if name not in weights:
            problems.add(MISSING, name)
        elif weights.spec(name).shape != shape:
            problems.add(SHAPE, f"{name}: {shape} expected, {weights.spec(name).shape} found")
    problems.raise_if_any(
        "The files of a component don't fit its config.json",
        folder,
        f"every tensor of {class_name}",
    )
    return module
