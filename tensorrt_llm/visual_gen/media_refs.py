# SPDX-License-Identifier: Apache-2.0
"""Reference media of a request. Nothing reads them yet, so a request that names one is refused."""

from tensorrt_llm._utils import describe_error


def refuse_media_references(image_reference: object, video_reference: object) -> None:
    """Refuse reference media by name until image-to-video and video-to-video are built.

    Raises:
        NotImplementedError: one of the two is given.
    """
    for name, value in (("image_reference", image_reference), ("video_reference", video_reference)):
        if value is not None:
            raise NotImplementedError(
                describe_error(
                    f"{name} is not supported yet",
                    where=f"VisualGenParams.{name}",
                    expected="None",
                    found=type(value).__name__,
                    remedy="generate from text alone",
                )
            )
