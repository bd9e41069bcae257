"""A warning at the place of an open critical incident waits; silences cover what their patterns say."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from incidents.store import RUN, TENANT, Store

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.incidents.messages import write_escalated, write_firing, write_resolved
from fp8watch_server.incidents.silences import covers, silences_of
from fp8watch_server.notify.fanout import hold_inhibited

PLACE = {"module": "layers.1.mlp.down_proj", "operand": "input", "ranks": [0], "tile": None, "element": None}


class Told:
    """Incidents written by hand."""

    def __init__(self, store: Store) -> None:
        self.store, self.now = store, 1000.0

    def opens(
        self, id: str, severity: str, module: str | None = PLACE["module"], mode: str = "dead-layer", attempt: int = 1
    ) -> str | None:
        self.now += 1
        row: dict[str, Any] = dict.fromkeys(("title", "verdict", "cause"), "") | {
            "fix": [],
            "alternatives": [],
            "evidence": [],
        }
        row |= {"run_id": RUN, "tenant": TENANT, "id": id, "attempt": attempt, "mode": mode, "severity": severity}
        row |= {"status": "open", "first_step": 1, "last_step": 1, "num_events": 1, "origin": True, "sites": []}
        row |= {"num_sites": 0, "place": {**PLACE, "module": module}, "fingerprint": id, "opened_at": self.now}
        row |= {"updated_at": self.now, "resolved_at": None}
        with writing(self.store.db) as conn:
            conn.execute(sa.insert(t.incident), [row])
            return write_firing(conn, row, self.now, "")

    def _row(self, conn: sa.Connection, id: str, **values: Any) -> dict[str, Any]:
        conn.execute(sa.update(t.incident).where(t.incident.c.id == id).values(**values))
        return dict(conn.execute(sa.select(t.incident).where(t.incident.c.id == id)).mappings().one())

    def resolves(self, id: str) -> None:
        self.now += 1
        with writing(self.store.db) as conn:
            write_resolved(conn, self._row(conn, id, status="resolved", resolved_at=self.now), self.now, "")

    def grows(self, id: str) -> None:
        with writing(self.store.db) as conn:
            write_escalated(conn, self._row(conn, id, severity="critical"), self.now, "")

    @property
    def states(self) -> list[tuple[str, str, str]]:
        rows = sorted(self.store.rows(t.outbox), key=lambda r: (r["created_at"], r["kind"]))
        return [(r["incident_id"], r["kind"], r["state"]) for r in rows]


@pytest.fixture
def told(store: Store) -> Told:
    return Told(store)


def test_a_warning_waits_while_a_critical_incident_is_open_at_its_place(told: Told) -> None:
    told.opens("c", "critical")
    reason = told.opens("w", "warning")
    assert reason == "waits while critical incident c is open at the same place"
    assert told.opens("elsewhere", "warning", module="lm_head") is None
    assert told.opens("too", "critical", mode="nan-in-loss") is None
    assert [s for s in told.states if s[2] == "inhibited"] == [("w", "firing", "inhibited")]


def test_it_is_told_after_all_when_it_is_what_is_left(told: Told) -> None:
    told.opens("c", "critical")
    told.opens("w", "warning")
    told.resolves("c")
    assert told.states[0] == ("c", "firing", "pending")
    assert sorted(told.states[1:]) == [("c", "resolved", "pending"), ("w", "firing", "pending")]
    told.resolves("w")
    assert told.states[-1] == ("w", "resolved", "pending")


def test_of_two_critical_incidents_the_last_lets_it_go(told: Told) -> None:
    told.opens("c1", "critical")
    told.opens("c2", "critical", mode="nan-in-loss")
    told.opens("w", "warning")
    told.resolves("c1")
    assert ("w", "firing", "inhibited") in told.states
    told.resolves("c2")
    assert ("w", "firing", "pending") in told.states


def test_a_critical_incident_of_an_attempt_that_has_ended_holds_back_nothing_of_the_next(told: Told) -> None:
    told.opens("c1", "critical", module=None, mode="nan-in-loss")
    told.opens("w1", "warning", module=None)
    assert told.opens("w2", "warning", module=None, mode="bad-batch", attempt=2) is None
    with writing(told.store.db) as conn:
        conn.execute(sa.update(t.outbox).values(channel="x"))
        hold_inhibited(conn, "x")
    assert [s[2] for s in told.states if s[0] == "w2"] == ["pending"]
    told.opens("c2", "critical", module=None, mode="nan-in-loss", attempt=2)
    assert str(told.opens("w3", "warning", module=None, attempt=2)).startswith("waits while critical incident c2")
    told.resolves("c1")
    assert ("w1", "firing", "pending") in told.states, "of two attempts that are open the other holds nothing back"
    assert ("w3", "firing", "inhibited") in told.states
    told.resolves("c2")
    assert ("w3", "firing", "pending") in told.states


def test_one_that_ended_before_is_never_told(told: Told) -> None:
    told.opens("c", "critical")
    told.opens("w", "warning")
    told.resolves("w")
    told.resolves("c")
    assert [s for s in told.states if s[0] == "w"] == [("w", "firing", "inhibited")]


def test_one_that_became_critical_is_told_once(told: Told) -> None:
    told.opens("c", "critical")
    told.opens("w", "warning")
    told.grows("w")
    told.resolves("c")
    assert sorted(s for s in told.states if s[0] == "w") == [("w", "firing", "inhibited"), ("w", "firing", "pending")]


def test_a_warning_that_was_quicker_than_the_critical_one_is_held_while_it_waits(told: Told) -> None:
    told.opens("w", "warning")
    told.opens("c", "critical")
    with writing(told.store.db) as conn:
        conn.execute(sa.update(t.outbox).values(channel="x"))
        hold_inhibited(conn, "x")
    assert told.states == [("w", "firing", "inhibited"), ("c", "firing", "pending")]


@pytest.mark.parametrize(
    ("pattern", "value", "whether"),
    [
        ("", "anything", True),
        ("run", "run", True),
        ("run", "run-2", False),
        ("llama-*", "llama-7b", True),
        ("llama-*", "my-llama-7b", False),
        ("layers.*.mlp.*", "layers.3.mlp.up_proj", True),
        ("layers.?.mlp", "layers.13.mlp", False),
        ("experts[0]", "experts[0]", True),  # a name that looks like a pattern covers itself
        ("(a+)+$", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!", False),
        ("*a*a*a*a*a*a*a*a*b", "a" * 200, False),
    ],
)
def test_a_silence_covers_names_and_patterns(pattern: str, value: str, whether: bool) -> None:
    assert covers(pattern, value) is whether


def test_a_silence_by_pattern_keeps_the_message_back_until_it_runs_out(told: Told) -> None:
    row = {"run_id": "r*", "tenant": TENANT, "id": "s", "mode": "dead-*", "module": "layers.1.*", "comment": "known"}
    with writing(told.store.db) as conn:
        conn.execute(sa.insert(t.silence), [{**row, "created_at": 0.0, "expires_at": 1003.0}])
    assert told.opens("a", "critical") == "silenced by s"
    assert told.opens("b", "critical", module="lm_head") is None
    assert told.opens("c", "critical") is None  # it has run out
    told.resolves("a")
    assert [s[0] for s in told.states] == ["b", "c"]
    with told.store.db.connect() as conn:
        module = str(PLACE["module"])
        assert [s["comment"] for s in silences_of(conn, TENANT, RUN, "dead-layer", module, 1001.0)] == ["known"]
        assert silences_of(conn, TENANT, RUN, "dead-layer", module, 1003.0) == []
