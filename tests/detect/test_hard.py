"""Healthy runs that look ill page nobody."""

from __future__ import annotations

import numpy as np
import pytest
from detect.folded import fold
from detect.hard import HARD
from detect.play import play
from detect.scenarios import Case
from detect.trace import Trace, healthy


def raised(trace: Trace) -> list[tuple[str, int]]:
    """Modes of warnings and pages."""
    return [(i.mode, i.first.step) for i in fold(play(Case([trace], 0)), trace.facts) if i.severity != "info"]


@pytest.mark.parametrize(
    "name", ["domain switch", "batch ×2", "masked tokens", "frozen layers", "starved experts", "sharp attention"]
)
def test_a_healthy_run_that_looks_ill_raises_no_more_than_information(name: str) -> None:
    assert raised(HARD[name](2001, 240)) == []


@pytest.mark.parametrize("num", [1000, pytest.param(5000, marks=pytest.mark.heavy(7, "server/fp8watch_server/detect"))])
def test_thousands_of_healthy_steps_with_everything_in_them_page_nobody(num: int) -> None:
    """LR re-warm-up, a batch of twice the size, a switch of the data."""
    at = np.arange(num)
    again, twice, switch = num * 2 // 5, num * 3 // 5, num * 4 // 5
    lr = 2e-3 * np.minimum(1, (np.where(at < again, at, at - again) + 1) / 100)
    trace = healthy(2002, num, 1, lr=lr)
    grads, moving = trace.mask(operand="grad_output"), ~trace.mask(operand="weight")
    for name in ("num_elements", "num_nonzero", "num_underflow", "tile_noise_ratio_sum", "num_tiles"):
        trace.columns[name][twice:, moving] *= 2
    trace.grow(grads, np.where(at >= twice, -1.0, 0.0))
    rng = np.random.default_rng(0)
    for j in np.flatnonzero(moving):
        trace.grow(np.arange(len(trace.sites)) == j, np.where(at >= switch, rng.normal(0, 0.3), 0.0))
    trace.steps["loss"] += np.where(at >= switch, 1.2, 0.0) * np.exp(-np.maximum(at - switch, 0) / 60)
    found = fold(play(Case([trace], 0, per_batch=16)), trace.facts)
    assert [(i.mode, i.first.step) for i in found if i.severity == "critical"] == []
    assert len([i for i in found if i.severity == "warning"]) <= 2
