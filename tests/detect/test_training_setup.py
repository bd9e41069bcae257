"""Moments that change between two steps, clipping that stops, causal attention that sees ahead."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy

from fp8watch_agent.training_names import (
    CHANGED,
    CLIP_NORM,
    MOMENTS_CHANGED,
    MOMENTS_LOOKED,
    SEES_AHEAD,
    WEIGHTS_CHANGED,
)
from fp8watch_server.incidents.explain import explain

AT, STEPS = 80, 112


def made() -> Trace:
    return healthy(3, STEPS, 1, recipe="blockwise", power_2_scale=True)


def only_at(step: int, value: float, until: int | None = None) -> np.ndarray:
    """NaN is "not said": a log of other steps is absent."""
    out = np.full(STEPS, np.nan)
    out[step:until] = value
    return out


def incidents(t: Trace) -> list[Folded]:
    t.absent_logs = True
    return fold(play(Case([t], AT)), t.facts)


def changed(t: Trace, step: int, weights: float = 0.0, until: int | None = None) -> None:
    until = until or step + 1
    t.logs[MOMENTS_CHANGED] = only_at(step, 3, until)
    t.logs[MOMENTS_LOOKED] = only_at(step, 24, until)
    t.logs[WEIGHTS_CHANGED] = only_at(step, weights, until)
    t.logs[f"{CHANGED}exp_avg of layers.0.fc1.weight"] = only_at(step, 1, until)


def test_moments_that_change_alone_are_told_in_their_step() -> None:
    t = made()
    changed(t, AT)
    [incident] = incidents(t)
    assert (incident.mode, incident.severity, incident.first.step, incident.named.verdict) == (
        "silent-data-corruption", "warning", AT, "shared",
    )  # fmt: skip
    told = explain(incident.named, t.facts)
    assert told.title == f"The optimizer's state changed before step {AT} while no optimizer ran: 3 of 24 moments"
    assert "exp_avg of layers.0.fc1.weight, and 2 more, is not what the optimizer left" in told.cause
    assert told.fix


def test_moments_that_come_with_their_weights_were_loaded() -> None:
    t = made()
    changed(t, AT, weights=7)
    assert incidents(t) == []


def test_a_trainer_that_writes_into_moments_again_and_again_is_told_once() -> None:
    t = made()
    changed(t, 20, until=STEPS)
    assert len(incidents(t)) == 1


@pytest.mark.parametrize("often", [True, False], ids=["clipped often", "clipped never"])
@pytest.mark.parametrize("to", [None, 8.0], ids=["gone", "larger"])
def test_clipping_that_stops_is_told_in_its_third_step_with_the_first(often: bool, to: float | None) -> None:
    t = made()
    t.logs[CLIP_NORM] = only_at(0, 1e-6 if often else 1e6)
    t.logs[CLIP_NORM][AT:] = np.nan if to is None else to
    [incident] = incidents(t)
    assert (incident.mode, incident.first.onset, incident.first.step) == ("recipe-mismatch", AT, AT + 2)
    assert incident.severity == ("warning" if often and (to is None or to > 1e-6) else "info")
    told = explain(incident.named, t.facts)
    assert told.title == (
        f"Gradients are no longer clipped since step {AT}"
        if to is None
        else f"Gradients are clipped to 8 since step {AT}"
    )
    assert f"in {AT if often else 0} steps of {AT} before" in told.cause
    assert told.fix


def test_a_step_that_was_not_clipped_and_a_norm_that_is_scheduled_are_silent() -> None:
    t = made()
    t.logs[CLIP_NORM] = only_at(0, 1.0)
    t.logs[CLIP_NORM][[40, 41, 70, 90]] = np.nan
    assert incidents(t) == []
    t.logs[CLIP_NORM] = np.linspace(1.0, 0.5, STEPS)
    assert incidents(t) == []
    t.logs[CLIP_NORM][:AT] = 1.0
    assert incidents(t) == [], "it has only begun to change"


def test_attention_that_sees_ahead_is_told_once_with_its_module() -> None:
    t = made()
    t.logs[f"{SEES_AHEAD}layers.1.attention"] = only_at(AT, 1.0)
    t.logs[f"{SEES_AHEAD}layers.0.attention"] = only_at(AT + 8, 1.0)
    [incident] = incidents(t)
    assert (incident.mode, incident.severity, incident.first.step) == ("recipe-mismatch", "warning", AT)
    told = explain(incident.named, t.facts)
    assert told.title == "Attention of layers.1.attention sees later tokens"
    assert "FP8 is not the cause" in told.cause
    assert told.fix


def test_both_are_told_at_their_module_and_a_mask_for_as_long_as_it_leaks() -> None:
    t = made()
    module = next(f.module for f in t.facts.values() if f.operand == "weight")
    t.logs[MOMENTS_CHANGED], t.logs[MOMENTS_LOOKED] = only_at(AT, 1, AT + 1), only_at(AT, 24, AT + 1)
    t.logs[f"{CHANGED}exp_avg of {module}.weight"] = only_at(AT, 1, AT + 1)
    [incident] = incidents(t)
    assert incident.first.site is not None
    facts = t.facts[incident.first.site]
    assert (facts.module, facts.operand) == (module, "weight")
    t = made()
    t.logs[f"{SEES_AHEAD}{module}"] = only_at(AT, 1.0)
    [incident] = incidents(t)
    assert incident.first.site is not None
    assert t.facts[incident.first.site].module == module
    assert incident.last_step > STEPS - 6
