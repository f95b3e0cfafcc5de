# SPDX-License-Identifier: Apache-2.0
"""The package's logger: the standard library's, plus ``warning_once``."""

import logging
import os

from tensorrt_llm._utils import describe_error

# Names that TensorRT-LLM has and Python hasn't.
_UPSTREAM_LEVELS = {"VERBOSE": logging.DEBUG, "INTERNAL_ERROR": logging.CRITICAL}


def level_of(name: str) -> int | None:
    """The level that a name of TensorRT-LLM's or Python's, in any case, stands for, if any."""
    return (logging.getLevelNamesMapping() | _UPSTREAM_LEVELS).get(name.strip().upper())


class Logger:
    """A thin front of ``logging.getLogger("tensorrt_llm")``.

    ``TLLM_LOG_LEVEL``, a name that ``level_of`` knows, sets the level and sends messages to stderr.
    Without it warnings show, and the rest is left to the application's own handlers; an unknown
    name is warned of and changes nothing. Messages never carry prompt text at INFO or above.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger("tensorrt_llm")
        name = os.environ.get("TLLM_LOG_LEVEL")
        level = level_of(name) if name else None
        if level is not None:
            self._logger.setLevel(level)
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
            self._logger.addHandler(handler)
        self._seen: set[str] = set()
        self.debug = self._logger.debug
        self.info = self._logger.info
        self.warning = self._logger.warning
        self.error = self._logger.error
        self.exception = self._logger.exception
        if name and level is None:
            # Not an error: how much is logged is no reason to stop what imports this.
            self.warning(
                describe_error(
                    "The log level is unknown and has no effect",
                    where="TLLM_LOG_LEVEL",
                    expected="verbose, debug, info, warning, error, critical or internal_error",
                    found=repr(name),
                    remedy="set it to one of these names, or unset it to see warnings only",
                )
            )

    def warning_once(self, message: str, *, key: str | None = None) -> None:
        """Log a warning the first time its key (by default its text) is seen in this process."""
        key = key or message
        if key not in self._seen:
            self._seen.add(key)
            self._logger.warning(message)


logger = Logger()
