"""Records that stand for several steps: which these are is answered with their values, over ranks too, compacted or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from store.kit import UP, Feed

from fp8watch_agent.record import Measured
from fp8watch_server.store import queries

LIGHT = int(Measured.COUNTS | Measured.AMAX)
STEPS = [15, 31, 47]


def of_rank(rank: int) -> dict[str, Any]:
    """Three records of a rank: two windows, and a step by itself. Of the first, rank 1 has the larger amax."""
    window = np.array([True, True, False])
    return {
        "measured": np.where(window, LIGHT | int(Measured.WINDOW), LIGHT), "num_elements": 16, "num_tiles": 1, "num_nonzero": 16,
        "amax_max": np.array([2.0 + rank, 4.0, 5.0]),
        "window_steps_back": np.where(window, 15 - 5 * rank, 0),
        "amax_steps_back": np.where(window, 3 + rank, 0),
    }  # fmt: skip


@pytest.fixture(params=[False, True], ids=["hot", "compacted"])
def held(request: pytest.FixtureRequest, feed: Feed) -> Feed:
    feed.sites = [UP]
    for rank in range(2):
        feed.send(feed.agent(rank=rank), STEPS, fields=of_rank(rank))
    if request.param:
        feed.compact(everything=True)
    return feed


def test_a_point_says_which_steps_it_stands_for_and_where_the_largest_amax_lay(held: Feed) -> None:
    with held.engine.connect() as conn:
        one = queries.series(conn, "run-1", UP.id, "amax_max", rank=1)
        assert (one["steps"], one["from_steps"], one["at_steps"]) == (STEPS, [5, 21, 47], [11, 27, 47])
        over = queries.series(conn, "run-1", UP.id, "amax_max")
        assert over["values"] == [3.0, 4.0, 5.0]
        assert over["from_steps"] == [0, 16, 47], "the first of any rank's"
        assert over["at_steps"] == [11, 28, 47], "of the rank that has it, of equals the first"
        counts = queries.series(conn, "run-1", UP.id, "num_elements")
        assert counts["from_steps"] == [0, 16, 47]
        assert "at_steps" not in counts
        several = queries.several_series(conn, "run-1", UP.id, ["amax_max", "num_elements"])
        assert several == {"amax_max": over, "num_elements": counts}
        back = queries.series(conn, "run-1", UP.id, "amax_steps_back")
        assert back["values"] == [4, 3, None], "a step by itself has no such number"


def test_points_that_are_left_out_take_theirs_along(feed: Feed) -> None:
    feed.sites = [UP]
    rng, n = np.random.default_rng(0), 240
    steps = list(range(16, 16 + n))
    back, at = rng.integers(1, 16, n), rng.integers(0, 2, n)
    fields = {
        "measured": LIGHT | int(Measured.WINDOW),
        "amax_max": rng.random(n),
        "window_steps_back": back,
        "amax_steps_back": at,
    }
    feed.send(feed.agent(), steps, fields=fields)
    with feed.engine.connect() as conn:
        got = queries.series(conn, "run-1", UP.id, "amax_max", points=30)
    assert got["stride"] > 1
    assert len(got["from_steps"]) == len(got["at_steps"]) == len(got["steps"]) < n
    assert got["from_steps"] == [s - back[s - 16] for s in got["steps"]]
    assert got["at_steps"] == [s - at[s - 16] for s in got["steps"]]


def test_where_each_record_is_of_its_own_step_nothing_is_said(feed: Feed) -> None:
    feed.sites = [UP]
    feed.send(feed.agent(), STEPS, fields={"measured": LIGHT, "amax_max": 1.0})
    with feed.engine.connect() as conn:
        got = queries.series(conn, "run-1", UP.id, "amax_max")
    assert not {"from_steps", "at_steps"} & set(got)


def test_more_of_a_step_that_has_left_is_added_to_it(feed: Feed) -> None:
    """A window that ends where something happens comes in the next batch, under the step before."""
    agent = feed.agent()
    feed.send(agent, [14, 15], sites=feed.sites[:1])
    feed.send(agent, [15, 16], sites=feed.sites[1:])
    for compacted in (False, True):
        if compacted:
            feed.compact(everything=True)
        with feed.engine.connect() as conn:
            of = [queries.series(conn, "run-1", s.id, "num_elements")["steps"] for s in feed.sites[:2]]
            loss = queries.scalars(conn, "run-1", "loss")
        assert of == [[14, 15], [15, 16]]
        assert loss["steps"] == [14, 15, 16]
