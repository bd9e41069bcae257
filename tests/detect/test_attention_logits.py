"""Attention logits: growth is told, a model that finds its feet is not, whatever its learning rate does."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import Folded, fold
from detect.play import play
from detect.scenarios import Case
from detect.trace import healthy

from fp8watch_server.incidents.explain import explain

STEPS = 240
NAME = "max_attention_logit"


def told(*logits: np.ndarray, lr: np.ndarray | None = None, first_step: int = 0) -> list[Folded]:
    """What is said of a healthy run whose attention modules have these logits, each [T]; NaN where none were seen."""
    t = healthy(5, STEPS, 1, first_step=first_step, lr=lr)
    t.logs |= {f"{NAME}/layers.{k}.attention": values for k, values in enumerate(logits)}
    return fold(play(Case([t], 0)), t.facts)


def small_model(level: float, *, every: int, seed: int) -> np.ndarray:
    """As logits of small healthy models were seen to go: up until step 80 to 110, then level, each look another sample."""
    steps, rng = np.arange(STEPS), np.random.default_rng(seed)
    seen = level / (1 + np.exp((75 - steps) / 12)) * np.exp2(rng.normal(0, 0.06, STEPS)) + 0.2
    return np.where(steps % every == 0, seen, np.nan)


def test_a_young_model_whose_logits_rise_and_level_off_is_silent() -> None:
    shapes = [(16, 1), (42, 1), (42, 2), (85, 1), (85, 4)]
    assert told(*(small_model(v, every=n, seed=seed) for v, n in shapes for seed in range(8))) == []


def test_a_young_model_may_pass_the_first_limit_and_come_back() -> None:
    """The demo's in health: 5.6 at step 11, 42 at 48, 97 at 108, 125 at 130, 105 at 168; seen each 10 steps."""
    at = [0, 4, 11, 18, 28, 38, 48, 68, 88, 108, 118, 124, 135, 148, 168, STEPS]
    seen = [0.5, 6.7, 19, 21.7, 27.4, 38.5, 40.5, 49.7, 78.3, 96.8, 118.7, 125.4, 121.9, 116.2, 104.7, 104.7]
    logits = np.interp(np.arange(STEPS), at, seen)
    logits[12 : STEPS - 100][np.arange(12, STEPS - 100) % 10 != 8] = np.nan
    assert told(logits) == []
    assert "warning" in {i.severity for i in told(logits, first_step=90_000)}


@pytest.mark.parametrize("warm_up", [100, 160])
def test_logits_that_rise_with_the_learning_rate_are_information_and_then_the_usual(warm_up: int) -> None:
    lr = 2e-3 * np.minimum(1, (np.arange(STEPS) + 1) / warm_up)
    [incident] = told(170 * np.minimum(1, (np.arange(STEPS) + 1) / warm_up), lr=lr)
    assert incident.severity == "info"
    words = explain(incident.first, healthy(5, 2, 1).facts)
    assert "before the learning rate is warm" in words.title
    assert "layers.0.attention" in words.title


def test_what_was_above_the_limit_when_it_was_attached_is_no_growth_until_it_doubles() -> None:
    level = np.full(STEPS, 180.0)
    assert {i.severity for i in told(level, first_step=90_000)} <= {"info"}
    level[160:] = 420.0
    assert "warning" in {i.severity for i in told(level, first_step=90_000)}


@pytest.mark.parametrize(("then", "severities"), [(150.0, set()), (900.0, {"warning"})])
def test_few_looks_at_what_was_above_the_limit_all_along_are_no_growth(then: float, severities: set[str]) -> None:
    """Logged each 30 steps: there are fewer looks than say what is usual."""
    level = np.where(np.arange(STEPS) % 30 == 0, 150.0, np.nan)
    level[90] = then
    assert {i.severity for i in told(level, first_step=50_010)} == severities


@pytest.mark.parametrize(("octaves", "first_step"), [(0.08, 120), (0.05, 3000)])
def test_growth_that_lasts_is_told_before_the_limit(octaves: float, first_step: int) -> None:
    at = 120
    logits = 18 * np.exp2(octaves * np.clip(np.arange(STEPS) - at, 0, None))
    [incident, *_] = told(np.minimum(logits, 5e3), first_step=first_step)
    assert (incident.mode, incident.severity) == ("attention-logit-growth", "warning")
    reached = first_step + at + np.log2(100 / 18) / octaves
    assert first_step + at < incident.first.step < reached - 5


def test_the_last_limit_pages_at_any_time() -> None:
    logits = np.full(STEPS, 20.0)
    logits[20:] = 3e4
    assert "critical" in {i.severity for i in told(logits)}


def test_crossing_the_limit_after_the_warm_up_warns_at_once() -> None:
    logits = np.full(STEPS, 60.0)
    logits[150:] = 130.0
    [incident] = told(logits)
    assert (incident.severity, incident.first.step) == ("warning", 150)
