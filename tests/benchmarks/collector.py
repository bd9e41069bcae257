"""What one collector takes: CPU time per batch and record, end to end, detectors included; and how many ranks that is.

A real process on each database, bodies made beforehand, CPU time of the collector read from /proc (of PostgreSQL's
processes as well). Not a test: nothing here asserts on time.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import database
import httpx
from benchmarks.table import machine, table, write
from collector.kit import Serving

from fp8watch_server.load.drive import LoadReport, run_load
from fp8watch_server.load.stream import Plan
from fp8watch_server.store.dialect import parse_url

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def postgresql_cpu_s(url: str) -> float:
    """Of the server and everything it has started and ended; 0 for SQLite."""
    folder = parse_url(url).query.get("host")
    if not isinstance(folder, str) or not Path(folder, "postmaster.pid").exists():
        return 0.0
    postmaster = int(Path(folder, "postmaster.pid").read_text().split()[0])
    fields = Path(f"/proc/{postmaster}/stat").read_text().rsplit(")", 1)[1].split()
    ended = (int(fields[13]) + int(fields[14])) / TICKS
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    return cpu_s(postmaster) + ended + sum(cpu_s(int(child)) for child in children)


def pending(url: str) -> float:
    """Batches that were taken and are not looked at yet: the collector's own count would be cached."""
    from sqlalchemy import func, select

    from fp8watch_server.store import schema as t
    from fp8watch_server.store.dialect import make_engine

    engine = make_engine(url)
    with engine.connect() as conn:
        count = conn.execute(select(func.count()).where(t.hot_batch.c.detected == 0)).scalar_one()
    engine.dispose()
    return float(count)


def one(kind: str, plan: Plan, rate: float) -> tuple[LoadReport, int, float, float]:
    """A fresh collector under a load: the report, and of what came behind registration the bodies and CPU seconds."""
    with database.fresh_database(kind) as url, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fp8watch", "serve", "--port", "0"]
        serving = Serving(Path(folder), command=command, FP8WATCH_DATABASE_URL=url)
        with serving:
            assert serving.process is not None
            pid = serving.process.pid
            httpx.get(f"{serving.url}/metrics")
            left = [plan.num_ranks]
            before = [0.0, 0.0]

            def on_ack(rank: int, body: object) -> None:
                left[0] -= 1
                if left[0] == 0:  # every rank is registered by now
                    before[:] = [cpu_s(pid), postgresql_cpu_s(url)]

            report = run_load(plan, serving.url, rate=rate, prepared=True, on_ack=on_ack)
            until = time.monotonic() + 30
            while pending(url) and time.monotonic() < until:
                time.sleep(0.2)
            num_bodies = report.num_bodies - plan.num_ranks
            return report, num_bodies, cpu_s(pid) - before[0], postgresql_cpu_s(url) - before[1]


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--sites", type=int, default=160)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1.0, help="steps per second of a rank; 0: no pause")
    parser.add_argument("--repetitions", type=int, default=1, help="taken for the sake of the other scripts")
    args = parser.parse_args()
    rows = []
    for kind in database.KINDS:
        plan = Plan(num_ranks=args.ranks, num_sites=args.sites, num_steps=args.steps, run=f"bench-{kind}")
        report, num_bodies, own_s, database_s = one(kind, plan, args.rate)
        per_body = report.num_records / report.num_bodies
        rows.append(
            (
                kind,
                f"{own_s / num_bodies * 1e3:.2f} + {database_s / num_bodies * 1e3:.2f}",
                f"{num_bodies * per_body / (own_s + database_s):,.0f}",
                f"{num_bodies / own_s:.0f}",
                f"{report.quantile_s(0.5) * 1e3:.0f} ms, {report.quantile_s(0.99) * 1e3:.0f} ms",
            )
        )
    columns = ("database", "CPU ms a batch: collector + database", "records per CPU-second")
    columns += ("ranks at 1 step/s on one core", "answers: median, 99 %")
    head = (
        f"## Collector, end to end\n\n{args.ranks} ranks, one batch a step of {args.sites} sites (whole sketches of "
        f"`fp8watch load`), {args.rate:g} steps/s a rank. HTTP, checks, commit, detectors and totals are all in it.\n"
    )
    where = machine("uvicorn", "uvloop", "httptools", "sqlalchemy", "psycopg")
    write("collector", f"{head}\n{table(columns, rows)}\n\n{where}")


if __name__ == "__main__":
    main()
