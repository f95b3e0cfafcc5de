# SPDX-License-Identifier: Apache-2.0
"""Options as pydantic models that refuse an unknown field by name, and say which they have."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from tensorrt_llm._utils import describe_error


class StrictModel(BaseModel):
    """Base of the option models.

    Raises:
        pydantic.ValidationError: (a ValueError) an unknown field.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, data: Any) -> Any:
        unknown = data.keys() - cls.model_fields.keys() if isinstance(data, Mapping) else ()
        if unknown:
            raise ValueError(
                describe_error(
                    "Unknown field",
                    where=cls.__name__,
                    expected=f"fields {sorted(cls.model_fields)}",
                    found=sorted(map(str, unknown)),
                    remedy="correct the name, or leave the field out",
                )
            )
        return data
