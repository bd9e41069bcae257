"""A Linear and a training step in emulated FP8, beside float32, with the observer and without."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO

import torch
from benchmarks import table
from torch import nn

import fp8watch
from fp8watch.demo.model import ByteModel
from fp8watch.demo.text import batches, load_text
from fp8watch.kernels.registry import available


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

        if watch is not None:
            run()  # the first step registers
        return run

    cases = {"float32": case(None, False)}
    for backend in ("cpu", "reference"):
        if available("cpu")[backend] is None:
            cases[f"**{backend}**, no observer"] = case(backend, False)
            cases[f"**{backend}**, counts, extremes, histogram"] = case(backend, True, every=1 << 30)
            cases[f"**{backend}**, all statistics"] = case(backend, True)
    got = table.interleaved(cases, repetitions)
    base = got["float32"]
    rows = [(name, f"{t * 1e3:.1f}", f"{t / base:.2f}") for name, t in got.items()]
    return table.table((f"{size} tokens × {size} features", "ms", "against float32"), rows)


def training(repetitions: int) -> str:
    """A step of the demo's model, as a user attaches it."""
    text = load_text()

    def case(fp8: bool, observe: bool, **how: object) -> Callable[[], object]:
        torch.manual_seed(0)
        model, data = ByteModel(), batches(text, 16, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if fp8:
            kept.append(attached(model, observe=observe, **how))

        def run() -> None:
            loss = model(*next(data))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        for _ in range(6):  # past the calibration step
            run()
        return run

    kept: list[fp8watch.Watch] = []
    cases = {
        "float32": case(False, False),
        "emulated FP8, no observer": case(True, False),
        "as attached: overhead_budget=0.01": case(True, True),
        "every=1, all statistics in each step": case(True, True, overhead_budget=None),
    }
    got = table.interleaved(cases, repetitions * 4)
    bare = got["emulated FP8, no observer"]
    rows = [(n, f"{t * 1e3:.1f}", f"{t / got['float32']:.2f}", f"{t / bare:.3f}") for n, t in got.items()]
    for watch in kept:
        watch.detach()
    return table.table(("", "ms", "against float32", "against no observer"), rows)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as spool:
        os.environ["FP8WATCH_SPOOL_DIR"] = spool
        text = f"""## Emulated FP8 Linear, forward and backward, one thread

{table.machine("torch", "numpy")} {args.repetitions} repetitions. Goals: ≤ 1.15 at 1024², ≤ 1.10 at 2048².

{linear(1024, args.repetitions)}

{linear(2048, max(3, args.repetitions // 2))}

## A training step of the demo's model (1.8 M parameters, batch 16 × 64), one thread

Goal: attached ≤ 1.02 of the same path without the observer.

{training(args.repetitions)}
"""
    table.write("linear", text)


if __name__ == "__main__":
    main()
