"""Request timeout based on database progress: 503 after 0.7 s without any.

Shapes:     an awaitable -> its result, or the problem that says when to come back
Thread:     event loop; `progress` may be called from any

A slow disk delays everybody a little, and sending them all away would only bring them back together. A database that
has finished nothing since the request came is down: the agent gets a 503 within a second, and keeps its data. A slow
collector is different: while the threads of a request use CPU time, it is waited for. Pages and queries wait a little
longer, because a query may be slow on a healthy database.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import sqlalchemy as sa
from anyio import CapacityLimiter, to_thread
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fp8watch_server.db.directory import HOME
from fp8watch_server.db.shards import Shards
from fp8watch_server.http.away_page import asked_by_a_person, away_page
from fp8watch_server.http.errors import Problem

WITHOUT_PROGRESS_S = 0.7
AT_MOST_S = 10.0
WORKED_S = 0.01
"""CPU seconds that show that a thread is at work; one that polls a locked database uses far fewer."""
PROBE_AFTER_S = 2.0
"""A page or query that takes this long probes whether the database answers at all."""
PROBE_S = 1.0
RETRY_AFTER_S = 1

T = TypeVar("T")


def unavailable(detail: str) -> Problem:
    """A 503 with Retry-After."""
    return Problem(
        503,
        detail,
        rule="an answer of 200 means committed",
        remedy="send the same again later; the collector recovers by itself",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


class WorkClock:
    """CPU time of one thread; 0 before it starts, and where the system has no such clock (macOS, Windows)."""

    def __init__(self) -> None:
        self._clock: int | None = None
        self._before_s = 0.0  # CPU time of earlier work

    def start(self) -> None:
        """Start the clock of the calling thread."""
        if hasattr(time, "pthread_getcpuclockid"):
            self._before_s = time.thread_time()
            self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def read_s(self) -> float:
        """CPU seconds since `start`."""
        if self._clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._clock) - self._before_s
        except OSError:  # the thread has ended
            return 0.0


class ProgressTimeout:
    """Timeout state of one database."""

    def __init__(self) -> None:
        self._progress_at = -WITHOUT_PROGRESS_S

    def progress(self) -> None:
        """Report that the database has finished something."""
        self._progress_at = time.monotonic()

    async def wait(self, work: Awaitable[T], worked_s: Callable[[], float] = float) -> T:
        """The result of `work`, cancelled when neither the database nor its worker threads make progress.

        Args:
            worked_s: CPU time of the threads that work on it.

        Raises:
            Problem: 503.
        """
        task = asyncio.ensure_future(work)
        began = at_work = time.monotonic()
        before_s = worked_s()
        try:
            while True:
                until = min(max(at_work, self._progress_at) + WITHOUT_PROGRESS_S, began + AT_MOST_S)
                left_s = until - time.monotonic()
                if left_s > 0:
                    await asyncio.wait({task}, timeout=left_s)
                    if task.done():
                        return self._result(task)
                    continue
                now_s = worked_s()
                if now_s - before_s < WORKED_S or until >= began + AT_MOST_S:
                    break
                before_s, at_work = now_s, time.monotonic()
        finally:
            if not task.done():
                task.cancel()
        raise unavailable(f"the database has finished nothing for {time.monotonic() - at_work:.2g} s")

    def _result(self, task: asyncio.Future[T]) -> T:
        if not isinstance(task.exception(), SQLAlchemyError):  # a refused batch is progress, too
            self.progress()
        return task.result()


class DbTimeoutMiddleware:
    """ASGI middleware for everything but ingest: answers 503 while the database is unreachable.

    The blocked work is left to end by itself: a thread cannot be stopped from outside.
    """

    def __init__(self, app: ASGIApp, shards: Shards) -> None:
        self._app = app
        self._shards = shards
        self._probes: dict[str, asyncio.Task[None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or send 503."""
        if scope["type"] != "http" or scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        state = {"started": False, "given_up": False}

        async def guarded(message: Message) -> None:
            if not state["given_up"]:
                state["started"] = True
                await send(message)

        task = asyncio.ensure_future(self._app(scope, receive, guarded))
        try:
            while not (await asyncio.wait({task}, timeout=PROBE_AFTER_S))[0]:
                if not state["started"] and not await self._answers(scope) and not state["started"]:
                    break
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.done():
            return task.result()
        state["given_up"] = True
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        if asked_by_a_person(scope):
            await away_page(RETRY_AFTER_S)(scope, receive, send)
        else:
            await unavailable("the database does not answer").response()(scope, receive, send)

    async def _answers(self, scope: Scope) -> bool:
        """Whether home answers, and the shard of the run that is asked for."""
        run_id = (scope.get("path_params") or {}).get("run_id")  # once the router has read the path
        names = {HOME, HOME if run_id is None else self._shards.directory.known(run_id) or HOME}
        probes = [self._probe(name) for name in names]
        await asyncio.wait(probes, timeout=PROBE_S)
        return all(p.done() and not p.cancelled() and p.exception() is None for p in probes)

    def _probe(self, name: str) -> asyncio.Task[None]:
        probe = self._probes.get(name)
        if probe is None or probe.done():
            probe = asyncio.ensure_future(to_thread.run_sync(self._ask, name, limiter=CapacityLimiter(1)))
            self._probes[name] = probe
        return probe

    def _ask(self, name: str) -> None:
        with self._shards.named(name).connect() as conn:
            conn.execute(sa.text("SELECT 1"))
