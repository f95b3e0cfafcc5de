# SPDX-License-Identifier: Apache-2.0
"""Ended jobs are removed once their time is over."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable

from tensorrt_llm.logger import logger
from tensorrt_llm.serve.ledger import Ledger

_DISK_ERRORS = (sqlite3.Error, OSError)


async def expire_forever(
    ledger: Ledger, delete: Callable[[str], Awaitable[bool]], pause: float
) -> None:
    """Remove what has expired, round after round. A disk that fails spoils one job or one round.

    Args:
        ledger: Knows what has expired.
        delete: Removes a job and its files.
        pause: Seconds between two rounds.
    """
    while True:
        try:
            expired = await ledger.expired()
        except _DISK_ERRORS:
            logger.exception("What has expired can't be looked up; it is tried again.")
            expired = []
        for id in expired:
            try:
                await delete(id)
                logger.info("%s has expired.", id)
            except _DISK_ERRORS:
                # Its row is tried again by the next round; files without one, by the next start.
                logger.exception("%s has expired, but can't be removed.", id)
        await asyncio.sleep(pause)
