"""What one collector takes: CPU time per batch and record, end to end, detectors included; and how many ranks that is.

A real process on each database, bodies made beforehand, CPU time of the collector read from /proc (of PostgreSQL's
processes as well). Not a test: nothing here asserts on time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
from collector.kit import Serving
from support import database

from benchmarks import store
from benchmarks.table import machine, table, write
from fp8watch_agent.wire import Batch, decode_batch
from fp8watch_server.app import _detection
from fp8watch_server.db.dialect import parse_url, writing
from fp8watch_server.load.drive import LoadReport, run_load
from fp8watch_server.load.stream import LoadPlan
from fp8watch_server.pipeline.detect_worker import DetectWorker
from fp8watch_server.settings import Settings
from fp8watch_server.store import commit, hot_batches
from fp8watch_server.store.commit import Incoming

T = TypeVar("T")
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

    from fp8watch_server.db import schema as t
    from fp8watch_server.db.dialect import make_engine

    engine = make_engine(url)
    with engine.connect() as conn:
        count = conn.execute(select(func.count()).where(t.hot_batch.c.detected == 0)).scalar_one()
    engine.dispose()
    return float(count)


def one(kind: str, plan: LoadPlan, rate: float) -> tuple[LoadReport, int, float, float]:
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


PARTS = ("decode and check", "commit", "detectors", "marks, incidents, totals")


def parts(kind: str, num_ranks: int, a_commit: int = 20, a_look: int = 200) -> dict[str, float]:
    """CPU milliseconds a batch of each part of the work, one after the other in one thread; the database's own left out."""
    plan = LoadPlan(num_ranks=num_ranks, num_steps=8, run="parts")
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(name: str, work: Callable[..., T], *args: Any) -> T:
        began = time.process_time()
        try:
            return work(*args)
        finally:
            spent[name] += time.process_time() - began

    with database.fresh_database(kind) as url:
        made = store.Database(url)
        streams = store.register(made.engine, plan, plan.sites)
        worker = DetectWorker(made.engine, _detection(Settings(database_url=url)))
        judge, write_down = worker._judge, worker._commit
        worker._judge = lambda *args: timed("detectors", judge, *args)  # type: ignore[method-assign]
        worker._commit = lambda *args: timed("marks, incidents, totals", write_down, *args)  # type: ignore[method-assign]
        known, since, num = commit.KnownSites(), 0, 0

        def put(bodies: list[bytes], batches: list[Batch]) -> None:
            taken = [Incoming(b, raw, hashlib.sha256(raw).digest()) for b, raw in zip(batches, bodies, strict=True)]
            now = time.time()
            with writing(made.engine) as conn:
                commit.commit_group(conn, taken, known, now=now, replays=False)
                for item in taken:
                    hot_batches.remember(conn, item.batch, now)

        bodies = [s.body(range(step, step + 1)).data for step in range(plan.num_steps) for s in streams]
        for at in range(0, len(bodies), a_commit):
            if at == 2 * num_ranks // a_commit * a_commit:  # engines are made and caches are full
                spent.update(dict.fromkeys(PARTS, 0.0))
                num = 0
            group = bodies[at : at + a_commit]
            batches = timed("decode and check", _decoded, group)
            timed("commit", put, group, batches)
            num, since = num + len(group), since + len(group)
            if since >= a_look:
                worker.drain()
                since = 0
        worker.drain()
        made.engine.dispose()
    return {name: s / num * 1e3 for name, s in spent.items()}


def _decoded(bodies: list[bytes]) -> list[Batch]:
    return [decode_batch(body) for body in bodies]


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=500)
    parser.add_argument("--sites", type=int, default=160)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1.0, help="steps per second of a rank; 0: no pause")
    parser.add_argument("--inside", type=int, default=200, help="ranks for the parts by themselves")
    parser.add_argument("--repetitions", type=int, default=1, help="taken for the sake of the other scripts")
    args = parser.parse_args()
    rows, own_ms = [], []
    shapes = {"whole, one step a batch": (1, 1, args.steps), "light, eight steps a batch": (8, 16, 8 * args.steps // 2)}
    for kind in database.KINDS:
        for shape, (steps_per_batch, every, num_steps) in shapes.items():
            plan = LoadPlan(
                num_ranks=args.ranks,
                num_sites=args.sites,
                num_steps=num_steps,
                steps_per_batch=steps_per_batch,
                every=every,
                run=f"bench-{kind}",
            )
            report, num_bodies, own_s, database_s = one(kind, plan, args.rate)
            if steps_per_batch == 1:
                own_ms.append(own_s / num_bodies * 1e3)
            num_steps = num_bodies * steps_per_batch
            rows.append(
                (
                    f"{kind}: {shape}",
                    f"{own_s / num_bodies * 1e3:.2f} + {database_s / num_bodies * 1e3:.2f}",
                    f"{report.num_records / report.num_bodies * num_bodies / (own_s + database_s):,.0f}",
                    f"{num_steps / own_s:.0f} ({num_steps / (own_s + database_s):.0f})",
                    f"{report.quantile_s(0.5) * 1e3:.0f} ms, {report.quantile_s(0.99) * 1e3:.0f} ms",
                )
            )
    inside = {kind: parts(kind, args.inside) for kind in database.KINDS}
    columns = ("database and records", "CPU ms a batch: collector + database", "records per CPU-second")
    columns += ("ranks at 1 step/s on one core (with the database on it)", "answers: median, 99 %")
    head = (
        f"## Collector, end to end\n\n{args.ranks} ranks of {args.sites} sites at {args.rate:g} steps/s (`fp8watch load`). Whole: every "
        "record is a whole sketch, and each step a batch, as in the first steps of a training. Light: full records each "
        "16th step and light ones between, eight steps a batch, as agents send at their defaults. HTTP, checks, commit, "
        "detectors and totals are all in it. Goal: 1,000 ranks of light records.\n"
    )
    where = machine("uvicorn", "uvloop", "httptools", "sqlalchemy", "psycopg")
    split = [
        (kind, *(f"{of[name]:.2f}" for name in PARTS), f"{own - sum(of.values()):.2f}")
        for (kind, of), own in zip(inside.items(), own_ms, strict=True)
    ]
    more = (
        f"Where the collector's own time goes, CPU milliseconds a batch: each part by itself in one thread, {args.inside} ranks; "
        "the rest is HTTP, and threads that wait for each other's turn at the interpreter and for memory that is cold.\n"
    )
    parted = table(("database", *PARTS, "the rest"), split)
    write("collector", f"{head}\n{table(columns, rows)}\n\n{more}\n{parted}\n\n{where}")


if __name__ == "__main__":
    main()
