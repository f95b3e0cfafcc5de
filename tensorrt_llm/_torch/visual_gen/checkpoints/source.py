# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint comes from: a local folder, or a Hub repository at one revision."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download

from tensorrt_llm._utils import describe_error

# What a pipeline reads. Examples, pickled states and the reasoner's vision tower stay on the Hub.
_NEEDED_FILES = [
    "model_index.json",
    "transformer/*.json",
    "transformer/*.safetensors",
    "vae/*",
    "scheduler/*",
    "text_tokenizer/*",
    "assets/negative_prompt.json",
]


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint on disk and what was asked for.

    Attributes:
        path: Folder that holds model_index.json.
        model: The caller's name of it.
        revision: The caller's branch, tag or commit; None for a folder.
        commit: The Hub commit that the files belong to; None for a folder.
    """

    path: Path
    model: str
    revision: str | None
    commit: str | None


def resolve_source(model: str, revision: str | None) -> CheckpointSource:
    """Find ``model`` on disk, or fetch what is needed of it from the Hub at ``revision``.

    Raises:
        ValueError: a folder that is no pipeline. (A folder with a revision is refused by
            VisualGenArgs already.)
        huggingface_hub.errors.HfHubHTTPError: the Hub's own refusals, unchanged.
    """
    folder = Path(model).expanduser()
    if not folder.exists():
        path = Path(snapshot_download(model, revision=revision, allow_patterns=list(_NEEDED_FILES)))
        return CheckpointSource(path, model, revision, commit=path.name)
    if not (folder / "model_index.json").is_file():
        raise ValueError(
            describe_error(
                "Not a pipeline folder",
                where=f"VisualGenArgs.model = {model!r}",
                expected="model_index.json and the component folders beside it",
                found="no model_index.json",
                remedy="pass the checkpoint's root folder, not one of its components",
            )
        )
    return CheckpointSource(folder, model, None, None)
