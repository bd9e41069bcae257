"""A healthy run raises nothing, in 600 steps, however hard it is to read."""

from __future__ import annotations

import numpy as np
import pytest
from detect.healthy_run import Run

from fp8watch_server.detect.engine import DetectionEngine


def found_in(run: Run, num_steps: int = 600, per_batch: int = 16, every: int = 1) -> list[tuple[str, int]]:
    engine = DetectionEngine(run.facts)
    found = []
    for first in range(0, num_steps, per_batch):
        batch = run.batch(range(first, min(first + per_batch, num_steps), every))
        found += [(f.mode, f.step) for f in engine.observe(batch)]
    return found


@pytest.mark.parametrize("power_2_scale", [True, False])
def test_a_plain_run(power_2_scale: bool) -> None:
    assert found_in(Run(power_2_scale=power_2_scale)) == []


def test_gradients_that_wander_over_octaves() -> None:
    assert found_in(Run(seed=1, gradient_wander_octaves=0.9)) == []


def test_a_learning_rate_that_warms_up_while_weights_grow_fast() -> None:
    run = Run(seed=2)
    run.lr = lambda step: 2e-3 * min(1.0, (step + 1) / 100)
    run.growth = lambda step: 0.1 if step < 100 else 0.005
    assert found_in(run) == []


def test_the_fast_growth_of_the_first_steps_from_scratch() -> None:
    run = Run(seed=3)
    run.growth = lambda step: 0.25 * 0.9**step + 0.012
    assert found_in(run) == []


def test_a_learning_rate_that_doubles_or_restarts() -> None:
    run = Run(seed=4)
    run.lr = lambda step: 2e-3 if step < 200 else 4e-3 if step < 400 else 6e-4
    run.growth = lambda step: 0.03 if 200 <= step < 240 else 0.008
    assert found_in(run) == []


def test_one_layer_that_grows_alone_is_not_the_optimizer() -> None:
    run = Run(seed=5)
    growth = np.zeros(14)
    growth[3] = 0.2  # twenty octaves in a hundred steps
    run.growth = lambda step: growth * (100 <= step < 200)  # type: ignore[assignment,return-value]
    assert {mode for mode, _ in found_in(run)} == {"outlier-growth"}


def test_a_run_without_loss_and_lr() -> None:
    run = Run(seed=6, with_loss=False)
    run.lr = lambda step: None
    assert found_in(run, 200) == []


def test_a_run_sampled_each_tenth_step() -> None:
    assert found_in(Run(seed=7), every=10, per_batch=40) == []


def test_frozen_layers() -> None:
    run = Run(seed=8)
    engine = DetectionEngine(run.facts)
    weights = np.flatnonzero(run.roles == "weight")[:12]

    def freeze(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        rows["amax_max"][weights] = 0.25

    assert [f for first in range(0, 304, 16) for f in engine.observe(run.batch(range(first, first + 16), freeze))] == []
