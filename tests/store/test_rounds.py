"""Of several collectors on one database one works at a time, and the next one takes over whatever the first died of."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from store.filled_store import fill
from store.kit import Feed
from support.database import fresh_database

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.leader import Leader
from fp8watch_server.db.leader_loop import LeaderLoop, Pause
from fp8watch_server.store.compactor import Compactor

LOG = logging.getLogger("rounds")
LONG_S = 30.0


@pytest.fixture
def two() -> Iterator[tuple[sa.Engine, sa.Engine]]:
    """Two collectors' engines on one PostgreSQL."""
    with fresh_database("postgresql") as url:
        engines = make_engine(url), make_engine(url)
        yield engines
        for engine in engines:
            engine.dispose()


def until(met: Any) -> None:
    end = time.monotonic() + LONG_S
    while not met():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_leads_until_it_lets_go(two: tuple[sa.Engine, sa.Engine]) -> None:
    first, second = (Leader(engine, "work") for engine in two)
    other = Leader(two[1], "other work")
    assert first.held()
    assert not second.held()
    assert first.held()
    assert other.held()  # each work has a leader of its own
    first.release()
    until(second.held)
    assert not first.held()
    for leader in (second, other):
        leader.release()


def test_a_leader_that_dies_is_followed(two: tuple[sa.Engine, sa.Engine]) -> None:
    first, second = (Leader(engine, "work") for engine in two)
    assert first.held()
    with two[1].connect() as conn:
        conn.execute(
            sa.text("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND pid IS NOT NULL")
        )
    until(second.held)
    with pytest.raises(sa.exc.SQLAlchemyError):
        first.held()
    assert not first.held()
    second.release()


def test_sqlite_has_one_collector_which_leads(feed: Feed) -> None:
    assert feed.engine.dialect.name != "sqlite" or all(Leader(feed.engine, "work").held() for _ in range(2))


def test_of_two_compactors_one_works_until_it_stops(two: tuple[sa.Engine, sa.Engine]) -> None:
    feed = Feed(two[0])
    fill(feed, 300, ranks=1)
    names: list[str] = []
    made = []
    for engine, name in zip(two, ("first", "second"), strict=True):
        compactor = Compactor(
            engine, clock=lambda: feed.now + 1e6, round_s=0.02, crash=lambda at, name=name: names.append(name)
        )
        made.append(compactor)
    try:
        made[0].start()
        until(lambda: feed.count(t.hot_batch) == 0)
        made[1].start()
        feed.send(feed.agent(), [400], seq=900)
        until(lambda: feed.count(t.hot_batch) == 0)
        assert set(names) == {"first"}
        made[0].stop()
        feed.send(feed.agent(), [401], seq=901)
        until(lambda: feed.count(t.hot_batch) == 0)
    finally:
        for compactor in made:
            compactor.stop()
    assert names[-1] == "second"  # rounds may have failed in between: a database that is busy is tried again


class Turns:
    """A leader whose turns are the test's."""

    mine = True

    def held(self) -> bool:
        return self.mine

    def release(self) -> None:
        self.mine = False


def test_trouble_is_counted_forgotten_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    calls, forgotten, done = [], [], threading.Event()
    trouble = [sa.exc.OperationalError("SELECT 1", {}, Exception("gone")), ValueError("a bug"), None]

    def work() -> Pause:
        calls.append(1)
        problem = trouble[min(len(calls), 3) - 1]
        if problem is not None:
            raise problem
        done.set()
        return Pause(LONG_S)

    turns = Turns()
    rounds = LeaderLoop(
        "t",
        "work",
        turns,
        work,
        LOG,
        forget=lambda: forgotten.append(1),
        retry_s=0.0,  # type: ignore[arg-type]
    )
    with caplog.at_level(logging.WARNING, "rounds"):
        rounds.start()
        assert done.wait(LONG_S)
        done.clear()
        rounds.wake()
        assert done.wait(LONG_S), "a wake ends a rest"
        began = time.monotonic()
        rounds.stop()
    assert time.monotonic() - began < LONG_S / 2
    assert (rounds.num_failures, len(forgotten)) == (2, 2)
    assert [r.levelname for r in caplog.records] == ["WARNING", "ERROR"]
    assert not turns.mine, "who stops lets somebody else"


def test_who_does_not_lead_forgets_and_does_nothing() -> None:
    forgotten, turns = threading.Event(), Turns()
    turns.mine = False
    rounds = LeaderLoop("t", "work", turns, lambda: pytest.fail("not our turn"), LOG, forget=forgotten.set)  # type: ignore[arg-type]
    rounds.start()
    assert forgotten.wait(LONG_S)
    rounds.stop()
    assert rounds.num_failures == 0
