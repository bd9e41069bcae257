"""Runs that are over cost the compactor nothing: no batch of theirs stays, and retention looks at them once a day."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from store.filled_store import fill
from store.kit import Feed

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.store import compactor
from fp8watch_server.store.compact import COOL_AFTER_S
from fp8watch_server.store.compactor import Compactor
from fp8watch_server.store.retention import DAY_S, Policy, prune, settled_after_s


def runs_with_work(feed: Feed) -> list[tuple[str, str]]:
    with feed.engine.connect() as conn:
        return compactor._runs(conn)


def test_a_batch_without_steps_leaves_once_it_was_seen_and_is_known_when_it_comes_again(feed: Feed) -> None:
    agent = feed.agent()
    feed.send(agent, [1, 2, 3])
    body = agent.body([], [], health={"ended": 1.0})
    assert feed.commit(body, detected=False)
    feed.compact(everything=True)
    assert (feed.count(t.hot_batch), feed.count(t.hot_batch, t.hot_batch.c.step_min.is_(None))) == (1, 1)
    with writing(feed.engine) as conn:
        conn.execute(sa.update(t.hot_batch).values(detected=t.BATCH_DETECTED))
    Compactor(feed.engine, clock=lambda: feed.now + COOL_AFTER_S - 1).round()
    assert feed.count(t.hot_batch) == 1  # its health is of now
    feed.compact(everything=True)
    assert (feed.count(t.hot_batch), runs_with_work(feed)) == (0, [])
    assert not feed.commit(body)
    assert feed.count(t.hot_batch) == 0


def test_retention_looks_at_silent_runs_once_a_day(feed: Feed) -> None:
    asked: list[str] = []

    def note(conn: Any, cursor: Any, sql: str, parameters: Any, *more: Any) -> None:
        if "cell.sources" in sql and "compacted_at DESC" in sql:
            asked.extend(value for value in _values(parameters) if str(value) in ("old", "own", "new"))

    for run in ("old", "own"):
        feed.agent(run)
    with writing(feed.engine) as conn:
        conn.execute(sa.insert(t.retention), [{"run_id": "own", "tenant": t.DEFAULT_TENANT, "keep_steps": 5}])
    feed.now += 3 * DAY_S
    feed.agent("new")
    worker = Compactor(feed.engine, Policy(), clock=lambda: feed.now)
    sa.event.listen(feed.engine, "before_cursor_execute", note)
    for wanted in (["new", "old", "own"], ["new", "own"]):
        asked.clear()
        worker._prune()
        assert sorted(asked) == wanted
    worker._pruned_all_at -= DAY_S
    asked.clear()
    worker._prune()
    assert sorted(asked) == ["new", "old", "own"]


def _values(parameters: Any) -> Any:
    return parameters.values() if isinstance(parameters, dict) else parameters


def test_what_a_policy_deletes_with_time_goes_while_a_run_is_looked_at(feed: Feed) -> None:
    policy = Policy(keep_days=3.0)
    fill(feed, 300)
    feed.compact()
    feed.now += COOL_AFTER_S
    feed.compact()
    now = feed.now + 3 * DAY_S + 600
    assert prune(feed.engine, policy, now, heard_since=now - settled_after_s(policy)).num_cells_to_summary == 2
