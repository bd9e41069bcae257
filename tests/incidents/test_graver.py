"""What is graver than its cause is told as such: a warning, or information, keeps no page from anybody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from detect.scenarios import delayed_clip, optimizer_divergence
from detect.trace import healthy
from detect.written_weights import AT, leaping, written
from incidents.findings import OTHER, finding, put
from incidents.store import Store

from fp8watch_agent.module_settings import SETTING
from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import Finding
from fp8watch_server.detect.modes.recipe_mismatch.detector import mismatch
from fp8watch_server.detect.precedence import BLIND, HABIT
from fp8watch_server.detect.sessions import BLIND_FACT, Change, SessionFacts
from fp8watch_server.detect.statistics import without_consequences

LATER = 10
"""Steps from a weight that was set anew to the LR that leaps."""


def test_weights_that_run_away_behind_one_that_was_set_anew_are_a_page(tmp_path: Path) -> None:
    t = written(leaping(), AT)
    optimizer_divergence(t, AT + LATER, 2, np.random.default_rng(0))
    store = Store(tmp_path, t)  # type: ignore[arg-type]
    for batch in t.batches(1):
        store.take(batch)
        if batch.header.step0 == AT + LATER - 1:
            assert [i["severity"] for i in store.incidents] == ["warning"]
        if batch.header.step0 == AT + 2 * LATER:
            break
    [incident] = store.incidents
    assert (incident["mode"], incident["severity"]) == ("silent-data-corruption", "critical")
    assert incident["last_step"] > AT + LATER  # not over while they do
    assert "Behind it: " in incident["cause"]
    sent = [row["payload"]["incident"]["severity"] for row in store.rows(schema.outbox) if row["kind"] == "firing"]
    assert sorted(sent) == ["critical", "warning"]
    store.db.dispose()


def test_of_one_step_a_warning_takes_in_nothing_critical(store: Store) -> None:
    cause, noise = finding(store, "delayed-clip", 10), finding(store, "chronic-quantization-noise", 10)
    for severity, told in (("warning", [cause]), ("critical", [cause, replace(noise, severity="critical")])):
        found = [cause, replace(noise, severity=severity)]
        assert without_consequences(found, sites=store.run.facts) == told


def opened_before(store: Store, mode: str, kind: str) -> None:
    """Information that an earlier version opened, with the kind that it gave it."""
    put(store, finding(store, mode, 10, severity="info"))
    with writing(store.db) as conn:
        [event] = store.rows(schema.incident_event)
        conn.execute(sa.update(schema.incident_event).values(detail={**event["detail"], "kind": kind}))


@pytest.mark.parametrize(
    ("mode", "kind", "told"),
    [
        ("optimizer-divergence", "optimizer-divergence", ("outlier-growth", "warning")),
        ("silent-data-corruption", "silent-data-corruption", ("dead-layer", "warning")),
        ("recipe-mismatch", "recipe-mismatch", ("gradient-underflow", "critical")),
    ],
)
def test_information_takes_in_nothing_graver(store: Store, mode: str, kind: str, told: tuple[str, str]) -> None:
    opened_before(store, mode, kind)
    put(store, finding(store, told[0], 12, severity=told[1]), finding(store, "chronic-quantization-noise", 12, OTHER))
    assert {(i["mode"], i["severity"]) for i in store.incidents} == {
        (mode, "info"),
        told,
        ("chronic-quantization-noise", "warning"),
    }
    assert store.messages == ["firing"] * 3


def test_what_changed_for_the_model_is_information_that_explains_nothing() -> None:
    [settings, flags] = [
        mismatch([Change(name, 0.1, 0.0, "the session before")], 10, 0) for name in (f"{SETTING}p", "recipe")
    ]
    assert (settings.severity, settings.kind) == ("info", HABIT)
    assert (flags.severity, flags.kind) == ("warning", "recipe-mismatch")
    blind = mismatch([Change(BLIND_FACT, "a of 62", "", "")], 10, 0)
    assert blind.kind == BLIND


@pytest.mark.parametrize("blind", [True, False])
def test_what_nobody_observes_is_no_reason_for_a_clip(blind: bool) -> None:
    """It is told two steps before."""
    t = healthy(3, 66, recipe="delayed", hybrid=True)
    delayed_clip(t, 50, 0, np.random.default_rng(0))
    engine = DetectionEngine(t.facts)
    said = SessionFacts(session=t.session, rank=0)
    engine.add_sessions([said])
    found: list[Finding] = []
    for batch in t.batches(1):
        if blind and batch.header.step0 == 48:
            engine.add_sessions([replace(said, facts={BLIND_FACT: "lm_head (its output was not seen); "})])
        found += engine.observe(batch)
    assert [f.kind for f in found if f.mode == "recipe-mismatch"] == [BLIND] * blind
    assert "warning" in {f.severity for f in found if f.mode == "delayed-clip"}
