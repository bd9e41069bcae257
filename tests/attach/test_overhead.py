"""The budget of observing: what stays in each step counts first, full statistics get what it leaves."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fp8watch.kernels import cpu
from fp8watch.numerics.tile_stats import HEAVY
from fp8watch.observer import calibration, observation_plan
from fp8watch.observer.canary import LEAST_SHARE, SHARE, Canary
from fp8watch.observer.stopwatch import EXTRA, LIGHT, SAMPLING, STEP, Stopwatch, events_of
from fp8watch.session.overhead_budget import (
    AGAIN_STEPS,
    EARLY_STEPS,
    FIRST_STEPS,
    MAX_EVERY,
    MAX_LIGHT_EVERY,
    Cost,
    Overhead,
    choose_every,
    choose_light_every,
    choose_turns,
)


class Gauges:
    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def set_gauge(self, name: str, value: float) -> None:
        self.values[name] = value


class Run:
    """An Overhead whose measured steps take 100 s without observing, and these shares of it on top."""

    def __init__(self, every: int = 1, budget: float | None = 0.02, extra: float = 0.0, in_turns: bool = False) -> None:
        self.extra = extra
        self.said: list[str] = []
        self.gauges, self.overhead = Gauges(), Overhead(every, budget, self.said.append, in_turns=in_turns)
        self.num_closed, self.measured = 0, []
        slab = SimpleNamespace(device=torch.device("cpu"))
        self.plan = SimpleNamespace(slab=slab, observing=True, stopwatch=None, canary=Canary())

    def steps(self, number: int, light: float, sampling: float) -> None:
        for _ in range(number):
            if self.num_closed >= self.overhead.next_measured:
                self.overhead.begin_step(self.plan, self.num_closed)
            if self.plan.stopwatch is not None:
                self.measured.append(self.num_closed)
                watch = self.plan.stopwatch = Stopwatch(clock=lambda: 0.0)
                watch.add(LIGHT, 0.0, 100 * light)
                watch.add(SAMPLING, 0.0, 100 * sampling)
                watch.add(EXTRA, 0.0, self.extra)
                watch.add(STEP, 0.0, 100 + self.extra + 100 * (light + sampling))
            self.overhead.step_closed(self.plan, self.gauges)
            self.num_closed += 1


@pytest.mark.parametrize(
    ("light", "sampling", "every"),
    [
        (0.01, 0.20, 20),
        (0.01, 0.005, 1),
        (0.0, 2.0, MAX_EVERY),  # cannot be kept, and nothing else is paid
        (0.04, 0.20, 20),  # nothing left: half of what each step takes beyond it
        (0.0199, 0.10, 20),  # too little left: a quarter of the budget
        (0.0149, 0.10, 20),
        (0.0201, 0.10, 20),
        (0.5, 0.0, 1),
        (0.5, 1.0, 5),
    ],
)
def test_full_statistics_get_what_each_step_leaves_of_the_budget(light, sampling, every) -> None:
    assert choose_every(Cost(light, sampling), 0.02) == every


def test_a_budget_that_each_step_takes_nearly_alone_is_exceeded_by_a_quarter_at_most() -> None:
    for light in np.linspace(0.0, 0.05, 200):
        total = light + 0.06 / choose_every(Cost(light, 0.06), 0.01)
        assert total <= max(0.0100, light + max(0.0025, (light - 0.01) / 2)) + 1e-9


def test_turns_of_the_canary_are_part_of_the_budget() -> None:
    run = Run(every=1, budget=0.01)
    run.plan.canary.cover([0, 5], 5)
    run.steps(20, light=0.003, sampling=0.04)
    assert run.plan.canary.share == pytest.approx(0.0021), "three tenths of what is left"
    assert run.overhead.every == 9, "0.01 less 0.003 for operands and 0.0021 for turns"
    assert run.overhead.ratio == pytest.approx(0.003 + 0.0021 + 0.04 / 9)
    alone = Run(every=1, budget=0.01)
    alone.steps(20, light=0.003, sampling=0.04)
    assert alone.overhead.every == 6


@pytest.mark.parametrize(
    ("light", "fixed", "budget", "share"),
    [
        (0.0, 0.0, 0.01, SHARE),
        (0.0, 0.0, 0.05, SHARE),  # more would find nothing sooner that matters
        (0.003, 0.002, 0.01, 0.0015),
        (0.005, 0.003, 0.01, LEAST_SHARE),
        (0.2, 0.1, 0.01, LEAST_SHARE),  # whatever the rest takes
    ],
)
def test_turns_come_as_often_as_the_rest_leaves_of_the_budget(light, fixed, budget, share) -> None:
    canary = Canary()
    canary.pace(choose_turns(Cost(light, 0.1, fixed=fixed), budget))
    assert canary.share == pytest.approx(share)


def test_the_median_of_several_spread_steps_decides() -> None:
    run = Run()
    run.steps(FIRST_STEPS[0], 0.001, 0.01)
    run.steps(1, 5.0, 9.0)  # another process had the core
    run.steps(3, 0.001, 0.01)
    run.steps(1, 5.0, 9.0)
    assert run.overhead.every == 1
    run.steps(20, 0.001, 0.01)
    run.steps(80, 0.001, 0.01)
    assert run.measured[: len(EARLY_STEPS)] == list(EARLY_STEPS)
    assert all(b - a > 1 for a, b in zip(run.measured, run.measured[1:], strict=False))
    assert run.overhead.every == 1
    assert run.said == []
    assert run.overhead.ratio == run.gauges.values["overhead_ratio"] == pytest.approx(0.011)


def test_it_is_measured_again_and_goes_down_when_it_was_unlucky_but_not_below_what_was_asked_for() -> None:
    run = Run(every=2)
    run.steps(12, 0.01, 0.2)
    assert run.overhead.every == 20
    assert run.overhead.ratio == pytest.approx(0.02)
    (text,) = run.said
    assert text == (
        "observing adds at least 2000 ms to a step of 100000 ms (2.0%); full statistics of a site come once in 20 steps, and what "
        "breaks is seen in each"
    )
    run.steps(3 * AGAIN_STEPS, 0.001, 0.001)
    assert run.overhead.every == 2
    run.steps(3 * AGAIN_STEPS, 0.01, 0.2)
    assert run.overhead.every == 20
    assert len(run.said) == 1


def test_what_rarer_statistics_cannot_lower_is_said_too() -> None:
    run = Run()
    run.steps(12, 0.2, 0.08)
    assert run.overhead.every == 1
    (text,) = run.said
    assert text == (
        "observing adds at least 28000 ms to a step of 100000 ms (28.0%); full statistics of a site come in each step; sites=, "
        "windows= or a larger every= bring it nearer to overhead_budget=0.02"
    )


@pytest.mark.parametrize(
    ("light", "sampling", "fixed", "light_every", "every"),
    [
        (0.004, 0.005, 0.001, 1, 1),  # all of it fits
        (0.004, 0.5, 0.001, 1, 34),
        (0.06, 0.06, 0.002, 8, 6),
        (0.20, 0.10, 0.002, 16, 19),  # looked at seldom, and full statistics as often as light ones allow
        (0.05, 0.10, 0.03, 16, 16),  # what stays in each step is more than the budget
    ],
)
def test_where_nothing_is_quantised_operands_are_looked_at_so_often_that_the_budget_holds(
    light, sampling, fixed, light_every, every
) -> None:
    cost = Cost(light, sampling, fixed=fixed)
    assert choose_light_every(cost, 0.02) == light_every
    assert choose_every(cost, 0.02, light_every) == every
    if fixed < 0.02 and every < MAX_EVERY and light_every < MAX_LIGHT_EVERY:
        assert fixed + light / light_every + sampling / every <= 0.02 + 1e-9


def test_operands_that_a_gemm_reads_quantised_are_looked_at_in_each_step() -> None:
    run = Run()
    run.steps(12, 0.2, 0.1)
    assert run.overhead.light_every == 1
    run = Run(in_turns=True)
    run.steps(12, 0.2, 0.1)
    assert run.overhead.light_every == MAX_LIGHT_EVERY
    (text,) = run.said
    assert "it is looked at once in 16" in text
    assert run.overhead.ratio == pytest.approx(0.2 / 16 + 0.1 / run.overhead.every)


def test_measuring_counts_and_comes_less_often_where_it_takes_much() -> None:
    run = Run(extra=80.0)
    run.steps(12, 0.001, 0.001)
    assert run.overhead.ratio == pytest.approx(0.002 + 0.8 / AGAIN_STEPS)
    run.steps(4000, 0.001, 0.001)
    apart = np.diff(run.measured[len(EARLY_STEPS) :]).tolist()
    assert apart[0] == 200
    assert apart[-1] == 800
    assert run.overhead.ratio == pytest.approx(0.002 + 0.8 / 800)


def test_no_budget_measures_nothing_and_neither_does_a_step_that_is_not_observed() -> None:
    run = Run(budget=None)
    run.steps(30, 0.5, 0.5)
    assert run.measured == []
    assert run.overhead.every == 1
    assert run.overhead.ratio is None
    run = Run()
    run.plan.observing = False
    run.steps(30, 0.5, 0.5)
    assert run.measured == []


class Event:
    """A mark that the device passes when it is told to; its own clock runs by its own seconds."""

    now, passed = 0.0, -1.0

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.passed

    def elapsed_time(self, end) -> float:
        return (end.at - self.at) * 1e3


def test_on_a_device_its_events_count_and_are_read_when_it_has_passed_them() -> None:
    Event.now, Event.passed = 0.0, -1.0
    run = Run()
    run.overhead._event, run.overhead._measurable = Event, True
    for _ in range(FIRST_STEPS[-1] + 1):
        if run.num_closed >= run.overhead.next_measured:
            run.overhead.begin_step(run.plan, run.num_closed)
        Event.now += 1.0
        if run.plan.stopwatch is not None:
            with run.plan.stopwatch.span(LIGHT):
                Event.now += 0.01
        run.overhead.step_closed(run.plan, run.gauges)
        run.num_closed += 1
    assert run.overhead.ratio is None, "read although the device has not come there"
    Event.passed = Event.now
    run.overhead.step_closed(run.plan, run.gauges)
    assert run.overhead.ratio == pytest.approx(0.01)
    assert run.overhead.every == 1


def test_a_clock_that_fails_or_is_missing_says_nothing() -> None:
    with pytest.raises(NotImplementedError):
        events_of(torch.device("xla"))

    def broken():
        raise RuntimeError("no such device")

    watch = Stopwatch(broken)
    assert watch.mark() is None
    with watch.span(LIGHT):
        pass
    watch.stop()
    assert watch.failed()
    assert watch.read() is None
    run = Run()
    run.plan.slab.device = torch.device("xla")
    run.steps(30, 0.5, 0.5)
    assert run.measured == []
    assert run.overhead.ratio is None


def run(watch, model, *inputs):
    for x in inputs:
        model(x).backward()
        watch.step()


@pytest.mark.parametrize("recipe", ["blockwise", "observe"])
def test_a_real_step_is_measured_and_light_rows_are_sent_between_samples(attach, mlp, recipe, capsys) -> None:
    watch, x = attach(mlp, overhead_budget=1e-9, recipe=recipe), torch.randn(32, 64)
    assert watch._overhead.ratio is None
    run(watch, mlp, *[x] * (FIRST_STEPS[-1] + 1))
    name, share = watch._recorder.gauge
    assert name == "overhead_ratio"
    assert share > 0
    assert watch._overhead.ratio == share
    assert watch._overhead.every == 1 or "full statistics of a site come once in" in capsys.readouterr().err
    watch._overhead.every, watch._overhead.next_measured = 1 << 20, math.inf
    broken = x.clone()
    broken[3, 5] = math.nan
    light_every = watch._overhead.light_every
    assert light_every == (MAX_LIGHT_EVERY if recipe == "observe" else 1)
    run(watch, mlp, *[x] * (light_every + 1))
    rows = [row for step in range(-1, -1 - light_every, -1) for row in watch._recorder.step(step)[1].values()]
    assert rows
    assert not any(int(row["measured"]) & HEAVY for row in rows)
    run(watch, mlp, *[broken] * (1 if recipe == "blockwise" else 2))  # a loss that is NaN is followed by all operands
    assert any(int(row["num_nan"]) for row in watch._recorder.step(-1)[1].values())
    assert not watch.guard.errors


def test_what_others_do_meanwhile_is_no_cost_of_observing() -> None:
    """A machine that is shared, or a step that waits for its data."""
    stopwatch = Stopwatch()
    with stopwatch.span(LIGHT):
        time.sleep(0.2)
    stopwatch.stop()
    took = stopwatch.read()
    assert took is not None
    assert took[LIGHT] < 0.1
    assert took[STEP] < 0.1


def test_what_is_reported_is_all_that_observing_adds(attach, mlp, monkeypatch) -> None:
    """A quantiser made slow on purpose: in observe mode nobody else would have paid for it."""

    def measured(*args, **kwargs):
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass
        return real(*args, **kwargs)

    real = observation_plan.measure_operand
    monkeypatch.setattr(observation_plan, "measure_operand", measured)
    monkeypatch.setattr(calibration, "measure_operand", measured)
    watch, x = attach(mlp, overhead_budget=0.5, recipe="observe", every=1 << 20, probes=[]), torch.randn(32, 64)
    run(watch, mlp, *[x] * (FIRST_STEPS[-1] + 1))
    assert watch._overhead.ratio > 0.5, "six operands of 5 ms each in a step of a few"


def test_observing_never_makes_what_nobody_multiplies(attach, mlp, train, monkeypatch) -> None:
    def refused(*args, **kwargs):
        raise AssertionError("an operand was quantised to be thrown away")

    for name in ("quantize", "quantize_dequantize", "quantize_dequantize_both", "values_into"):
        monkeypatch.setattr(cpu, name, refused)
    watch = attach(mlp, recipe="observe", every=2, backend="cpu")
    train(mlp, steps=4)
    assert not watch.guard.errors
    assert len(watch._recorder.step(0)[1]) == 11


@pytest.mark.parametrize(
    ("how", "looks"),
    [({}, [1, 2, 2]), ({"windows": [(1000, None)]}, []), ({"sites": ["up.input.rowwise"]}, [1]), ({"pause": True}, [])],
    ids=["all", "outside of windows", "one site", "paused"],
)
def test_what_is_not_observed_is_not_looked_at(attach, monkeypatch, how, looks) -> None:
    found: list[int] = []
    real = observation_plan.measure_operand
    monkeypatch.setattr(
        observation_plan, "measure_operand", lambda used, *a, **k: found.append(len(used)) or real(used, *a, **k)
    )
    how = dict(how)
    pause = how.pop("pause", False)
    model = torch.nn.Sequential()
    model.add_module("up", torch.nn.Linear(64, 64))
    watch = attach(model, recipe="observe", probes=[], **how)
    if pause:
        watch.pause()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(32, 64, requires_grad=True)).square().mean().backward()
    optimizer.step()
    assert sorted(found) == looks, "operands looked at, with so many directions each"
    assert watch.last_step == 0, "the step ends all the same"
    assert not watch.guard.errors


def test_paused_costs_next_to_nothing(attach) -> None:
    """Thread CPU time against an unattached twin, in turns. Loose: it was a third of a step once."""

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])

    plain, paused, x = model(), model(), torch.randn(256, 256)
    attach(paused, recipe="observe").pause()

    def took(net) -> float:
        began = time.thread_time()
        net(x).square().mean().backward()
        return time.thread_time() - began

    ratios = sorted(took(paused) / took(plain) for _ in range(40))
    assert ratios[len(ratios) // 2] < 1.25
