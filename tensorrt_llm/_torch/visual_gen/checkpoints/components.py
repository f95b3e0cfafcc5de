# SPDX-License-Identifier: Apache-2.0
"""The parts beside the transformer, judged before anything large is read.

diffusers and transformers would find most of these faults only after the transformer is loaded, and
a VAE that lacks a tensor they fill with random values.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

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


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint.

    Raises:
        ValueError: it can't be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, "JSON", error) from error


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
        ValueError: a scheduler of another family, or a configuration that can't be read.
    """
    import diffusers

    folder = root / "scheduler"
    path = folder / "scheduler_config.json"
    config = read_json(path)
    name = (config.get("_class_name") if isinstance(config, dict) else None) or _SCHEDULERS[0]
    if name not in _SCHEDULERS:
        raise ValueError(
            describe_error(
                "Unknown scheduler",
                where=f"{path}, _class_name",
                expected=f"one of {_SCHEDULERS}",
                found=repr(name),
                remedy="use the checkpoint's own scheduler folder",
            )
        )
    try:
        return getattr(diffusers, name).from_pretrained(folder)
    except Exception as error:  # whatever diffusers makes of bad fields
        raise _unreadable(path, f"a configuration of {name}", error) from error


def read_tokenizer(root: Path) -> Any:
    """The checkpoint's text tokenizer.

    Raises:
        ValueError: it can't be read.
    """
    from transformers import AutoTokenizer

    folder = root / "text_tokenizer"
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises nearly everything here
        raise _unreadable(folder, "a tokenizer that transformers reads", error) from error


def plan_vae(root: Path) -> nn.Module:
    """Match the VAE's files with the model that its configuration describes, by headers alone.

    Returns:
        The VAE on the meta device.

    Raises:
        ValueError: a configuration that can't be used; all missing tensors and wrong shapes.
    """
    return _plan_module(root / "vae", "AutoencoderKLWan")


def plan_sound_tokenizer(root: Path) -> nn.Module | None:
    """The same for the sound tokenizer; None for a checkpoint without one.

    Its encoder may be missing as a whole: generation only decodes.
    """
    folder = root / "sound_tokenizer"
    if not folder.is_dir():
        return None
    return _plan_module(folder, "Cosmos3AVAEAudioTokenizer", optional="encoder.")


def _plan_module(folder: Path, class_name: str, optional: str | None = None) -> nn.Module:
    """Tensors that the model has no place for do no harm and are left alone, as diffusers does.

    Args:
        folder: Holds config.json and the weights.
        class_name: Of diffusers.
        optional: Names with this prefix may all be missing.
    """
    import diffusers

    config = read_json(folder / "config.json")
    weights = SafetensorsFolder(folder)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # diffusers normalises the sound decoder's weights in a way that torch calls old.
            warnings.simplefilter("ignore", FutureWarning)
            module = getattr(diffusers, class_name).from_config(config)
    except Exception as error:  # whatever diffusers makes of bad fields
        path = folder / "config.json"
        raise _unreadable(path, f"a configuration of {class_name}", error) from error
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


def _unreadable(path: Path, expected: str, error: Exception) -> ValueError:
    return ValueError(
        describe_error(
            "A checkpoint file can't be read",
            where=path,
            expected=expected,
            found=f"{type(error).__name__}: {error}",
            remedy="download it again",
        )
    )
