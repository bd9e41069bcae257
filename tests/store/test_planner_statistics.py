"""PostgreSQL's planner knows of ten thousand sessions before autovacuum does; detection reads the session that is new alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from store.kit import Feed
from support.database import fresh_database

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.db.planner_statistics import PlannerStatistics
from fp8watch_server.detect.sessions import sessions_of
from fp8watch_server.ingest.registered import Registered
from fp8watch_server.pipeline import engine_restore, run_engines
from fp8watch_server.pipeline.detection import Detection
from fp8watch_server.store.commit import Incoming
from fp8watch_server.store.registrations import Unknown


@pytest.fixture
def engine() -> Iterator[sa.Engine]:
    with fresh_database("postgresql") as url:
        made = make_engine(url)
        yield made
        made.dispose()


def with_sessions(engine: sa.Engine, ranks: range) -> None:
    """Copies of one session, under the names of `Feed.agent`."""
    with writing(engine) as conn:
        row = dict(conn.execute(sa.select(t.session)).mappings().first() or {})
        conn.execute(sa.insert(t.session), [row | {"session": f"{r:016x}{1:016x}", "rank": r} for r in ranks])


def test_a_table_that_has_grown_fourfold_is_analysed_once(engine: sa.Engine) -> None:
    Feed(engine).agent()
    with_sessions(engine, range(1, 400))
    with engine.connect() as conn:
        conn.execute(sa.text("SELECT pg_stat_force_next_flush()"))
        conn.execute(sa.select(t.session.c.rank)).all()
    with writing(engine) as conn:
        conn.execute(sa.text("SELECT pg_stat_force_next_flush()"))
        conn.execute(sa.update(t.session).values(last_seen_at=2.0))
    found = PlannerStatistics(
        engine
    ).renew()  # of other tables the server may still count what an earlier test left there
    assert found.count("session") == 1
    again = PlannerStatistics(engine)
    assert again.renew() == []
    assert again.renew() == []  # it does not even look
    plan = "EXPLAIN SELECT rank FROM session WHERE run_id = 'run-1' AND tenant = 'default' AND session = 'x'"
    with engine.connect() as conn:
        assert "pk_session" in str(conn.exec_driver_sql(plan).all())


def test_of_many_sessions_only_a_new_one_is_read(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(engine)
    feed.agent()
    with_sessions(engine, range(1, 300))
    told: list[list[int]] = []

    class Engine:
        settling = False

        def add_sites(self, sites: Any) -> None: ...
        def take_notices(self) -> list[Any]:
            return []

        def add_sessions(self, sessions: Any) -> None:
            told.append([s.rank for s in sessions])

    detection = Detection(
        make_facts=lambda sites: {s.id: s for s in sites},
        make_engine=lambda *args: Engine(),  # type: ignore[arg-type,return-value]
        fold=lambda *args, **kw: [],
        close_quiet=lambda *args, **kw: [],
        queue_resolved=lambda *args: None,
        make_sessions=sessions_of,
    )
    engines, key = run_engines.RunEngines(engine, detection, lambda restoring: None), ("run-1", "default")
    monkeypatch.setattr(engine_restore, "replay", lambda *args: 0)
    monkeypatch.setattr(run_engines, "LOOK_AGAIN_S", 60.0)
    engines.of(key, 1, set())
    assert [len(ranks) for ranks in told] == [300]
    with_sessions(engine, range(300, 310))
    engines.of(key, 1, {f"{5:016x}{1:016x}"})  # one that is known
    engines.of(key, 1, {f"{307:016x}{1:016x}"})
    assert told[1:] == [[307]]
    monkeypatch.setattr(run_engines, "LOOK_AGAIN_S", 0.0)
    engines.of(key, 1, set())
    assert len(told[-1]) == 310  # after a while all are looked at again


def test_a_collector_with_a_queue_reads_the_sessions_that_it_does_not_know(engine: sa.Engine) -> None:
    feed = Feed(engine)
    agents = [feed.agent(rank=rank) for rank in range(3)]
    registered = Registered(engine)
    try:
        from fp8watch_agent.wire import decode_batch

        def ask(rank: int) -> list[Exception | None]:
            body = agents[rank].body(feed.sites, [1])
            return registered.check([Incoming(decode_batch(body), body, b"")])

        assert ask(0) == [None]
        assert set(registered._runs["run-1"].sessions) == {agents[0].session}
        assert ask(2) == [None]
        with writing(engine) as conn:
            conn.execute(sa.delete(t.run))
        registered._read("run-1")
        (wrong,) = ask(0)
        assert isinstance(wrong, Unknown)
    finally:
        registered.close()
