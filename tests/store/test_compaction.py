"""Compaction changes where records lie, and nothing of what is answered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from store.filled_store import WINDOWS, fill
from store.kit import DOWN, SITES, UP, Feed, made_up

from fp8watch_server.db import schema as t
from fp8watch_server.store import queries, series
from fp8watch_server.store.compactor import Compactor


def test_answers_are_the_same_before_and_after(feed: Feed) -> None:
    fill(feed, 600)
    before, records = feed.answers(windows=WINDOWS), [feed.records(rank=rank) for rank in (None, 0, 1)]
    done = feed.compact()
    assert done.num_records == 2 * 512 * len(SITES)
    assert feed.count(t.hot_batch) == 2 * 3  # 480…519 are left in part, and 520…599
    assert feed.count(t.cell) == 2
    assert feed.answers(windows=WINDOWS) == before
    feed.compact(everything=True)
    assert feed.count(t.hot_batch) == 0
    assert feed.answers(windows=WINDOWS) == before
    assert [feed.records(rank=rank) for rank in (None, 0, 1)] == records


def test_of_one_rank_every_record_is_stored_once(feed: Feed) -> None:
    fill(feed, 300, ranks=1)
    before = feed.answers(windows=WINDOWS, ranks=(None, 0))
    feed.compact(everything=True)
    assert feed.count(t.sheet) == 2
    assert feed.answers(windows=WINDOWS, ranks=(None, 0)) == before


def test_a_batch_that_comes_late_goes_into_its_block(feed: Feed) -> None:
    fill(feed, 300)
    late = feed.agent(rank=1, attempt=1).body([UP], [5], fields={"amax_max": 1e6}, scalars={"loss": [9.0]}, seq=999)
    feed.compact(everything=True)
    assert feed.commit(late)
    before = feed.answers(windows=WINDOWS)
    feed.compact(everything=True)
    assert feed.count(t.hot_batch) == 0
    assert feed.answers(windows=WINDOWS) == before
    assert not feed.commit(late)


def test_a_second_rank_that_comes_late_makes_a_roll_up(feed: Feed) -> None:
    fill(feed, 300, ranks=1)
    feed.compact(everything=True)
    rng = np.random.default_rng(1)
    feed.send(feed.agent(rank=1), list(range(100, 140)), fields=made_up(rng, 40, 3))
    before = feed.answers(windows=WINDOWS)
    feed.compact(everything=True)
    assert feed.answers(windows=WINDOWS) == before
    assert feed.count(t.sheet, t.sheet.c.rank == t.ROLLED_RANK) == 1  # of one cell; the other has one rank


def test_a_step_computed_again_belongs_to_the_newer_attempt_in_blocks_too(feed: Feed) -> None:
    rng = np.random.default_rng(3)
    first = feed.agent()
    feed.send(first, list(range(300)), fields=made_up(rng, 300, 3))
    feed.compact(everything=True)
    again = feed.agent(attempt=2)
    feed.send(again, list(range(100, 300)), [UP, DOWN], fields=made_up(rng, 200, 2))
    before = feed.answers(windows=WINDOWS)
    feed.compact(everything=True)
    assert feed.answers(windows=WINDOWS) == before
    feed.send(first, [400], fields=made_up(rng, 1, 3))
    before = feed.answers(windows=WINDOWS)
    feed.compact(everything=True)
    assert feed.answers(windows=WINDOWS) == before


def test_compacting_again_changes_nothing(feed: Feed) -> None:
    fill(feed, 300)
    feed.compact(everything=True)
    with feed.engine.connect() as conn:
        rows = conn.execute(sa.select(t.cell)).all()
    done = feed.compact(everything=True)
    assert not done.anything
    with feed.engine.connect() as conn:
        assert conn.execute(sa.select(t.cell)).all() == rows


def test_steps_that_come_slowly_are_compacted_together(feed: Feed) -> None:
    agent, began = feed.agent(), feed.now
    compactor, num = Compactor(feed.engine, clock=lambda: feed.now), 0
    for step in range(200):  # 40 s a step
        feed.now = began + 40.0 * step
        feed.send(agent, [step], [UP])
        num += compactor.round().num_groups
    assert 0 < num <= 4
    feed.now += 700.0  # idle
    assert compactor.round().num_groups
    assert feed.count(t.hot_batch) == 0


def test_what_the_detectors_have_not_seen_stays(feed: Feed) -> None:
    agent = feed.agent()
    feed.commit(agent.body(SITES, [1, 2]), detected=False)
    feed.compact(everything=True)
    assert feed.count(t.hot_batch) == 1


def test_two_compactors_on_one_database_do_the_work_once(feed: Feed) -> None:
    fill(feed, 300)
    before = feed.answers(windows=WINDOWS)
    raced = []

    def other(name: str) -> None:
        if name == "compact.encoded" and not raced:
            raced.append(name)
            Compactor(feed.engine, clock=lambda: feed.now + 1e6).round()

    feed.compact(everything=True, crash=other)
    assert raced
    assert feed.count(t.hot_batch) == 0
    assert feed.answers(windows=WINDOWS) == before


def test_a_roll_up_that_a_late_batch_overtakes_is_not_shown(feed: Feed) -> None:
    fill(feed, 300)
    agent = feed.agent(rank=1)
    late = agent.body([UP], [5], fields={"amax_max": 1e6}, scalars={"loss": [9.0]}, seq=999)
    overtaken = []

    def other(name: str) -> None:
        if name == "rollup.part" or name != "rollup.encoded" or overtaken:
            return
        overtaken.append(name)
        assert feed.commit(late)
        Compactor(feed.engine, clock=lambda: feed.now + 1e6).round()

    feed.compact(everything=True, crash=other)
    assert overtaken
    with feed.engine.connect() as conn:
        got = queries.series(conn, "run-1", UP.id, "amax_max", 5, 5)
        assert got["values"] == [1e6]
        assert queries.top(conn, "run-1", "num_elements", 1)["items"][0]["value"] == 2000
    assert feed.count(t.hot_batch) == 0


def test_a_batch_whose_steps_lie_far_apart_is_no_burden(feed: Feed) -> None:
    agent = feed.agent()
    steps = [3, 300, 1 << 30, (1 << 32) - 1]
    feed.send(agent, steps, [UP], fields={"amax_max": [1.0, 2.0, 3.0, 4.0]})
    before = feed.answers(ranks=(None, 0))
    feed.compact()
    assert feed.count(t.cell) == 3  # the newest is warm yet
    assert feed.answers(ranks=(None, 0)) == before
    feed.compact(everything=True)
    assert (feed.count(t.cell), feed.count(t.hot_batch)) == (4, 0)
    assert feed.answers(ranks=(None, 0)) == before


def test_hot_steps_that_were_put_together_once_change_with_the_batches_that_come(feed: Feed) -> None:
    agent, other = feed.agent(), feed.agent(rank=1)
    feed.send(agent, list(range(100)), fields={"amax_max": 1.0})

    def worst(step: int) -> float:
        with feed.engine.connect() as conn:
            return float(queries.top(conn, "run-1", "amax_max", 1, step, step)["items"][0]["value"])

    assert worst(70) == 1.0
    feed.send(other, [70], fields={"amax_max": 2.0})
    assert worst(70) == 2.0
    feed.send(feed.agent(rank=1, attempt=2), [70], fields={"amax_max": 0.5})
    assert worst(70) == 1.0


@pytest.mark.parametrize("database_kind", ["postgresql"])  # on SQLite nobody writes meanwhile
def test_scalars_that_come_while_a_cell_is_packed_do_not_tear_it(feed: Feed) -> None:
    agent = feed.agent()
    feed.send(agent, list(range(200)))
    late = [agent.body(SITES, [200])]

    def in_between(conn: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "FROM scalar" in statement and late:
            feed.commit(late.pop())

    sa.event.listen(feed.engine, "after_cursor_execute", in_between)
    feed.compact(everything=True)
    assert not late, "nothing came in between"
    sa.event.remove(feed.engine, "after_cursor_execute", in_between)
    with feed.engine.connect() as conn:
        assert queries.scalars(conn, "run-1", "loss", points=1000)["steps"] == list(range(201))


@pytest.mark.parametrize("points", [3, 40, 10_000])
def test_the_histogram_of_a_long_run_is_added_up_in_parts(
    feed: Feed, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks, a hole, and hot steps; what is added up in parts is what is added up at once."""
    fill(feed, 300)
    feed.compact(everything=True)
    late = list(range(700, 760))
    feed.send(feed.agent(), late, fields=made_up(np.random.default_rng(2), len(late), len(SITES)), seq=900)
    with feed.engine.connect() as conn:
        want = queries.histogram(conn, "run-1", UP.id, points=points)
        assert want["steps"][-1] <= 759
        for at_once in (11, 100, 359):
            monkeypatch.setattr(series, "HISTOGRAMS_AT_ONCE", at_once)
            assert queries.histogram(conn, "run-1", UP.id, points=points) == want, at_once
        assert queries.histogram(conn, "run-1", UP.id, 301, 699) == {**want, "steps": [], "counts": [], "stride": 1}
