"""What is graver than its cause is told as such: a warning, or information, keeps no page from anybody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from detect.scenarios import optimizer_divergence
from detect.test_weight_set_anew import AT, leaping, written
from incidents.findings import finding
from incidents.store import Store

from fp8watch_server.db import schema
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
