"""Forecasts: right on a line, silent on what is no lasting trend."""

from __future__ import annotations

import numpy as np
import pytest

from fp8watch_server.detect.trend import AHEAD, WINDOW_STEPS, forecast

STEPS = np.arange(1000, 1000 + WINDOW_STEPS)


def noise(seed, scale=0.1):
    return np.random.default_rng(seed).standard_normal(WINDOW_STEPS) * scale


def test_a_line_passes_its_limit_within_the_interval():
    for seed in range(50):
        rate = 0.01
        said = forecast(STEPS, 3 + rate * (STEPS - STEPS[0]) + noise(seed), 8.0)
        assert said is not None
        truth = (8.0 - 3 - rate * (WINDOW_STEPS - 1)) / rate
        assert said.soonest <= truth <= said.latest
        assert said.steps == pytest.approx(truth, rel=0.15)
        assert (said.first_step, said.last_step) == (STEPS[0], STEPS[-1])


def test_what_is_no_lasting_trend_is_not_continued():
    rise = 0.01 * (STEPS - STEPS[0])
    cases = {
        "noise": noise(1),
        "a fall": -rise + noise(2),
        "a jump": np.where(STEPS[0] + 128 > STEPS, 0.0, 2.0) + noise(3),
        "one that fades": 2 * (1 - np.exp(-(STEPS - STEPS[0]) / 40)) + noise(4, 0.01),
        "one that fades late": 4 * (1 - np.exp(-(STEPS - STEPS[0]) / 70)) + noise(4, 0.01),
        "one that has turned": np.minimum(rise, rise[::-1]) + noise(5, 0.01),
        "one in its noise": 0.0005 * (STEPS - STEPS[0]) + noise(6, 1.0),
        "not measured": np.full(WINDOW_STEPS, np.nan),
    }
    assert {name: forecast(STEPS, values, 5.0) for name, values in cases.items()} == dict.fromkeys(cases)


def test_a_limit_behind_or_far_ahead_has_no_forecast():
    line = 0.01 * (STEPS - STEPS[0])
    assert forecast(STEPS, line, 1.0) is None
    assert forecast(STEPS, line, 2.55 + 0.01 * WINDOW_STEPS * (AHEAD + 0.1)) is None
    assert forecast(STEPS, line, 2.55 + 0.01 * WINDOW_STEPS * (AHEAD - 0.1)) is not None


def test_few_looks_are_no_trend_and_a_look_each_tenth_step_is():
    line = 0.01 * (STEPS - STEPS[0])
    assert forecast(STEPS[::32], line[::32], 5.0) is None
    assert forecast(STEPS[:100], line[:100], 5.0) is None
    assert forecast(STEPS[::10], line[::10], 5.0) is not None
