"""What works on one database of a collector: ingest, detection, compaction, messages.

Shapes:     Engine -> threads over it
Thread:     the application starts and ends it; a shard that is opened late is started by the thread that opens it
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sqlalchemy.engine import Engine

from fp8watch_server.db.bell import Bell
from fp8watch_server.db.schema import DEFAULT_TENANT
from fp8watch_server.ingest.ingest_stats import IngestStats
from fp8watch_server.ingest.intake import Ingest
from fp8watch_server.ingest.routes import decode_checked
from fp8watch_server.pipeline.detect_worker import Detection, DetectWorker
from fp8watch_server.settings import Settings
from fp8watch_server.store.compactor import Compactor
from fp8watch_server.store.retention import policy_of


class Dispatching(Protocol):
    """What sends messages: a thread over the outbox."""

    def start(self) -> None:
        """Start the thread."""
        ...

    def wake(self) -> None:
        """The outbox has something new."""
        ...

    def stop(self) -> None:
        """End it; what is not sent stays in the outbox."""
        ...


class Station:
    """The threads of one database.

    Args:
        engine: the database.
        settings: of the collector.
        detection: detectors and incidents.
        dispatcher: makes the sender of messages, or None.
        stats: counters of the whole collector.
        shard: name of the database; "": home.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        detection: Detection,
        dispatcher: Callable[[Engine, Settings], Dispatching | None],
        stats: IngestStats,
        shard: str = "",
    ) -> None:
        self._sender = dispatcher(engine, settings)
        self.worker = DetectWorker(engine, detection, public_url=settings.public_url, on_change=self.wake_sender)
        self.compactor = Compactor(engine, policy_of(settings))
        self._bell = Bell(engine, self._heard, self.worker.look_for_urgent)
        wake, hurry = self.worker.wake, self.worker.wake_for
        self.ingest = Ingest(engine, settings, decode_checked, stats, wake, hurry, shard)
        self._started = False

    def wake_sender(self) -> None:
        """Messages may have been written."""
        if self._sender is not None:
            self._sender.wake()

    def _heard(self, run_id: str) -> None:
        """Somebody has committed what cannot wait."""
        self.worker.wake_for(run_id, DEFAULT_TENANT)

    def start(self) -> None:
        """Start the threads, once: of a database that is at this collector's revision."""
        if self._started:
            return
        self._started = True
        self._bell.start()
        self.worker.start()
        self.compactor.start()
        if self._sender is not None:
            self._sender.start()

    def stop(self) -> None:
        """Finish what was taken in, and end the threads."""
        self.ingest.stop()
        if not self._started:
            return
        self._bell.stop()
        self.worker.stop()
        self.compactor.stop()
        if self._sender is not None:
            self._sender.stop()
