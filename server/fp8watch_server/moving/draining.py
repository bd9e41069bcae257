"""Waits until the queue has no batch of a run for the database that it leaves.

Shapes:     run id, shard -> nothing of it is left
Thread:     main; an event loop of its own

Collectors notice within a second that a run is refused; what they had accepted before is committed by the workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from fp8watch_server.db.directory import REFRESH_EVERY_S
from fp8watch_server.db.schema import DEFAULT_TENANT
from fp8watch_server.moving.move import CannotMove
from fp8watch_server.queue.jetstream import JetStream, QueueError
from fp8watch_server.queue.subjects import WORK, run_subject
from fp8watch_server.settings import Settings

PATIENCE_S = 120.0


def drain_of(settings: Settings, run_id: str) -> Callable[[str], None]:
    """What waits, given the name of the database that the run leaves.

    Raises (when it is called):
        CannotMove: the workers do not empty it, or the queue is away.
    """

    def drain(shard: str) -> None:
        time.sleep(3 * REFRESH_EVERY_S)
        try:
            asyncio.run(_drain(settings, run_id, shard))
        except QueueError as e:
            raise CannotMove(f"the queue does not say what waits of run {run_id!r} ({e}); try again") from e

    return drain


async def _drain(settings: Settings, run_id: str, shard: str) -> None:
    queue = JetStream(
        settings.queue, replicas=settings.queue_replicas, max_bytes=settings.queue_bytes, client="fp8watch shards"
    )
    await queue.open()
    try:
        until = time.monotonic() + PATIENCE_S
        while num := sum([await queue.num_waiting(s, run_subject(s, DEFAULT_TENANT, run_id, shard)) for s in WORK]):
            if time.monotonic() > until:
                raise CannotMove(f"{num} batches of run {run_id!r} still wait in the queue; start fp8watch worker")
            await asyncio.sleep(0.1)
    finally:
        await queue.close()
