"""Workers in a thread and as processes, and what the database holds."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from collector.kit import Recorder, Serving

from fp8watch_server.app import create_app
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.directory import open_directory
from fp8watch_server.db.shards import open_shards
from fp8watch_server.settings import Settings

QUEUE_BYTES = 64 << 20


def app_of(database_url: str, queue: str, queue_bytes: int = QUEUE_BYTES) -> Any:
    """A collector with a queue, and fakes in place of the detectors."""
    settings = Settings(database_url=database_url, queue=queue, queue_replicas=1, queue_bytes=queue_bytes)
    return create_app(settings, detection=Recorder().detection(), dispatcher=lambda e, s: None, pages=False)


def eventually(what: Callable[[], Any], timeout_s: float = 30.0, said: Callable[[], object] = lambda: "") -> Any:
    """Wait until something holds."""
    until = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < until, said()
        time.sleep(0.02)
    return found


@contextmanager
def working(database_url: str, queue: str, replicas: int = 1, max_bytes: int = QUEUE_BYTES) -> Iterator[Any]:
    """A worker in a thread; ended with SIGTERM's way."""
    from fp8watch_server.queue.jetstream import JetStream
    from fp8watch_server.worker.loop import Worker

    engine = make_engine(database_url)
    with _in_thread(
        lambda: Worker(engine, JetStream(queue, replicas=replicas, max_bytes=max_bytes, client="test"))
    ) as worker:
        yield worker
    engine.dispose()


@contextmanager
def crewing(settings: Settings) -> Iterator[Any]:
    """The workers of home and all shards, in a thread; ended with SIGTERM's way."""
    from fp8watch_server.worker.crew import Crew

    home = make_engine(settings.database_url)
    shards = open_shards(home, settings.shard_urls, open_directory(home, settings.shard_urls))
    with _in_thread(lambda: Crew(shards, settings)) as crew:
        yield crew
    for engine in (home, *(shard.engine for shard in shards.others.values())):
        engine.dispose()


@contextmanager
def _in_thread(make: Callable[[], Any]) -> Iterator[Any]:
    ready = threading.Event()
    made: list[Any] = []

    async def work() -> None:
        worker = make()
        made.extend([worker, asyncio.get_running_loop()])
        ready.set()
        await worker.run()

    thread = threading.Thread(target=lambda: asyncio.run(work()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield made[0]
    finally:
        made[1].call_soon_threadsafe(made[0].stop)
        thread.join(20)
        assert not thread.is_alive()


def worker_process(tmp_path: Path, database_url: str, queue: str, **env: str) -> Serving:
    """`fp8watch worker` as a process of its own."""
    command = [sys.executable, "-m", "fp8watch_server.worker.command"]
    given = {"FP8WATCH_DATABASE_URL": database_url, "FP8WATCH_QUEUE": queue, **env}
    return Serving(tmp_path, command=command, **given).start()


def arrivals(engine: sa.Engine) -> list[tuple[str, int, int]]:
    """(run, rank, seq) of what is stored, in the order of commits."""
    b = t.hot_batch.c
    with engine.connect() as conn:
        return [tuple(row) for row in conn.execute(sa.select(b.run_id, b.rank, b.seq).order_by(b.run_id, b.arrival))]
