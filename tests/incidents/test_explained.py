"""Why something is wrong may be found by a later look than the one that told it: the incident then says it."""

from __future__ import annotations

from typing import Any

import pytest
from incidents.findings import DOWN, OTHER, finding, modes, put
from incidents.store import Store

from fp8watch_server.detect.families.fault_why import EXPLAINED
from fp8watch_server.detect.finding import Evidence, Finding

ROLLED: dict[str, Any] = {"why": "codes-rolled", "numbers": {"share": 1.0, "axis": 1.0, "by": 16.0}}
EPS: dict[str, Any] = {"why": "eps", "numbers": {"share": 1.0, "eps": 1e-3, "zeroed": 0.1}, "kind": "in-effect"}
STALE: dict[str, Any] = {"why": "copy-stale", "numbers": {"share": 1.0, "distance": 0.02, "updates": 3.0}}


def found(store: Store, mode: str, step: int, module: str = DOWN, **extra: Any) -> Finding:
    made = finding(store, mode, step, module, "critical", not_before=0, **extra)
    if "why" not in extra:
        return made
    proof = Evidence(EXPLAINED, 100.0, None, "% of what was wrong", step)
    more = {**made.extra, "found_at": made.site}
    return Finding(**{**made.__dict__, "extra": more, "evidence": (*made.evidence, proof)})


CASES = [
    ("quantiser-fault", "quantiser-fault", ROLLED, "codes lie 16 columns off"),
    ("quantiser-fault", "recipe-mismatch", EPS, "An amax epsilon of"),
    ("kernel-output-fault", "quantiser-fault", STALE, "is stale: about 3 updates old"),
]


@pytest.mark.parametrize(("told", "then", "why", "title"), CASES, ids=["codes", "eps", "copy"])
def test_what_is_found_later_is_said_by_the_incident_that_is_open(store, told, then, why, title) -> None:
    put(store, found(store, told, 80))
    put(store, found(store, then, 81, **why))
    [incident] = store.incidents
    assert (incident["mode"], incident["first_step"]) == (then, 80)
    assert title in incident["title"]
    put(store, found(store, told, 82))
    assert title in store.incidents[0]["title"], "a look that does not say why takes nothing back"


def test_a_cause_of_another_place_is_not_its(store) -> None:
    put(store, found(store, "quantiser-fault", 80))
    put(store, found(store, "quantiser-fault", 81, OTHER, **ROLLED))
    assert "columns off" not in store.incidents[0]["title"]


def test_other_sites_under_one_setting_are_one_incident(store) -> None:
    put(store, found(store, "recipe-mismatch", 80, **EPS))
    put(store, found(store, "quantiser-fault", 82, OTHER))
    assert modes(store) == ["recipe-mismatch"]


@pytest.mark.parametrize("other", [{"operands": ["weight"]}, ROLLED], ids=["operand", "cause"])
def test_another_fault_is_told_beside_a_setting_that_is_in_effect(store, other) -> None:
    put(store, found(store, "recipe-mismatch", 80, **EPS))
    put(store, found(store, "quantiser-fault", 82, OTHER, **other))
    assert sorted(modes(store)) == ["quantiser-fault", "recipe-mismatch"]
