# SPDX-License-Identifier: Apache-2.0
"""The package's logger: the standard library's, plus ``warning_once``."""

import logging
import os


class Logger:
    """A thin front of ``logging.getLogger("tensorrt_llm")``.

    ``TLLM_LOG_LEVEL``, a name of the standard library's levels, sets the level and sends messages
    to stderr. Without it warnings show, and the rest is left to the application's own handlers.
    Messages never carry prompt text at INFO or above.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger("tensorrt_llm")
        level = os.environ.get("TLLM_LOG_LEVEL")
        if level:
            self._logger.setLevel(level.upper())
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
            self._logger.addHandler(handler)
        self._seen: set[str] = set()
        self.debug = self._logger.debug
        self.info = self._logger.info
        self.warning = self._logger.warning
        self.error = self._logger.error
        self.exception = self._logger.exception

    def warning_once(self, message: str, *, key: str | None = None) -> None:
        """Log a warning the first time its key (by default its text) is seen in this process."""
        key = key or message
        if key not in self._seen:
            self._seen.add(key)
            self._logger.warning(message)


logger = Logger()
