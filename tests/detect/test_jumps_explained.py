"""Jumps and levels of a loss that are of nothing in the data: weights that were written, data that are learnt, an LR that fell."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy

from fp8watch_agent.record import StepPresent
from fp8watch_agent.training_names import MOMENTS_CHANGED, WEIGHTS_CHANGED, WEIGHTS_LOOKED
from fp8watch_server.incidents.explain import explain

AT, STEPS = 120, 180


def told(t: Trace) -> list[Folded]:
    return fold(play(Case([t], AT)), t.facts)


def without_loss(t: Trace, where: np.ndarray) -> None:
    """Nobody says what the loss is there. [T]"""
    t.steps["present"][where] &= np.uint8(255 - int(StepPresent.LOSS))


def jumps(t: Trace, at: int, steps: int, by: float = 5.0) -> None:
    t.steps["loss"][at : at + steps] += by
    t.steps["grad_norm"][at : at + steps] = 12.0


def written(t: Trace, *steps: int, moments: int = 4) -> None:
    for name, value in ((WEIGHTS_CHANGED, 6), (MOMENTS_CHANGED, moments), (WEIGHTS_LOOKED, 40)):
        t.logs[name] = np.full(STEPS, np.nan)
        t.logs[name][list(steps)] = value


@pytest.mark.parametrize("steps", [3, STEPS])
def test_a_loss_that_jumps_where_weights_were_written_is_not_of_the_data(steps: int) -> None:
    t = healthy(3, STEPS)
    jumps(t, AT, steps)
    written(t, AT)
    [incident] = told(t)
    assert (incident.mode, incident.severity) == ("bad-batch", "warning" if steps == 3 else "info")
    words = explain(incident.named, t.facts)
    assert f"at step {AT}, behind weights that were written" in words.title
    assert "something wrote 6 weights of 40 looked at" in words.cause
    assert "one batch" not in words.cause
    assert "mixture" not in words.cause
    assert "re-initialisation" in words.fix[0]["text"]


def test_weights_that_are_written_every_few_steps_explain_nothing() -> None:
    t = healthy(3, STEPS)
    jumps(t, AT, 3)
    written(t, *range(AT % 5, STEPS, 5), moments=0)
    [incident] = [i for i in told(t) if i.mode == "bad-batch"]
    assert "behind weights" not in explain(incident.named, t.facts).title


@pytest.mark.parametrize("each", [1, 10], ids=["by ones", "by tens"])
@pytest.mark.parametrize("told_each", [1, 5], ids=["each loss", "now and then"])
def test_nor_does_what_is_written_in_each_step_however_steps_are_numbered_and_losses_told(
    each: int, told_each: int
) -> None:
    num = 100 * told_each
    t = healthy(1, num)
    jumps(t, 85 * told_each, 3 * told_each)
    for name, value in ((WEIGHTS_CHANGED, 6), (MOMENTS_CHANGED, 0), (WEIGHTS_LOOKED, 40)):
        t.logs[name] = np.full(num, float(value))
    without_loss(t, np.arange(num) % told_each != 0)
    t.steps["step"] *= each
    found = [i for i in told(t) if i.mode == "bad-batch"]
    assert found
    assert not any("behind weights" in explain(i.named, t.facts).title for i in found)


def learnt(height: float, steps: int = 4) -> Trace:
    """The loss of data that are learnt by heart; for some steps it is higher."""
    t = healthy(3, STEPS)
    rng = np.random.default_rng(5)
    at = np.arange(STEPS)
    t.steps["loss"] = (2.4 * np.exp(-at / 12) + 0.015) * np.exp(rng.normal(0, 0.25, STEPS))
    t.steps["loss"][0] = 2.4
    t.steps["loss"][AT : AT + steps] = height * np.array([0.7, 1.0, 0.8, 0.6, 0.7, 0.7, 0.6, 0.7])[:steps]
    t.steps["grad_norm"][AT : AT + steps] = 12.0
    return t


@pytest.mark.parametrize(("height", "severity"), [(0.2, "info"), (2.0, "warning")])
def test_a_little_jump_of_a_loss_that_is_next_to_nothing_is_information(height: float, severity: str) -> None:
    t = learnt(height)
    [incident] = told(t)
    assert (incident.mode, incident.severity) == ("bad-batch", severity)
    words = explain(incident.named, t.facts)
    assert ("learnt by heart" in words.cause) == (severity == "info")
    assert "stays" not in words.title  # the losses of a jump that came back are no level


@pytest.mark.parametrize(
    ("start", "usual", "height"), [(3.0, -5.0, 0.3), (1000.0, 1.0, 100.0)], ids=["below zero", "has a unit"]
)
def test_a_loss_that_is_no_cross_entropy_has_not_learnt_its_data_by_heart(
    start: float, usual: float, height: float
) -> None:
    t = healthy(3, STEPS)
    rng, at = np.random.default_rng(5), np.arange(STEPS)
    t.steps["loss"] = usual + (start - usual) * np.exp(-at / 6) + 0.02 * rng.normal(0, 1, STEPS)
    t.steps["loss"][AT : AT + 3] = height
    t.steps["grad_norm"][AT : AT + 3] = 12.0
    [incident] = told(t)
    assert (incident.mode, incident.severity) == ("bad-batch", "warning")
    assert "learnt by heart" not in explain(incident.named, t.facts).cause


def test_a_jump_that_comes_back_over_some_steps_is_no_level() -> None:
    t = learnt(0.2)
    rng = np.random.default_rng(0)
    t.steps["loss"][30:] = 0.0165 * np.exp(rng.normal(0, 0.3, STEPS - 30))
    t.steps["loss"][AT : AT + 8] = [0.0622, 0.1186, 0.2982, 0.2193, 0.0181, 0.0602, 0.0669, 0.0201]
    titles = [explain(i.named, t.facts).title for i in told(t)]
    assert titles
    assert not any("stays" in title for title in titles)


def test_losses_of_a_search_for_an_lr_are_no_level_for_those_behind_it() -> None:
    t = healthy(3, STEPS)
    smooth = 2.2 + 1.2 * np.exp(-np.arange(STEPS) / 60)
    t.steps["loss"] = smooth + 0.1 * (t.steps["loss"] - t.steps["loss"].mean())
    t.steps["lr"] = 1e-3
    t.steps["lr"][:AT] = np.geomspace(1e-6, 0.1, AT)
    t.steps["loss"][AT:] = 1.25 * t.steps["loss"][AT - 20]
    assert told(t) == []


@pytest.mark.parametrize("each", [1, 10], ids=["each loss", "now and then"])
def test_a_level_behind_an_lr_that_fell_is_of_the_lr_where_that_step_has_no_loss_too(each: int) -> None:
    num, fell = 800, 503
    t, at = healthy(1, num), np.arange(num)
    rng = np.random.default_rng(1)
    t.steps["loss"] = 2.0 + 0.02 * rng.normal(0, 1, num) - np.where(at >= fell, 0.6, 0.0)
    t.steps["loss"][:20] = 4.0  # it has learnt: at its first level a fall would be no level
    t.steps["lr"] = np.where(at < fell, 1e-3, 1e-4)
    without_loss(t, at % each != 0)
    assert [i for i in told(t) if i.mode == "bad-batch"] == []


@pytest.mark.parametrize(("each", "kinds"), [(7, True), (70, False)], ids=["a kind", "a bad batch"])
def test_batches_of_a_kind_that_came_all_along_are_no_jump(each: int, kinds: bool) -> None:
    """Text alone among captions of images: the loss of most falls to a tenth, that of these by a half."""
    t, at = healthy(1, 240), np.arange(240)
    rng = np.random.default_rng(5)
    other = (at % each == each - 1) & (kinds | (at >= 200))
    t.steps["loss"] = np.where(other, 2.8 + 2 * np.exp(-at / 40), 0.2 + 5 * np.exp(-at / 40)) + rng.normal(0, 0.02, 240)
    t.steps["grad_norm"] = np.where(other, 9.0, 1.0)
    assert bool([i for i in told(t) if i.mode == "bad-batch"]) is not kinds


def test_a_bad_batch_that_comes_again_and_again_is_told_each_time() -> None:
    t, at = healthy(1, 300), np.arange(300)
    t.steps["loss"] = 0.4 + np.random.default_rng(5).normal(0, 0.02, 300)
    bad = (at >= 100) & (at % 30 == 0)
    t.steps["loss"][bad], t.steps["grad_norm"][bad] = 3.0, 9.0
    found = play(Case([t], 100))
    assert {f.extra["began"] for f in found if f.mode == "bad-batch"} == set(at[bad].tolist())
