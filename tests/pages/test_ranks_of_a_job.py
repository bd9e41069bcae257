"""Ranks of the job that runs now, however often it was started and however many there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa
from support.database import KINDS, fresh_database

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.pages.coverage import agents
from fp8watch_server.store.rank_sessions import of_ranks

NOW = 10_000.0
KEY = {"run_id": "r", "tenant": "default"}
WELL = {"acknowledged": 100.0, "internal_errors": 0.0, "spooled": 0.0}


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[sa.Engine]:
    """A database with one run."""
    with ExitStack() as stack:
        made = make_engine(stack.enter_context(fresh_database(request.param)))
        stack.callback(made.dispose)
        schema.metadata.create_all(made)
        with writing(made, turn_s=10) as conn:
            conn.execute(sa.insert(schema.run), [{**KEY, "name": "r", "created_at": 0.0, "last_seen_at": NOW}])
        yield made


def session(rank: int, attempt: int = 1, at: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A session that is well, registered `at`."""
    texts = dict.fromkeys(("host", "recipe", "fingerprint", "backend"), "")
    row = {**KEY, **texts, "session": f"{rank}-{attempt}", "rank": rank, "attempt": attempt, "world_size": 1, "pid": 1}
    row |= {"mesh": {}, "versions": {}, "facts": {}, "registered_at": at, "last_seen_at": NOW, "health": WELL}
    return {**row, "ended": False, **changes}


def told(engine: sa.Engine, sessions: list[dict[str, Any]], world_size: int, attempt: int = 2) -> dict[str, Any]:
    """What the page of a run with these sessions says of its ranks."""
    run: Any = {"id": "r", "world_size": world_size, "attempt": attempt}
    with writing(engine, turn_s=10) as conn:
        conn.execute(sa.delete(schema.session))
        conn.execute(sa.insert(schema.session), sessions)
    with engine.connect() as conn:
        return agents(run, of_ranks(conn, run, NOW), NOW)


def test_a_rank_that_ended_before_the_newest_attempt_has_not_come_in_it(engine: sa.Engine) -> None:
    before = [session(rank, ended=True, last_seen_at=4000.0) for rank in range(8)]
    after = [session(rank, 2, 5000.0) for rank in range(8) if rank != 5]
    got = told(engine, [*before, *after], 8)
    assert (got["num_missing"], got["since"], got["num_ranks"], got["num_unwell"]) == (1, " in attempt 2", 7, 0)
    late = session(5, 1, 4990.0, session="late")  # one that came for the first time, and has no attempt before
    got = told(engine, [*(s for s in before if s["rank"] != 5), *after, late], 8)
    assert (got["num_missing"], got["num_unwell"]) == (0, 0)


def test_ranks_that_a_smaller_job_no_longer_has_are_not_silent(engine: sa.Engine) -> None:
    dead = [session(rank, last_seen_at=4000.0) for rank in range(8)]
    alive = [session(rank, 2, 5000.0) for rank in range(4)]
    got = told(engine, [*dead, *alive], 4)
    assert (got["num_missing"], got["num_unwell"], got["num_ranks"]) == (0, 0, 4)
    got = told(engine, [*dead, *alive], 8)  # they are of the job, and silent
    assert (got["num_missing"], got["num_unwell"], got["rows"][0]["rank"]) == (0, 4, 4)


def test_one_rank_of_more_than_a_thousand_that_lost_something_is_named(engine: sa.Engine) -> None:
    ranks = [session(rank, 1, ended=True) for rank in range(1100)]
    ranks[1090]["health"] = {**WELL, "dropped_ring_full": 17.0}
    ranks[1091]["health"] = {**WELL, "internal_errors": 2.0}
    ranks[1092]["health"] = {**WELL, "spooled": 3.0}
    ranks[1093] |= {"ended": False, "last_seen_at": NOW - 600}
    ranks[1094]["health"] = None
    ranks[1095]["health"] = {**WELL, "overhead_ratio": "nan"}
    got = told(engine, ranks, 1101, attempt=1)
    assert [row["rank"] for row in got["rows"][:5]] == [1090, 1091, 1092, 1093, 0]
    assert (got["num_ranks"], got["num_missing"], got["num_unwell"], got["since"]) == (1100, 1, 4, "")
    assert (got["num_more"], got["num_more_unwell"], got["num_lost"]) == (1068, 0, 17)
    for row in ranks:
        row["health"] = {"dropped_ring_full": 1.0}
    got = told(engine, ranks, 1100, attempt=1)
    assert (got["num_unwell"], got["num_more_unwell"], len(got["rows"])) == (1100, 1068, 32)
    assert got["lost_more"]
