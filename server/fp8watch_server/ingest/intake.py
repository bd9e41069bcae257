"""What takes bodies in for one database: a committer for batches, and a small pool for the rest.

Upstream:   fp8watch_server.ingest.routes
Downstream: fp8watch_server.ingest.group_commit
Shapes:     work, or a body -> its result, waited for as long as the database gets anything done
Thread:     event loop; the work is done in threads
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
from anyio import to_thread
from sqlalchemy.engine import Engine

from fp8watch_agent.wire import Batch
from fp8watch_server.http.db_timeout import ProgressTimeout, WorkClock, unavailable
from fp8watch_server.ingest.committer_of import committer_of
from fp8watch_server.ingest.group_commit import Closed
from fp8watch_server.ingest.ingest_stats import IngestStats
from fp8watch_server.ingest.request_sender import RequestSender
from fp8watch_server.ingest.sites import SiteRegistry
from fp8watch_server.settings import Settings
from fp8watch_server.store.commit import Committed

MAX_WRITERS = 4
"""Registrations and bodies of tile maps that are worked on at once."""
MAX_WORKING = 64
"""Those that have begun, with the ones whose senders were told to come back: a database that hangs holds their threads."""

T = TypeVar("T")


class Ingest:
    """What the routes share. One for each database of the collector; they count together."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        decode: Callable[[bytes], Batch],
        stats: IngestStats,
        wake: Callable[[], None],
        hurry: Callable[[str, str], None],
        shard: str = "",
    ) -> None:
        self.engine = engine
        self.wake = wake
        self.stats = stats
        self.limiter = anyio.CapacityLimiter(MAX_WRITERS)
        self.db_timeout = ProgressTimeout()
        self.sites = SiteRegistry(self.engine, self.db_timeout.progress)
        self._working: set[object] = set()
        self.committer = committer_of(settings, engine, decode, self._committed, hurry, shard)
        self.num_tile_map_bodies = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking work in the pool of the ingest, and wait for it as long as it or the database gets anything done."""
        if len(self._working) >= MAX_WORKING:
            raise unavailable(f"{MAX_WORKING} registrations wait for the database")
        clock = WorkClock()

        def timed() -> T:
            self._working.add(clock)
            clock.start()
            try:
                return work()
            finally:
                self._working.discard(clock)

        waiting = to_thread.run_sync(timed, limiter=self.limiter, abandon_on_cancel=True)
        return await self.db_timeout.wait(waiting, clock.read_s)

    async def commit(self, body: bytes, sender: RequestSender) -> Committed:
        """Hand a body to the committer, and wait likewise."""
        try:
            return await self.db_timeout.wait(*self.committer.commit(body, sender))
        except Closed:
            raise unavailable("the collector is stopping") from None

    def _committed(self, seconds: float) -> None:
        self.db_timeout.progress()
        self.stats.commit_seconds.observe(seconds)

    def stop(self) -> None:
        """Finish what came in, and end."""
        self.committer.stop()
