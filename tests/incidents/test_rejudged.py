"""Later evidence re-judges an open incident, once; what is another cause opens its own."""

from __future__ import annotations

from itertools import permutations

import pytest
from detect.healthy_run import Run
from incidents.findings import DOWN, OTHER, finding, modes, put
from incidents.store import Store

from fp8watch_server.db import schema
from fp8watch_server.detect.finding import Evidence, Finding


def bad_batch(store: Store, onset: int, step: int, **extra: object) -> Finding:
    f = finding(store, "bad-batch", step, began=onset, sites=[], **extra)
    values = {**f.__dict__, "site": None, "rank_in_flow": 1 << 40, "verdict": "unknown"}
    return Finding(**{**values, "evidence": (Evidence("loss", 4.5, 2.2, "", onset),)})


def leap(store: Store, step: int, not_before: int, module: str = DOWN) -> Finding:
    return finding(store, "outlier-growth", step, module, leap=True, began=step, not_before=not_before)


def test_an_incident_begins_with_its_onset(store: Store) -> None:
    put(store, bad_batch(store, 109, 112))
    [incident] = store.incidents
    assert (incident["first_step"], incident["last_step"]) == (109, 112)


def test_evidence_that_comes_later_re_judges_an_open_incident_and_says_so_once(store: Store) -> None:
    put(store, bad_batch(store, 120, 125))
    for step in (128, 129, 130):
        put(store, leap(store, step, 65))
    [incident] = store.incidents
    assert (incident["mode"], incident["first_step"], incident["verdict"]) == ("outlier-growth", 120, "fp8")
    assert "leaped" in incident["title"]
    assert "ordinary" not in incident["cause"]
    assert incident["place"]["module"] == DOWN
    details = [e["detail"] for e in store.rows(schema.incident_event)]
    told = [d["earlier_cause_than"] for d in details if "earlier_cause_than" in d]
    assert told == ["bad-batch"]
    assert store.messages == ["firing", "firing"]
    note = store.rows(schema.outbox)[1]["payload"]["note"]
    assert note == "It was told as bad-batch; what was measured since says outlier-growth."


def test_a_leap_that_began_after_the_loss_jumped_is_another_matter(store: Store) -> None:
    put(store, bad_batch(store, 120, 125))
    put(store, leap(store, 128, 127))
    assert modes(store) == ["bad-batch", "outlier-growth"]


def test_what_is_measured_first_and_what_is_told_first_make_the_same_incident(store: Store) -> None:
    put(store, leap(store, 128, 65))
    put(store, bad_batch(store, 120, 125))
    [incident] = store.incidents
    assert (incident["mode"], incident["first_step"]) == ("outlier-growth", 120)


def test_a_failure_that_began_later_explains_nothing_that_came_before(store: Store) -> None:
    put(store, bad_batch(store, 109, 112))
    put(store, finding(store, "inf-laundering", 114, severity="critical"))
    assert [(i["mode"], i["first_step"]) for i in store.incidents] == [("bad-batch", 109), ("inf-laundering", 114)]
    assert store.messages == ["firing", "firing"]


def test_what_follows_a_failure_is_still_its_consequence(store: Store) -> None:
    put(store, finding(store, "inf-laundering", 114, severity="critical"))
    put(store, bad_batch(store, 115, 118))
    [incident] = store.incidents
    assert (incident["mode"], incident["first_step"]) == ("inf-laundering", 114)
    assert store.messages == ["firing"]


def test_a_tile_that_was_dying_and_is_zero_stays_one_incident(store: Store) -> None:
    put(store, finding(store, "dying-tile", 100, began=80))
    put(store, finding(store, "zero-tile-eps", 110, severity="critical"))
    [incident] = store.incidents
    assert (incident["mode"], incident["first_step"]) == ("zero-tile-eps", 80)


def test_another_tile_that_is_zero_is_its_own(store: Store) -> None:
    put(store, finding(store, "dying-tile", 100, began=80))
    put(store, finding(store, "zero-tile-eps", 110, OTHER, severity="critical"))
    assert modes(store) == ["dying-tile", "zero-tile-eps"]


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_any_order_of_delivery_makes_the_same_incidents(store: Store, order: tuple[int, ...]) -> None:
    found = [
        bad_batch(store, 109, 112),
        finding(store, "inf-laundering", 114, severity="critical"),
        finding(store, "chronic-quantization-noise", 115),
    ]
    for i in order:
        put(store, found[i])
    got = {(i["mode"], i["first_step"]) for i in store.incidents}
    assert got == {("bad-batch", 109), ("inf-laundering", 114)}


def of_rank(store: Store, rank: int, mode: str, flow: int, verdict: str) -> Finding:
    values = finding(store, mode, 100, severity="critical").__dict__
    return Finding(**{**values, "rank": rank, "rank_in_flow": flow, "verdict": verdict})


def test_a_judgement_that_comes_back_is_sent_once_and_breaks_nothing(store: Store) -> None:
    storm = [
        ("nan-in-activation", 50, "unknown"),
        ("zero-tile-eps", 40, "fp8"),
        ("nan-in-activation", 30, "shared"),
        ("kernel-output-fault", 20, "unknown"),
        ("zero-tile-eps", 10, "fp8"),
    ]
    for rank, (mode, flow, verdict) in enumerate(storm):
        put(store, of_rank(store, rank, mode, flow, verdict))
    assert modes(store) == ["zero-tile-eps"]
    assert store.messages == ["firing", "firing"]


def test_what_takes_over_is_not_dated_before_it_can_have_begun(store: Store) -> None:
    put(store, finding(store, "chronic-quantization-noise", 99, began=95))
    put(store, finding(store, "nan-in-activation", 100, severity="critical"))
    [incident] = store.incidents
    assert (incident["mode"], incident["first_step"]) == ("nan-in-activation", 100)


def test_consequences_do_not_move_a_beginning_to_any_past(store: Store) -> None:
    put(store, finding(store, "optimizer-divergence", 110, began=100))
    put(store, finding(store, "chronic-quantization-noise", 111, began=95))
    begun = store.incidents[0]["first_step"]
    assert 90 <= begun <= 95
    for i, began in enumerate((89, 83, 77, 71, 65)):
        put(store, finding(store, "chronic-quantization-noise", 112 + i, began=began))
    steps = {i["mode"]: i["first_step"] for i in store.incidents}
    assert steps["optimizer-divergence"] >= 90


def test_slow_alarms_make_the_same_incidents_in_any_order(tmp_path_factory: pytest.TempPathFactory) -> None:
    seen = set()
    for order in permutations(range(3)):
        store = Store(tmp_path_factory.mktemp("order"), Run())
        found = [
            finding(store, "optimizer-divergence", 110, began=100),
            finding(store, "chronic-quantization-noise", 111, began=89),
            finding(store, "gradient-underflow", 112, OTHER, began=84),
        ]
        for i in order:
            put(store, found[i])
        seen.add(tuple((i["mode"], i["first_step"]) for i in store.incidents))
        store.db.dispose()
    assert len(seen) == 1, seen


def test_information_that_grows_worse_is_told_by_what_made_it_more(store: Store) -> None:
    mild = finding(store, "delayed-clip", 100, depth=2.5)
    deep = finding(store, "delayed-clip", 102, depth=9.0)
    put(store, Finding(**{**mild.__dict__, "severity": "info"}))
    assert "clip depth 2.5" in store.incidents[0]["title"]
    put(store, Finding(**{**deep.__dict__, "severity": "warning"}))
    [incident] = store.incidents
    assert (incident["severity"], incident["first_step"]) == ("warning", 100)
    assert "clip depth 9" in incident["title"]
    assert store.messages == ["firing", "firing"]
    assert store.rows(schema.outbox)[1]["payload"]["note"] == "It was information and is a warning now."
    put(store, Finding(**{**mild.__dict__, "severity": "info", "step": 103}))
    assert "clip depth 9" in store.incidents[0]["title"]
    assert store.messages == ["firing", "firing"]
