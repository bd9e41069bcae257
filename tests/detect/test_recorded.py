"""Real trainings: healthy ones raise no more than information, faults that were put into the model are named."""

from __future__ import annotations

import json

import pytest
from benchmarks.detection.long_score import HELD_OUT, RESULTS
from benchmarks.detection.recorded import TRACES, Recorded, traces
from detect.folded import fold
from detect.light import lightly

from fp8watch_server.detect.engine import DetectionEngine

RUNS = {r.name: r for r in traces()}


def incidents(run: Recorded, every: int = 1) -> list[tuple[str, int, str]]:
    engine = DetectionEngine(run.facts)
    batches = run.batches if every == 1 else lightly(run.batches, every)
    found = [f for batch in batches for f in engine.observe(batch)]
    return [(i.mode, i.first.step, i.severity) for i in fold(found, run.facts) if i.severity != "info"]


EVERY = (1, 64)
"""Full samples of each step, and as seldom as `attach` may choose: the steps between have light rows."""


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", [n for n, r in RUNS.items() if not r.mode])
def test_a_healthy_training_raises_nothing(name: str, every: int) -> None:
    assert incidents(RUNS[name], every) == []


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", [n for n, r in RUNS.items() if r.mode])
def test_a_fault_in_a_real_training_is_named(name: str, every: int) -> None:
    run = RUNS[name]
    got = incidents(run, every)
    assert run.mode in {mode for mode, _, _ in got}
    assert min(step for _, step, _ in got) >= run.onset
    assert len(got) <= 2


def test_the_traces_stay_small() -> None:
    assert len(RUNS) == 19
    assert sum(p.stat().st_size for p in TRACES.iterdir()) <= 2 << 20


def test_the_long_healthy_trainings_that_were_kept_as_scores_paged_nobody() -> None:
    """The runs are too large for the tree; `long_score` replays them, and this is what docs/detection.md shows."""
    runs = json.loads(RESULTS.read_text())
    held_out = [r for r in runs if r["seed"] >= HELD_OUT]
    assert sum(r["num_steps"] for r in held_out) >= 30_000
    assert {"blockwise-5000", "delayed-5000"} <= {r["kind"] for r in held_out}
    assert [i for r in runs for i in r["said"] if i["severity"] == "critical"] == []
