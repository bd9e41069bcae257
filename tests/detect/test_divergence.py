"""Weights that grow everywhere at once are the optimizer's, and soon told."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from detect.folded import fold
from detect.healthy_run import Run
from detect.play import play
from detect.scenarios import Case
from detect.trace import healthy

from fp8watch_agent.training_names import WEIGHTS_CHANGED, WEIGHTS_LOOKED
from fp8watch_server.detect import statistics
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import Finding
from fp8watch_server.incidents.explain import explain

# Median growth of log2 amax after LR ×30 at step 120, as measured on a small model under AdamW 2e-3.
MEASURED = [
    0.301,
    0.37,
    0.331,
    0.297,
    0.246,
    0.213,
    0.181,
    0.141,
    0.129,
    0.105,
    0.088,
    0.073,
    0.063,
    0.057,
    0.05,
    0.042,
]


def diverging(at: int = 120, *, lr_known: bool = True, scale: float = 1.0, seed: int = 0) -> Run:
    run = Run(seed=seed)
    run.lr = lambda step: (2e-3 if step < at else 6e-2) if lr_known else None
    run.growth = lambda step: scale * MEASURED[step - at] if at <= step < at + len(MEASURED) else 0.005
    return run


def observe(run: Run, num_steps: int = 160, per_batch: int = 4, every: int = 1) -> list[Finding]:
    engine = DetectionEngine(run.facts)
    return [
        f
        for first in range(0, num_steps, per_batch)
        for f in engine.observe(run.batch(range(first, first + per_batch, every)))
    ]


@pytest.mark.parametrize(("lr_known", "scale"), [(True, 1.0), (False, 1.0), (True, 0.4)])
def test_a_learning_rate_times_thirty_is_told_within_ten_steps(lr_known: bool, scale: float) -> None:
    found = observe(diverging(lr_known=lr_known, scale=scale))
    assert {f.mode for f in found} == {"optimizer-divergence"}
    first = found[0]
    assert 120 <= first.step <= 126
    assert first.verdict == "shared"
    assert first.extra["num_moving"] == 14
    if lr_known:
        assert first.extra["lr_jump"] == pytest.approx((2e-3, 6e-2))
        [lr] = [e for e in first.evidence if e.field == "lr"]
        assert lr.since_step == 120


def test_weights_that_run_away_long_after_a_jump_of_the_lr_are_not_dated_to_it() -> None:
    run = diverging()
    run.lr = lambda step: 1e-5 if step < 60 else 1e-3
    first = observe(run)[0]
    assert first.mode == "optimizer-divergence"
    assert first.extra["lr_jump"] is None
    assert first.onset >= 119
    [lr] = [e for e in first.evidence if e.field == "lr"]
    assert (lr.value, lr.baseline, lr.since_step) == (pytest.approx(1e-3), pytest.approx(1e-5), None), "it was measured"
    said = explain(first, run.facts)
    assert "LR" not in f"{said.title} {said.cause}"
    assert "jump" not in said.fix[0]["text"]


def test_of_a_run_that_is_looked_at_rarely_the_lr_may_be_the_cause_since_the_look_before() -> None:
    run = diverging(4804, scale=40)
    run.growth = lambda step: 4.0 if 4804 <= step < 4960 else 0.002
    first = observe(run, 5120, 160, 40)[0]
    assert first.onset > 4804 + 20
    assert first.extra["lr_jump"] == pytest.approx((2e-3, 6e-2))


def test_it_ends_when_the_growth_ends() -> None:
    found = observe(diverging(), 240)
    assert found[-1].step < 145


def test_it_is_seen_in_a_sampled_run() -> None:
    found = observe(diverging(scale=4.0), 400, per_batch=8, every=4)  # growth per sample: that of four steps
    assert found
    assert found[0].step <= 132


def test_nothing_is_judged_in_the_first_fifty_steps() -> None:
    assert observe(diverging(at=20), 60) == []


def test_a_loss_that_breaks_while_the_optimizer_diverges_is_its_consequence() -> None:
    run, engine = diverging(), None
    engine = DetectionEngine(run.facts)

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step >= 126:
            s["loss"] = float("nan")
        if step >= 127:
            rows["num_nan"] = 5

    found = [f for first in range(0, 140, 4) for f in engine.observe(run.batch(range(first, first + 4), change))]
    assert {f.mode for f in found} == {"optimizer-divergence"}
    assert found[-1].step == 139
    assert found[-1].extra["consequence"] is True


def test_growth_under_a_broken_quantiser_is_not_the_optimizers() -> None:
    run = diverging()
    engine = DetectionEngine(run.facts)
    i = run.index("layers.0.mlp.gate_proj", "weight")

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step >= 115:
            rows["scale_ratio_max"][i] = 1.9

    found = [f for first in range(0, 160, 4) for f in engine.observe(run.batch(range(first, first + 4), change))]
    assert {f.mode for f in found} == {"stale-weight-scale"}


def moved_by(num_steps: int, moves: Callable[[int, np.random.Generator], np.ndarray], seed: int) -> set[str]:
    """Modes that are told of a run whose weights move by so many octaves in each step from 120 on. [14]"""
    run, rng = Run(seed=seed), np.random.default_rng([seed, 1])
    moved, weights = np.zeros(len(run.sites)), run.roles == "weight"

    def move(rows: np.ndarray, scalars: np.ndarray, step: int) -> None:
        if step >= 120:
            moved[weights] += moves(step, rng)
        for name in ("amax_max", "amax_min_nonzero", "scale_inv_max", "scale_inv_min"):
            rows[name] *= np.exp2(moved)

    engine = DetectionEngine(run.facts)
    found = [f for at in range(0, num_steps, 4) for f in engine.observe(run.batch(range(at, at + 4), move))]
    return {f.mode for f in found}


@pytest.mark.parametrize("seed", range(4))
def test_after_a_jump_of_the_lr_no_weight_is_called_corrupted(seed: int) -> None:
    """All of them scatter: in most steps one moves the most, and none by itself."""
    assert "silent-data-corruption" not in moved_by(140, lambda step, rng: rng.normal(0, 0.12, 14), seed)


def test_a_weight_that_stays_where_it_is_while_all_others_leap_is_not_corrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        statistics, "explains", lambda *_: False
    )  # that all others leaped is told, and takes the rest in
    stays = np.r_[0.06, np.full(13, 0.4)]
    assert "silent-data-corruption" not in moved_by(128, lambda step, rng: stays * (step == 122), 0)
    leaps = np.r_[0.4, np.full(13, 0.0)]
    assert moved_by(128, lambda step, rng: leaps * (step == 122), 0) == {"silent-data-corruption"}


@pytest.mark.parametrize("by", [1, 5], ids=["by ones", "by fives"])
@pytest.mark.parametrize(
    ("each", "alarms"), [(20, False), (2, True), (None, True)], ids=["now and then", "always", "nobody"]
)
def test_growth_across_weights_that_something_else_wrote_is_none_of_the_optimizers(
    each: int | None, alarms: bool, by: int
) -> None:
    """As the outer step of local SGD does each 20 steps, with a momentum of its own. What writes in nearly each step is part of the
    updates."""
    trace = healthy(5, 160, 1, recipe="blockwise", power_2_scale=True)
    steps = np.arange(trace.num_steps)
    trace.grow(trace.mask(operand="weight"), 0.5 * by * np.floor(steps / 20))
    looked = np.full(trace.num_steps, np.nan)
    if each is not None:
        looked[steps % each == 0] = 40
    trace.logs |= {WEIGHTS_CHANGED: looked * 0.8, WEIGHTS_LOOKED: looked}
    trace.absent_logs = True
    trace.steps["step"] *= by
    modes = {i.mode for i in fold(play(Case([trace], 0)), trace.facts)}
    assert ("optimizer-divergence" in modes) is alarms
