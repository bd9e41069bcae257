"""An incident about what a session says of itself stays open while the session says it."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from incidents.findings import finding, put
from incidents.store import RUN, TENANT, Store

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing
from fp8watch_server.detect.precedence import BLIND
from fp8watch_server.incidents.auto_resolve import close_quiet

SAID = "40 % of the GEMM FLOPs were announced as observed and send nothing: layers.0.down (not called)"


def session(store: Store, blind: str, *, rank: int = 0, attempt: int = 1) -> None:
    row = {
        "run_id": RUN, "tenant": TENANT, "session": f"{rank}-{attempt}", "rank": rank, "attempt": attempt, "world_size": 2,
        "mesh": {}, "host": "h", "pid": 1, "versions": {}, "recipe": "observe", "fingerprint": "", "backend": "cpu",
        "facts": {"blind": blind}, "registered_at": 0.0, "last_seen_at": 0.0,
    }  # fmt: skip
    with writing(store.db) as conn:
        conn.execute(sa.insert(schema.session), [row])


def blind(store: Store) -> None:
    changes = [("blind", SAID, "", "what attach announced")]
    put(store, finding(store, "recipe-mismatch", 3, blind=True, changes=changes))


def silent_up_to(store: Store, step: int, attempt: int = 1) -> list[str]:
    with writing(store.db) as conn:
        close_quiet(conn, RUN, TENANT, attempt, step, store.now)
    return [incident["status"] for incident in store.incidents]


def test_that_much_is_blind_stays_open_until_it_is_seen(store: Store) -> None:
    session(store, SAID)
    blind(store)
    assert silent_up_to(store, 500) == ["open"]
    assert store.messages == ["firing"]
    with writing(store.db) as conn:
        conn.execute(sa.update(schema.session).values(facts={"blind": ""}))
    assert silent_up_to(store, 501) == ["resolved"]
    assert store.messages == ["firing", "resolved"]


@pytest.mark.parametrize(("rank", "status"), [(0, "resolved"), (1, "open")])
def test_the_newest_session_of_each_rank_says_it(store: Store, rank: int, status: str) -> None:
    session(store, SAID)
    session(store, "", rank=rank, attempt=2)
    blind(store)
    assert silent_up_to(store, 500, attempt=2) == [status]


def test_another_configuration_is_over_when_it_is_quiet(store: Store) -> None:
    session(store, SAID)
    put(store, finding(store, "recipe-mismatch", 3, changes=[("margin", 1, 0, "the step before")]))
    assert silent_up_to(store, 500) == ["resolved"]


def test_what_else_was_seen_of_training_is_over_when_it_is_quiet(store: Store) -> None:
    session(store, SAID)
    noise = finding(store, "recipe-mismatch", 3, severity="info", kind="gradient-noise")
    assert noise.kind == BLIND
    put(store, noise)
    assert silent_up_to(store, 500) == ["resolved"]


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_blind_is_an_incident_of_its_own_though_it_begins_with_another(store: Store, first: int) -> None:
    session(store, SAID)
    changes = ([("blind", SAID, "", "what attach announced")], [("margin", 1, 0, "the step before")])
    of_both = [finding(store, "recipe-mismatch", 3, blind=not k, sites=[], changes=c) for k, c in enumerate(changes)]
    put(store, of_both[first])
    put(store, of_both[1 - first])
    silent_up_to(store, 500)
    told = {i["title"].partition(" ")[0]: i["status"] for i in store.incidents}
    assert told == {"40": "open", "FP8": "resolved"}
    assert len({i["fingerprint"] for i in store.incidents}) == 2


def test_an_incident_of_an_earlier_version_stands_by_its_kind(store: Store) -> None:
    session(store, SAID)
    blind(store)
    with store.db.begin() as conn:
        [event] = store.rows(schema.incident_event)
        detail = {key: value for key, value in event["detail"].items() if key != "topic"}
        conn.execute(schema.incident_event.update().values(detail=detail))
    assert silent_up_to(store, 500) == ["open"]


def test_other_incidents_are_over_when_they_are_quiet(store: Store) -> None:
    session(store, SAID)
    put(store, finding(store, "delayed-clip", 3))
    assert silent_up_to(store, 500) == ["resolved"]
