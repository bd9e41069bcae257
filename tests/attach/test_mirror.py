"""Scalars of a watch in a function of the user's: what they are, where they are called, what they may never do."""

from __future__ import annotations

import contextvars
import threading
import time

import numpy as np
import pytest
import torch

import fp8watch
from fp8watch.session.mirror import MAX_WAITING, Window
from fp8watch_agent.record import Measured, empty_rows

NAME = contextvars.ContextVar("NAME", default="none")


def measured_rows(num, **values):
    rows = empty_rows(num)
    rows["measured"] = int(Measured.COUNTS | Measured.AMAX | Measured.SCALE)
    rows["num_elements"] = rows["num_nonzero"] = 1000
    for name, value in values.items():
        rows[name] = value
    return rows


def test_at_most_ten_scalars_of_a_window_reach_the_function_on_a_thread_of_its_own(attach, mlp, train):
    seen, threads = [], set()
    NAME.set("of the caller")
    watch = attach(mlp)

    def to(values, step):
        threads.add((threading.current_thread() is threading.main_thread(), NAME.get()))
        seen.append((step, values))

    fp8watch.mirror(watch, to=to, every=3)
    train(mlp, steps=7)
    watch.detach()
    assert [step for step, _ in seen] == [2, 5, 6]
    assert threads == {(False, "of the caller")}
    for _, values in seen:
        assert len(values) <= 10
        assert all(name.startswith("fp8watch/") for name in values)
        assert all(isinstance(value, float) for value in values.values())
    first = seen[0][1]
    assert {"fp8watch/worst_tile_sqnr_db", "fp8watch/underflow_ratio", "fp8watch/nonfinite_elements"} <= set(first)
    assert 10 < first["fp8watch/worst_tile_sqnr_db"] < 60
    assert "fp8watch/incidents_open" not in first, "nobody can tell without a collector"
    assert not watch.guard.errors


def test_a_window_holds_extremes_and_sums_and_leaves_out_what_was_not_measured():
    window = Window()
    assert not window.add(measured_rows(2, amax_max=[1.0, 4.0], num_saturated=[1, 2], num_underflow=[10, 500]))
    assert window.add(measured_rows(1, amax_max=2.0, num_nan=[3], num_inf=[1]))
    assert window.values == {
        "nonfinite_elements": 4.0, "saturated_elements": 3.0, "underflow_ratio": 0.5, "amax_max": 4.0, "sentinel_tiles": 0.0,
    }  # fmt: skip
    rows = measured_rows(2, num_nan=[0, 1], num_inf=[7, 7], num_saturated=[9, 9])
    rows["measured"] |= int(Measured.CODES)  # codes do not tell what the cast did
    codes = Window()
    codes.add(rows)
    assert codes.values == {"nonfinite_elements": 1.0, "amax_max": pytest.approx(rows["amax_max"].max())}
    energies = measured_rows(2, num_tiles=[10, 10], num_zero_tiles=[0, 5], tile_noise_ratio_sum=[0.1, 0.5])
    energies["measured"] |= int(Measured.ENERGIES)
    sqnr = Window()
    sqnr.add(energies)
    assert sqnr.values["worst_tile_sqnr_db"] == pytest.approx(10.0)
    empty = Window()
    empty.add(empty_rows(3))
    assert empty.values == {}


def test_what_broke_is_told_at_once(attach, mlp, train):
    seen = []
    watch = attach(mlp)
    fp8watch.mirror(watch, to=lambda values, step: seen.append((step, values)), every=1000)
    train(mlp, steps=2)
    with torch.no_grad():
        mlp.up.weight[3, 5] = float("nan")
    train(mlp, steps=1)
    until = time.monotonic() + 30
    while not seen and time.monotonic() < until:
        time.sleep(0.05)
    assert seen[0][0] == 2
    assert seen[0][1]["fp8watch/nonfinite_elements"] >= 1
    watch.detach()


def test_a_function_that_raises_or_hangs_costs_training_nothing(attach, mlp, train):
    calls = []

    def raises(values, step):
        calls.append(step)
        raise ZeroDivisionError

    watch = attach(mlp)
    release = threading.Event()
    fp8watch.mirror(watch, to=raises, every=1)
    hangs = fp8watch.mirror(watch, to=lambda *_: release.wait(20), every=1)
    began = time.thread_time()
    train(mlp, steps=30)
    assert time.thread_time() - began < 5
    assert len(hangs._waiting) <= MAX_WAITING
    watch.detach()
    release.set()
    assert len(calls) == 5, "five times in a row, and no more"
    assert watch.guard.errors == {"mirror": 5}
    assert watch.summary()["num_steps"] == 30


def test_an_incident_comes_with_its_address(attach, mlp, train, monkeypatch):
    from fp8watch.session import mirror as module

    monkeypatch.setattr(module.OpenIncidents, "ask", lambda self: (2, "http://c/incidents/7"))
    monkeypatch.setattr(module.OpenIncidents, "known", lambda self: (2, "http://c/incidents/7"))
    seen = []
    watch = attach(mlp)
    fp8watch.mirror(watch, to=lambda values, step: seen.append(values), every=1)
    train(mlp, steps=1)
    watch.detach()
    assert seen[0]["fp8watch/incidents_open"] == 2.0
    assert seen[0]["fp8watch/incident"] == "http://c/incidents/7"


def test_an_address_is_whole_whether_the_collector_knows_its_own_or_not():
    from fp8watch.session.mirror import OpenIncidents
    from fp8watch_agent.settings import AgentSettings

    asked = OpenIncidents(AgentSettings(collector="http://c:1"), "r")
    assert asked._read({"items": [{"url": "/incidents/7"}, {"url": "/incidents/6"}]}) == (2, "http://c:1/incidents/7")
    assert asked._read({"items": [{"url": "https://w/incidents/7"}]}) == (1, "https://w/incidents/7")
    assert asked._read({"items": []}) == (0, None)


def test_arguments_that_cannot_work_are_refused_and_where_nothing_is_recorded_nothing_starts(attach, mlp, monkeypatch):
    watch = attach(mlp)
    with pytest.raises(TypeError, match="must be a function"):
        fp8watch.mirror(watch, to="wandb")
    with pytest.raises(ValueError, match="every=0"):
        fp8watch.mirror(watch, to=print, every=0)
    watch.detach()
    monkeypatch.setenv("FP8WATCH_DISABLED", "1")
    assert fp8watch.mirror(attach(mlp), to=print) is None


def test_rows_of_any_size_are_added_up_without_being_copied_whole():
    rows = measured_rows(2000, amax_max=np.linspace(1, 2, 2000, dtype=np.float32))
    window = Window()
    began = time.thread_time()
    for _ in range(20):
        window.add(rows)
    assert time.thread_time() - began < 0.2  # 1 ms a step and site table of 2,000, with room
    assert window.values["amax_max"] == 2.0
