"""Retention: what goes, what stays, and that nothing of it is noticed where it should not be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import sqlalchemy as sa
from collector.filled_run import an_incident
from store.filled_store import fill
from store.kit import SITES, UP, Feed, made_up

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.store import queries
from fp8watch_server.store.retention import DAY_S, Policy, prune

DAY = DAY_S + 2e6  # past the moment at which the tests compact


def merged(feed: Feed) -> list[Any]:
    return feed.answers(ranks=(None,))


def test_after_a_day_the_roll_up_is_left_and_says_the_same(feed: Feed) -> None:
    fill(feed, 300)
    feed.compact(everything=True)
    before = merged(feed)
    assert prune(feed.engine, Policy(), feed.now + DAY).num_cells_to_rollup == 2
    assert feed.count(t.sheet, t.sheet.c.rank >= 0) == 0
    assert merged(feed) == before
    with feed.engine.connect() as conn:
        assert queries.series(conn, "run-1", UP.id, "amax_max", rank=1)["steps"] == []
    assert prune(feed.engine, Policy(), feed.now + DAY).num_cells_to_rollup == 0  # once more does nothing


def test_a_loss_that_rank_0_does_not_have_stays_and_so_does_a_step_that_broke_on_another(feed: Feed) -> None:
    """Of a pipeline the last stage has the loss."""
    for rank, num in ((0, 300), (1, 300), (2, 300)):
        loss = [math.nan if rank == 2 and step == 7 else 2.0 for step in range(num)]
        scalars = {"lr": [0.1] * num} | ({"loss": loss} if rank else {})
        feed.send(feed.agent(rank=rank), list(range(num)), scalars=scalars)
    feed.compact(everything=True)
    for _ in range(2):
        prune(feed.engine, Policy(), feed.now + DAY)
        c = t.scalar.c
        with feed.engine.connect() as conn:
            kept = conn.execute(sa.select(c.step, c.rank, c.loss_class).order_by(c.step, c.rank)).all()
        assert [step for step, rank, kind in kept if rank == 1 and kind == 0] == list(range(300))
        assert [(step, kind) for step, rank, kind in kept if rank == 2] == [(7, 1)]
        assert len(kept) == 2 * 300 + 1


def test_of_one_rank_nothing_goes_after_a_day(feed: Feed) -> None:
    fill(feed, 300, ranks=1)
    feed.compact(everything=True)
    before = feed.answers(ranks=(None, 0))
    assert prune(feed.engine, Policy(), feed.now + DAY).num_cells_to_rollup == 0
    assert feed.answers(ranks=(None, 0)) == before


def test_around_an_incident_detail_stays_for_good_and_so_do_the_ranks_that_one_names(feed: Feed) -> None:
    fill(feed, 700)
    feed.compact(everything=True)
    with writing(feed.engine) as conn:
        place = {"ranks": [1], "module": UP.module}
        conn.execute(sa.insert(t.incident), [an_incident(first_step=330, last_step=340, place=place)])
    prune(feed.engine, Policy(keep_days=1.0), feed.now + 40 * DAY)
    prune(feed.engine, Policy(), feed.now + DAY)
    with feed.engine.connect() as conn:
        for rank in (0, 1):
            steps = queries.series(conn, "run-1", UP.id, "amax_max", points=1000, rank=rank)["steps"]
            assert steps == list(range(256, 512)), rank
    fill(feed, 300, run="other")
    feed.compact(everything=True)
    with writing(feed.engine) as conn:
        place = {"ranks": [1], "module": UP.module}
        conn.execute(
            sa.insert(t.incident), [an_incident(id="i9", run_id="other", first_step=9999, last_step=9999, place=place)]
        )
    prune(feed.engine, Policy(), feed.now + DAY, run_id="other")
    with feed.engine.connect() as conn:
        assert queries.series(conn, "other", UP.id, "amax_max", points=1000, rank=0)["steps"] == []
        assert len(queries.series(conn, "other", UP.id, "amax_max", points=1000, rank=1)["steps"]) == 300


def test_each_limit_of_a_policy_drops_the_oldest_to_their_summary(feed: Feed) -> None:
    fill(feed, 700, ranks=1)
    feed.compact(everything=True)
    with feed.engine.connect() as conn:
        sizes = list(conn.execute(sa.select(t.cell.c.num_bytes).order_by(t.cell.c.step0)).scalars())
        heat = queries.heatmap(conn, "run-1", "num_nonfinite", points=20)
    assert min(sizes) > 0
    dry = prune(feed.engine, Policy(keep_steps=100), feed.now + 10, dry_run=True)
    assert (dry.num_cells_to_summary, dry.num_bytes) == (2, sum(sizes[:2]))
    assert prune(feed.engine, Policy(keep_days=300.0), feed.now + DAY).num_cells_to_summary == 0
    assert prune(feed.engine, Policy(keep_bytes=sum(sizes[1:])), feed.now + 10).num_cells_to_summary == 1
    assert prune(feed.engine, Policy(keep_steps=100), feed.now + 10).num_cells_to_summary == 1
    assert feed.count(t.sheet) == 1
    assert feed.count(t.block) in (0, len(SITES))  # arrays for SQL
    with feed.engine.connect() as conn:
        assert queries.heatmap(conn, "run-1", "num_nonfinite", points=20) == heat  # columns of 64 steps: of summaries
        assert queries.series(conn, "run-1", UP.id, "amax_max", points=1000)["steps"] == list(range(512, 700))
        assert len(queries.scalars(conn, "run-1", "loss", points=1000)["steps"]) == 700


def test_the_bytes_of_a_cell_are_those_that_are_there(feed: Feed) -> None:
    """Compacted step by step, on a rank that comes late, and after its detail has gone."""

    def counted() -> tuple[int, int]:
        x = t.sheet.c
        with feed.engine.connect() as conn:
            there = conn.execute(sa.select(sa.func.sum(sa.func.length(x.body) + sa.func.length(x.histograms)))).scalar()
            return int(conn.execute(sa.select(sa.func.sum(t.cell.c.num_bytes))).scalar_one()), int(there or 0)

    rng = np.random.default_rng(5)
    for rank in (0, 1, 2):
        agent = feed.agent(rank=rank)
        for step in range(0, 30, 3):
            feed.send(agent, [step, step + 1, step + 2], fields=made_up(rng, 3, 3))
            feed.compact(everything=True)
            said, there = counted()
            assert said == there > 0
    prune(feed.engine, Policy(), feed.now + DAY)
    left, there = counted()
    assert left == there
    assert 0 < left < said


def test_a_run_may_keep_more_or_less_than_the_others(feed: Feed) -> None:
    for run in ("run-1", "short"):
        fill(feed, 600, ranks=1, run=run)
    with writing(feed.engine) as conn:
        conn.execute(sa.insert(t.retention), [{"run_id": "short", "keep_steps": 50}])
    feed.compact(everything=True)
    prune(feed.engine, Policy(), feed.now + 10)
    x = t.sheet.c
    assert feed.count(t.sheet, x.run_id == "run-1") == 3
    assert feed.count(t.sheet, x.run_id == "short") == 1


def test_a_batch_that_comes_after_its_detail_has_gone_is_added_to_the_roll_up(feed: Feed) -> None:
    fill(feed, 200)
    feed.compact(everything=True)
    prune(feed.engine, Policy(), feed.now + DAY)
    with feed.engine.connect() as conn:
        before = queries.series(conn, "run-1", UP.id, "num_elements", 5, 5)["values"]
    feed.send(feed.agent(rank=2), [5], [UP], fields={"amax_max": 1e6})
    for _ in range(2):  # while it is hot, and in the block
        with feed.engine.connect() as conn:
            assert queries.series(conn, "run-1", UP.id, "num_elements", 5, 5)["values"] == [before[0] + 1000]
            assert queries.series(conn, "run-1", UP.id, "amax_max", 5, 5)["values"] == [1e6]
        feed.compact(everything=True)
    assert feed.count(t.hot_batch) == 0


def test_a_batch_that_comes_after_its_blocks_have_gone_changes_nothing(feed: Feed) -> None:
    fill(feed, 700, ranks=1)
    feed.compact(everything=True)
    prune(feed.engine, Policy(keep_steps=100), feed.now + 10)
    with feed.engine.connect() as conn:
        top = queries.top(conn, "run-1", "num_nonfinite", 3)
    late = feed.agent().body([UP], [5], fields={"num_nan": 10**6}, seq=999)
    assert feed.commit(late)
    feed.compact(everything=True)
    assert feed.count(t.hot_batch) == 0
    assert not feed.commit(late)
    with feed.engine.connect() as conn:
        assert queries.top(conn, "run-1", "num_nonfinite", 3) == top
