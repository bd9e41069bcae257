"""What recipe="observe" costs a training step: attached in several ways, beside the same model unattached, in turns.

Thread CPU time, because other work on the machine takes wall time from whichever case is running. A second unattached
twin says how much of a difference is noise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO

import torch

import fp8watch
from benchmarks import table
from benchmarks.own_time import in_own_time
from fp8watch.demo.model import ByteModel
from fp8watch.demo.text import batches, load_text
from fp8watch.session.overhead_budget import EARLY_STEPS

SHAPE = {"dim": 320, "num_layers": 6, "num_heads": 5, "hidden": 864}
BATCH, TOKENS = 8, 50
TURNS = 30
"""For each repetition: full statistics and what else goes round come in their turns."""
ALONE_STEPS = EARLY_STEPS[-1] + 8
"""Steps that each case makes by itself before the cases take turns: what a watch says of itself is measured in them,
as a share of its own steps and not of everybody's."""

PLAIN, TWIN = "unattached", "unattached twin (noise)"


def case(
    attached: bool = True, pause: bool = False, **how: object
) -> tuple[Callable[[], float], fp8watch.Watch | None]:
    """One model and what makes a step of it; the same weights and data in every case."""
    torch.manual_seed(0)
    model, data = ByteModel(**SHAPE), batches(load_text(), BATCH, TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    watch = None
    if attached:
        with redirect_stderr(StringIO()):
            watch = fp8watch.attach(model, run="bench", recipe="observe", **how)  # type: ignore[arg-type]
        if pause:
            watch.pause()

    def run() -> float:
        loss = model(*next(data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return in_own_time(run), watch


def turns(cases: dict[str, Callable[[], float]], losses: dict[str, list[float]], count: int) -> dict[str, list[float]]:
    """CPU seconds of each case turn by turn.

    Raises:
        RuntimeError: losses differ: what observes has changed a number.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(count):
        for name, run in cases.items():
            began = time.thread_time()
            losses[name].append(run())
            times[name].append(time.thread_time() - began)
    for step in zip(*losses.values(), strict=False):  # cases have made more steps or fewer
        if len(set(step)) != 1:
            raise RuntimeError(f"losses of one step differ: {step}")
    return times


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["FP8WATCH_SPOOL_DIR"] = tempfile.mkdtemp(prefix="fp8watch-bench-")
    never = 1 << 30
    made = {
        PLAIN: case(attached=False),
        TWIN: case(attached=False),
        "as attached by default": case(),
        "a step between two samples": case(overhead_budget=None, every=never),
        "a step with all statistics": case(overhead_budget=None),
        "`watch.pause()`": case(pause=True),
        "outside of `windows=`": case(windows=[(never, None)]),
        "`sites=` one Linear, `probes=[]`": case(sites=["layers.0.attention.q_proj"], probes=[]),
    }
    losses: dict[str, list[float]] = {}
    for name, (run, watch) in made.items():
        with redirect_stderr(StringIO()):
            alone = ALONE_STEPS if watch is not None and "step" not in name else 2
            losses[name] = [run() for _ in range(alone)]
    said = {name: watch.summary() for name, (_, watch) in made.items() if watch is not None}
    took = turns({name: run for name, (run, _) in made.items()}, losses, TURNS * args.repetitions)
    rows, noise = [], 0.0
    for name, times in took.items():
        ratios = [a / b for a, b in zip(times, took[PLAIN], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        if name == TWIN:
            noise = max(high - 1, 1 - low)
        resolved = name in (PLAIN, TWIN) or abs(middle - 1) > noise
        share = said.get(name, {}).get("overhead_ratio")
        rows.append(
            (
                name,
                f"{statistics.median(times) * 1e3:.1f}",
                "1"
                if name == PLAIN
                else f"{middle:.3f} ({low:.3f} … {high:.3f})" + ("" if resolved else ", not resolved"),
                "" if share is None else f"{share:.3f}",
                said[name]["every"] if share is not None else "",
            )
        )
    for _, watch in made.values():
        if watch is not None:
            watch.detach()
    columns = ("", "CPU ms", "against unattached, median (quartiles)", "the watch says", "full statistics every")
    parameters = sum(p.numel() for p in ByteModel(**SHAPE).parameters()) / 1e6
    table.write(
        "observe",
        f"""## What observing costs, `recipe="observe"`, one thread

{table.machine("torch", "numpy")} {TURNS * args.repetitions} turns. A transformer of {parameters:.1f} M parameters ({SHAPE["dim"]} wide,
{SHAPE["num_layers"]} layers), {BATCH * TOKENS} tokens a step; CPU time of the training thread, medians of the ratios within a turn; what
a watch does for a share of the time is paced by the time of its own model. Nothing is
quantised: operands are read, and their statistics are kept. Losses are equal to the last bit. Load of the machine at the end:
{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. A difference smaller than the twin's is not resolved. Goals: ≤ 1.03 by default, ≤ 1.01 paused or outside
of windows; what the watch says within a fifth of what is measured.

{table.table(columns, rows)}
""",
    )


if __name__ == "__main__":
    main()
