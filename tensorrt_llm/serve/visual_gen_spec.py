# SPDX-License-Identifier: Apache-2.0
"""``VisualGen`` as what the worker process loads."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorrt_llm.serve.worker_client import WorkerSpec
from tensorrt_llm.visual_gen.args import VisualGenArgs

if TYPE_CHECKING:
    from tensorrt_llm.visual_gen.visual_gen import VisualGen


def visual_gen_spec(model: str | os.PathLike[str], args: VisualGenArgs) -> WorkerSpec:
    """What serves a checkpoint.

    Args:
        model: Folder or Hub id. A folder is served under its own name, without its path.
        args: The options of ``VisualGen``.
    """
    name = os.fspath(model)
    folder = Path(name)
    return WorkerSpec(
        factory=f"{__name__}:load_visual_gen",
        # Fields that weren't set stay so: a default that is filled in may mean something else.
        options={"model": name, "args": args.model_dump(mode="json", exclude_unset=True)},
        model=folder.resolve().name if folder.is_dir() else name,
        aliases=(name,),
    )


def load_visual_gen(model: str, args: dict[str, Any]) -> "VisualGen":
    """Load it; in the worker process."""
    from tensorrt_llm.visual_gen.visual_gen import VisualGen

    return VisualGen(model, VisualGenArgs(**args))
