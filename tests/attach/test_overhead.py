"""The budget of observing: what stays in each step counts first, full statistics get what it leaves."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from fp8watch.overhead import CALIBRATION_STEP, MAX_EVERY, Overhead
from fp8watch.quantize.stats import HEAVY


class Gauges:
    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def set_gauge(self, name: str, value: float) -> None:
        self.values[name] = value


def calibrated(light: float, sampling: float, budget: float | None, monkeypatch, every: int = 1):
    """An Overhead that has seen a step of 100 s without observing, and these shares of it on top."""
    now = [0.0]
    monkeypatch.setattr("fp8watch.overhead.time", SimpleNamespace(perf_counter=lambda: now[0]))
    said: list[str] = []
    gauges, overhead = Gauges(), Overhead(every, budget, said.append)
    plan = SimpleNamespace(calibrating=True, light_s=100 * light - 1, sampling_s=100 * sampling, calibration_s=50.0)
    began = 100 + 100 * light - 1 + 100 * sampling + 50  # the step, then its end, which takes 1 s
    now[0] = began + 1
    overhead.step_closed(plan, gauges, began)
    return overhead.every, said, gauges.values


@pytest.mark.parametrize(
    ("light", "sampling", "every"),
    [(0.01, 0.20, 20), (0.019, 0.10, MAX_EVERY), (0.02, 0.10, MAX_EVERY), (0.5, 0.0, MAX_EVERY), (0.01, 0.005, 1)],
)
def test_full_statistics_get_what_each_step_leaves_of_the_budget(light, sampling, every, monkeypatch) -> None:
    got, said, gauges = calibrated(light, sampling, 0.02 + 1e-12, monkeypatch)
    assert got == every
    assert len(said) == (every > 1)
    assert gauges["overhead_ratio"] == pytest.approx(light + sampling / every)
    if said:
        assert f"observing costs {light + sampling:.1%} of a step" in said[0]
        assert f"({light:.1%} without full statistics)" in said[0]
        assert f"each {every} steps" in said[0]


def test_every_is_never_lowered_and_no_budget_measures_nothing(monkeypatch) -> None:
    assert calibrated(0.01, 0.2, 0.02, monkeypatch, every=100)[0] == 100
    assert calibrated(0.5, 0.5, None, monkeypatch) == (1, [], {})
    assert calibrated(0.001, 0.01, 0.0, monkeypatch)[0] == MAX_EVERY


def run(watch, model, *inputs):
    for x in inputs:
        model(x).backward()
        watch.step()


def test_a_real_step_is_measured_and_light_rows_are_sent_between_samples(attach, mlp) -> None:
    watch, x = attach(mlp, overhead_budget=1e-9), torch.randn(32, 64)
    run(watch, mlp, *[x] * (CALIBRATION_STEP + 1))
    plan = watch._plan
    assert plan.light_s != 0, "differences of so small times may be below zero"
    assert plan.sampling_s != 0
    assert watch._overhead.every == MAX_EVERY
    name, share = watch._recorder.gauge
    assert name == "overhead_ratio"
    assert share > 0
    broken = x.clone()
    broken[3, 5] = math.nan
    run(watch, mlp, x, broken)
    rows = watch._recorder.step(CALIBRATION_STEP + 1)[1]
    assert rows
    assert not any(int(row["measured"]) & HEAVY for row in rows.values())
    rows = watch._recorder.step(CALIBRATION_STEP + 2)[1]
    assert any(int(row["num_nan"]) for row in rows.values())
    assert not watch.guard.errors
