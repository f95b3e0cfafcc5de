# SPDX-License-Identifier: Apache-2.0
"""From a reference to encoded bytes of a known format: paths, file:, data:, http(s): and bytes."""

import base64
import binascii
import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from tensorrt_llm.visual_gen.media_fetch import describe_url, fetch
from tensorrt_llm.visual_gen.media_formats import (
    ACCEPTED,
    FORMATS,
    HEAD_BYTES,
    format_of_mime,
    format_of_suffix,
    kind_of,
    sniff,
)
from tensorrt_llm.visual_gen.media_policy import LOCAL_PATHS_OFF, MediaPolicy, bad_media, shorten

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_FIELDS = {"image": "image_reference", "video": "video_reference"}


@dataclass(frozen=True)
class MediaSource:
    """Encoded media, opened.

    Attributes:
        file: Seekable, at its start.
        size: Bytes, at least 1 and within the policy's limit.
        format: A key of ``IMAGE_FORMATS`` or ``VIDEO_FORMATS``, told by the content.
        label: The request field and the kind of reference, for errors.
    """

    file: BinaryIO
    size: int
    format: str
    label: str


def is_encoded(reference: object) -> bool:
    """Whether ``open_source`` takes this: a str, a PathLike or bytes."""
    return isinstance(reference, (str, os.PathLike, bytes, bytearray, memoryview))


@contextmanager
def open_source(reference: object, kind: str, policy: MediaPolicy) -> Iterator[MediaSource]:
    """Open a str, PathLike or bytes reference; a file stays open inside the ``with`` block.

    Args:
        reference: A path, a ``file:``, ``data:``, ``http:`` or ``https:`` URI, or the bytes of a
            file.
        kind: "image" or "video".
        policy: The limits.

    Raises:
        MediaError: it can't be had, is forbidden, empty, too large, or has another format than
            one of the kind, or another than its file name or MIME type says.
    """
    field = _FIELDS[kind]
    limit = policy.max_image_bytes if kind == "image" else policy.max_video_bytes
    promised, promise = None, ""
    if isinstance(reference, (bytes, bytearray, memoryview)):
        data: bytes | BinaryIO = bytes(reference)
        label = f"{field}, bytes"
    else:
        text = os.fsdecode(os.fspath(reference))
        scheme = _scheme(text, field) if isinstance(reference, str) else ""
        if scheme == "data":
            label = f"{field}, data URI"
            data, promise = _read_data_uri(text, label, limit)
            promised = format_of_mime(promise)
            promise = f"the MIME type {shorten(promise, 60)}"
        elif scheme in ("http", "https"):
            label = f"{field}, {describe_url(text)}"
            data = fetch(text, policy, field, min(limit, policy.max_download_bytes))
        else:
            path = text
            if scheme == "file":
                path = _path_of_file_uri(text, f"{field}, file URI")
            label = f"{field}, file {shorten(path)}"
            data = _open_file(path, label, policy)
            suffix = os.path.splitext(path)[1]
            promised, promise = format_of_suffix(suffix), f"the name *{shorten(suffix, 20)}"
    with io.BytesIO(data) if isinstance(data, bytes) else data as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if not 0 < size <= limit:
            raise bad_media(
                "The file is too large" if size else "The file is empty",
                label,
                expected=f"1 to {limit} bytes (MediaPolicy.max_{kind}_bytes)",
                found=f"{size} bytes",
                remedy="give a smaller file" if size else "write the file again: it holds nothing",
            )
        name = _check_format(file.read(HEAD_BYTES), kind, label, promised, promise)
        file.seek(0)
        yield MediaSource(file, size, name, label)


def _check_format(head: bytes, kind: str, label: str, promised: str | None, promise: str) -> str:
    """The format of the content, once it is one of the kind and the one that was promised."""
    name = sniff(head)
    if name not in FORMATS[kind]:
        other = kind_of(name)
        raise bad_media(
            f"Not a file that can serve as {kind} reference",
            label,
            expected=ACCEPTED[kind],
            found=f"{name} {other}" if other else name,
            remedy=f"pass it as {_FIELDS[other]}" if other else "convert it first",
        )
    if promised is not None and promised != name:
        raise bad_media(
            f"The content contradicts {promise}",
            label,
            expected=promised,
            found=name,
            remedy="correct whichever of the two is wrong",
        )
    return name


def _scheme(text: str, field: str) -> str:
    """The URI scheme of a reference, in lower case; "" for a path.

    Raises:
        MediaError: a scheme that isn't read.
    """
    match = _SCHEME.match(text)
    scheme = match.group(1).lower() if match else ""
    if scheme in ("data", "file", "http", "https"):
        return scheme
    if match and text.startswith("//", match.end()):
        raise bad_media(
            "A URI scheme that isn't read",
            field,
            expected="file, data, http or https",
            found=shorten(scheme, 40),
            remedy="use one of these schemes, or pass a path",
        )
    return ""


def _read_data_uri(text: str, label: str, limit: int) -> tuple[bytes, str]:
    """The bytes of a ``data:`` URI (RFC 2397, base64 only) and its MIME type."""
    head, comma, payload = text[len("data:") :].partition(",")
    mime, *parameters = head.split(";")
    if not comma or not parameters or parameters[-1].strip().lower() != "base64":
        raise bad_media(
            "Not a data URI that can be read",
            label,
            expected="data:MIME-TYPE;base64,...",
            found="no comma" if not comma else "no ;base64 before the comma",
            remedy="encode the file in base64 and write data:image/png;base64, before it",
        )
    if format_of_mime(mime) is None:
        raise bad_media(
            "A MIME type that isn't accepted",
            label,
            expected="that of the content, image/png or video/mp4 say",
            found=shorten(mime, 60) or "none",
            remedy="write the type of the content after data:, image/png for instance",
        )
    if len(payload) > 4 * (limit // 3 + 1):
        raise bad_media(
            "The file is too large",
            label,
            expected=f"at most {limit} bytes",
            found=f"{len(payload)} characters of base64",
            remedy="give a smaller file, or pass it by path or URL",
        )
    try:
        return base64.b64decode(unquote(payload), validate=True), mime
    except (binascii.Error, ValueError) as error:
        raise bad_media(
            "The base64 data is broken",
            label,
            expected="base64 (RFC 4648) with its padding",
            found=error,
            remedy="encode the whole file again, without line breaks",
        ) from None


def _path_of_file_uri(text: str, label: str) -> str:
    """The path of a ``file:`` URI (RFC 8089), without a host or with localhost."""
    try:
        parts = urlsplit(text)
    except ValueError:
        parts = None
    if (
        parts is None
        or parts.netloc not in ("", "localhost")
        or not parts.path.startswith("/")
        or parts.query
        or parts.fragment
    ):
        raise bad_media(
            "Not a file URI that can be read",
            label,
            expected="file:///absolute/path, special characters percent-encoded",
            found="another host, a relative path, a query or a fragment",
            remedy="write file:// and the absolute path, or pass the path itself",
        )
    return unquote(parts.path)


def _open_file(path: str, label: str, policy: MediaPolicy) -> BinaryIO:
    """Open a regular file for reading."""
    if not policy.local_paths_allowed():
        raise bad_media(
            "Local files are forbidden here",
            label,
            expected="a URL, a data URI or the bytes",
            found="a path",
            remedy=f"upload the file; whoever runs this may allow paths "
            f"(MediaPolicy.allow_local_paths, {LOCAL_PATHS_OFF})",
        )
    try:
        # Non-blocking: opening a FIFO would wait for its writer before fstat can refuse it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a null character
        found = error.strerror if isinstance(error, OSError) else error
        raise bad_media(
            "The file can't be opened",
            label,
            expected="a readable file",
            found=found,
            remedy="correct the path, or the file's rights",
        ) from None
    file = os.fdopen(descriptor, "rb") if _is_regular(descriptor) else None
    if file is None:
        os.close(descriptor)
        raise bad_media(
            "Not a regular file",
            label,
            expected="a file",
            found="a folder, device, pipe or socket",
            remedy="pass the path of a picture or clip",
        )
    return file


def _is_regular(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)
