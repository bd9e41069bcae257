"""Logged values: a row a name, step and rank, of which most go with the detail of their rank."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from store.kit import UP, Feed

from fp8watch_server.db import schema as t
from fp8watch_server.store import history, queries
from fp8watch_server.store.retention import DAY_S, Policy, prune

DAY = DAY_S + 2e6  # past the moment at which the tests compact


def test_of_each_name_the_first_rank_that_logged_it_stays(feed: Feed) -> None:
    steps = list(range(40))
    for rank in (0, 1, 2):
        logs: dict[str, list[float | None]] = {"accuracy": [0.5] * 40} | ({"last_stage": [2.0] * 40} if rank else {})
        feed.send(feed.agent(rank=rank), steps, [UP], logs=logs)
    feed.compact(everything=True)

    def charts() -> list[Any]:
        with feed.engine.connect() as conn:
            return [queries.scalars(conn, "run-1", name, points=100)["values"] for name in ("accuracy", "last_stage")]

    before = charts()
    assert before == [[0.5] * 40, [2.0] * 40]
    prune(feed.engine, Policy(), feed.now + DAY)
    assert charts() == before
    c = t.logged.c
    with feed.engine.connect() as conn:
        rows = conn.execute(sa.select(c.name, c.rank, sa.func.count()).group_by(c.name, c.rank).order_by(c.name)).all()
    assert [tuple(row) for row in rows] == [("accuracy", 0, 40), ("last_stage", 1, 40)]


def test_the_steps_of_one_rank_are_found_without_the_others(feed: Feed) -> None:
    where = history._where(t.logged, ("run-1", "default"), (1, 0), 0)
    query = sa.select(t.logged.c.value).where(*where)
    with feed.engine.connect() as conn:
        text = str(query.compile(conn, compile_kwargs={"literal_binds": True}))
        if conn.dialect.name == "sqlite":
            plan = conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}").all()
        else:
            conn.exec_driver_sql("SET LOCAL enable_seqscan = off")
            plan = conn.exec_driver_sql(f"EXPLAIN {text}").all()
    assert "ix_logged_source" in str(plan)
