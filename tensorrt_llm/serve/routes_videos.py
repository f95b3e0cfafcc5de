# SPDX-License-Identifier: Apache-2.0
"""The routes below /v1/videos."""

import re
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import UploadFile

from tensorrt_llm.serve.bodies import read_body
from tensorrt_llm.serve.common import check_model, errors, manager_of, no_query, wait_for
from tensorrt_llm.serve.downloads import download
from tensorrt_llm.serve.errors import ApiError
from tensorrt_llm.serve.intake import Submission, submit
from tensorrt_llm.serve.jobs import LiveJob
from tensorrt_llm.serve.manager import Snapshot
from tensorrt_llm.serve.records import server_timing, video_resource
from tensorrt_llm.serve.references import Reference
from tensorrt_llm.serve.requests import REFERENCE_FIELDS, ReferenceObject, VideoGenerationRequest
from tensorrt_llm.serve.responses import (
    ContentQuery,
    ListQuery,
    VideoDeleted,
    VideoJob,
    VideoList,
)

router = APIRouter(prefix="/v1/videos")

_ID = re.compile(r"video_[0-9a-f]{32}", re.ASCII)
_CREATE_ERRORS = errors(400, 408, 413, 415, 429, 500, 503)
_BODY = {"x-body": "VideoGenerationRequest"}
_QUEUED = {"status": "queued", "completed_at": None, "expires_at": None, "error": None}
_MP4 = {
    200: {"description": "The video.", "content": {"video/mp4": {}}},
    206: {"description": "A range of it.", "content": {"video/mp4": {}}},
}


@router.post(
    "",
    status_code=202,
    response_model=VideoJob,
    responses=_CREATE_ERRORS,
    openapi_extra=_BODY,
    dependencies=[no_query],
)
async def create_video(request: Request) -> JSONResponse:
    """Queue a video; the answer's id is there to ask for its state."""
    job = await _submit(request)
    # As it was queued: by now it may run, or have ended.
    return JSONResponse(video_resource(replace(job.record, **_QUEUED), None, 0), 202)


@router.post(
    "/sync",
    response_class=Response,
    responses=_CREATE_ERRORS | {200: _MP4[200], 404: errors(404)[404]},
    openapi_extra=_BODY,
    dependencies=[no_query],
)
async def create_video_and_wait(request: Request) -> Response:
    """Generate a video and send it; it stays as a job like any other."""
    manager = manager_of(request)
    job = await _submit(request)
    await wait_for(manager, request, job)
    headers = server_timing(job.record)
    headers["Content-Location"] = f"/v1/videos/{job.record.id}/content"
    return await download(manager, request, job.record.files[0], headers)


@router.get("", response_model=VideoList, responses=errors(404))
async def list_videos(request: Request, query: Annotated[ListQuery, Query()]) -> JSONResponse:
    """The jobs, a page at a time."""
    page = await manager_of(request).page(
        "video", after=query.after, limit=query.limit + 1, ascending=query.order == "asc"
    )
    if page is None:
        raise _unknown(query.after, "after")
    data = [video_resource(*snapshot) for snapshot in page[: query.limit]]
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(page) > query.limit,
        }
    )


@router.get("/{video_id}", response_model=VideoJob, responses=errors(404), dependencies=[no_query])
async def retrieve_video(request: Request, video_id: str) -> JSONResponse:
    """State of a job."""
    return JSONResponse(video_resource(*await _find(request, video_id)))


@router.get("/{video_id}/content", response_class=Response, responses=errors(400, 404, 416) | _MP4)
async def download_video(
    request: Request, video_id: str, query: Annotated[ContentQuery, Query()]
) -> Response:
    """The video of a completed job."""
    record, _, _ = await _find(request, video_id)
    if record.status != "completed":
        reason = f": {record.error['message']}" if record.error else ", not completed"
        raise ApiError(400, f"There is no video, the job is {record.status}{reason}")
    return await download(manager_of(request), request, record.files[0], server_timing(record))


@router.delete(
    "/{video_id}",
    response_model=VideoDeleted,
    responses=errors(404),
    dependencies=[no_query],
)
async def delete_video(request: Request, video_id: str) -> JSONResponse:
    """Cancel a job, if it is under way, and remove it with its files."""
    if not _ID.fullmatch(video_id) or not await manager_of(request).delete(video_id):
        raise _unknown(video_id)
    return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": True})


async def _submit(request: Request) -> LiveJob:
    manager = manager_of(request)
    # The place is held from before the body is read, so that bodies in memory are bounded too.
    with manager.slot():
        body, files = await read_body(request, VideoGenerationRequest, REFERENCE_FIELDS)
        check_model(manager, body.model)
        submission = Submission(
            kind="video",
            prompt=body.prompt,
            params=body.params(),
            format="mp4",
            origins=body.origins(),
            seconds=body.seconds,
            references=_references(body, files),
        )
        return await submit(manager, submission)


def _references(body: VideoGenerationRequest, files: dict[str, UploadFile]) -> list[Reference]:
    """The references of a request; a field with an uploaded file holds no more than its place."""
    references = []
    for name in REFERENCE_FIELDS:
        value = getattr(body, name)
        if name in files:
            references.append(Reference(name, files[name].file))
        elif value is not None:
            url = value.image_url if isinstance(value, ReferenceObject) else value
            references.append(Reference(name, url))
    return references


async def _find(request: Request, video_id: str) -> Snapshot:
    found = await manager_of(request).get(video_id) if _ID.fullmatch(video_id) else None
    if found is None:
        raise _unknown(video_id)
    return found


def _unknown(video_id: str, param: str = "video_id") -> ApiError:
    return ApiError(404, f"There is no video {video_id[:100]!r}.", param=param)
