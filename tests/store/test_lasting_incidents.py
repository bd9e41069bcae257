"""An incident that lasts as long as its run: what is asked for and kept because of it has an end."""

from __future__ import annotations

import numpy as np
import sqlalchemy as sa
from collector.filled_run import an_incident
from store.filled_store import fill
from store.kit import UP, Feed

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.store import commit, tile_maps
from fp8watch_server.store.retention import Policy, prune


def lasts(feed: Feed, first: int, last: int) -> None:
    with writing(feed.engine) as conn:
        conn.execute(sa.delete(t.incident))
        conn.execute(sa.insert(t.incident), [an_incident(first_step=first, last_step=last, sites=[UP.id])])


def test_maps_are_asked_for_in_its_first_steps(feed: Feed) -> None:
    feed.agent()
    for last, wanted in ((100, [100, 116]), (180, [180, 196]), (5000, None)):
        lasts(feed, 100, last)
        with feed.engine.connect() as conn:
            got = commit.captures_wanted(conn, "run-1")
        assert got == ([] if wanted is None else [{"site": UP.id, "steps": wanted}])


def test_no_maps_are_asked_for_because_of_an_attempt_that_is_over(feed: Feed) -> None:
    feed.agent()
    lasts(feed, 100, 100)
    feed.agent(attempt=2)
    with feed.engine.connect() as conn:
        assert commit.captures_wanted(conn, "run-1") == []


def test_maps_and_detail_are_kept_around_its_ends(feed: Feed) -> None:
    agent = feed.agent()
    fill(feed, 1400, per_batch=200)
    feed.compact(everything=True)
    lasts(feed, 100, 1100)
    row = {"run_id": "run-1", "site": UP.id, "rank": 0, "attempt": 1, "session": agent.session}
    row |= {"body": np.zeros(1).tobytes(), "received_at": feed.now}
    with writing(feed.engine) as conn:
        conn.execute(sa.insert(t.tile_map), [{**row, "step": step} for step in range(1400)])
        tile_maps.prune(conn, "run-1")
    with feed.engine.connect() as conn:
        kept = tile_maps.steps_available(conn, "run-1", UP.id)
    assert kept == [*range(84, 117), *range(1084, 1117), *range(1144, 1400)]
    prune(feed.engine, Policy(keep_bytes=1), feed.now + 10)
    with feed.engine.connect() as conn:
        cells = conn.execute(sa.select(t.cell.c.step0, t.cell.c.kept).order_by(t.cell.c.step0)).all()
    assert [step0 for step0, kept in cells if kept == t.KEPT_DETAIL] == [0, 1024]
