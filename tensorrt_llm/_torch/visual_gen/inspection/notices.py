# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint that loads still keeps a request from."""

import os
from collections.abc import Mapping
from typing import Any

from tensorrt_llm._torch.visual_gen.models.cosmos3.guardrails import GUARDRAILS_OFF, WAYS_OUT


def notices(index: Mapping[str, Any]) -> tuple[str, ...]:
    """One sentence each; none for a checkpoint whose requests all run.

    Args:
        index: Its ``model_index.json``.
    """
    reason = _missing_guardrails(index)
    if reason is None:
        return ()
    return (
        f"it asks for guardrails, which can't be loaded here ({reason}): it loads with a warning, "
        f"and requests are refused until you {WAYS_OUT}",
    )


def _missing_guardrails(index: Mapping[str, Any]) -> str | None:
    """Why the package is not there, in the conditions of ``load_guardrails``.

    Its gated weights are left to the load, which would fetch them.
    """
    if os.environ.get(GUARDRAILS_OFF) == "1" or not index.get("enable_safety_checker", True):
        return None
    try:
        from cosmos_guardrail import CosmosSafetyChecker  # noqa: F401
    except Exception as error:  # a package of many parts
        return f"{type(error).__name__}: {error}"
    return None
