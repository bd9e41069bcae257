"""A run that begins again under its name, at lower steps: what goes first is what the attempt of before had."""

from __future__ import annotations

import numpy as np
import sqlalchemy as sa
from collector.kit import Agent
from store.kit import UP, Feed

from fp8watch_agent.record import TileMap
from fp8watch_agent.wire import decode_tile_maps, encode_tile_maps
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.store import queries, tile_maps
from fp8watch_server.store.retention import Policy, prune


def maps(feed: Feed, agent: Agent, steps: range) -> None:
    one = np.ones(1)
    names = {"amax": "u2", "scale_inv": "f4", "flags": "u1", "num_nonfinite": "u2", "num_underflow": "u2"}
    made = {name: one.astype(dtype) for name, dtype in names.items()}
    agent.seq += 1
    few = [TileMap(site=UP.id, step=step, shape=(1, 1), **made) for step in steps]
    sent = decode_tile_maps(encode_tile_maps("run-1", agent.session, agent.rank, agent.seq, few))
    with writing(feed.engine) as conn:
        assert tile_maps.commit_tile_maps(conn, sent, bytes([agent.seq]) * 32, now=feed.now)
        tile_maps.prune(conn, "run-1")


def kept(feed: Feed) -> tuple[list[int], int]:
    """Steps with a map, and the one that is shown where none is asked for."""
    with feed.engine.connect() as conn:
        shown = queries.kept_map(conn, "run-1", UP.id)
        assert shown is not None
        return shown.steps, shown.tiles.step


def test_its_tile_maps_are_the_newest(feed: Feed) -> None:
    maps(feed, feed.agent(), range(10_000, 10_301))
    assert kept(feed) == ([*range(10_045, 10_301)], 10_300)
    feed.now += 100
    again = feed.agent(attempt=2)
    maps(feed, again, range(11))
    assert kept(feed) == ([*range(11), *range(10_056, 10_301)], 10)
    with feed.engine.connect() as conn:
        assert conn.execute(sa.select(t.tile_map_batch.c.step_max).order_by(sa.text("1"))).scalars().all() == [
            10,
            10_300,
        ]
    maps(feed, again, range(11, 300))
    assert kept(feed) == ([*range(44, 300)], 299)
    with feed.engine.connect() as conn:
        assert conn.execute(sa.select(t.tile_map_batch.c.step_max)).scalars().all() == [299]


def test_the_maps_of_a_rank_that_missed_a_start_are_of_now(feed: Feed) -> None:
    feed.agent(rank=0)
    feed.now += 100
    maps(feed, feed.agent(rank=0, attempt=2), range(300))
    maps(feed, feed.agent(rank=1, attempt=1), range(290, 301))
    assert kept(feed) == ([*range(45, 301)], 300)


def test_the_bytes_that_are_kept_are_those_that_came_last(feed: Feed) -> None:
    feed.send(feed.agent(), list(range(1024, 2048)))
    feed.compact(everything=True)
    feed.now += 1000
    feed.send(feed.agent(attempt=2), list(range(512)))
    feed.compact(everything=True)
    with feed.engine.connect() as conn:
        sizes = dict(conn.execute(sa.select(t.cell.c.step0, t.cell.c.num_bytes)).all())
    prune(feed.engine, Policy(keep_bytes=sum(sizes[step0] for step0 in (0, 256, 1792))), feed.now + 10)
    with feed.engine.connect() as conn:
        left = conn.execute(sa.select(t.cell.c.step0).where(t.cell.c.kept == t.KEPT_DETAIL).order_by(t.cell.c.step0))
        assert left.scalars().all() == [0, 256, 1792]
