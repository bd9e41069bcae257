"""A training that writes weights on purpose from its first steps on is information: what breaks in it is told for itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from detect.trace import Trace, healthy
from incidents.findings import finding, modes, put
from incidents.store import Store

from fp8watch_agent.update_names import ASTRAY, COARSE, COARSE_BITS, OF, UPDATE_TIMES, UPDATES_LOOKED
from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing

AT, STEPS, LOOKED = 80, 112, 14
BROKEN_AT, BROKEN_STEPS = 46, 64
HABITS = {
    "optimizer-divergence": {UPDATE_TIMES: 2.0},
    "silent-data-corruption": {ASTRAY: 0.3, f"{OF}layers.0.mlp.down_proj.weight": 1.0},
    "recipe-mismatch": {COARSE: 5.0, COARSE_BITS: 8.0},
}


def training(mode: str, apart: int, steps: int) -> Trace:
    """One in whose every look at updates, `apart` steps from the last, the habit is seen."""
    t = healthy(3, steps, 1)
    for name, value in {UPDATES_LOOKED: 5.0, **HABITS[mode]}.items():
        t.logs[name] = np.full(steps, np.nan)
        t.logs[name][3::apart] = value
    return t


def told(folder: Path, t: Trace, closed_at: int | None = None) -> Store:
    store = Store(folder, t)  # type: ignore[arg-type]
    for batch in t.batches(4):
        if closed_at is not None and batch.header.step0 >= closed_at:
            with writing(store.db) as conn:
                conn.execute(sa.update(schema.incident).values(status="resolved", resolved_at=store.now))
            closed_at = None
        store.take(batch)
    return store


def page(store: Store) -> list[tuple[str, int, str]]:
    """Mode, first step and state of the notice of each critical incident."""
    of = {row["incident_id"]: row["state"] for row in store.rows(schema.outbox) if row["kind"] == "firing"}
    return [(i["mode"], i["first_step"], of[i["id"]]) for i in store.incidents if i["severity"] == "critical"]


@pytest.mark.parametrize(
    ("mode", "behind", "broken", "closed"),
    [
        ("optimizer-divergence", 1, "loss", False),
        ("optimizer-divergence", 1, "operand", False),
        ("optimizer-divergence", 1, "loss", True),
        ("optimizer-divergence", 9, "loss", False),
        ("silent-data-corruption", 1, "loss", False),
        ("silent-data-corruption", 9, "operand", False),
    ],
)
def test_what_breaks_in_it_opens_a_critical_incident_with_its_notice(
    tmp_path: Path, mode: str, behind: int, broken: str, closed: bool
) -> None:
    t = training(mode, LOOKED, BROKEN_STEPS)
    at = BROKEN_AT - 1 + behind  # steps behind a look at updates
    t.steps["loss"][at:] = np.nan
    if broken == "operand":
        site = t.one("mlp.down_proj", "input")
        t.columns["num_nan"][at, site], t.columns["first_nonfinite"][at, site] = 7, (5, 130, 0)
    store = told(tmp_path, t, closed_at=BROKEN_AT - 10 if closed else None)
    assert page(store) == [("nan-in-loss" if broken == "loss" else "nan-in-activation", at, "pending")]
    assert mode in modes(store)
    store.db.dispose()


@pytest.mark.parametrize("mode", HABITS)
def test_it_takes_in_no_noise(tmp_path: Path, mode: str) -> None:
    t = training(mode, 2, STEPS)
    t.set_sqnr(t.mask("mlp.down_proj", "input"), np.where(np.arange(STEPS) >= AT + 3, 18.0, 31.0))
    store = told(tmp_path, t)
    assert sorted(modes(store)) == sorted([mode, "chronic-quantization-noise"])
    assert [i["severity"] for i in store.incidents if i["mode"] == mode] == ["info"]
    store.db.dispose()


def test_information_of_an_earlier_version_takes_in_nothing_that_breaks(store: Store) -> None:
    put(store, finding(store, "optimizer-divergence", 10, severity="info"))
    put(store, finding(store, "nan-in-loss", 14, severity="critical"))
    assert [i["mode"] for i in store.incidents if i["severity"] == "critical"] == ["nan-in-loss"]
    assert store.messages == ["firing", "firing"]


@pytest.mark.parametrize("extra", [{"weight_born": True}, {"consequence": True}])
def test_weights_that_break_are_no_matter_of_information(store: Store, extra: dict[str, bool]) -> None:
    put(store, finding(store, "optimizer-divergence", 10, severity="info", kind="update-times"))
    put(store, finding(store, "nan-in-activation", 12, severity="critical", **extra))
    assert modes(store) == ["optimizer-divergence", "nan-in-activation"]
    assert [i["severity"] for i in store.incidents] == ["info", "critical"]
