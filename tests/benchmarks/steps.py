"""A training step with the collector up, refusing, silent and slow: each in a process of its own, taking turns.

A dead collector must cost nothing: dead : up ≤ 1.01. Run with a name as its only argument it is one of those processes:
it reads how many steps to make, and answers with the time of each.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import table
from fp8watch.session.overhead_budget import EARLY_STEPS

ROUND = 8  # steps in one turn
ALONE = EARLY_STEPS[-1] + 8  # before that: early steps compile, register and are measured
CASES = ("no observer", "collector up", "refused", "blackholed", "1 B/s", "429")


def child() -> None:
    """Train as told. The model, the data and the seed are the same in every case."""
    import torch

    from benchmarks.linear import attached
    from benchmarks.own_time import in_own_time
    from fp8watch.demo.model import ByteModel
    from fp8watch.demo.text import batches, load_text

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, data = ByteModel(), batches(load_text(), 16, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    collector = sys.argv[2] or None
    watch = attached(model, observe=sys.argv[1] != CASES[0], collector=collector, run="bench", every=1)

    def step() -> float:
        start = time.perf_counter()
        loss = model(*next(data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return time.perf_counter() - start

    step = in_own_time(step)
    for line in sys.stdin:
        times = [step() for _ in range(int(line))]
        print(json.dumps([times, watch.summary()["health"]]), flush=True)
    watch.detach()


def rounds(
    urls: dict[str, str], spool: Path, repetitions: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Medians of the turns of each case, and what its agent says of itself at the end."""
    children = {}
    for name in CASES:
        environ = {**os.environ, "FP8WATCH_SPOOL_DIR": str(spool / name.replace("/", " per ")), "OMP_NUM_THREADS": "1"}
        children[name] = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.steps", name, urls.get(name, "")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
    medians: dict[str, list[float]] = {name: [] for name in CASES}
    health: dict[str, dict[str, float]] = {}
    for turn in range(repetitions + 1):
        for name, process in children.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{ROUND if turn else ALONE}\n")
            process.stdin.flush()
            times, health[name] = json.loads(process.stdout.readline())
            if turn:
                medians[name].append(statistics.median(times))
    for process in children.values():
        process.communicate("")
    return medians, health


def main() -> None:
    """Measure and write."""
    if len(sys.argv) == 3 and sys.argv[1] in CASES:
        return child()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    from collector.kit import Serving
    from faults.proxy import Fault, Proxy

    with tempfile.TemporaryDirectory() as name, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: refused
        proxies = {
            "blackholed": Fault(blackhole=True),
            "1 B/s": Fault(bytes_per_s=1.0),
            "429": Fault(status=429, headers="Retry-After: 1\r\n"),
        }
        with Serving(Path(name), "--port", "0") as served:
            urls = {"collector up": served.url, "refused": f"http://127.0.0.1:{closed.getsockname()[1]}"}
            running = []
            for case, fault in proxies.items():
                proxy = Proxy(served.url)
                proxy.fault = fault
                proxy.start()
                running.append(proxy)
                urls[case] = proxy.url
            medians, health = rounds(urls, Path(name), args.repetitions)
            for proxy in running:
                proxy.stop()
    bare, up = medians["no observer"], medians["collector up"]
    rows = []
    for case, times in medians.items():
        against = [statistics.median(t / b for t, b in zip(times, base, strict=True)) for base in (bare, up)]
        rows.append(
            (case, f"{statistics.median(times) * 1e3:.1f}", f"{against[0]:.3f}", f"{against[1]:.3f}",
             f"{health[case].get('produced', 0):.0f}", f"{health[case].get('acknowledged', 0):.0f}")
        )  # fmt: skip
    columns = ("", "ms", "against no observer", "against collector up", "records made", "acknowledged")
    table.write(
        "steps",
        f"""## A training step with the collector up and dead, one thread

{table.machine("torch", "numpy")} {args.repetitions} turns of {ROUND} steps a case, behind {ALONE} of each, in processes that take turns; medians of the
ratios of neighbouring turns. The model of the demo, emulated FP8, `overhead_budget=0.01`. Goals: statistics on : off
≤ 1.02, collector dead : up ≤ 1.01.

{table.table(columns, rows)}
""",
    )


if __name__ == "__main__":
    main()
