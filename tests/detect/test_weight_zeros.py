"""A part of one weight that becomes exactly 0 is told; pruning, a weight that began as zeros and what codes alone show are not."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy

from fp8watch_agent.record import Measured
from fp8watch_server.incidents.explain import explain

AT, STEPS = 60, 100
MODULE = "layers.1.mlp.down_proj"
NAMES = ("num_nonzero",)


def told(t: Trace) -> list[Folded]:
    return fold(play(Case([t], AT)), t.facts)


def emptied(t: Trace, rows: np.ndarray, share: float, at: int = AT) -> None:
    """So much of some weights is 0 from a step on."""
    nonzero = t.columns["num_nonzero"].astype(np.int64)
    nonzero[at:, rows] = np.round(t.columns["num_elements"][at:, rows] * (1 - share)).astype(np.int64)
    t.columns["num_nonzero"] = nonzero


@pytest.mark.parametrize("share", [0.004, 0.017, 0.15])
def test_a_part_of_a_weight_that_becomes_zero_is_told_in_its_step(share: float) -> None:
    t = healthy(3, STEPS)
    emptied(t, t.mask(MODULE, "weight"), share)
    [incident] = told(t)
    assert (incident.mode, incident.severity, incident.first.step) == ("silent-data-corruption", "warning", AT)
    assert incident.first.onset == AT
    words = explain(incident.named, t.facts)
    assert words.title == f"{100 * share:.3g} % of the weight of {MODULE} became exactly 0, since step {AT}"
    assert f"0 % were at step {AT - 1}" in words.cause
    assert words.place["module"] == MODULE
    assert words.verdict == "shared"


@pytest.mark.parametrize(("share", "before"), [(0.002, 0.0), (0.05, 0.01)])
def test_few_zeros_or_some_more_of_them_are_not(share: float, before: float) -> None:
    t = healthy(3, STEPS)
    emptied(t, t.mask(MODULE, "weight"), before, at=0)
    emptied(t, t.mask(MODULE, "weight"), share)
    assert told(t) == []


def test_pruning_of_all_weights_is_not() -> None:
    t = healthy(3, STEPS)
    emptied(t, t.mask(operand="weight"), 0.3)
    assert told(t) == []


def test_a_weight_that_begins_as_zeros_is_not() -> None:
    t = healthy(3, STEPS)
    emptied(t, t.mask(MODULE, "weight"), 1.0, at=0)
    emptied(t, t.mask(MODULE, "weight"), 0.0, at=2)
    assert told(t) == []


def test_what_is_known_of_codes_alone_is_no_zero_of_the_weight() -> None:
    t = healthy(3, STEPS)
    emptied(t, t.mask(MODULE, "weight"), 0.15)
    t.columns["measured"] = t.columns["measured"] | int(Measured.CODES)
    assert [i for i in told(t) if i.mode == "silent-data-corruption"] == []
