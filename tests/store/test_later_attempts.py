"""A run that goes back a day later: its new steps replace those of which only the roll-up, or the summary, is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from store.filled_store import fill
from store.kit import SITES, UP, Feed, made_up

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.store import queries
from fp8watch_server.store.check import check
from fp8watch_server.store.retention import DAY_S, Policy, prune

DAY = DAY_S + 2e6  # past the moment at which the tests compact


def asked(feed: Feed, step: int, field: str = "num_elements") -> Any:
    with feed.engine.connect() as conn:
        return queries.series(conn, "run-1", UP.id, field, step, step)["values"]


def loss(feed: Feed) -> dict[int, float]:
    with feed.engine.connect() as conn:
        got = queries.scalars(conn, "run-1", "loss", points=1000)
    return {step: value for step, value in zip(got["steps"], got["values"], strict=True) if value is not None}


def trained(feed: Feed, attempt: int, steps: range, value: float) -> None:
    for rank in (0, 1):
        agent = feed.agent(rank=rank, attempt=attempt)
        fields = made_up(np.random.default_rng(rank), len(steps), len(SITES)) | {"amax_max": value}
        feed.send(agent, list(steps), fields=fields, scalars={"loss": [value + rank] * len(steps)})


def whole(feed: Feed, since: int) -> None:
    """After the second attempt: its steps are its own alone, and those before it are what they were."""
    assert asked(feed, 150) == [2000]
    assert asked(feed, 150, "amax_max") == [3.0]
    assert loss(feed)[150] == 3.5
    assert (asked(feed, 50), asked(feed, 50, "amax_max"), loss(feed)[50]) == ([2000], [9.0], 9.5)
    with feed.engine.connect() as conn:
        own = queries.series(conn, "run-1", UP.id, "amax_max", since, 299, 1000, rank=1)
    assert own["steps"] == list(range(since, 300))
    assert set(own["values"]) <= {3.0}


@pytest.mark.parametrize("earlier", [False, True])
def test_steps_computed_again_after_a_day_replace_those_in_the_roll_up(feed: Feed, earlier: bool) -> None:
    trained(feed, 1, range(300), 9.0)
    feed.compact(everything=True)
    prune(feed.engine, Policy(), feed.now + DAY)
    if earlier:  # of a collector that did not say which attempts are in it
        with writing(feed.engine) as conn:
            conn.execute(sa.update(t.cell).values(sources=[]))
    feed.now += 3e6
    trained(feed, 2, range(100, 300), 3.0)
    whole(feed, 100)
    feed.compact(everything=True)
    whole(feed, 100)
    assert check(feed.engine).problems == []
    prune(feed.engine, Policy(), feed.now + DAY)
    assert feed.count(t.sheet, t.sheet.c.attempt != t.ROLLED_ATTEMPT) == 0
    whole(feed, 300)
    feed.send(feed.agent(rank=2, attempt=1), [50, 150], [UP], fields={"amax_max": 99.0})  # late, by a day
    for _ in range(2):
        assert (asked(feed, 50), asked(feed, 50, "amax_max")) == ([3000], [99.0])
        feed.compact(everything=True)
    assert (asked(feed, 150), asked(feed, 150, "amax_max")) == ([2000], [3.0])
    assert check(feed.engine).problems == []


def test_steps_computed_again_after_their_blocks_have_gone_are_there(feed: Feed) -> None:
    trained(feed, 1, range(700), 9.0)
    feed.compact(everything=True)
    prune(feed.engine, Policy(keep_steps=100), feed.now + 10)
    assert asked(feed, 150) == []
    feed.now += 3e6
    trained(feed, 2, range(100, 200), 3.0)
    for _ in range(2):
        assert (asked(feed, 150), asked(feed, 150, "amax_max"), loss(feed)[150]) == ([2000], [3.0], 3.5)
        assert (asked(feed, 50), loss(feed)[50]) == ([], 9.5)
        feed.compact(everything=True)
    assert check(feed.engine).problems == []


def test_the_detail_of_a_rank_that_an_incident_names_is_not_counted_twice(feed: Feed) -> None:
    from collector.filled_run import an_incident

    fill(feed, 200)
    feed.compact(everything=True)
    before = (asked(feed, 50), asked(feed, 50, "signal_energy"))
    with writing(feed.engine) as conn:
        conn.execute(
            sa.insert(t.incident), [an_incident(first_step=9999, last_step=9999, place={"ranks": [1], "module": ""})]
        )
    prune(feed.engine, Policy(), feed.now + DAY)
    feed.now += 3e6
    trained(feed, 2, range(100, 200), 3.0)
    for _ in range(2):
        assert (asked(feed, 50), asked(feed, 50, "signal_energy")) == before
        assert (asked(feed, 150), asked(feed, 150, "amax_max")) == ([2000], [3.0])
        feed.compact(everything=True)
    assert check(feed.engine).problems == []
