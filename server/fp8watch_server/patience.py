"""How long a request waits for the database: as long as that gets anything done, and no second longer.

Upstream:   fp8watch_server.ingest    Downstream: fp8watch_server.problem
Shapes:     an awaitable -> its result, or the problem that says when to come back
Thread:     event loop; `progress` may be called from any

A slow disk makes everybody wait a little, and that is no reason to send them away to come again together. A database
that has finished nothing since the request came is down: it is answered within a second, and an agent keeps its data.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from .problem import Problem

WITHOUT_PROGRESS_S = 0.95
AT_MOST_S = 10.0
RETRY_AFTER_S = 1

T = TypeVar("T")


def unavailable(detail: str) -> Problem:
    """503 and when to come back."""
    return Problem(
        503,
        detail,
        rule="an answer of 200 means committed",
        remedy="send the same again later; the collector recovers by itself",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


class Patience:
    """One per database."""

    def __init__(self) -> None:
        self._progress_at = -WITHOUT_PROGRESS_S

    def progress(self) -> None:
        """The database has finished something."""
        self._progress_at = time.monotonic()

    async def wait(self, work: Awaitable[T]) -> T:
        """The result of `work`, which is cancelled when the database gets nothing done.

        Raises:
            Problem: 503.
        """
        task = asyncio.ensure_future(work)
        began = time.monotonic()
        try:
            while True:
                until = min(max(began, self._progress_at) + WITHOUT_PROGRESS_S, began + AT_MOST_S)
                left_s = until - time.monotonic()
                if left_s <= 0:
                    break
                await asyncio.wait({task}, timeout=left_s)
                if task.done():
                    return self._result(task)
        finally:
            if not task.done():
                task.cancel()
        raise unavailable(f"the database has finished nothing for {time.monotonic() - began:.2g} s")

    def _result(self, task: asyncio.Future[T]) -> T:
        if not isinstance(task.exception(), SQLAlchemyError):  # a refusal is progress, too
            self.progress()
        return task.result()
