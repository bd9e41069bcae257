"""A run that resumes on fewer ranks: of the steps that it computes again nothing is left of the ranks that it no longer has."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sqlalchemy as sa
from store.kit import SITES, UP, Feed

from fp8watch_server.store import queries
from fp8watch_server.store.check import check
from fp8watch_server.store.retention import DAY_S, Policy, prune

LOSSES = (1.0, 2.0, 3.0, 6.0)


def send(feed: Feed, rank: int, attempt: int, world_size: int, steps: range, loss: float, broken: int = -1) -> None:
    values = [math.nan if step == broken else loss for step in steps]
    amax = [value for value in values for _ in SITES]
    agent = feed.agent(rank=rank, attempt=attempt, world_size=world_size)
    feed.send(agent, list(steps), fields={"amax_max": amax}, scalars={"loss": values}, logs={"noise": list(values)})


def of_step(feed: Feed, step: int, rank: int | None = None) -> tuple[Any, ...]:
    """Loss, a logged value, largest amax and number of elements."""
    with feed.engine.connect() as conn:
        said = [queries.scalars(conn, "run-1", name, step, step, rank=rank) for name in ("loss", "noise")]
        said += [queries.series(conn, "run-1", UP.id, n, step, step, rank=rank) for n in ("amax_max", "num_elements")]
    return tuple(chart["nonfinite"][0][1] if chart["nonfinite"] else chart["values"][0] for chart in said)


def exported(feed: Feed, step: int) -> dict[str, Any]:
    pytest.importorskip("pyarrow", reason="pip install 'fp8watch[export]'")
    from fp8watch_server.export.tables import Asked, steps

    with feed.engine.connect() as conn:
        (table,) = steps(conn, Asked("run-1", step, step))
    (row,) = table.to_pylist()
    return {name: row[name] for name in ("attempt", "num_ranks", "loss")}


def whole(feed: Feed) -> None:
    for step in (10, 15, 20):
        assert of_step(feed, step) == (6.0, 6.0, 7.0, 2000)
    assert exported(feed, 15) == {"attempt": 2, "num_ranks": 2, "loss": 6.0}
    assert of_step(feed, 9) == (3.0, 3.0, 6.0, 4000)
    if feed.engine.dialect.name == "postgresql":
        with feed.engine.connect() as conn:
            rows = conn.execute(sa.text("SELECT step, loss FROM grafana.scalars('run-1', NULL, 100)")).all()
        assert {row.step: row.loss for row in rows} == {step: 3.0 if step < 10 else 6.0 for step in range(21)}


@pytest.mark.parametrize("first_compacted", [False, True])
def test_steps_computed_again_are_of_the_ranks_that_are_left(feed: Feed, first_compacted: bool) -> None:
    for rank, loss in enumerate(LOSSES):
        send(feed, rank, 1, 4, range(21), loss, broken=15 if rank == 3 else -1)
    if first_compacted:
        feed.compact(everything=True)
    assert of_step(feed, 15) == ("nan", "nan", "nan", 4000)
    for rank, loss in enumerate((5.0, 7.0)):
        send(feed, rank, 2, 2, range(10, 21), loss)
    whole(feed)
    assert of_step(feed, 15, rank=3) == ("nan", "nan", "nan", 1000)  # what that rank computed
    feed.compact(everything=True)
    whole(feed)
    prune(feed.engine, Policy(), feed.now + DAY_S + 2e6)
    for step in (15, 9):
        assert of_step(feed, step)[2:] == ((7.0, 2000) if step == 15 else (6.0, 4000))
    assert exported(feed, 15)["loss"] == 6.0
    assert check(feed.engine).problems == []


def test_a_rank_that_is_one_of_them_and_has_not_come_yet_stays(feed: Feed) -> None:
    for rank, loss in enumerate((1.0, 2.0, 6.0, 99.0)):
        send(feed, rank, 1, 4, range(21), loss)
    send(feed, 0, 2, 3, range(10, 21), 4.0)
    for _ in range(2):
        assert of_step(feed, 15) == (4.0, 4.0, 6.0, 3000)
        feed.compact(everything=True)


def test_ranks_that_come_back_count_again(feed: Feed) -> None:
    """Attempts are counted rank by rank: the second of rank 2 is of the third start."""
    for rank in range(3):
        send(feed, rank, 1, 3, range(21), 1.0)
    for rank in range(2):
        send(feed, rank, 2, 2, range(10, 21), 3.0)
    for rank in range(3):
        send(feed, rank, 2 if rank == 2 else 3, 3, range(15, 21), 5.0)
    for _ in range(2):
        assert [of_step(feed, step)[::3] for step in (9, 12, 15)] == [(1.0, 3000), (3.0, 2000), (5.0, 3000)]
        feed.compact(everything=True)
