"""What people say of incidents, and what it means for the next one of the same cause."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from incidents.nonfinite_findings import inf_at
from incidents.store import RUN, TENANT, Store

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing
from fp8watch_server.incidents import triage
from fp8watch_server.incidents.causes import cause_id, pattern_of
from fp8watch_server.store.incident_states import STATES, is_in, state_of


def say(store: Store, incident: dict[str, Any], action: str) -> dict[str, Any]:
    """Do what people do, and read what became of it."""
    with writing(store.db) as conn:
        triage.act(conn, incident, action, store.now, by="ann")
    return next(i for i in store.incidents if i["id"] == incident["id"])


def broken_and_over(store: Store, first: int) -> dict[str, Any]:
    """An incident at step `first` that closed itself."""
    for start in range(first - 5, first + 35, 8):
        store.take(store.run.batch(range(start, start + 8), inf_at(store.run, first)))
    found = [i for i in store.incidents if i["first_step"] == first]
    assert found[-1]["status"] == "resolved"
    return found[-1]


def test_a_critical_failure_does_not_close_itself_unseen(store: Store) -> None:
    incident = broken_and_over(store, 5)
    assert state_of(incident) == "unseen"
    assert state_of(say(store, incident, "seen")) == "seen"
    assert [e["kind"] for e in store.rows(schema.incident_event)][-2:] == ["resolved", "seen"]
    assert say(store, store.incidents[0], "seen")["updated_at"] == store.now  # a second time changes nothing
    assert len([e for e in store.rows(schema.incident_event) if e["kind"] == "seen"]) == 1


def test_a_cause_that_was_fixed_and_comes_back_has_regressed_and_has_its_owner(store: Store) -> None:
    first = broken_and_over(store, 5)
    with writing(store.db) as conn:
        triage.assign(conn, first, "ann", store.now, by="bob")
    assert state_of(say(store, first, "fixed")) == "fixed"
    again = broken_and_over(store, 61)
    assert (again["regression_of"], again["owner"]) == (first["id"], "ann")
    assert again["cause_id"] == first["cause_id"]


def test_a_false_alarm_that_comes_back_has_not_regressed(store: Store) -> None:
    first = broken_and_over(store, 5)
    say(store, say(store, first, "fixed"), "false-alarm")
    assert broken_and_over(store, 61)["regression_of"] is None


def test_later_findings_do_not_undo_what_people_said(store: Store) -> None:
    store.take(store.run.batch(range(8), inf_at(store.run, 5, 6, 7, 8, 9)))
    say(store, store.incidents[0], "ack")
    store.take(store.run.batch(range(8, 12), inf_at(store.run, 5, 6, 7, 8, 9)))
    (incident,) = store.incidents
    assert (incident["last_step"], state_of(incident)) == (9, "acknowledged")
    assert incident["seen_at"] is not None


@pytest.mark.parametrize(
    ("status", "actions", "state"),
    [
        ("open", ["ack"], "acknowledged"),
        ("open", ["seen"], "open"),
        ("open", ["resolve"], "seen"),
        ("open", ["fixed"], "fixed"),
        ("resolved", ["ack"], "unseen"),
        ("resolved", ["resolve"], "seen"),
        ("resolved", ["false-alarm"], "false-alarm"),
        ("resolved", ["false-alarm", "resolve"], "false-alarm"),
        ("resolved", ["fixed", "seen"], "seen"),
    ],
)
def test_states_in_words_and_in_sql_are_the_same(store: Store, status: str, actions: list[str], state: str) -> None:
    row: dict[str, Any] = dict.fromkeys(("mode", "title", "verdict", "cause", "fingerprint"), "x")
    row |= dict.fromkeys(("attempt", "first_step", "last_step", "num_events", "num_sites"), 1)
    row |= {key: [] for key in ("sites", "evidence", "fix", "alternatives")}
    row |= {"run_id": RUN, "tenant": TENANT, "id": "i", "place": {}, "severity": "warning", "status": status}
    row |= {"origin": True, "opened_at": 1.0, "updated_at": 1.0}
    with writing(store.db) as conn:
        conn.execute(sa.insert(schema.incident).values(**row))
    for action in actions:
        say(store, store.incidents[0], action)
    assert state_of(store.incidents[0]) == state
    with store.db.connect() as conn:
        found = [s for s in STATES if conn.execute(sa.select(schema.incident.c.id).where(is_in(s))).first()]
    assert found == [state]


def test_a_cause_is_a_mode_at_a_kind_of_place() -> None:
    assert pattern_of("layers.2.mlp.down_proj") == "layers.*.mlp.down_proj"
    assert pattern_of("h2.fc1") == "h2.fc1"
    one, other = ({"module": f"layers.{i}.mlp.up", "operand": "input"} for i in (2, 31))
    assert cause_id("m", one) == cause_id("m", other)
    assert len({cause_id("m", one), cause_id("n", one), cause_id("m", {**one, "operand": "weight"})}) == 3
    assert cause_id("m", {"module": None, "operand": None}) == cause_id("m", {})
