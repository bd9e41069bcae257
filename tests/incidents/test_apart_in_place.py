"""An incident that stays open swallows no later failure of its mode: another place, another topic, or what is graver is told."""

from __future__ import annotations

from typing import Any

import pytest
from incidents.findings import DOWN, OTHER, comes_and_goes, finding, put
from incidents.store import Store

from fp8watch_server.db import schema

LATER = 100


def stays(store: Store, mode: str = "delayed-clip", **extra: Any) -> None:
    for step in range(10, LATER):
        put(store, finding(store, mode, step, began=10, **extra))


def told(store: Store) -> list[tuple[str, str, int, int]]:
    return [(i["place"]["module"], i["severity"], i["first_step"], i["last_step"]) for i in store.incidents]


@pytest.mark.parametrize("severity", ["warning", "critical"])
def test_a_failure_of_the_same_mode_at_another_place_much_later_is_told(store: Store, severity: str) -> None:
    stays(store)
    for step in range(LATER, LATER + 20):
        put(store, finding(store, "delayed-clip", step, began=10))
        put(store, finding(store, "delayed-clip", step, OTHER, severity=severity, began=LATER))
    first, second = told(store)
    assert first == (DOWN, "warning", 10, LATER + 19)
    assert second == (OTHER, severity, LATER, LATER + 19)
    assert store.messages == ["firing", "firing"]


def test_what_begins_together_is_one_failure_at_however_many_places(store: Store) -> None:
    stays(store)
    put(store, finding(store, "delayed-clip", LATER, OTHER, severity="info"))  # and information opens nothing beside it
    put(store, finding(store, "delayed-clip", LATER, "layers.0.attn.q_proj", began=20))
    assert told(store) == [(DOWN, "warning", 10, LATER)]


def test_of_one_place_it_is_the_same_failure_though_not_all_operands_were_named(store: Store) -> None:
    stays(store)
    weight = store.run.sites[store.run.index(DOWN, "weight")].id
    put(store, finding(store, "delayed-clip", LATER, sites=[weight]))
    more = [s.id for s in store.run.sites if s.module == OTHER]
    put(store, finding(store, "delayed-clip", LATER + 1, OTHER, sites=more, num_sites=300))
    assert len(store.incidents) == 1


def test_values_that_break_are_one_failure_wherever(store: Store) -> None:
    stays(store, "nan-in-activation", kind="nan")
    put(store, finding(store, "nan-in-activation", LATER, OTHER, severity="critical", kind="inf"))
    assert len(store.incidents) == 1


def test_another_topic_of_a_mode_is_another_failure(store: Store) -> None:
    nowhere = {"sites": [], "num_sites": 0}
    stays(store, "bad-batch", kind="repeated", **nowhere)
    put(store, finding(store, "bad-batch", LATER, kind="labels", **nowhere))
    put(store, finding(store, "bad-batch", LATER + 1, kind="repeated", **nowhere))
    assert [(i["first_step"], i["last_step"]) for i in store.incidents] == [(10, LATER + 1), (LATER, LATER)]
    assert store.messages == ["firing", "firing"]


def test_an_incident_of_an_earlier_version_has_no_topic_and_takes_all_in(store: Store) -> None:
    nowhere = {"sites": [], "num_sites": 0}
    put(store, finding(store, "bad-batch", 10, kind="repeated", **nowhere))
    with store.db.begin() as conn:
        [event] = store.rows(schema.incident_event)
        detail = {key: value for key, value in event["detail"].items() if key != "topic"}
        conn.execute(schema.incident_event.update().values(detail=detail))
    for step in range(11, 40):
        put(store, finding(store, "bad-batch", step, kind="labels", began=39, **nowhere))
    assert len(store.incidents) == 1


def test_what_becomes_critical_is_told_with_what_made_it_so(store: Store) -> None:
    """Both began together, so that they are one failure; the first keeps its time, and takes the page over no more."""
    put(store, finding(store, "delayed-clip", 10, OTHER))
    for steps in ((12, 13), (14,)):  # in one call, and in a later one
        mild = [finding(store, "delayed-clip", step, OTHER, began=10) for step in steps]
        put(store, *mild, *(finding(store, "delayed-clip", step, severity="critical", began=12) for step in steps))
    [incident] = store.incidents
    assert told(store) == [(DOWN, "critical", 10, 14)]
    assert DOWN in incident["title"]
    [first, page] = sorted(store.rows(schema.outbox), key=lambda row: row["created_at"])
    assert (first["payload"]["incident"]["place"]["module"], page["payload"]["incident"]["place"]["module"]) == (
        OTHER,
        DOWN,
    )
    assert [e["detail"]["graver_than"] for e in store.rows(schema.incident_event) if "graver_than" in e["detail"]] == [
        "warning"
    ]


def test_of_one_mode_each_topic_comes_and_goes_by_itself(store: Store) -> None:
    nowhere = {"sites": [], "num_sites": 0}
    kinds = ["loss", "loss", "labels", "loss"]
    comes_and_goes(store, *(finding(store, "bad-batch", 100 * i, kind=k, **nowhere) for i, k in enumerate(kinds)))
    assert store.messages == ["firing", "resolved"] * 3
