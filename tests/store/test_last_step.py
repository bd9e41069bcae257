"""The last step of a run is the one that it is at, also where its ranks went back in place, one after the other."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from store.kit import NOW, UP, Feed

from fp8watch_server.db import schema as t


def told(feed: Feed, agent: Any, steps: range, at: float = 0.0) -> int:
    """Send steps that took a second each from `at` on; the last step after them."""
    feed.send(agent, list(steps), [UP], times=[NOW + at + i for i in range(len(steps))])
    with feed.engine.connect() as conn:
        return int(conn.execute(sa.select(t.run.c.last_step)).scalar_one())


def test_ranks_that_go_back_one_after_the_other_take_the_last_step_with_them(feed: Feed) -> None:
    zero, one = feed.agent(rank=0), feed.agent(rank=1)
    assert told(feed, zero, range(101)) == 100
    assert told(feed, one, range(93)) == 100  # is behind, and has not gone back
    assert told(feed, zero, range(50, 58), 200) == 57
    assert told(feed, one, range(93, 101), 93) == 100  # late: of before, which nothing says yet
    assert told(feed, zero, range(58, 66), 208) == 65
    assert told(feed, one, range(50, 58), 200) == 65  # is behind where the other is now
    assert told(feed, one, range(58, 74), 208) == 73
    assert told(feed, zero, range(66, 70), 216) == 73


def test_a_batch_of_before_that_comes_late_is_no_step_back(feed: Feed) -> None:
    agent = feed.agent()
    first, second = (agent.body([UP], list(steps)) for steps in (range(8), range(8, 16)))
    for body in (second, first):
        assert feed.commit(body)
    with feed.engine.connect() as conn:
        assert conn.execute(sa.select(t.run.c.last_step)).scalar_one() == 15


def test_of_a_newer_attempt_that_begins_again_it_is_the_step_of_that_one(feed: Feed) -> None:
    old = feed.agent()
    assert told(feed, old, range(101)) == 100
    assert told(feed, feed.agent(attempt=2), range(5), 200) == 4
    assert told(feed, old, range(101, 103), 101) == 4
