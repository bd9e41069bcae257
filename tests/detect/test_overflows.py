"""Gradients that overflow now and then are how a loss scale is found; overflows that go on are told."""

from __future__ import annotations

import numpy as np
import pytest
from detect.healthy_run import Run
from detect.single_steps import detect, evidence, modes

from fp8watch_agent.record import Measured, StepPresent, StepStatus
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import Finding
from fp8watch_server.incidents.explain import explain

UP = "layers.1.mlp.up_proj"


def put_inf(rows: np.ndarray, i: int) -> None:
    rows["num_inf"][i], rows["num_sentinel_tiles"][i], rows["amax_max"][i] = 1, 1, np.inf


def put_nan(rows: np.ndarray, i: int) -> None:
    rows["num_nan"][i] = 7


def overflowing(
    run: Run, of: range, *, scale: float | None = 65536.0, backoff: float = 0.5, nan: bool = False
) -> list[Finding]:
    """Steps 0 to 130, those in `of` skipped with gradients that are not finite."""
    now = scale

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        nonlocal now
        if now is not None:
            s["present"] |= int(StepPresent.LOSS_SCALE)
            s["loss_scale"] = now
        if step in of:
            for i in np.flatnonzero(run.roles == "grad_output"):
                (put_nan if nan else put_inf)(rows, int(i))
            s["status"] = int(StepStatus.SKIPPED)
            now = None if now is None else now * backoff

    return detect(run, change, range(131), per_batch=4)


def told(found: list[Finding]) -> list[tuple[str, str, int]]:
    """The first of each severity."""
    first: dict[tuple[str, str], int] = {}
    for f in found:
        first.setdefault((f.mode, f.severity), f.step)
    return [(*key, step) for key, step in first.items()]


@pytest.mark.parametrize("nan", [False, True])
def test_a_scale_that_falls_with_each_step_is_told_though_each_step_is_skipped(nan: bool) -> None:
    found = overflowing(Run(), range(100, 131), nan=nan)
    assert told(found) == [("scale-collapse", "warning", 103), ("scale-collapse", "critical", 119)]
    assert evidence(found[0]) | {"nonfinite_gradients": 0} == {
        "loss_scale": 8192.0,
        "halvings_without_growth": 3,
        "halvings_to_one": 13.0,
        "skipped_steps": 4,
        "nonfinite_gradients": 0,
    }
    assert found[0].evidence[0].baseline == 65536.0
    assert found[0].onset == 100


@pytest.mark.parametrize("scale", [65536.0, None])
def test_steps_that_are_skipped_for_ever_are_critical(scale: float | None) -> None:
    run = Run()
    found = overflowing(run, range(100, 131), scale=scale, backoff=1.0)  # a scale that stands
    critical = next(f for f in found if f.severity == "critical")
    assert (critical.mode, critical.step, critical.onset) == ("scale-collapse", 119, 100)
    words = explain(critical, run.facts)
    assert words.title.startswith("20 steps in a row were skipped")
    assert "since step 100" in words.cause


@pytest.mark.parametrize("first", [range(20), range(60, 61), range(100, 102)])
def test_the_search_for_a_scale_and_an_overflow_now_and_then_are_no_fault(first: range) -> None:
    assert overflowing(Run(), first, scale=2.0**32) == []


def test_a_search_that_does_not_end_is_told() -> None:
    assert told(overflowing(Run(), range(131), scale=2.0**32)) == [("scale-collapse", "critical", 39)]


def test_halvings_between_two_looks_are_all_counted() -> None:
    """Every fourth step is observed, and eight overflowed: the scale says how often."""
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        s["present"] |= int(StepPresent.LOSS_SCALE)
        s["loss_scale"] = 65536.0 if step < 100 else 65536.0 / 16

    engine = DetectionEngine(run.facts)
    found = [f for step in range(0, 120, 4) for f in engine.observe(run.batch([step], change))]
    assert [(f.mode, f.step) for f in found] == [("scale-collapse", 100)]
    assert evidence(found[0])["halvings_without_growth"] == 4
    assert found[0].evidence[0].baseline == 65536.0


def test_an_engine_that_skips_and_does_not_say_its_scale_is_information() -> None:
    run = Run()
    found = overflowing(run, range(100, 101), scale=None)
    assert [(f.mode, f.severity, f.step, f.kind) for f in found] == [("scale-collapse", "info", 100, "blind")]
    assert "None was recorded" in explain(found[0], run.facts).cause


def test_one_that_goes_on_skipping_is_told() -> None:
    found = overflowing(Run(), range(100, 131), scale=None)
    assert told(found) == [
        ("scale-collapse", "info", 100),
        ("scale-collapse", "warning", 102),
        ("scale-collapse", "critical", 119),
    ]


@pytest.mark.parametrize("scale", [65536.0, None])
def test_a_product_that_overflows_is_no_fault_of_its_kernel(scale: float | None) -> None:
    """In FP16 an overflow shows first in what a dgrad GEMM makes of finite operands."""
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if scale is not None:
            s["present"] |= int(StepPresent.LOSS_SCALE)
            s["loss_scale"] = scale
        if step == 65:
            s["status"] = int(StepStatus.SKIPPED)
            i = run.index(UP, "grad_output")
            rows["measured"][i] |= int(Measured.OUTPUTS)
            rows["num_nonfinite_outputs"][i] = 5
            put_inf(rows, run.index("layers.0.mlp.down_proj", "grad_output"))

    assert {f.severity for f in detect(run, change)} <= {"info"}


@pytest.mark.parametrize("where", ["input", "loss"])
def test_a_skipped_step_whose_forward_pass_broke_is_told_as_ever(where: str) -> None:
    run = Run()

    def change(rows: np.ndarray, s: np.ndarray, step: int) -> None:
        if step >= 65:
            s["status"] = int(StepStatus.SKIPPED)
            put_inf(rows, run.index(UP, "grad_output"))
            if where == "input":
                put_inf(rows, run.index(UP, "input"))
            else:
                s["loss"] = np.nan

    found = detect(run, change, range(60, 90))
    assert modes(found) == {"inf-laundering" if where == "input" else "nan-in-loss"}
    assert {f.severity for f in found} == {"critical"}
