"""A broken batch waits for nobody on its way through a queue: not for workers, nor for other lanes, nor for a leader that is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

pytest.importorskip("nats", reason="pip install 'fp8watch[nats]'")

from cluster.kit import arrivals, eventually, worker_process, working
from cluster.nats_servers import Node
from collector.hurt_server import Server
from collector.killing import SITES
from collector.kit import Agent
from sqlalchemy.exc import OperationalError
from support.database import fast_folder

from fp8watch_server.db.dialect import make_engine
from fp8watch_server.ingest import group_commit, queue_front
from fp8watch_server.queue import jetstream, subjects
from fp8watch_server.queue.jetstream import JetStream, QueueError

BROKEN: dict[str, Any] = {"fields": {"num_nan": 3}}


@pytest.fixture
def engine(database_url: str) -> Iterator[sa.Engine]:
    made = make_engine(database_url)
    yield made
    made.dispose()


@pytest.fixture
def no_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_front.QueueFront, "_short_cut", lambda self, item: Future())


def test_a_broken_batch_is_committed_at_once_and_counted_once(
    front: httpx.Client, engine: sa.Engine, database_url: str, node: Node
) -> None:
    """Before there is a worker, and while there is no queue; the worker finds it committed."""
    agent = Agent(front, run="run-1").register(SITES)
    agent.patient = False
    agent.send(SITES, [1])
    agent.send(SITES, [2], **BROKEN)
    eventually(lambda: arrivals(engine) == [("run-1", 0, 2)])
    node.kill()
    assert agent.post(agent.body(SITES, [3])).status_code == 503
    assert agent.post(agent.body(SITES, [4], **BROKEN)).status_code == 200
    assert arrivals(engine) == [("run-1", 0, 2), ("run-1", 0, 4)]
    node.start()
    with working(database_url, node.url) as worker:
        eventually(lambda: len(arrivals(engine)) == 3)
        eventually(lambda: worker.counts.committed == 2)
    assert arrivals(engine) == [("run-1", 0, 2), ("run-1", 0, 4), ("run-1", 0, 1)]
    assert worker.counts.refused == 0


def test_the_short_cut_is_tried_again_while_the_database_comes_back(
    front: httpx.Client, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, whole, failures = Agent(front, run="run-1").register(SITES), group_commit.commit_group, [3]

    def away(*args: Any, **given: Any) -> Any:
        if failures[0]:
            failures[0] -= 1
            raise OperationalError("COMMIT", None, Exception("away"))
        return whole(*args, **given)

    monkeypatch.setattr(group_commit, "commit_group", away)
    agent.send(SITES, [1], **BROKEN)
    eventually(lambda: arrivals(engine) == [("run-1", 0, 1)])
    assert failures == [0]


def test_a_storm_of_broken_batches_leaves_the_short_cut(
    front: httpx.Client, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_front, "MAX_SHORT_CUTS", 2)
    agent, held = Agent(front, run="run-1").register(SITES), threading.Event()
    whole = group_commit.commit_group

    def slow(*args: Any, **given: Any) -> Any:
        held.wait(20)
        return whole(*args, **given)

    monkeypatch.setattr(group_commit, "commit_group", slow)
    for step in range(5):
        agent.send(SITES, [step], **BROKEN)
    held.set()
    eventually(lambda: len(arrivals(engine)) == 2)
    time.sleep(0.3)
    assert len(arrivals(engine)) == 2


@pytest.mark.usefixtures("no_short_cut")
def test_a_worker_commits_broken_batches_while_healthy_ones_take_long(
    front: httpx.Client, engine: sa.Engine, database_url: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy, ill = (Agent(front, run=run, session=run * 32).register(SITES) for run in "ab")
    begun, held, whole = threading.Event(), threading.Event(), group_commit.commit_group

    def slow(conn: Any, group: Any, *args: Any, **given: Any) -> Any:
        if group[0].batch.header.run == "a":
            begun.set()
            held.wait(20)
        return whole(conn, group, *args, **given)

    monkeypatch.setattr(group_commit, "commit_group", slow)
    healthy.send(SITES, [1])
    with working(database_url, node.url):
        assert begun.wait(20)
        ill.send(SITES, [1], **BROKEN)
        eventually(lambda: arrivals(engine) == [("b", 0, 1)], 10)
        held.set()
        eventually(lambda: len(arrivals(engine)) == 2)


def test_a_lane_that_does_not_begin_holds_up_no_other(
    front: httpx.Client, engine: sa.Engine, database_url: str, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its consumer elects a leader, say."""
    runs = ["run-1", next(f"run-{i}" for i in range(2, 99) if subjects.lane_of(f"run-{i}", 0) != _LANE)]
    stuck, goes = (Agent(front, run=run, session=f"{i}" * 32).register(SITES) for i, run in enumerate(runs))
    whole, open_again, tried = JetStream._begin, threading.Event(), [0]

    async def begin(self: JetStream, stream: subjects.Stream, lane: int, shard: str) -> None:
        if lane == _LANE and not open_again.is_set():
            tried[0] += 1
            await asyncio.sleep(20)
        await whole(self, stream, lane, shard)

    monkeypatch.setattr(jetstream, "BEGIN_S", 0.5)
    monkeypatch.setattr(JetStream, "_begin", begin)
    for agent in (stuck, goes):
        agent.send(SITES, [1])
    with working(database_url, node.url) as worker:
        eventually(lambda: tried[0] >= 3 and arrivals(engine) == [(runs[1], 0, 1)], 20)
        assert worker.counts.restarts == 0
        open_again.set()
        eventually(lambda: len(arrivals(engine)) == 2)


_LANE = subjects.lane_of("run-1", 0)


def test_a_silent_queue_is_noticed_before_the_pull_would_end(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetstream, "SILENT_S", 3.0)
    monkeypatch.setattr(jetstream, "HEARTBEAT_S", 0.3)

    async def pull() -> float:
        queue = JetStream(node.url, replicas=1, max_bytes=1 << 24, client="test")
        await queue.open()
        await queue.begin_lane(subjects.URGENT, 0)
        reader = await queue.reader(subjects.URGENT, 0)
        until = time.monotonic() + 4.5
        while time.monotonic() < until:  # one that is there says so, though nothing comes
            assert await reader.pull(30.0) == []
        assert node.process is not None
        os.kill(node.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            with pytest.raises(QueueError):
                while True:
                    await reader.pull(30.0)
            return time.monotonic() - began
        finally:
            os.kill(node.process.pid, signal.SIGCONT)
            await queue.close()

    with ThreadPoolExecutor(1) as own:
        assert own.submit(lambda: asyncio.run(pull())).result() < 20


def test_a_worker_ends_though_its_database_hangs(tmp_path: Path, database_url: str, node: Node, folder: Path) -> None:
    import tempfile

    server = Server(Path(tempfile.mkdtemp(prefix="fp8pg-", dir=fast_folder())) / "data")
    env = {"FP8WATCH_SHARDS": f"a={server.url}", "FP8WATCH_QUEUE_REPLICAS": "1", "FP8WATCH_QUEUE_BYTES": str(1 << 26)}
    worker = worker_process(tmp_path, database_url, node.url, **env)
    engine = make_engine(server.url)
    with engine.connect() as conn:
        there = sa.text("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'fp8watch worker%'")
        eventually(lambda: conn.rollback() or conn.execute(there).scalar_one(), 60)
    engine.dispose()
    try:
        server.freeze()
        time.sleep(2)
        began = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(40) == 0
        assert time.monotonic() - began < 30
        worker.wait()
    finally:
        server.thaw()
        server.stop()
