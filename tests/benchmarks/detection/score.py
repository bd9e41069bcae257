"""`make bench-detect`: the engine and the public rules on traces, printed. A developer's look at a change; no torch.

    PYTHONPATH=tests python -m benchmarks.detection.score [--seeds N] [--healthy-steps N] [--split tune|test]

What is published are real trainings, `make prove`. Traces are made up, so that they show whether the engine still tells what it is
given: tests/detect/test_engine_score.py holds it to that.

Two operating points. What attach sends by default has amax, scales and counts of each step; energies, moments and depth
of a site come once in 1 to 64 steps, by what they cost. The first column is of the rarest of these, 64, the second of full
statistics in each step.

Two sources. Recorded: real trainings on the CPU (`record.py`), 184 steps each. Made up: traces after a calibration on
real training, with faults put into their columns. Thresholds were chosen on the tuning seeds of the made-up part
and on the recorded runs, which are therefore in sample.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
from benchmarks.detection.recorded import Recorded, traces
from benchmarks.detection.report import Point, report
from benchmarks.detection.scoring import Healthy, Outcome, count_healthy, judge, rule_alarms, rules_of
from benchmarks.operating_point import refuse_other_settings
from detect.folded import Folded, fold
from detect.hard import HARD
from detect.play import play
from detect.rotated import rotating, turned
from detect.scenarios import SCENARIOS, Case, Expected, Scenario, twin
from detect.trace import Trace, healthy

from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.families import degenerate, invariant
from fp8watch_server.detect.step_view import BatchColumns

SPLITS = {"tune": 0, "test": 1000}
RAREST = 64
"""Steps between full statistics of one site: the most that attach's `overhead_budget` chooses."""
ALWAYS = 1
SEEDS, HEALTHY_STEPS = 4, 33_000
LEVELS = ("mild", "medium", "severe")


def scalars(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """loss, grad norm, amax of a made-up run."""
    return trace.steps["loss"].copy(), trace.steps["grad_norm"].copy(), trace.columns["amax_max"]


def sent(case: Case, every: int) -> Case:
    """The case with full statistics of a site once in so many steps, in turns."""
    case.traces = [turned(t, every) for t in case.traces] if every > ALWAYS else case.traces
    return case


def faults(
    first_seed: int,
    num_seeds: int,
    every: int,
    scenarios: Sequence[Scenario] = SCENARIOS,
    levels: Sequence[int] = range(len(LEVELS)),
) -> Iterator[Outcome]:
    """Every scenario × seed × severity, with its twin."""
    for scenario in scenarios:
        for seed in range(first_seed, first_seed + num_seeds):
            healthy_case = sent(twin(scenario, seed), every)
            in_twin = fold(play(healthy_case), healthy_case.traces[0].facts)
            twin_alarms = rule_alarms(*scalars(healthy_case.traces[0]))
            for level in levels:
                yield _fault(scenario, sent(scenario.make(seed, level), every), level, in_twin, twin_alarms)
        sys.stderr.write(f"{scenario.name} ")
        sys.stderr.flush()


def _fault(
    scenario: Scenario, case: Case, level: int, in_twin: list[Folded], twin_alarms: dict[str, list[int]]
) -> Outcome:
    sites = case.traces[0].facts
    incidents = fold(play(case), sites)
    out = judge(
        scenario.name, level, scenario.expected, case.onset, incidents, in_twin, sites, loss_from=scenario.loss_sees
    )
    out.rules = rules_of(*scalars(case.traces[0]), case.onset, twin_alarms)
    return out


def healthy_runs(first_seed: int, num_steps: int, every: int, run_steps: int = 500) -> Iterator[Healthy]:
    """Each kind of healthy run, in runs of `run_steps`, together `num_steps`."""
    runs_each = max(1, round(num_steps / run_steps / len(HARD)))
    for name, make in HARD.items():
        total = Healthy(name)
        for k in range(runs_each):
            trace = make(first_seed + 500 + k, run_steps)
            incidents = fold(play(sent(Case([trace], 0), every)), trace.facts)
            count_healthy(total, incidents, run_steps, rule_alarms(*scalars(trace)))
        sys.stderr.write(f"{name} ")
        sys.stderr.flush()
        yield total


def recorded(every: int) -> tuple[list[Outcome], list[Healthy]]:
    """The real trainings."""
    outcomes, quiet = [], []
    runs = list(traces())
    calm = next((r for r in runs if r.name == "healthy-1"), None)
    for run in runs:
        incidents = fold(_play_recorded(run, every), run.facts)
        steps, amax = run.steps, run.amax()
        alarms = rule_alarms(steps["loss"], steps["grad_norm"], amax)
        if not run.mode:
            total = Healthy(run.name)
            count_healthy(total, incidents, run.num_steps, alarms)
            quiet.append(total)
            continue
        expected = Expected(run.mode, run.module or None, run.operand or None, "any")
        before = [i for i in incidents if i.last_step < run.onset]
        out = judge(run.name, 1, expected, run.onset, incidents, before, run.facts)
        out.rules = rules_of(steps["loss"], steps["grad_norm"], amax, run.onset)
        outcomes.append(out)
        total = Healthy(run.name + " (before the fault)")
        count_healthy(total, before, run.onset, {k: [t for t in v if t < run.onset] for k, v in alarms.items()})
        quiet.append(total)
    assert calm is not None or not runs
    return outcomes, quiet


def _play_recorded(run: Recorded, every: int) -> list:
    engine = DetectionEngine(run.facts)
    batches = rotating(run.batches, every) if every > ALWAYS else run.batches
    return [f for batch in batches for f in engine.observe(batch)]


def cost() -> dict[str, float]:
    """µs of CPU per record, of a model with 32 layers (1120 sites), batches of eight steps."""
    trace = healthy(0, 72, 32)
    engine, batches = DetectionEngine(trace.facts), list(trace.batches())
    for batch in batches[:7]:
        engine.observe(batch)
    num = sum(len(b.site) for b in batches[7:])
    began = time.process_time()
    for batch in batches[7:]:
        columns = BatchColumns(batch, engine._table)
        bad = degenerate.degenerate(columns)
        below, above = invariant.off_scale(columns)
        quiet = bad.any() or below.any() or above.any() or columns.nonfinite.any()
        assert not quiet
    invariants = time.process_time() - began
    began = time.process_time()
    for batch in batches[7:]:
        engine.observe(batch)
    everything = time.process_time() - began
    return {
        "invariants": invariants / num * 1e6,
        "everything": everything / num * 1e6,
        "state_kib": len(engine.dump()) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--healthy-steps", type=int, default=HEALTHY_STEPS)
    parser.add_argument("--split", choices=SPLITS, default="test")
    args = parser.parse_args()
    refuse_other_settings()
    first = SPLITS[args.split]
    began = time.process_time()
    rarest = Point(
        RAREST,
        list(faults(first, args.seeds, RAREST)),
        list(healthy_runs(first, args.healthy_steps, RAREST)),
        *recorded(RAREST),
    )
    always = Point(ALWAYS, list(faults(first, 1, ALWAYS)), [], *recorded(ALWAYS))
    took_s = time.process_time() - began
    sys.stdout.write(f"\n{report(rarest, always, cost(), args.split, args.seeds)}\n{took_s:.0f} s of one core.\n")


if __name__ == "__main__":
    main()
