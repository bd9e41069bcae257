"""Very many ranks of one run, through a queue and two workers: what is accepted and committed, what each process takes, and how
long people wait.

Real processes on one machine; `fp8watch load --fleet` stands for the ranks, at a reduced rate. Not a test: nothing here
asserts on time.

python -m benchmarks.fleet --ranks 10000 --interval 120 --batches 2 --print
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import httpx
import sqlalchemy as sa

from benchmarks.collector import cpu_s, pending
from benchmarks.queued import Setup, num_stored, standing
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, parse_url
from fp8watch_server.load.fleet import Fleet, FleetPlan, FleetReport
from fp8watch_server.load.stream import LoadPlan
from fp8watch_server.store.compactor import Compactor

MIB = 1 << 20
PAGES = (
    "/runs/{run}",
    "/api/v1/runs/{run}",
    "/api/v1/runs/{run}/sites",
    "/api/v1/runs/{run}/series?site={site}&field=amax_max",
    "/api/v1/runs/{run}/top?field=underflow_ratio&n=10",
    "/api/v1/runs/{run}/heatmap?field=amax_max",
    "/api/v1/runs/{run}/incidents",
    "/api/v1/runs",
    "/metrics",
)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


@dataclass
class Watched:
    """What was seen while the fleet sent."""

    rss: dict[str, int] = field(default_factory=dict)  # most bytes of each part
    lag: list[int] = field(default_factory=list)  # batches acknowledged and not stored
    undetected: list[int] = field(default_factory=list)


class Watcher(threading.Thread):
    """Looks at the processes and the database every few seconds."""

    def __init__(self, setup: Setup, num_acked: list[int]) -> None:
        super().__init__(daemon=True)
        self._setup, self._num_acked = setup, num_acked
        self.seen, self.ended = Watched(), threading.Event()

    def run(self) -> None:
        """Until it is told to end."""
        while not self.ended.wait(5.0):
            parts = {**self._setup.pids, "load": [os.getpid()]}
            for part, pids in parts.items():
                for i, pid in enumerate(pids):
                    name = part if len(pids) == 1 else f"{part} {i + 1}"
                    self.seen.rss[name] = max(self.seen.rss.get(name, 0), rss_bytes(pid))
            acked = self._num_acked[0]
            self.seen.lag.append(acked - num_stored(self._setup.database_url))
            self.seen.undetected.append(int(pending(self._setup.database_url)))


def page_times(url: str, run: str, site: int) -> dict[str, tuple[float, float, int, list[int]]]:
    """First and median milliseconds of five, bytes, and the statuses of each page and query."""
    out = {}
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        for page in PAGES:
            path, took, size, statuses = page.format(run=quote(run), site=site), [], 0, []
            for _ in range(5):
                began = time.perf_counter()
                answer = client.get(path, headers={"Accept": "text/html"} if path.startswith("/runs") else {})
                took.append((time.perf_counter() - began) * 1e3)
                size = len(answer.content)
                statuses.append(answer.status_code)
            out[page] = took[0], statistics.median(took), size, statuses
    return out


def detected_at(url: str, run: str) -> float | None:
    """When the first incident of the run was written."""
    engine = make_engine(url)
    with engine.connect() as conn:
        i = t.incident.c
        found = conn.execute(sa.select(sa.func.min(i.opened_at)).where(i.run_id == run)).scalar_one()
    engine.dispose()
    return found


def database_bytes(url: str) -> int:
    """Of the database on disk."""
    engine = make_engine(url)
    with engine.connect() as conn:
        size = int(
            conn.execute(sa.text("SELECT pg_database_size(:name)"), {"name": parse_url(url).database}).scalar_one()
        )
    engine.dispose()
    return size


def compact_all(setup: Setup) -> dict[str, float]:
    """Compact what is there, as the collector would when it has cooled; CPU and wall seconds, and batches that are left."""
    engine = make_engine(setup.database_url)
    began, own_s, others = time.monotonic(), time.process_time(), setup.spent_s()
    compactor = Compactor(engine, cool_after_s=0.0)
    while compactor.round().anything:
        pass
    spent = setup.spent_s()[-1] - others[-1]
    with engine.connect() as conn:
        left = int(conn.execute(sa.select(sa.func.count()).select_from(t.hot_batch)).scalar_one())
    engine.dispose()
    return {
        "cpu_s": time.process_time() - own_s,
        "postgresql_cpu_s": spent,
        "s": time.monotonic() - began,
        "left": left,
    }


def table_bytes(url: str) -> dict[str, tuple[int, int]]:
    """Rows, and bytes with indexes, of the largest tables."""
    engine = make_engine(url)
    out = {}
    with engine.connect() as conn:
        for table in (t.hot_batch, t.scalar, t.session, t.detect_state):
            size = conn.execute(sa.text("SELECT pg_total_relation_size(:name)"), {"name": table.name}).scalar_one()
            out[table.name] = int(conn.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()), int(size)
    engine.dispose()
    return out


def one(plan: FleetPlan, num_nodes: int, num_workers: int, settle_s: float, seconds: float = 0.0) -> dict[str, object]:
    """A fleet on a fresh setup, and what was seen; it ends after so many seconds of sending, 0: when all is sent."""
    with standing(num_nodes, num_workers=num_workers) as setup:
        num_acked = [0]
        spent: list[list[float]] = [setup.spent_s()]
        lock = threading.Lock()

        def on_ack(rank: int, number: int) -> None:
            with lock:
                if not num_acked[0]:  # every rank is registered by now
                    spent.append(setup.spent_s())
                num_acked[0] += 1

        watcher = Watcher(setup, num_acked)
        watcher.start()
        own_s = cpu_s(os.getpid())
        stop = threading.Event()

        def end() -> None:
            while not num_acked[0] and not stop.wait(1.0):
                pass
            stop.wait(seconds)
            stop.set()

        if seconds:
            threading.Thread(target=end, daemon=True).start()
        report: FleetReport = Fleet(plan, setup.url, num_senders=4, on_ack=on_ack, stop=stop).run()
        own_s = cpu_s(os.getpid()) - own_s
        sent = time.monotonic()
        while num_stored(setup.database_url) < report.num_bodies and time.monotonic() < sent + settle_s:
            time.sleep(0.5)
        committed_s = time.monotonic() - sent
        while pending(setup.database_url) and time.monotonic() < sent + settle_s:
            time.sleep(0.5)
        detected_s = time.monotonic() - sent
        spent.append(setup.spent_s())
        opened = detected_at(setup.database_url, plan.load.run)
        pages = page_times(setup.url, plan.load.run, plan.load.sites[0].id)
        hot_mib, tables = database_bytes(setup.database_url) / MIB, table_bytes(setup.database_url)
        compacted = compact_all(setup)
        pages_after = page_times(setup.url, plan.load.run, plan.load.sites[0].id)
        watcher.ended.set()
        watcher.join()
        seen = watcher.seen
        start, registered, end = spent
        return {
            "ranks": plan.load.num_ranks,
            "registered_s": report.registered_s,
            "sending_s": report.elapsed_s,
            "accepted": report.num_bodies,
            "records": report.num_records,
            "bytes": report.num_bytes,
            "requests": report.num_requests,
            "refused": report.num_refused,
            "retries": report.num_retries,
            "late": report.num_late,
            "problems": report.problems,
            "answers_ms": [report.quantile_s(0.5) * 1e3, report.quantile_s(0.99) * 1e3],
            "committed": num_stored(setup.database_url),
            "committed_after_s": committed_s,
            "detected_after_s": detected_s,
            "undetected": pending(setup.database_url),
            "lag_most": max(seen.lag, default=0),
            "undetected_most": max(seen.undetected, default=0),
            "registration_cpu_s": [b - a for a, b in zip(start, registered, strict=True)],
            "cpu_ms_a_batch": [(b - a) / report.num_bodies * 1e3 for a, b in zip(registered, end, strict=True)],
            "load_cpu_s": own_s,
            "rss_mib": {name: size / MIB for name, size in seen.rss.items()},
            "detection_s": None if opened is None or report.broken_at is None else opened - report.broken_at,
            "pages_ms": pages,
            "compaction": compacted,
            "pages_after_ms": pages_after,
            "database_mib": [hot_mib, database_bytes(setup.database_url) / MIB],
            "tables": tables,
            "machine_load": os.getloadavg()[0],
        }


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--sites", type=int, default=160)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--steps-per-batch", type=int, default=8)
    parser.add_argument("--interval", type=float, default=120.0, help="seconds between two batches of a rank")
    parser.add_argument("--nodes", type=int, default=1, help="NATS servers: 0, 1 or 3")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--settle", type=float, default=600.0, help="seconds that the end may take")
    parser.add_argument("--seconds", type=float, default=0.0, help="end sending after so long; 0: when all is sent")
    parser.add_argument("--repetitions", type=int, default=1, help="taken for the sake of the other scripts")
    args = parser.parse_args()
    load = LoadPlan(
        num_ranks=args.ranks,
        num_sites=args.sites,
        num_steps=args.batches * args.steps_per_batch,
        steps_per_batch=args.steps_per_batch,
        merge_steps=16,
        run=f"fleet-{args.ranks}",
    )
    plan = FleetPlan(load, args.interval, broken=(args.ranks // 3, args.batches - 1))
    found = one(plan, args.nodes, args.workers, args.settle, args.seconds)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
