"""A gradient norm that is of more weights than before, or of fewer, is laid on nothing that multiplies gradients."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy

from fp8watch_server.incidents.explain import explain

AT, STEPS = 90, 130


def made(factor: float) -> Trace:
    t = healthy(3, STEPS)
    t.steps["grad_norm"] = np.exp2(np.random.default_rng(5).normal(0, 0.15, STEPS))
    t.steps["grad_norm"][AT:] *= factor
    gradients = t.mask(operand="grad_output")  # the median is the same, of whichever of them
    for j in np.flatnonzero(gradients):
        t.grow(np.arange(len(t.sites)) == j, -np.log2(t.columns["amax_max"][:, j].astype(np.float64)) - 10)
    return t


def told(t: Trace) -> list[Folded]:
    return [i for i in fold(play(Case([t], AT)), t.facts) if i.mode == "scalar-shift"]


def weights(t: Trace, *, layers: str) -> np.ndarray:
    """Operands of wgrad of some layers."""
    of = np.array([s.module.startswith(layers) for s in t.sites])
    return np.flatnonzero(t.mask(operand="grad_output", direction="columnwise") & of)


@pytest.mark.parametrize("early", [0, 1])
def test_a_norm_that_triples_where_weights_are_unfrozen_is_information_that_says_so(early: int) -> None:
    t = made(3.0)
    t.columns["measured"][: AT - early, weights(t, layers="layers.0")] = 0
    [incident] = told(t)
    assert (incident.severity, incident.named.onset) == ("info", AT)
    words = explain(incident.named, t.facts)
    assert words.title.endswith(f"since step {AT}, with first gradients of 7 weights")
    assert "7 of 21 weights had their first gradient then" in words.cause
    assert words.fix[0]["text"].startswith("If parameters are meant")


def test_a_norm_that_falls_where_weights_are_frozen_is_information_that_says_so() -> None:
    t = made(1 / 3)
    t.columns["measured"][AT:, weights(t, layers="layers.0")] = 0
    [incident] = told(t)
    assert incident.severity == "info"
    assert explain(incident.named, t.facts).title.endswith("without gradients of 7 weights")


@pytest.mark.parametrize(
    "case", ["unfrozen long before", "grows where some cease", "looked at in turns", "one of many"]
)
def test_a_norm_that_triples_for_another_reason_stays_a_warning(case: str) -> None:
    t = made(3.0)
    some, measured = weights(t, layers="layers.0"), t.columns["measured"]
    if case == "unfrozen long before":
        measured[: AT - 20, some] = 0
    elif case == "grows where some cease":
        measured[AT:, some] = 0
    elif case == "looked at in turns":
        for k, j in enumerate(weights(t, layers="layers")):
            measured[np.arange(STEPS) % 7 != k % 7, j] = 0
    else:
        measured[:AT, some[:1]] = 0
    [incident] = told(t)
    assert incident.severity == "warning"
    assert "and not by the backward pass" in explain(incident.named, t.facts).title
