# SPDX-License-Identifier: Apache-2.0
"""Downloads of finished files: whole or one range, read off the event loop."""

import os
import re
from collections.abc import AsyncIterator
from typing import BinaryIO

from fastapi import Request
from fastapi.responses import StreamingResponse

from tensorrt_llm.serve.errors import ApiError
from tensorrt_llm.serve.manager import JobManager
from tensorrt_llm.serve.records import StoredFile

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)
_CHUNK = 256 * 1024


async def download(
    manager: JobManager, request: Request, file: StoredFile, headers: dict[str, str]
) -> StreamingResponse:
    """The answer with a file's bytes.

    Args:
        manager: Its folder has the file.
        request: A GET's ``Range`` and ``If-Range`` count; several ranges get the whole file.
        file: Finished.
        headers: Further headers.

    Raises:
        ApiError: 404 it was removed this moment, 416 no such range.
    """
    in_files = manager.ledger.in_files
    try:
        source = await in_files(open, manager.folder.media / file.name, "rb")
    except FileNotFoundError:
        raise ApiError(404, "The file has been removed.") from None
    # The name is unique and the bytes never change, so it serves as entity tag.
    etag = f'"{file.name}"'
    try:
        span = _span(request, etag, file.size)
    except ApiError:
        await in_files(source.close)
        raise
    start, end = span or (0, file.size)
    headers = headers | {
        "Accept-Ranges": "bytes",
        "Content-Disposition": f'inline; filename="{file.name}"',
        "Content-Length": str(end - start),
        "ETag": etag,
        # A browser must take it for what it is.
        "X-Content-Type-Options": "nosniff",
    }
    if span is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.size}"
    return StreamingResponse(
        _chunks(manager, source, start, end),
        status_code=200 if span is None else 206,
        headers=headers,
        media_type=file.content_type,
    )


def _span(request: Request, etag: str, size: int) -> tuple[int, int] | None:
    """[start, end) of the range that is asked for; None for the whole file."""
    match = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if request.method != "GET" or not match or request.headers.get("if-range", etag) != etag:
        return None
    first, last = match.groups()
    if first:
        start, end = int(first), min(int(last) + 1 if last else size, size)
        if last and int(last) < int(first):
            return None
    elif last:
        start, end = max(0, size - int(last)), size
    else:
        return None
    if start >= end:
        raise ApiError(
            416,
            f"The range lies outside the file's {size} bytes.",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return start, end


async def _chunks(
    manager: JobManager, source: BinaryIO, start: int, end: int
) -> AsyncIterator[bytes]:
    # A file that is removed meanwhile can be read to its end.
    with source:
        source.seek(start, os.SEEK_SET)
        while start < end:
            chunk = await manager.ledger.in_files(source.read, min(_CHUNK, end - start))
            if not chunk:
                return
            start += len(chunk)
            yield chunk
