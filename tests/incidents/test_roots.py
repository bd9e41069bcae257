"""A root cause mutes what it explains, takes over what it explains later, and grows louder once."""

from __future__ import annotations

import pytest
from incidents.findings import DOWN, OTHER, finding, modes, put
from incidents.store import RUN, TENANT, Store

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing
from fp8watch_server.detect.finding import Evidence
from fp8watch_server.incidents.auto_resolve import close_quiet


def test_what_an_open_incident_explains_is_counted_there_and_sends_nothing(store: Store) -> None:
    put(store, finding(store, "delayed-clip", 10))
    for step in range(12, 18):
        put(store, finding(store, "chronic-quantization-noise", step))
    [incident] = store.incidents
    assert (incident["mode"], incident["num_events"]) == ("delayed-clip", 7)
    assert store.messages == ["firing"]
    muted = [e["detail"]["muted"] for e in store.rows(schema.incident_event) if "muted" in e["detail"]]
    assert muted == ["chronic-quantization-noise"]


def test_another_module_is_another_matter(store: Store) -> None:
    put(store, finding(store, "delayed-clip", 10))
    put(store, finding(store, "chronic-quantization-noise", 12, OTHER))
    assert modes(store) == ["delayed-clip", "chronic-quantization-noise"]


def test_a_cause_that_shows_anywhere_mutes_anywhere(store: Store) -> None:
    put(store, finding(store, "optimizer-divergence", 10, severity="critical"))
    put(store, finding(store, "outlier-growth", 12, OTHER))
    assert modes(store) == ["optimizer-divergence"]


def test_values_that_break_behind_a_warning_make_it_a_page_and_its_cause_says_so(store: Store) -> None:
    """An LR that grew is a warning; a loss of NaN behind it is the end of the run, and somebody is to be woken."""
    put(store, finding(store, "optimizer-divergence", 10))
    put(store, finding(store, "outlier-growth", 11, OTHER))
    [before] = store.incidents
    assert before["severity"] == "warning"
    for step in (12, 13):
        put(store, finding(store, "nan-in-activation", step, OTHER, severity="critical"))
    [incident] = store.incidents
    assert (incident["mode"], incident["severity"]) == ("optimizer-divergence", "critical")
    assert incident["cause"].startswith(before["cause"])
    assert incident["cause"].count("Behind it: NaN") == 1
    assert store.messages == ["firing", "firing"]
    [told] = [row["payload"] for row in store.rows(schema.outbox) if "is critical now" in str(row["payload"])]
    assert "Behind it: NaN" in str(told)


def test_a_cause_that_is_found_later_takes_its_consequence_over(store: Store) -> None:
    put(store, finding(store, "delayed-clip", 10))
    put(store, finding(store, "frozen-scale", 13))
    [incident] = store.incidents
    assert (incident["mode"], incident["first_step"], incident["last_step"]) == ("frozen-scale", 10, 13)
    assert "Frozen scale" in incident["title"]
    assert store.messages == ["firing"]


@pytest.mark.parametrize(("good", "alone"), [(13, True), (5, False)])
def test_what_was_open_before_a_fault_can_have_begun_is_none_of_its_consequences(
    store: Store, good: int, alone: bool
) -> None:
    for step in range(7, 111, 7):
        put(store, finding(store, "chronic-quantization-noise", step, began=0, stride=7))
    fault = finding(store, "quantiser-fault", 111, OTHER, "critical", began=good + 1, not_before=good + 1, stride=98)
    put(store, fault)
    chronic = {"first_step": 0, "mode": "chronic-quantization-noise"}
    told = [{name: i[name] for name in chronic} for i in store.incidents]
    taken = {"first_step": good + 1, "mode": "quantiser-fault"}
    assert told == ([chronic, taken] if alone else [taken])


def test_a_warning_that_becomes_critical_is_told_once_more(store: Store) -> None:
    put(store, finding(store, "delayed-clip", 10))
    for step in (11, 12, 13):
        put(store, finding(store, "delayed-clip", step, severity="critical"))
    assert [i["severity"] for i in store.incidents] == ["critical"]
    assert store.messages == ["firing", "firing"]
    assert len({r["idempotency_key"] for r in store.rows(schema.outbox)}) == 2


def test_the_same_failure_again_says_that_it_was_here_before(store: Store) -> None:
    put(store, finding(store, "delayed-clip", 10))
    with writing(store.db) as conn:
        close_quiet(conn, RUN, TENANT, 1, 40, store.now)
    put(store, finding(store, "delayed-clip", 100))
    first, second = store.incidents
    assert "It was here before: steps 10 to 10, resolved." in second["cause"]
    assert "before" not in first["cause"]
    put(store, finding(store, "delayed-clip", 5), attempt=2)
    assert "of attempt 1" in next(i for i in store.incidents if i["attempt"] == 2)["cause"]


def test_another_expert_was_not_here_before(store: Store) -> None:
    for expert, at in ((5, 10), (2, 100), (5, 200)):
        put(store, finding(store, "dead-layer", at, severity="info", expert=expert))
        with writing(store.db) as conn:
            close_quiet(conn, RUN, TENANT, 1, at + 30, store.now)
    assert ["It was here before" in i["cause"] for i in store.incidents] == [False, False, True]


@pytest.mark.parametrize(("step", "status"), [(11 + 64 * 19, "open"), (11 + 64 * 21, "resolved")])
def test_an_incident_of_sampled_evidence_closes_after_twenty_samples(store: Store, step: int, status: str) -> None:
    put(store, finding(store, "delayed-clip", 10, stride=64))
    with writing(store.db) as conn:
        close_quiet(conn, RUN, TENANT, 1, step, store.now)
    assert [i["status"] for i in store.incidents] == [status]


def test_news_of_a_consequence_join_the_evidence(store: Store) -> None:
    put(store, finding(store, "kernel-output-fault", 10, severity="critical", gain=None, tokens=None))
    news = [Evidence("checkpoint_saved", 12, "before the failure", "step", 10)]
    put(store, finding(store, "kernel-output-fault", 12, severity="critical", consequence=True, news=news))
    [incident] = store.incidents
    assert [e["field"] for e in incident["evidence"]] == ["clip_depth", "checkpoint_saved"]


@pytest.mark.parametrize(
    ("module", "severity", "told"),
    [
        (OTHER, "info", ["dead-layer", "quantiser-fault"]),
        (OTHER, "warning", ["quantiser-fault"]),
        (DOWN, "info", ["quantiser-fault"]),
    ],
)
@pytest.mark.parametrize("began", [{}, {"began": 55}], ids=["not before", "began"])
def test_a_fault_that_was_seen_late_leaves_information_on_other_modules_as_it_is(
    store: Store, module: str, severity: str, told: list[str], began: dict[str, int]
) -> None:
    put(store, finding(store, "dead-layer", 77, module, severity=severity))
    put(store, finding(store, "quantiser-fault", 90, severity="critical", not_before=55, **began))
    assert sorted(modes(store)) == told
    fault = next(i for i in store.incidents if i["mode"] == "quantiser-fault")
    assert fault["severity"] == "critical"
