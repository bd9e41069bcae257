"""A Linear and a training step in emulated FP8, beside float32, with the observer and without."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import numpy as np
import torch
from torch import nn

import fp8watch
from benchmarks import table
from benchmarks.own_time import in_own_time
from fp8watch.demo.model import ByteModel
from fp8watch.demo.text import batches, load_text
from fp8watch.kernels.registry import available
from fp8watch.numerics.tile_stats import HEAVY
from fp8watch.observer.observation_plan import ObservationPlan
from fp8watch.session.overhead_budget import EARLY_STEPS
from fp8watch.session.standing_state import StandingState
from fp8watch.session.watch import Watch


def attached(model: nn.Module, *, observe: bool, **how: object) -> fp8watch.Watch:
    """`attach` without its line; `observe=False` leaves the compute path alone (FP8WATCH_DISABLED=stats)."""
    os.environ["FP8WATCH_DISABLED"] = "" if observe else "stats"
    with redirect_stderr(StringIO()):
        watch = fp8watch.attach(model, **how)  # type: ignore[arg-type]
    os.environ.pop("FP8WATCH_DISABLED")
    return watch


def linear(size: int, repetitions: int) -> str:
    """Forward and backward of one Linear: tokens × features = size × size, one thread."""
    x, g = torch.randn(size, size, requires_grad=True), torch.randn(size, size)

    def case(backend: str | None, observe: bool, every: int = 1) -> Callable[[], object]:
        model = nn.Sequential(nn.Linear(size, size, bias=False))
        watch = None
        if backend is not None:
            watch = attached(model, observe=observe, backend=backend, overhead_budget=None, every=every)

        def run() -> None:
            x.grad = model[0].weight.grad = None
            model(x).backward(g)
            if watch is not None:
                watch.step()

        run = in_own_time(run)
        if watch is not None:
            run()  # the first step registers
        return run

    cases = {"float32": case(None, False)}
    for backend in ("cpu", "reference"):
        if available("cpu")[backend] is None:
            cases[f"**{backend}**, no observer"] = case(backend, False)
            cases[f"**{backend}**, counts, extremes, histogram"] = case(backend, True, every=1 << 30)
            cases[f"**{backend}**, all statistics"] = case(backend, True)
    got = table.interleaved(cases, repetitions, time.thread_time)
    base = got["float32"]
    rows = [(name, f"{t * 1e3:.1f}", f"{t / base:.2f}") for name, t in got.items()]
    return table.table((f"{size} tokens × {size} features", "ms", "against float32"), rows)


STEPS_A_TURN = 6
"""In which models take turns; one step a turn would find nothing of the observer in the caches, as no training does."""
NARROW = {"dim": 256, "num_layers": 2, "num_heads": 4, "hidden": 768}
WIDE = {"dim": 1024, "num_layers": 1, "num_heads": 8, "hidden": 2816}


def training(shape: dict[str, int], turns: int) -> str:
    """A step of a transformer on 1024 tokens: what each kind of step costs."""
    text = load_text()

    def case(fp8: bool, observe: bool, **how: object) -> tuple[Callable[[], object], fp8watch.Watch | None]:
        torch.manual_seed(0)
        model, data = ByteModel(**shape), batches(text, 16, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        watch = attached(model, observe=observe, **how) if fp8 else None

        def run() -> None:
            loss = model(*next(data))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        run = in_own_time(run)
        for _ in range(6):  # past the calibration step
            run()
        return run, watch

    never = 1 << 30
    cases = {
        "float32": case(False, False),
        "emulated FP8, no observer": case(True, False),
        "observed, a step between two samples": case(True, True, overhead_budget=None, every=never),
        "observed, a step with all statistics": case(True, True, overhead_budget=None),
    }
    took = table.taking_turns({name: run for name, (run, _) in cases.items()}, turns, time.thread_time)
    base, bare = list(took.values())[:2]

    def ratio(case: Sequence[float], to: Sequence[float]) -> float:
        return statistics.median(a / b for a, b in zip(case, to, strict=True))

    rows = [
        (n, f"{statistics.median(t) * 1e3:.1f}", f"{ratio(t, base):.2f}", f"{ratio(t, bare):.3f}")
        for n, t in took.items()
    ]
    for _, watch in cases.values():
        if watch is not None:
            watch.detach()
    return table.table(("", "ms", "against float32", "against no observer"), rows)


CASES = ("unobserved", "twin", "attached")
Took = dict[str, list[float]]


def one_round(shape: dict[str, int], steps: int, number: int, took: Took, counted: Counter[str]) -> dict[str, Any]:
    """Models made anew, which take turns for so many steps a side; what the watch says of itself.

    Args:
        number: of the round: says whose turn is first, and who is made first.
        took: CPU seconds of a step of each case, turn by turn; added to.
        counted: records, and those with full statistics; added to.
    """
    runs: dict[str, Callable[[], None]] = {}
    watches: dict[str, Watch] = {}
    for case in CASES[number % 3 :] + CASES[: number % 3]:
        torch.manual_seed(0)
        model, data = ByteModel(**shape), batches(load_text(), 16, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        watches[case] = attached(model, observe=case == "attached")

        def run(
            model: nn.Module = model, data: Iterator[Any] = data, optimizer: torch.optim.Optimizer = optimizer
        ) -> None:
            loss = model(*next(data))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        runs[case] = in_own_time(run)
    for case, run in runs.items():  # each by itself: a watch measures what it costs as a share of its own steps
        for _ in range(EARLY_STEPS[-1] + 8 if case == "attached" else 12):
            run()
    watch = watches["attached"]
    summary, record = watch.summary(), watch._recorder.record_step

    def count(header: Any, ids: Any, rows: Any, *rest: Any) -> None:
        counted["full"] += int(np.count_nonzero(rows["measured"] & int(HEAVY)))
        counted["rows"] += len(rows)
        record(header, ids, rows, *rest)

    watch._recorder.record_step = count
    for turn in range(steps // STEPS_A_TURN):
        first = (turn + number) % 3
        for case in CASES[first:] + CASES[:first]:
            began = time.thread_time()
            for _ in range(STEPS_A_TURN):
                runs[case]()
            took[case].append((time.thread_time() - began) / STEPS_A_TURN)
    for watch in watches.values():
        watch.detach()
    return summary


def as_attached(models: dict[str, tuple[dict[str, int], int, int]]) -> str:
    """Attached at defaults beside the same path unobserved, in turns of STEPS_A_TURN steps, with samples among them; a second
    unobserved twin says what is noise. CPU time of the training thread.

    Args:
        models: name -> shape, rounds, steps a side in each. A model's place in memory alone makes it a percent faster or slower
            than its twin for as long as it lives, so rounds begin with new ones.
    """
    rows = []
    for name, (shape, rounds, steps) in models.items():
        counted: Counter[str] = Counter()
        took: Took = {case: [] for case in CASES}
        said = [one_round(shape, steps, number, took, counted) for number in range(rounds)]
        base = took["unobserved"]

        def against(case: str, took: Took = took, base: list[float] = base) -> str:
            low, middle, high = statistics.quantiles([a / b for a, b in zip(took[case], base, strict=True)], n=4)
            return f"{middle:.3f} ({low:.3f} … {high:.3f}) | {sum(took[case]) / sum(base):.3f}"

        each = counted["rows"] / counted["full"] if counted["full"] else math.inf
        says = statistics.median(summary["overhead_ratio"] for summary in said)
        every = ", ".join(str(summary["every"]) for summary in said)
        rows.append(
            (f"as attached: {name}", f"{len(base) * STEPS_A_TURN} in {rounds} rounds", f"{statistics.median(base) * 1e3:.1f}",
             against("twin"), against("attached"), f"{says:.3f}",
             f"{counted['full']} of {counted['rows']} rows, 1 in {each:.0f}; every={every}")
        )  # fmt: skip
    columns = (
        "model", "steps a side", "unobserved, CPU ms", "noise: a twin, median of turns (quartiles)", "sum",
        "attached, median of turns (quartiles)", "sum", "the watch says", "full statistics",
    )  # fmt: skip
    return table.table(columns, rows)


def parts(shape: dict[str, int], steps: int) -> str:
    """Where the time of an observed step goes that an unobserved one does not spend: timers around the few functions
    through which all of it passes."""
    text = load_text()
    spent: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}  # in the running step
    kept: dict[bool, list[Counter[str]]] = {False: [], True: []}
    calls: Counter[str] = Counter()
    runs = {}
    for observe in (False, True):
        torch.manual_seed(0)
        model, data = ByteModel(**shape), batches(text, 16, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        watch = attached(model, observe=observe, overhead_budget=None, every=1 << 30)
        runs[observe] = (model, data, optimizer, watch)

    def step(observe: bool) -> None:
        model, data, optimizer, _ = runs[observe]
        began = time.thread_time()
        loss = model(*next(data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent[observe]["step"] = time.thread_time() - began
        kept[observe].append(spent[observe])
        spent[observe] = Counter()

    now = False

    def timed(owner: object, name: str, part: str) -> Callable[[], None]:
        original = getattr(owner, name)

        def wrapper(*args: object, **kwargs: object) -> object:
            began = time.thread_time()
            try:
                return original(*args, **kwargs)
            finally:
                spent[now][part] += time.thread_time() - began
                calls[part] += now

        setattr(owner, name, wrapper)
        return lambda: setattr(owner, name, original)

    undo = [
        timed(ObservationPlan, "quantize", "quantising"),
        timed(ObservationPlan, "_keep", "keeping the tiles"),
        timed(ObservationPlan, "note_probe", "probes of norms and attention"),
        timed(Watch, "_close", "end of the step"),
        timed(StandingState, "before", "what the optimizer keeps, before its step"),
        timed(StandingState, "after", "and behind it"),
    ]
    for i in range(6 + steps):
        if i == 6:  # past the registration
            kept[False].clear(), kept[True].clear(), calls.clear()
        for now in (False, True):
            step(now)
    for back in undo:
        back()
    for *_, watch in runs.values():
        watch.detach()
    names = dict.fromkeys(name for counter in kept[True] for name in counter)
    more = {
        n: statistics.median(on[n] - off[n] for off, on in zip(kept[False], kept[True], strict=True)) for n in names
    }
    bare = statistics.median(off["step"] for off in kept[False])
    del more["step"]
    more["statistics in the kernel, merging"] = more.pop("quantising") - more["keeping the tiles"]
    calls["statistics in the kernel, merging"] = calls.pop("quantising")
    more["together"] = sum(more.values())
    rows = [
        (name, f"{calls[name] / steps:.0f}" if calls[name] else "", f"{t * 1e3:.2f}", f"{t / bare:.2%}")
        for name, t in more.items()
    ]
    return table.table(("what observing adds to a step", "calls", "ms", "of the step"), rows)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as spool:
        os.environ["FP8WATCH_SPOOL_DIR"] = spool
        more = max(7, args.repetitions)
        together = as_attached({"demo, 256 wide": (NARROW, 6, 15 * more), "1024 wide": (WIDE, 2, 15 * more)})
        text = f"""## Emulated FP8 Linear, forward and backward, one thread

{table.machine("torch", "numpy")} {args.repetitions} repetitions, CPU time of the training thread,
which other work on the machine changes little. Goals: ≤ 1.15 at 1024², ≤ 1.10 at 2048².

{linear(1024, args.repetitions)}

{linear(2048, max(3, args.repetitions // 2))}

## A training step of a transformer, 1024 tokens, one thread

Medians of the ratios of neighbouring turns. What is left between two samples is a few calls of Python for each operand, whatever
its size.

The demo's model: 256 wide, 2 layers, 1.8 M parameters.

{training(NARROW, args.repetitions * 12)}

{parts(NARROW, args.repetitions * 10)}

1024 wide, 1 layer, 13 M parameters.

{training(WIDE, args.repetitions * 2)}

As attached by default, samples included; models take turns of {STEPS_A_TURN} steps and are made anew in each round, and what a watch does for a share of the time is
paced by the time of its own model. Goal: ≤ 1.01. The median of the turns does not see what few of them pay, the sum does:
bursts of full statistics after a jump are among them. Load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.

{together}
"""
    table.write("linear", text)


if __name__ == "__main__":
    main()
