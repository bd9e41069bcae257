"""A quiet tenant beside one that sends all it can, with a quota and without: answers to the quiet one.

    python -m benchmarks.noisy --repeats 3

A collector on SQLite in a process, a noisy fleet in another, and the quiet one here; the cases take turns. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from collector.kit import Serving
from support.database import fast_folder

from fp8watch_server.auth.command import create
from fp8watch_server.db import migrations
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.load.drive import run_load
from fp8watch_server.load.stream import LoadPlan

CASES = {
    "alone": (False, ""),
    "beside a noisy one": (True, ""),
    "beside it, with a quota": (True, "noisy=records:2000"),
}
NOISY_RANKS, QUIET_RANKS, SITES, RATE = 16, 8, 100, 1.0


@contextmanager
def collector(quotas: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Its URL, and a token for each tenant."""
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        url = f"sqlite:///{Path(folder) / 'c.db'}"
        engine = make_engine(url)
        migrations.upgrade(engine)
        tokens = {name: create(engine, name, "ingest", name, f"{name}*") for name in ("noisy", "quiet")}
        engine.dispose()
        command = [sys.executable, "-m", "fp8watch", "serve", "--port", "0"]
        env = {"FP8WATCH_DATABASE_URL": url, "FP8WATCH_QUOTAS": quotas}
        with Serving(Path(folder), command=command, **env) as serving:
            yield serving.url, tokens


def measure(case: str, seconds: int) -> list[float]:
    """Seconds of each answer to the quiet tenant."""
    noisy, quotas = CASES[case]
    with collector(quotas) as (url, tokens):
        beside = None
        if noisy:
            command = [sys.executable, "-m", "fp8watch", "load", "--url", url, "--run", "noisy", "--sites", str(SITES)]
            command += ["--ranks", str(NOISY_RANKS), "--steps", "1000000"]
            env = {"FP8WATCH_TOKEN": tokens["noisy"]}
            beside = Serving(Path("/"), command=command, **env)
            beside.process = subprocess.Popen(
                command, env={**beside.env, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
            )
            time.sleep(5)
        steps = int(seconds * RATE)
        plan = LoadPlan(num_ranks=QUIET_RANKS, num_sites=SITES, num_steps=steps, run="quiet", step_s=1 / RATE)
        report = run_load(plan, url, token=tokens["quiet"], rate=RATE)
        if beside is not None and beside.process is not None:
            beside.process.kill()
            beside.process.wait()
    return report.latencies_s


def main() -> None:
    """Print each case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=15)
    args = parser.parse_args()
    found: dict[str, list[list[float]]] = {case: [] for case in CASES}
    for _ in range(args.repeats):
        for case in CASES:
            found[case].append(measure(case, args.seconds))
    for case, runs in found.items():
        of = [sorted(run) for run in runs]
        p50 = statistics.median(run[len(run) // 2] for run in of)
        p99 = [round(run[int(0.99 * (len(run) - 1))] * 1e3) for run in of]
        print(json.dumps({"case": case, "p50_ms": round(p50 * 1e3), "p99_ms": p99, "batches": sum(map(len, of))}))


if __name__ == "__main__":
    main()
