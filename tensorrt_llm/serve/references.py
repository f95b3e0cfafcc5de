# SPDX-License-Identifier: Apache-2.0
"""Reference media of a request, to a file that the worker reads: uploads, URLs, data URIs.

Nothing is decoded here: a hostile file meets its decoder in the worker process.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from tensorrt_llm.serve.media_folder import MediaFolder
from tensorrt_llm.serve.settings import ServeSettings
from tensorrt_llm.visual_gen.media_formats import HEAD_BYTES, format_of_suffix, kind_of, sniff
from tensorrt_llm.visual_gen.media_policy import MediaPolicy, bad_media
from tensorrt_llm.visual_gen.media_source import open_source

_KIND_OF_FIELD = {"image_reference": "image", "video_reference": "video"}


@dataclass(frozen=True)
class Reference:
    """One reference as it was sent.

    Attributes:
        field: "image_reference", "video_reference" or "input_reference".
        source: An http(s) URL or a ``data:`` URI, or an uploaded file.
    """

    field: str
    source: str | BinaryIO


def media_policy(settings: ServeSettings) -> MediaPolicy:
    """The limits on references that clients name."""
    return MediaPolicy(
        allow_local_paths=settings.allow_local_media,
        allow_private_addresses=settings.allow_private_addresses,
    )


def keep_reference(
    reference: Reference, job_id: str, folder: MediaFolder, policy: MediaPolicy
) -> tuple[str, Path]:
    """Copy a reference into the media folder. Blocks, for a URL until it is fetched.

    Returns:
        The field of ``VisualGenParams`` and the path of the copy.

    Raises:
        MediaError: (a ValueError) it can't be had, is forbidden or of the wrong kind.
        StorageFullError: there is no room.
    """
    if isinstance(reference.source, str):
        kind = _KIND_OF_FIELD.get(reference.field) or _kind_of_uri(reference.source)
        with open_source(reference.source, kind, policy) as media:
            path = folder.save_upload(f"{job_id}-{kind}", media.file, media.size)
    else:
        kind = _kind_of_file(reference)
        size = reference.source.seek(0, os.SEEK_END)
        reference.source.seek(0)
        path = folder.save_upload(f"{job_id}-{kind}", reference.source, size)
    return f"{kind}_reference", path


def _kind_of_uri(uri: str) -> str:
    """ "image" or "video", by what a URI says of itself; its content is checked later."""
    if uri.lower().startswith("data:"):
        return "video" if uri[5:11].lower() == "video/" else "image"
    try:
        path = urlsplit(uri).path
    except ValueError:
        path = uri
    return kind_of(format_of_suffix(os.path.splitext(path)[1]) or "") or "image"


def _kind_of_file(reference: Reference) -> str:
    """ "image" or "video" of an uploaded file, by its bytes."""
    found = sniff(reference.source.read(HEAD_BYTES))
    kind, wanted = kind_of(found), _KIND_OF_FIELD.get(reference.field)
    if kind is None or wanted not in (None, kind):
        raise bad_media(
            "The uploaded file can't serve as reference",
            reference.field,
            expected="an image" if wanted == "image" else wanted or "an image or a video",
            found=found,
            remedy="upload a file of that kind, or put it in the other reference field",
        )
    return kind
