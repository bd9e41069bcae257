"""A worker's databases: home and each shard have a `Worker` of their own in one process.

Shapes:     settings -> batches of all lanes, committed
Thread:     an event loop; each shard has a thread that asks whether it answers

Each has its own connection to the queue and its own lanes, so that a shard that is away holds back its own runs, which
wait in the queue, and no others.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fp8watch_server.db.directory import HOME
from fp8watch_server.db.shards import Shards
from fp8watch_server.queue.jetstream import JetStream
from fp8watch_server.settings import Settings
from fp8watch_server.worker.loop import Worker

THREADS_PER_DATABASE = 4
"""A database that hangs keeps those that wait for it."""


class Crew:
    """Workers of one process, one for each database.

    Args:
        shards: the databases, opened where they answer.
        settings: where the queue is.
    """

    def __init__(self, shards: Shards, settings: Settings) -> None:
        self._shards = shards

        def of(name: str) -> Worker:
            queue = JetStream(
                settings.queue,
                replicas=settings.queue_replicas,
                max_bytes=settings.queue_bytes,
                client=f"fp8watch worker {name}".strip(),
            )
            engine = shards.home if name == HOME else shards.others[name].engine
            return Worker(engine, queue, name, partial(shards.named, name))

        self.workers = {name: of(name) for name in (HOME, *shards.others)}

    @property
    def num_committed(self) -> int:
        """Batches."""
        return sum(worker.counts.committed for worker in self.workers.values())

    @property
    def num_refused(self) -> int:
        """Batches that no database took."""
        return sum(worker.counts.refused for worker in self.workers.values())

    def stop(self) -> None:
        """Finish the commits in hand, and end."""
        for worker in self.workers.values():
            worker.stop()

    async def run(self) -> None:
        """Work until stopped."""
        pool = ThreadPoolExecutor(THREADS_PER_DATABASE * len(self.workers), "fp8watch-worker")
        asyncio.get_running_loop().set_default_executor(pool)
        for shard in self._shards.others.values():
            shard.start()
        try:
            await asyncio.gather(*(worker.run() for worker in self.workers.values()))
        finally:
            for shard in self._shards.others.values():
                await asyncio.to_thread(shard.stop)
