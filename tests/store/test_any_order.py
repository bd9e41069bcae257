"""Batches permuted, sent twice and split, with compaction, roll-up and a restart at any moment: the same run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from store.kit import SITES, Feed, made_up
from support.database import KINDS, fresh_database

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing

STEPS, PER_BATCH = 290, 29
HEAVY: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "phases": [Phase.generate],  # an example takes a second: what fails is not made smaller
    "suppress_health_check": list(HealthCheck),
}


def bodies(feed: Feed, run: str) -> list[bytes]:
    """Two ranks, and a second attempt of one that repeats some steps without one of the sites."""
    rng = np.random.default_rng(11)
    out = []
    for rank in (0, 1):
        agent = feed.agent(run, rank)
        for first in range(0, STEPS, PER_BATCH):
            steps = list(range(first, first + PER_BATCH))
            loss = list(rng.normal(2, 1, PER_BATCH))
            out.append(agent.body(SITES, steps, fields=made_up(rng, PER_BATCH, 3), scalars={"loss": loss}))
    again = feed.agent(run, 0, attempt=2)
    for first in range(240, 300, 20):
        steps = list(range(first, first + 20))
        out.append(again.body(SITES[:2], steps, fields=made_up(rng, 20, 2), scalars={"loss": [1.0] * 20}))
    half = feed.agent(run, 1)  # of one step a second batch: the later one counts
    out.append(half.body(SITES[:1], [5], fields=made_up(rng, 1, 1), scalars={"loss": [5.0]}, seq=777))
    return out


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Any:
    with fresh_database(request.param) as url:
        feed = Feed(make_engine(url))
        for body in bodies(feed, "plain"):
            feed.commit(body)
        yield feed, feed.answers("plain"), [0]
        feed.engine.dispose()


@settings(derandomize=True, max_examples=3, **HEAVY)
@given(data=st.data())
def test_any_order_and_any_moment_of_compaction_give_the_same_answers(shared: Any, data: st.DataObject) -> None:
    in_some_order(shared, data)


@pytest.mark.heavy(50, "server/fp8watch_server/store", "server/fp8watch_server/db")
@settings(max_examples=30, **HEAVY)
@given(data=st.data())
def test_any_of_many_orders_gives_the_same_answers(shared: Any, data: st.DataObject) -> None:
    in_some_order(shared, data)


def in_some_order(shared: Any, data: st.DataObject) -> None:
    feed, want, number = shared
    number[0] += 1
    run = f"run-{number[0]}"
    given_bodies = bodies(feed, run)
    order = data.draw(st.permutations(range(len(given_bodies))), label="order")
    twice = data.draw(st.lists(st.sampled_from(order), max_size=5), label="sent again")
    moments = data.draw(st.sets(st.integers(0, len(order)), max_size=3), label="compacted before")
    for i, index in enumerate([*order, *twice]):
        if i in moments:
            feed.compact(everything=data.draw(st.booleans(), label="all of it"))
        assert feed.commit(given_bodies[index]) == (i < len(order))
    assert _same(feed.answers(run), want)
    feed.compact(everything=True)
    assert _same(feed.answers(run), want)
    assert feed.count(t.hot_batch, t.hot_batch.c.run_id == run) == 0
    with writing(feed.engine) as conn:
        conn.execute(t.run.delete().where(t.run.c.run_id == run))


def _same(got: list[Any], want: list[Any]) -> bool:
    return [a for a, b in zip(got, want, strict=True) if a != b] == []
