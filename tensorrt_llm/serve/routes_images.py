# SPDX-License-Identifier: Apache-2.0
"""POST /v1/images/generations and the downloads of its URLs."""

import base64
import re
import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from tensorrt_llm.serve.bodies import read_body
from tensorrt_llm.serve.common import check_model, errors, manager_of, no_query, wait_for
from tensorrt_llm.serve.downloads import download
from tensorrt_llm.serve.errors import ApiError
from tensorrt_llm.serve.intake import Submission, submit
from tensorrt_llm.serve.records import server_timing
from tensorrt_llm.serve.requests import ImageGenerationRequest
from tensorrt_llm.serve.responses import ImagesResponse

router = APIRouter(prefix="/v1/images", dependencies=[no_query])

_ID = re.compile(r"image_[0-9a-f]{32}", re.ASCII)


@router.post(
    "/generations",
    response_model=ImagesResponse,
    responses=errors(400, 408, 413, 415, 429, 500, 503),
    openapi_extra={"x-body": "ImageGenerationRequest"},
)
async def generate_images(request: Request) -> JSONResponse:
    """Generate pictures and wait for them."""
    manager = manager_of(request)
    # The place is held from before the body is read, so that bodies in memory are bounded too.
    with manager.slot():
        body, _ = await read_body(request, ImageGenerationRequest)
        check_model(manager, body.model)
        by_url = body.response_format == "url"
        job = await submit(
            manager,
            Submission(
                kind="image",
                prompt=body.prompt,
                params=body.params(),
                format=body.file_format,
                origins=body.origins(),
                kept=by_url,
            ),
        )
    await wait_for(manager, request, job)
    if by_url:
        base = str(request.base_url)
        count = len(job.record.files)
        data = [{"url": f"{base}v1/images/{job.record.id}/{i}/content"} for i in range(count)]
    else:
        encode = manager.ledger.in_files
        data = [
            {"b64_json": (await encode(base64.b64encode, content)).decode("ascii")}
            for content in job.contents
        ]
    return JSONResponse(
        {
            "created": int(time.time()),
            "data": [picture | {"revised_prompt": body.prompt} for picture in data],
            "output_format": body.file_format,
            "size": job.record.size,
        },
        headers=server_timing(job.record),
    )


@router.get(
    "/{image_id}/{index}/content",
    response_class=Response,
    responses=errors(404, 416)
    | {
        200: {
            "description": "The picture.",
            "content": {f"image/{name}": {} for name in ("png", "webp", "jpeg")},
        },
        206: {"description": "A range of it."},
    },
)
async def download_image(request: Request, image_id: str, index: str) -> Response:
    """Download a picture by the URL that its generation gave."""
    manager = manager_of(request)
    found = await manager.get(image_id) if _ID.fullmatch(image_id) else None
    files = [] if found is None else found[0].files
    if not re.fullmatch("[0-9]", index, re.ASCII) or int(index) >= len(files):
        raise ApiError(404, "There is no such picture, or it has expired.")
    return await download(manager, request, files[int(index)], server_timing(found[0]))
