"""A batch that was too large went in halves, whose sequence numbers are huge: what is sent behind them is newer all the same."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from store.kit import SITES, Feed
from support.database import KINDS, fresh_database

from fp8watch_agent.wire import SPLIT_SHIFT, parent_seq
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.store import queries

HALVES = (2 << SPLIT_SHIFT | 3, 3 << SPLIT_SHIFT | 3)
RUN = "run-1"


@pytest.fixture(params=KINDS)
def feed(request: pytest.FixtureRequest) -> Any:
    with fresh_database(request.param) as url:
        feed = Feed(make_engine(url))
        agent = feed.agent(RUN)
        for seq, steps in zip(HALVES, ([10, 11], [12, 13]), strict=True):
            fields = {"amax_max": [8.0] * 2}
            feed.send(agent, steps, SITES[:1], fields=fields, scalars={"loss": [9.0] * 2}, seq=seq, **_beside(9.0, 2))
        fields = {"amax_max": [1.0] * 3}  # training went back in place, to step 11
        feed.send(agent, [11, 12, 13], SITES[:1], fields=fields, scalars={"loss": [2.0] * 3}, seq=4, **_beside(2.0, 3))
        yield feed
        feed.engine.dispose()


def _beside(value: float, num_steps: int) -> dict[str, Any]:
    return {"health": {"retries": value}, "logs": {"entropy": [value] * num_steps}}


def test_the_seq_of_a_half_is_known_by_its_whole() -> None:
    assert [parent_seq(seq) for seq in (*HALVES, 4, 0, -7)] == [3, 3, 4, 0, -7]


@pytest.mark.parametrize("compacted", [False, True])
def test_of_steps_that_came_again_behind_halves_the_later_ones_count(feed: Feed, compacted: bool) -> None:
    if compacted:
        feed.compact(everything=True)
    with feed.engine.connect() as conn:
        amax = queries.series(conn, RUN, SITES[0].id, "amax_max", None, None, 50, 0)
        loss = queries.scalars(conn, RUN, "loss", None, None, 50, 0)
        logged = queries.scalars(conn, RUN, "entropy", None, None, 50, 0)
        health = conn.execute(sa.select(t.session.c.health)).scalar_one()
    assert amax["values"] == [8.0, 1.0, 1.0, 1.0]
    assert loss["values"] == logged["values"] == [9.0, 2.0, 2.0, 2.0]
    assert health == {"retries": 2.0}
