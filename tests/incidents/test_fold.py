"""One cause is one incident and one message, over ranks, steps, storms and restarts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from detect.healthy_run import Run
from incidents.findings import comes_and_goes, finding, put
from incidents.nonfinite_findings import DOWN, NAN, Change, inf_at, nan_from
from incidents.store import RUN, TENANT, Store

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing
from fp8watch_server.detect.finding import Evidence, Finding, Severity
from fp8watch_server.incidents import auto_resolve, triage
from fp8watch_server.incidents.fold import close_quiet, fold
from fp8watch_server.incidents.messages import write_resolved

fold_module = sys.modules["fp8watch_server.incidents.fold"]

KL = "rollout_corr/kl"


def test_an_incident_holds_what_the_contract_names(store: Store) -> None:
    store.take(store.run.batch(range(8), inf_at(store.run, 5)))
    [incident] = store.incidents
    site = store.run.sites[store.run.index(DOWN, "input")]
    assert incident["title"] == f"Inf laundered to 448 in {DOWN} input (fprop), tile (37, 1)"
    assert incident["place"] == {
        "ranks": [0],
        "module": DOWN,
        "gemm": "fprop",
        "operand": "input",
        "direction": "rowwise",
        "tile": [37, 1],
        "element": [37, 200],
        "expert": None,
    }
    assert (incident["mode"], incident["severity"], incident["status"]) == ("inf-laundering", "critical", "open")
    assert (incident["first_step"], incident["last_step"], incident["num_events"]) == (5, 5, 1)
    assert (incident["origin"], incident["num_sites"], incident["sites"]) == (True, 1, [site.id])
    assert incident["evidence"][0] == {
        "field": "num_inf",
        "value": 1,
        "baseline": 0,
        "unit": "elements",
        "since_step": 5,
    }
    assert all(set(f) == {"kind", "text"} for f in incident["fix"])
    assert all(set(a) == {"mode", "check"} for a in incident["alternatives"])
    assert "Verdict: FP8" in incident["cause"]
    assert "loss not seen" not in incident["cause"]


def test_repeated_findings_of_one_cause_move_its_last_step_and_send_one_message(store: Store) -> None:
    change = inf_at(store.run, *range(5, 30))
    for first in range(0, 32, 4):
        store.take(store.run.batch(range(first, first + 4), change))
    [incident] = store.incidents
    assert (incident["first_step"], incident["last_step"], incident["num_events"]) == (5, 29, 25)
    assert store.messages == ["firing"]


def test_twenty_clean_steps_resolve_it_and_say_so(store: Store) -> None:
    store.take(store.run.batch(range(8), inf_at(store.run, 5)))
    assert store.take(store.run.batch(range(8, 25))) == []
    [change] = store.take(store.run.batch([25]))
    assert change.change == "resolved"
    [incident] = store.incidents
    assert incident["status"] == "resolved"
    assert incident["resolved_at"] == pytest.approx(store.now)
    assert store.messages == ["firing", "resolved"]
    assert [e["kind"] for e in store.rows(schema.incident_event)] == ["opened", "resolved"]


def test_nan_everywhere_after_the_weights_broke_stays_with_its_cause(store: Store) -> None:
    born = store.run.index("layers.0.mlp.up_proj", "input")
    for first in range(0, 60, 4):
        store.take(store.run.batch(range(first, first + 4), nan_from(5, born)))
    [incident] = store.incidents
    assert incident["mode"] == "nan-in-activation"
    assert incident["place"]["module"] == "layers.0.mlp.up_proj"
    assert (incident["first_step"], incident["last_step"]) == (5, 59)
    assert incident["num_sites"] == len(store.run.sites)
    assert store.messages == ["firing"]
    assert len(store.rows(schema.incident_event)) <= 4


def test_a_second_cause_later_is_a_second_incident(store: Store) -> None:
    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        inf_at(store.run, 5)(rows, s, step)
        if step == 9:
            s["loss"] = NAN

    store.take(store.run.batch(range(12), change))
    assert [i["mode"] for i in store.incidents] == ["inf-laundering", "nan-in-loss"]
    assert store.messages == ["firing", "firing"]


def test_the_same_mode_elsewhere_is_one_incident_within_the_window_only(store: Store) -> None:
    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        inf_at(store.run, 5)(rows, s, step)
        inf_at(store.run, 8, 20, module="layers.0.attn.o_proj")(rows, s, step)

    store.take(store.run.batch(range(22), change))
    assert [(i["first_step"], i["last_step"], i["num_sites"]) for i in store.incidents] == [(5, 8, 2), (20, 20, 1)]


def test_a_storm_over_ranks_modules_and_steps_is_one_message(store: Store) -> None:
    ranks = [Run(seed=r, rank=r) for r in range(8)]
    for first in range(0, 120, 20):
        for run in ranks:
            store.take(run.batch(range(first, first + 20), nan_from(7, 0)))
    [incident] = store.incidents
    assert incident["place"]["ranks"] == list(range(8))
    assert incident["num_events"] == 8 * 113
    assert store.messages == ["firing"]


@pytest.mark.parametrize("cause_first", [True, False])
def test_the_rank_that_broke_first_is_named_whoever_reports_first(store: Store, cause_first: bool) -> None:
    bad, other = Run(seed=1, rank=3), Run(seed=2, rank=0)
    born = bad.index("layers.0.mlp.up_proj", "input")
    ours = bad.batch(range(3, 8), nan_from(5, born))  # rank 3 breaks in step 5
    theirs = other.batch(range(3, 8), nan_from(6))  # its gradients reach all weights in step 6
    for batch in (ours, theirs) if cause_first else (theirs, ours):
        store.take(batch)
    [incident] = store.incidents
    assert incident["place"]["module"] == "layers.0.mlp.up_proj"
    assert incident["place"]["operand"] == "input"
    assert incident["place"]["ranks"] == [0, 3]
    assert (incident["first_step"], incident["origin"]) == (5, True)
    assert store.messages == ["firing"]


@pytest.mark.parametrize("cause_first", [True, False])
def test_weights_that_one_ranks_loss_broke_are_its_consequence_on_every_rank(store: Store, cause_first: bool) -> None:
    bad, other = Run(seed=1, rank=3), Run(seed=2, rank=0)

    def broken_from(step0: int) -> Change:
        def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
            s["loss"] = NAN if step >= step0 else s["loss"]
            rows["num_nan"] = 9 * (step >= 6)  # the update of step 5 reached the weights of both

        return change

    ours, theirs = bad.batch(range(3, 8), broken_from(5)), other.batch(range(3, 8), broken_from(6))
    for batch in (ours, theirs) if cause_first else (theirs, ours):
        store.take(batch)
    [incident] = store.incidents
    assert (incident["mode"], incident["first_step"], incident["origin"]) == ("nan-in-loss", 5, True)
    assert incident["place"]["ranks"] == [0, 3]
    assert store.messages == ["firing"]


def test_a_restart_of_the_collector_opens_nothing_twice(store: Store) -> None:
    batches = [store.run.batch(range(s, s + 4), nan_from(5, 0)) for s in range(0, 60, 4)]
    for b in batches[:8]:
        store.take(b)
    store.restart()
    for b in batches[:8]:
        store.engine.observe(b)  # detected before: replayed in silence
    for b in batches[8:]:
        store.take(b)
    assert len(store.incidents) == 1
    assert store.messages == ["firing"]


def test_a_batch_whose_transaction_was_undone_leaves_nothing(store: Store) -> None:
    findings = store.engine.observe(store.run.batch(range(8), inf_at(store.run, 5)))

    def crash() -> None:
        with writing(store.db) as conn:
            fold(conn, RUN, TENANT, 1, findings, store.run.facts, 0.0)
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        crash()
    assert store.incidents == []
    assert store.messages == []
    with writing(store.db) as conn:
        assert len(fold(conn, RUN, TENANT, 1, findings, store.run.facts, 0.0)) == 1
    assert store.messages == ["firing"]


def test_what_was_resolved_by_hand_is_not_opened_again_by_its_consequences(store: Store) -> None:
    store.take(store.run.batch(range(8), nan_from(5, 0)))
    with writing(store.db) as conn:
        conn.execute(sa.update(schema.incident).values(status="resolved"))
    store.take(store.run.batch(range(8, 30), nan_from(5, 0)))
    assert len(store.incidents) == 1


def test_flapping_sends_four_messages_however_often(store: Store) -> None:
    [finding] = store.engine.observe(store.run.batch(range(6), inf_at(store.run, 5)))
    for step in range(5, 2505, 25):
        store.now += 10.0
        with writing(store.db) as conn:
            where = (conn, RUN, TENANT, 1)
            fold(*where, [replace(finding, step=step)], store.run.facts, store.now)
            close_quiet(*where, step + 21, store.now)
    assert len(store.incidents) == 100
    assert {i["status"] for i in store.incidents} == {"resolved"}
    assert store.messages == ["firing", "resolved", "firing", "resolved"]


def scalar(step: int, name: str, severity: Severity = "info") -> Finding:
    evidence = (Evidence(name, 2.0, 1.0, "", step),)
    extra = {"name": name, "why": "level", "began": step, "news": evidence}
    return Finding("scalar-shift", severity, step, 0, None, None, None, evidence, "unknown", 1 << 40, extra)


def test_of_logged_scalars_only_the_same_one_comes_and_goes(store: Store) -> None:
    names = ["reward/mean", "response_length", "reward/mean", "entropy", "reward/mean"]
    comes_and_goes(store, *(scalar(100 * i, name) for i, name in enumerate(names)))
    assert store.messages == ["firing", "resolved"] * 4
    [held] = [e["detail"]["message"] for e in store.rows(schema.incident_event) if "message" in e["detail"]]
    assert held == "held back: 2 of the same scalar within 60 minutes"


def test_what_was_less_grave_holds_back_no_warning(store: Store) -> None:
    came = ["info", "info", "warning", "critical", "warning", "critical", "info"]
    comes_and_goes(store, *(finding(store, "bad-batch", 100 * i, severity=s) for i, s in enumerate(came)))
    told = [r["payload"]["incident"]["severity"] for r in store.rows(schema.outbox) if r["kind"] == "firing"]
    assert told == ["info", "info", "warning", "critical", "critical"]


def test_information_on_one_scalar_holds_back_no_warning_of_it(store: Store) -> None:
    comes_and_goes(store, scalar(0, KL), scalar(100, KL), scalar(200, KL, "warning"))
    assert store.messages == ["firing", "resolved"] * 3


@pytest.mark.parametrize("per_batch", [1, 10, 50])
def test_how_steps_are_cut_into_batches_changes_no_incident(store: Store, per_batch: int) -> None:
    for first in range(0, 100, per_batch):
        store.take(store.run.batch(range(first, first + per_batch), inf_at(store.run, 5, 12, 24, 60, 61)))
    assert [(i["first_step"], i["last_step"]) for i in store.incidents] == [(5, 24), (60, 61)]


def test_a_silence_keeps_the_message_back_and_the_incident_on_the_pages(store: Store) -> None:
    with writing(store.db) as conn:
        conn.execute(
            sa.insert(schema.silence).values(
                run_id="", tenant=TENANT, id="s1", mode="inf-laundering", created_at=0.0, expires_at=5000.0
            )
        )
    store.take(store.run.batch(range(40), inf_at(store.run, 5)))
    assert [i["status"] for i in store.incidents] == ["resolved"]
    assert store.messages == []


def test_a_sampled_run_closes_after_twenty_samples(store: Store) -> None:
    store.take(store.run.batch(range(0, 100, 10), inf_at(store.run, 50)))
    store.take(store.run.batch(range(100, 240, 10)))
    assert [i["status"] for i in store.incidents] == ["open"]
    store.take(store.run.batch(range(240, 270, 10)))
    assert [i["status"] for i in store.incidents] == ["resolved"]


def test_one_long_gap_between_samples_keeps_no_incident_open(store: Store) -> None:
    noisy = store.run.index(DOWN, "input")

    def noise(rows: np.ndarray, scalars: np.ndarray, step: int) -> None:
        if 5010 <= step < 5022:
            rows["tile_noise_ratio_sum"][noisy] *= 30
            rows["tile_noise_ratio_max"][noisy] = 0.5
            rows["noise_energy"][noisy] *= 30

    for step in [*range(60), *range(5000, 5060)]:
        store.take(store.run.batch([step], noise))
    assert [(i["first_step"], i["status"]) for i in store.incidents] == [(5010, "resolved")]


def test_a_loss_that_is_nan_can_be_stored_and_read(store: Store) -> None:
    store.take(store.run.batch([5], lambda rows, s, step: s["loss"].fill(NAN)))
    [incident] = store.incidents
    assert incident["place"]["module"] is None
    assert [e["value"] for e in incident["evidence"] if e["field"] == "loss"] == ["nan"]


def test_no_loss_is_said(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(tmp_path_factory.mktemp("db"), Run(with_loss=False))
    store.take(store.run.batch(range(8), inf_at(store.run, 5)))
    assert "loss not seen: call watch.log(loss=...)" in store.incidents[0]["cause"]
    store.db.dispose()


def test_a_rank_that_comes_after_the_clean_steps_joins_the_incident_that_is_over(store: Store) -> None:
    other = Run(seed=1, rank=1)
    for run in (store.run, other):
        for first in range(0, 40, 8):
            store.take(run.batch(range(first, first + 8), inf_at(run, 5)))
    [incident] = store.incidents
    assert (incident["status"], incident["place"]["ranks"], incident["num_events"]) == ("resolved", [0, 1], 2)
    assert store.messages == ["firing", "resolved"]


def test_a_late_critical_finding_of_a_warning_that_is_over_is_an_incident_of_its_own_which_ends(store: Store) -> None:
    """What was told as over stays over; nobody misses the page, and nothing fires for ever."""
    put(store, finding(store, "outlier-growth", 10))
    with writing(store.db) as conn:
        close_quiet(conn, RUN, TENANT, 1, 40, store.now)
    put(store, finding(store, "outlier-growth", 10, severity="critical"))
    put(store, finding(store, "outlier-growth", 10, severity="critical"))
    assert [(i["severity"], i["status"]) for i in store.incidents] == [("warning", "resolved"), ("critical", "open")]
    with writing(store.db) as conn:
        close_quiet(conn, RUN, TENANT, 1, 40, store.now + 1)
    for severity in ("critical", "warning"):  # later still: it joins what tells as much
        put(store, finding(store, "outlier-growth", 10, severity=severity))
    first, second = store.incidents
    assert [(i["severity"], i["status"]) for i in (first, second)] == [
        ("warning", "resolved"),
        ("critical", "resolved"),
    ]
    assert first["num_events"] + second["num_events"] == 5
    sent = sorted(store.rows(schema.outbox), key=lambda row: row["created_at"])
    told = [(row["incident_id"], row["kind"]) for row in sent]
    assert told == [(i["id"], kind) for i in (first, second) for kind in ("firing", "resolved")]


@pytest.fixture
def on_postgresql(database_url: str, tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path, Run(), database_url)
    yield made
    made.db.dispose()


def _resolve_by_hand(store: Store) -> None:
    with writing(store.db) as conn:
        row = dict(conn.execute(sa.select(schema.incident).with_for_update()).mappings().one())
        changed = triage.act(conn, row, "resolve", store.now, by="ann")
        if changed is not None and row["status"] != "resolved":
            write_resolved(conn, changed, store.now, "")


@pytest.mark.parametrize("database_kind", ["postgresql"])
@pytest.mark.parametrize("at", ["findings", "clean steps"])
def test_what_a_person_does_while_detection_writes_comes_before_it_or_after(
    on_postgresql: Store, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    store = on_postgresql
    put(store, finding(store, "outlier-growth", 10))
    person = threading.Thread(target=_resolve_by_hand, args=(store,))
    where, name = (fold_module, "target_of") if at == "findings" else (auto_resolve, "_stride")
    whole = getattr(where, name)

    def meanwhile(*args: Any) -> Any:
        if not person.ident:
            person.start()
            person.join(0.5)  # it waits, or is done
        return whole(*args)

    monkeypatch.setattr(where, name, meanwhile)
    if at == "findings":
        put(store, finding(store, "outlier-growth", 12, severity="critical"))
    else:
        with writing(store.db) as conn:
            close_quiet(conn, RUN, TENANT, 1, 40, store.now)
    person.join(20)
    assert not person.is_alive()
    [incident] = store.incidents
    assert incident["status"] == "resolved"
    assert incident["resolved_at"] is not None
    events = sorted(store.rows(schema.incident_event), key=lambda e: e["seq"])
    assert {"opened", "resolved"} <= {e["kind"] for e in events}
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    sent = sorted(store.rows(schema.outbox), key=lambda row: row["created_at"])
    assert [row["kind"] for row in sent].count("resolved") == 1
    assert sent[-1]["kind"] == "resolved"


def test_what_goes_on_after_an_incident_was_closed_by_hand_is_a_new_one(store: Store) -> None:
    store.take(store.run.batch(range(8), inf_at(store.run, 5)))
    with writing(store.db) as conn:
        conn.execute(sa.update(schema.incident).values(status="resolved"))
    store.take(store.run.batch(range(8, 12), inf_at(store.run, 9)))
    assert [(i["first_step"], i["status"]) for i in store.incidents] == [(5, "resolved"), (9, "open")]


def test_an_incident_right_after_a_restart_is_not_over_because_the_attempt_before_was_further(store: Store) -> None:
    for rank in range(2):
        store.take(Run(seed=rank, rank=rank, session=f"old{rank}").batch(range(4960, 5000)))
    again = Run(seed=3, session="new0")
    store.take(again.batch(range(4000, 4004), inf_at(again, 4001)), attempt=2)
    assert [(i["first_step"], i["status"]) for i in store.incidents] == [(4001, "open")]
    assert store.messages == ["firing"]


def test_a_logged_scalar_that_stays_broken_takes_in_what_leaves_its_band_with_it_and_nothing_later(
    store: Store,
) -> None:
    def said(step: int, name: str, began: int) -> Finding:
        evidence = (Evidence(name, float("nan"), 1.0, "", began),)
        extra = {"name": name, "why": "nonfinite", "began": began, "not_before": began, "news": evidence}
        return Finding("scalar-shift", "warning", step, 0, None, None, None, evidence, "unknown", 1 << 40, extra)

    for step in range(10, 60):  # each step is folded by itself: what an incident tells of is read back
        found = [said(step, "aux/z_loss", 10 if step < 40 else 40)]  # it was a number again for a moment
        found += [said(step, "aux/balance", 12)] if step >= 12 else []
        found += [said(step, "rollout_kl", 50)] if step >= 50 else []
        put(store, *found)
    first, second = store.incidents
    assert [(i["first_step"], i["last_step"]) for i in (first, second)] == [(10, 59), (50, 59)]
    assert [[e["field"] for e in i["evidence"]] for i in (first, second)] == [
        ["aux/z_loss", "aux/balance"],
        ["rollout_kl"],
    ]
    assert store.messages == ["firing", "firing"]
