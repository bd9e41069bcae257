"""A run of which many incidents are over: what folding a finding costs does not grow with them."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from incidents.findings import comes_and_goes, finding, put
from incidents.store import Store

from fp8watch_server.incidents import stored

APART = 100


def test_a_new_failure_asks_as_much_of_the_database_after_many_as_after_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked: list[int] = []
    num_loaded: list[int] = []
    load = stored.load

    def counted(*args: Any) -> Any:
        found = load(*args)
        num_loaded[-1] += len(found)
        return found

    monkeypatch.setattr("fp8watch_server.incidents.fold.load", counted)
    statements: list[str] = []
    sa.event.listen(
        store.db, "before_cursor_execute", lambda conn, cursor, statement, *more: statements.append(statement)
    )
    for n in range(1, 13):
        statements.clear()
        num_loaded.append(0)
        comes_and_goes(store, finding(store, "outlier-growth", n * APART))
        num_asked.append(len(statements))
    assert num_loaded == [0] * 12
    assert num_asked[-1] <= num_asked[1]
    num_loaded.append(0)
    put(store, finding(store, "outlier-growth", APART))  # late, of one that is over
    assert (num_loaded[-1], len(store.incidents)) == (1, 12)


def test_incidents_that_are_open_are_loaded_with_one_question_for_the_history_of_all(store: Store) -> None:
    statements: list[str] = []
    sa.event.listen(
        store.db, "before_cursor_execute", lambda conn, cursor, statement, *more: statements.append(statement)
    )
    put(store, *(finding(store, mode, 10) for mode in ("outlier-growth", "dead-layer", "bad-batch")))
    statements.clear()
    put(store, finding(store, "outlier-growth", 11))
    assert sum("FROM incident_event" in statement for statement in statements) == 1
