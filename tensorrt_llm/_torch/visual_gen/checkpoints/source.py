# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint comes from: a local folder, or a Hub repository at one revision.

``huggingface_hub`` does the transport, the cache and the authentication, with its own environment
variables. This module says which files are needed, has all of them come from one commit, and turns
what can go wrong into one message each. The types of the errors:

* ValueError: the caller named something that isn't there (a folder, a repository, a revision).
* PermissionError: the repository is gated, or the token is refused.
* ConnectionError: the Hub was needed and could not be reached, or the transfer broke off.

Each keeps the library's own exception as its cause. Importing this module costs neither torch nor
``huggingface_hub``.
"""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorrt_llm._torch.visual_gen.checkpoints.layout import (
    DESCRIPTIONS,
    missing_files,
    weight_files,
)
from tensorrt_llm._utils import describe_error

_SHOWN_FILES = 5
# No Hub id has any of these: it is "name" or "owner/name" of letters, digits, "-", "_" and ".".
_LOOKS_LOCAL = re.compile(r"[./~]|.*\\|.*/.*/|.*/$|[A-Za-z]:")


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


def resolve_source(model: str | None, revision: str | None) -> CheckpointSource:
    """Find ``model`` on disk, or fetch what is needed of it from the Hub at ``revision``.

    An existing folder wins over a Hub id of the same spelling. With ``HF_HUB_OFFLINE=1``, or
    without network, the Hub's cache serves.

    Args:
        model: A folder or a Hub id.
        revision: Branch, tag or commit of a Hub repository; None is its default branch.

    Raises:
        ValueError: no model; a folder that isn't there or is no pipeline; a folder with a revision;
            a name that is neither folder nor Hub id; a repository or revision that doesn't exist.
        PermissionError: a gated repository; a refused token.
        ConnectionError: offline, or without network, and not (or not wholly) in the cache; a
            transfer that broke off.
    """
    if not model:
        raise ValueError(
            describe_error(
                "No model was named",
                where="VisualGenArgs.model",
                expected="a folder in the diffusers layout, or a Hub id",
                found=repr(model),
                remedy=(
                    "set model to a checkpoint folder, or to a Hub id such as nvidia/Cosmos3-Nano"
                ),
            )
        )
    folder = Path(model).expanduser()
    if folder.exists():
        refuse_revision_of_folder(model, revision)
        return _local_source(model, folder)
    if _LOOKS_LOCAL.match(model):
        raise ValueError(
            describe_error(
                "The checkpoint folder does not exist",
                where=_where(model, revision),
                expected="an existing folder with model_index.json",
                found="no such path",
                remedy="correct the path; a Hub id has the form owner/name",
            )
        )
    path = _fetch(model, revision, DESCRIPTIONS)
    if missing_files(path):
        _fetch(model, revision, [glob.escape(file) for file in weight_files(path)], snapshot=path)
        _refuse_incomplete_cache(model, revision, path)
    return CheckpointSource(path, model, revision, commit=path.name)


def refuse_revision_of_folder(model: str, revision: str | None) -> None:
    """Raise ValueError for a revision beside an existing path: a folder has one state."""
    if revision is not None and Path(model).expanduser().exists():
        raise ValueError(
            describe_error(
                "A revision for a local checkpoint",
                where="VisualGenArgs.revision",
                expected="None, since a local folder has one state",
                found=f"{revision!r} with {model!r}",
                remedy="leave revision out; to fetch a Hub repository of that name, start where no "
                "such folder is",
            )
        )


def _local_source(model: str, folder: Path) -> CheckpointSource:
    if not (folder / "model_index.json").is_file():
        raise ValueError(
            describe_error(
                "Not a pipeline folder",
                where=_where(model, None),
                expected="model_index.json and the component folders beside it",
                found="no model_index.json" if folder.is_dir() else "a file",
                remedy="pass the checkpoint's root folder, not one of its components",
            )
        )
    return CheckpointSource(folder, model, None, None)


def _fetch(
    model: str, revision: str | None, patterns: Sequence[str], snapshot: Path | None = None
) -> Path:
    """Have the files that match in the Hub's cache, and return the snapshot's folder.

    Args:
        model: Hub id.
        revision: The caller's.
        patterns: Of paths in the repository.
        snapshot: What an earlier call returned. Its commit is what is fetched then: a branch that
            moves meanwhile can't mix two states.
    """
    # Here, because VisualGenArgs imports this module and has no use for the library.
    from huggingface_hub import snapshot_download

    try:
        commit = revision if snapshot is None else snapshot.name
        return Path(snapshot_download(model, revision=commit, allow_patterns=list(patterns)))
    except Exception as error:
        # All of them: what a broken transfer raises depends on the library's version and on the
        # storage behind it (httpx, httpx2, hf_xet, OSError for a full disk).
        raise _explain(error, _where(model, revision), snapshot) from error


def _explain(error: Exception, where: str, snapshot: Path | None) -> Exception:
    """The library's exception as one of ours, with a message of its own."""
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return ValueError(
            describe_error(
                "Neither a folder nor a Hub id",
                where=where,
                expected="an existing folder, or a Hub id of the form owner/name",
                found=_first_line(error),
                remedy="check the spelling: a folder of this machine, or owner/name",
            )
        )
    if isinstance(error, errors.GatedRepoError):
        return PermissionError(
            describe_error(
                "The repository is gated, and this account has no access to it",
                where=where,
                expected="an account that has accepted the repository's terms",
                found="the Hub denies access",
                remedy="accept the terms on the repository's page, then log in with "
                "`hf auth login` or set HF_TOKEN",
            )
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ValueError(
            describe_error(
                "No such repository on the Hub, and no such folder here",
                where=where,
                expected="a folder, or a repository that this account can read",
                found="neither",
                remedy=(
                    "correct the name; for a private repository log in with `hf auth login` or "
                    "set HF_TOKEN"
                ),
            )
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ValueError(
            describe_error(
                "The repository has no such revision",
                where=where,
                expected="a branch, tag or commit of the repository",
                found="the Hub knows none of that name",
                remedy="correct the revision; without one the default branch is used",
            )
        )
    refusal = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
    if isinstance(refusal, errors.HfHubHTTPError) and refusal.response.status_code in (401, 403):
        return PermissionError(
            describe_error(
                "The Hub refuses access with this token",
                where=where,
                expected="a valid token that may read the repository, or none",
                found=f"HTTP status {refusal.response.status_code}",
                remedy="log in again with `hf auth login`, or correct HF_TOKEN",
            )
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return _explain_cache(error, where, snapshot)
    return ConnectionError(
        describe_error(
            "The download broke off",
            where=where,
            expected="every file of the pipeline, whole",
            found=f"{type(error).__name__}: {_first_line(error)}",
            remedy="start again: files that are complete are not fetched twice; see that the disk "
            "has room",
        )
    )


def _explain_cache(error: Exception, where: str, snapshot: Path | None) -> ConnectionError:
    """Not in the cache, or not wholly, and the Hub may not or can't be asked."""
    snapshot = getattr(error, "snapshot_path", snapshot)
    if snapshot is not None:
        return _incomplete_cache(where, missing_files(Path(snapshot)) or [_first_line(error)])
    if _is_offline():
        return ConnectionError(
            describe_error(
                "Offline, and the checkpoint is not in the cache",
                where=where,
                expected=f"a snapshot of this revision in {_cache_folder()}",
                found="none, and HF_HUB_OFFLINE forbids fetching it",
                remedy="unset HF_HUB_OFFLINE and start once, or set HF_HOME to a cache that has it",
            )
        )
    return ConnectionError(
        describe_error(
            "The Hub can't be reached, and the checkpoint is not in the cache",
            where=where,
            expected=f"an answer, or a snapshot of this revision in {_cache_folder()}",
            found=_first_line(error.__cause__ or error),
            remedy="see to the network (proxy, HF_ENDPOINT), or start again when the Hub answers",
        )
    )


def _refuse_incomplete_cache(model: str, revision: str | None, path: Path) -> None:
    """Refuse a snapshot that lacks files, where the Hub may not be asked whether it has them.

    Online, a file that is still missing isn't in the repository; the loader refuses that by name.
    """
    missing = missing_files(path)
    if missing and _is_offline():
        raise _incomplete_cache(_where(model, revision), missing)


def _incomplete_cache(where: str, missing: list[str]) -> ConnectionError:
    return ConnectionError(
        describe_error(
            "The cached checkpoint is incomplete, and the Hub can't be asked for the rest",
            where=where,
            expected="every file of the pipeline in the cache",
            found=f"{len(missing)} missing: {', '.join(missing[:_SHOWN_FILES])}",
            remedy="start once with network and without HF_HUB_OFFLINE: only what is missing is "
            "fetched",
        )
    )


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _cache_folder() -> str:
    from huggingface_hub import constants

    return os.fspath(constants.HF_HUB_CACHE)


def _where(model: str, revision: str | None) -> str:
    asked = "" if revision is None else f", revision {revision!r}"
    return f"model {model!r}{asked}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
