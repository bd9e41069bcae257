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
    EPS,
    MOMENTS_CHANGED,
    MOMENTS_LOOKED,
    OPTIMIZER_BEGINS,
    SECOND_LOOKED,
    SECOND_ZERO,
    SEES_AHEAD,
    WEIGHTS_CHANGED,
    WEIGHTS_LOOKED,
    WRITTEN,
)
from fp8watch_agent.update_names import DECAY, SHRINK, UPDATES_LOOKED
from fp8watch_server.detect.families.optimizer_state import HOLD_STEPS
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


def written(t: Trace, *steps: int, weights: float = 7) -> None:
    t.logs[WEIGHTS_CHANGED], t.logs[WEIGHTS_LOOKED], t.logs[MOMENTS_CHANGED] = (
        np.full(STEPS, np.nan) for _ in range(3)
    )
    t.logs[WEIGHTS_CHANGED][list(steps)], t.logs[WEIGHTS_LOOKED][list(steps)] = weights, 12
    t.logs[MOMENTS_CHANGED][list(steps)] = 0


@pytest.mark.parametrize("steps", [(AT,), (AT, AT + 9, AT + 18)], ids=["once", "now and then"])
def test_weights_that_are_written_for_the_first_time_are_information(steps: tuple[int, ...]) -> None:
    t = made()
    written(t, *steps)  # averages that stay in place
    [incident] = incidents(t)
    assert (incident.mode, incident.severity, incident.first.onset, incident.first.step, incident.last_step) == (
        "silent-data-corruption", "info", AT, AT + HOLD_STEPS, AT + HOLD_STEPS,
    )  # fmt: skip
    told = explain(incident.named, t.facts)
    assert told.title == f"Weights were written before step {AT} while no optimizer ran: 7 of 12"
    assert "FP8 is not the cause" in told.cause
    assert "averages" in told.fix[0]["text"]


@pytest.mark.parametrize(
    ("weights", "end"),
    [(1, "1 of 12, layers.0.attention.q_proj.weight"), (7, "7 of 12, the first layers.0.attention.q_proj.weight")],
)
def test_the_first_weight_that_was_written_is_named(weights: float, end: str) -> None:
    t = made()
    written(t, AT, weights=weights)
    t.logs[f"{WRITTEN}layers.0.attention.q_proj.weight"] = only_at(AT, 1, AT + 1)
    [incident] = incidents(t)
    assert explain(incident.named, t.facts).title.endswith(end)
    modules = {t.facts[i].module for i in incident.named.extra["sites"]}
    assert modules == ({"layers.0.attention.q_proj"} if weights == 1 else set())


def test_weights_that_are_written_in_each_step_from_one_on_are_one_incident() -> None:
    t = made()
    written(t, *range(AT, AT + HOLD_STEPS + 6))
    [incident] = incidents(t)
    assert (incident.first.onset, incident.last_step) == (AT, AT + HOLD_STEPS + 5)


def test_what_writes_to_weights_do_is_told_by_its_own_name() -> None:
    t = made()
    written(t, *range(AT, STEPS))
    looks = range(AT + 3, STEPS, 2)
    for name, value in ((UPDATES_LOOKED, 8.0), (SHRINK, 0.02), (DECAY, 1e-4)):
        t.logs[name] = np.full(STEPS, np.nan)
        t.logs[name][list(looks)] = value
    t.absent_logs = True
    assert {i.mode for i in incidents(t)} == {"optimizer-divergence"}


def test_weights_that_were_written_from_the_start_are_written_on_purpose() -> None:
    t = made()
    written(t, *range(9, STEPS, 10))
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
    mode = "optimizer-divergence" if often else "recipe-mismatch"  # their norms are beyond the limit, or never were
    assert (incident.mode, incident.first.onset, incident.first.step) == (mode, AT, AT + 2)
    assert incident.severity == ("warning" if often else "info")
    told = explain(incident.named, t.facts)
    if often:
        assert told.title.endswith(f"clipped to 1e-06 until step {AT}")
        assert ("nothing clips them" if to is None else "they are clipped to 8") in told.cause
    else:
        assert told.title == f"Gradients are {'no longer clipped' if to is None else 'clipped to 8'} since step {AT}"
        assert f"in 0 steps of {AT} before" in told.cause
    assert told.fix


@pytest.mark.parametrize("later", [0, 10], ids=["at once", "later"])
def test_gradients_beyond_what_they_were_clipped_to_are_the_optimizers(later: int) -> None:
    t = made()
    t.logs[CLIP_NORM] = only_at(0, 5.0, AT)
    norms = t.steps["grad_norm"]
    norms[:] = 1.0
    norms[AT + later :] = 7.5
    found = incidents(t)
    assert [i.mode for i in found] == ([] if not later else ["recipe-mismatch"]) + ["optimizer-divergence"]
    beyond = next(i for i in found if i.mode == "optimizer-divergence")
    assert (beyond.severity, beyond.first.onset, beyond.named.verdict) == ("warning", AT, "shared")
    told = explain(beyond.named, t.facts)
    assert told.title == f"Gradients leave their clipping: norm 7.5, clipped to 5 until step {AT}"
    assert "clip_grad_norm_" in told.fix[0]["text"]


@pytest.mark.parametrize(("begins", "severity"), [(AT, "info"), (AT - 20, "warning")], ids=["then", "before"])
def test_another_stage_of_training_that_does_not_clip_is_information(begins: int, severity: str) -> None:
    t = made()
    t.logs[CLIP_NORM], t.logs[OPTIMIZER_BEGINS] = only_at(0, 1e-6, AT), only_at(begins, 1.0, begins + 1)
    [incident] = incidents(t)
    told = explain(incident.named, t.facts)
    assert (incident.severity, incident.first.onset) == (severity, AT)
    assert ("Another optimizer holds the parameters from that step on." in told.cause) is (severity == "info")


def test_clipping_that_comes_back_before_gradients_grow_is_no_divergence() -> None:
    t = made()
    t.logs[CLIP_NORM] = only_at(0, 5.0)
    t.logs[CLIP_NORM][AT : AT + 4] = np.nan
    t.steps["grad_norm"][:] = 1.0
    t.steps["grad_norm"][AT + 6 :] = 7.5
    assert [i.mode for i in incidents(t) if i.mode == "optimizer-divergence"] == []


@pytest.mark.parametrize("changed_too", [True, False], ids=["set to zero", "never held"])
def test_second_moments_that_are_0_are_the_optimizers(changed_too: bool) -> None:
    t = made()
    t.logs[SECOND_ZERO], t.logs[SECOND_LOOKED] = only_at(AT, 300.0, AT + 1), only_at(AT, 1200.0, AT + 1)
    t.logs[EPS] = only_at(AT, 1e-8, AT + 1)
    if changed_too:
        changed(t, AT)
    [incident] = incidents(t)
    assert (incident.mode, incident.severity, incident.named.verdict) == ("optimizer-divergence", "warning", "shared")
    told = explain(incident.named, t.facts)
    assert told.title == "25 % of the optimizer's second moments are 0 where first moments are not"
    assert "1e-08" in told.cause
    assert "float32" in told.fix[0]["text"]


def test_a_few_second_moments_that_are_0_are_not_told() -> None:
    t = made()
    t.logs[SECOND_ZERO], t.logs[SECOND_LOOKED] = only_at(AT, 3.0, AT + 1), only_at(AT, 1200.0, AT + 1)
    assert incidents(t) == []


def test_what_else_it_could_be_fits_what_was_found() -> None:
    t = made()
    t.logs[CLIP_NORM] = only_at(0, 1e6, AT)
    [of_clipping] = [i for i in incidents(t) if i.mode == "recipe-mismatch"]
    t = made()
    t.logs[f"{SEES_AHEAD}layers.1.attention"] = only_at(AT, 1.0)
    [of_mask] = incidents(t)
    told = [[a["mode"] for a in explain(i.named, t.facts).alternatives] for i in (of_clipping, of_mask)]
    assert told == [["optimizer-divergence", "bad-batch"], ["bad-batch", "scalar-shift"]]


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
