"""Measure, print, and write docs/benchmarks.md: ratios within one run, medians of interleaved repetitions.

Not a test: nothing here asserts on time. A row that was not measured says so.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fp8watch import ops
from fp8watch._attach import _plan
from fp8watch.demo.model import ByteModel
from fp8watch.demo.text import batches, load_text
from fp8watch.filter import select_linears
from fp8watch.formats import E4M3
from fp8watch.kernels import reference
from fp8watch.kernels.registry import resolve
from fp8watch.linear import take_over
from fp8watch.recipe import blockwise
from fp8watch_agent import wire
from fp8watch_agent.guard import Guard
from fp8watch_agent.record import STEP

OUT = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def interleaved(cases: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Median seconds of each case; the cases take turns, so that a drifting machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()
    for _ in range(repetitions):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def quantise(size: int, repetitions: int) -> list[str]:
    """One operand, float32, 1×128 tiles, one thread: share of the copy roof with the same traffic."""
    torch.set_num_threads(1)
    x = torch.randn(size, size)
    source = torch.ones(
        size * size * 5 // 2, dtype=torch.uint8
    )  # written: pages that never were read from one cached page
    target = torch.ones_like(source)

    def roof() -> None:
        target.copy_(source)

    def run(**how: bool) -> Callable[[], object]:
        return lambda: reference.quantize(x, (1, 128), E4M3, True, 0.0, **how)

    got = interleaved(
        {
            "memcpy of the same traffic, 5 B an element (roof)": roof,
            "x.to(float8_e4m3fn), no scales": lambda: x.to(torch.float8_e4m3fn),
            "reference: quantise": run(stats=False),
            "reference: quantise + counts": run(stats=True, heavy=False),
            "reference: quantise + all statistics": run(stats=True, heavy=True),
        },
        repetitions,
    )
    base = got["memcpy of the same traffic, 5 B an element (roof)"]
    return [f"| {name} | {t * 1e3:.1f} | {base / t:.3f} |" for name, t in got.items()]


def training(repetitions: int) -> list[str]:
    """A step of the demo's model: plain float32, emulated FP8 without and with the observer."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))  # as the demo does
    text = load_text()

    def step(fp8: bool, observe: bool, sampled: bool) -> Callable[[], object]:
        torch.manual_seed(0)
        model, data = ByteModel(), batches(text, 4, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        plan = None
        if fp8:
            linears, _ = select_linears(model, None)
            plan, _ = _plan(linears, blockwise(environ={}), resolve("reference", "cpu"), Guard(), observe=observe)
            ops.add_plan(plan)
            for i, (_, module) in enumerate(linears):
                take_over(module, ops.site_tensor(plan, i * ops.ROWS_PER_LINEAR), observe_only=False)

        def run() -> None:
            if plan is not None:
                plan.begin_step(sampled=sampled)
            loss = model(*next(data))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if plan is not None and plan.slab is not None:
                plan.slab.copy_rows()
                plan.slab.clear()

        return run

    got = interleaved(
        {
            "float32": step(False, False, False),
            "emulated FP8, no observer": step(True, False, False),
            "emulated FP8, counts": step(True, True, False),
            "emulated FP8, all statistics": step(True, True, True),
        },
        repetitions,
    )
    bare = got["emulated FP8, no observer"]
    return [f"| {name} | {t * 1e3:.0f} | {t / got['float32']:.2f} | {t / bare:.2f} |" for name, t in got.items()]


def wire_cost(repetitions: int) -> list[str]:
    """Encode 600 real records: 70 sites of the demo's model, as they come in a batch of 8 steps and of one step."""
    torch.manual_seed(0)
    model, data = ByteModel(), batches(load_text(), 4, 64)
    linears, _ = select_linears(model, None)
    plan, table = _plan(linears, blockwise(environ={}), resolve("reference", "cpu"), Guard(), observe=True)
    ops.add_plan(plan)
    for i, (_, module) in enumerate(linears):
        take_over(module, ops.site_tensor(plan, i * ops.ROWS_PER_LINEAR), observe_only=False)
    assert plan.slab is not None
    taken = []
    for _ in range(8):
        model(*next(data)).backward()
        taken.append(plan.slab.copy_rows())
        plan.slab.clear()
        plan.begin_step(sampled=True)
    ids = np.array([s.site_id for s in table], dtype=np.uint64)
    lines = []
    for num in (1, 8):
        steps = np.zeros(num, STEP)
        steps["step"] = np.arange(num)
        rows = np.concatenate(taken[:num])
        header = wire.Header(run="r", session="s", rank=0, seq=0, step0=0, num_steps=num, num_records=len(rows))
        index = np.repeat(np.arange(num), len(ids))

        def encode(header=header, steps=steps, index=index, num=num, rows=rows) -> bytes:  # type: ignore[no-untyped-def]
            return wire.encode_batch(header, steps, index, np.tile(ids, num), rows)

        t = interleaved({"": encode}, repetitions)[""]
        lines.append(
            f"| {num} × {len(ids)} records | {t * 1e3 / len(rows) * 600:.2f} | {len(encode()) / len(rows):.0f} |"
        )
    return lines


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--size", type=int, default=4096)
    args = parser.parse_args()
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    text = "\n".join(
        [
            "# Benchmarks",
            "",
            "Written by `make bench`. Ratios within one run, medians of interleaved repetitions; milliseconds are of this machine.",
            "",
            f"{cpu}, {os.cpu_count()} cores, {platform.system()}; Python {platform.python_version()}, "
            f"torch {str(torch.__version__).partition('+')[0]} (CPU build), numpy {np.__version__}; "
            f"{args.repetitions} repetitions.",
            "",
            f"## Quantise one operand, {args.size}×{args.size} float32, tiles 1×128, one thread",
            "",
            "| | ms | share of the roof |",
            "|---|---|---|",
            *quantise(args.size, args.repetitions),
            "",
            "The reference is plain torch: right, and slow. The native CPU kernel is not there yet.",
            "",
            "## A training step of the demo's model (1.8 M parameters, batch 4 × 64)",
            "",
            "| | ms | against float32 | against no observer |",
            "|---|---|---|---|",
            *training(args.repetitions),
            "",
            "## The wire (real records of the demo's model)",
            "",
            "| batch | encode, ms per 600 records | bytes per record |",
            "|---|---|---|",
            *wire_cost(args.repetitions),
            "",
            "## Not measured",
            "",
            "GPU kernels (there are none yet), the collector's ingest and queries under load, peers.",
            "",
        ]
    )
    OUT.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
