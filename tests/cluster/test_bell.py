"""What one process commits and cannot wait is heard by another that detects on the same PostgreSQL."""

from __future__ import annotations

import queue

import pytest
import sqlalchemy as sa
from collector.kit import Agent, Recorder, make_site, run_async

from fp8watch_agent.wire import Batch, decode_batch
from fp8watch_server.db import schema as t
from fp8watch_server.db.bell import Bell
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.ingest.group_commit import Committer
from fp8watch_server.ingest.ingest_stats import IngestStats
from fp8watch_server.pipeline.detect_worker import DetectWorker
from fp8watch_server.settings import Settings
from fp8watch_server.station import Station
from fp8watch_server.store.registrations import StoredSession, register_run, register_session, register_sites

SITES = [make_site("up", order=0)]


@pytest.fixture
def database_kind() -> str:
    return "postgresql"


def decoded(body: bytes) -> Batch:
    return decode_batch(body)


def test_a_broken_batch_is_heard_and_a_healthy_one_is_not(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A station, whose own committer has nothing to do with it; another process's commits."""
    heard: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(DetectWorker, "wake_for", lambda self, run, tenant: heard.put(run))

    listens, commits = make_engine(database_url), make_engine(database_url)
    settings = Settings(database_url=database_url)
    station = Station(listens, settings, Recorder().detection(), lambda e, s: None, IngestStats())
    station.start()
    agent = Agent(None, run="it's/run-1")
    facts = StoredSession(agent.session, 0, 1, {}, "h", 1, None, {}, "", "", "", {})
    with writing(commits) as conn:
        register_run(conn, agent.run, name="r", recipe="", backend="", world_size=1, now=1.0)
        register_session(conn, agent.run, facts, now=1.0)
        register_sites(conn, agent.run, agent.session, SITES, now=1.0)
    with commits.connect() as conn:
        listening = sa.text(
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
        )
        until = 200
        while not conn.execute(listening).scalar_one() and until:
            conn.rollback()
            until -= 1
            conn.exec_driver_sql("SELECT pg_sleep(0.05)")
    committer = Committer(commits, decoded)

    async def commit(*bodies: bytes) -> None:
        for body in bodies:
            await committer.commit(body)[0]

    run_async(commit(agent.body(SITES, [1]), agent.body(SITES, [2], fields={"num_inf": 1}), agent.body(SITES, [3])))
    assert heard.get(timeout=20) == agent.run
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.3)
    committer.stop()
    station.stop()
    with commits.connect() as conn:
        assert conn.execute(sa.select(sa.func.count()).select_from(t.hot_batch)).scalar_one() == 3
    for engine in (listens, commits):
        engine.dispose()


def test_who_listens_again_is_told(database_url: str) -> None:
    """A bell whose session is ended listens again, and says so: it may have missed a ring."""
    engine, began = make_engine(database_url), queue.Queue[None]()
    bell = Bell(engine, lambda run: None, lambda: began.put(None))
    bell.start()
    began.get(timeout=20)
    with engine.connect() as conn:
        conn.execute(
            sa.text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
            )
        )
    began.get(timeout=20)
    bell.stop()
    engine.dispose()
