# SPDX-License-Identifier: Apache-2.0
"""How a server is run: address, limits, storage, security."""

import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

STORAGE_PATH = "TRTLLM_MEDIA_STORAGE_PATH"
_MIB = 2**20

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def default_media_path() -> Path:
    """``TRTLLM_MEDIA_STORAGE_PATH``, or a folder of this user's data."""
    given = os.environ.get(STORAGE_PATH)
    if given:
        return Path(given)
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "tensorrt-llm-cosmos3" / "media"


class ServeSettings(BaseModel):
    """The options of a server beside those of the model.

    Raises:
        pydantic.ValidationError: (a ValueError) an unknown field or a value outside its range.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: StrictStr = Field("127.0.0.1", description="Address to listen on; loopback by default.")
    port: StrictInt = Field(8000, ge=0, le=65535, description="Port; 0 takes a free one.")
    media_path: Path = Field(
        default_factory=default_media_path,
        description="Folder of the job database and the media; one server at a time uses it. "
        "Default: `TRTLLM_MEDIA_STORAGE_PATH`, else a folder of the user's data.",
    )
    media_limit_bytes: StrictInt = Field(
        50 * 1024 * _MIB, ge=_MIB, description="Most bytes that media may take in `media_path`."
    )
    expire_after: _Seconds = Field(
        86400.0, description="Seconds after its end at which a job and its files are removed."
    )
    max_queue_size: StrictInt = Field(
        16, ge=1, le=10_000, description="Most requests that wait, beside the one that runs."
    )
    job_timeout: _Seconds = Field(
        3600.0,
        description="Seconds from a request's arrival to its end, the wait in the queue "
        "included; a job that is not finished by then fails.",
    )
    cancel_grace: _Seconds = Field(
        120.0,
        description="Seconds that a generation may go on after it was told to stop; then its "
        "process is killed and started again.",
    )
    drain_timeout: _Seconds = Field(
        30.0,
        description="Seconds that jobs may take to finish at a shutdown; those left fail.",
    )
    max_body_bytes: StrictInt = Field(
        128 * _MIB, ge=1024, description="Most bytes of a multipart body."
    )
    max_json_bytes: StrictInt = Field(
        16 * _MIB, ge=1024, description="Most bytes of a JSON body; upload larger media."
    )
    body_timeout: _Seconds = Field(300.0, description="Seconds that a body may take to arrive.")
    api_key: Annotated[StrictStr, Field(min_length=1)] | None = Field(
        None,
        repr=False,
        description="Token that every request but GET /health must carry as `Authorization: "
        "Bearer`. Without one, nobody is asked.",
    )
    allow_local_media: StrictBool = Field(
        False,
        description="Let requests name files of this machine as references, unless "
        "`TRTLLM_DISALLOW_LOCAL_MEDIA_PATH=1` forbids it.",
    )
    allow_private_addresses: StrictBool = Field(
        False, description="Let reference URLs lead to addresses that aren't public."
    )

    def model_post_init(self, context: Any) -> None:
        """Keep one spelling of the folder, whatever the working directory becomes."""
        object.__setattr__(self, "media_path", Path(os.path.abspath(self.media_path)))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
