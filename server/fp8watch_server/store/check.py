"""Integrity check: checksums of everything stored, and record counts and summaries against their blocks.

Shapes:     a database -> findings, as sentences
Thread:     `fp8watch check`

All bodies are verified against their SHA-256, all blocks against their CRC-32, and per cell: the detail has the records
that were counted on arrival, and the summary equals that of the blocks that are shown.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from fp8watch_server.db import schema as t
from fp8watch_server.store import blocks, sheets
from fp8watch_server.store.block_codec import DamagedBlock
from fp8watch_server.store.records import Parts, join
from fp8watch_server.store.summary import summarize, unpack_summary


@dataclass
class Checked:
    """What was read, and the errors found."""

    num_batches: int = 0
    num_blocks: int = 0  # sheets, and packed blocks of earlier collectors
    num_cells: int = 0
    problems: list[str] = field(default_factory=list)


def check(engine: Engine, run_id: str | None = None) -> Checked:
    """Check one run or all. Changes nothing."""
    done = Checked()
    with engine.connect() as conn:
        done.problems += _whole(conn)
        r = t.run.c
        query = sa.select(r.run_id, r.tenant).order_by(r.run_id, r.tenant)
        for run in conn.execute(query if run_id is None else query.where(r.run_id == run_id)).all():
            _batches(conn, run, done)
            c = t.cell.c
            cells = sa.select(t.cell).where(c.run_id == run.run_id, c.tenant == run.tenant).order_by(c.step0)
            for cell in conn.execute(cells).all():
                _cell(conn, cell, done)
    return done


def _whole(conn: Connection) -> list[str]:
    """The database's own integrity check."""
    if conn.dialect.name != "sqlite":
        return []
    found = [str(row[0]) for row in conn.exec_driver_sql("PRAGMA integrity_check(20)")]
    orphans = [str(row[0]) for row in conn.exec_driver_sql("PRAGMA foreign_key_check")]
    problems = [] if found == ["ok"] else [f"SQLite: {text}" for text in found]
    return problems + [f"table {name}: a row whose owner is not there" for name in sorted(set(orphans))]


def _batches(conn: Connection, run: Any, done: Checked) -> None:
    b = t.hot_batch.c
    of_run = (b.run_id == run.run_id, b.tenant == run.tenant)
    for arrival in conn.execute(sa.select(b.arrival).where(*of_run).order_by(b.arrival)).scalars().all():
        this = sa.select(b.session, b.seq, b.body, b.body_sha256).where(*of_run, b.arrival == arrival)
        row = conn.execute(this).first()
        if row is None:  # compacted meanwhile
            continue
        done.num_batches += 1
        if hashlib.sha256(bytes(row.body)).digest() != bytes(row.body_sha256):
            where = f"run {run.run_id!r}, session {row.session}, batch {row.seq}"
            done.problems.append(f"{where}: the body is not the one that was received")


def _cell(conn: Connection, cell: Any, done: Checked) -> None:
    done.num_cells += 1
    name = f"run {cell.run_id!r}, steps {cell.step0} to {cell.step0 + t.BLOCK_STEPS - 1}"
    try:
        _check_cell(conn, cell, name, done)
    except DamagedBlock as e:
        done.problems.append(f"{name}: {e}")


def _check_cell(conn: Connection, cell: Any, name: str, done: Checked) -> None:
    num_records = 0
    shown: list[Parts] = []
    for attempt, rank in _keys(cell):
        for parts in _blocks(conn, cell, attempt, rank, done):
            if [attempt, rank] in cell.sources:
                num_records += len(parts)
            if (attempt, rank) == (cell.shown_attempt, cell.shown_rank):
                shown.append(parts)
    if cell.kept == t.KEPT_DETAIL and num_records != cell.num_records:
        done.problems.append(f"{name}: {num_records} records in blocks, {cell.num_records} were compacted")
    if cell.shown_rank is None or cell.kept == t.KEPT_SUMMARY:
        return
    m = t.block_meta.c
    body = conn.execute(
        sa.select(m.body).where(m.run_id == cell.run_id, m.tenant == cell.tenant, m.step0 == cell.step0)
    ).scalar()
    if body is None:
        done.problems.append(f"{name}: no summary")
    elif not np.array_equal(
        unpack_summary(bytes(body)).tobytes(), summarize(_by_site(join(shown, blocks.ALL_FIELDS)), cell.step0).tobytes()
    ):
        done.problems.append(f"{name}: the summary is not that of the blocks that are shown")


def _by_site(parts: Parts) -> Parts:
    return parts.take(np.lexsort((parts.step, parts.site)))


def _keys(cell: Any) -> list[tuple[int, int]]:
    keys = {(attempt, rank) for attempt, rank in cell.sources}
    if cell.shown_rank is not None and cell.kept != t.KEPT_SUMMARY:
        keys.add((cell.shown_attempt, cell.shown_rank))
    return sorted(keys)


def _blocks(conn: Connection, cell: Any, attempt: int, rank: int, done: Checked) -> Iterator[Parts]:
    """The records of a source, sheet by sheet and block by block."""
    x = t.sheet.c
    this = (x.run_id == cell.run_id, x.tenant == cell.tenant, x.attempt == attempt, x.rank == rank)
    query = sa.select(t.sheet).where(*this, x.step0 == cell.step0).order_by(x.site_min)
    for row in conn.execute(query).all():
        done.num_blocks += 1
        yield sheets.decode([row], blocks.ALL_FIELDS, check=True)
    b, s = t.block.c, t.site.c
    of_run = (b.run_id == cell.run_id, b.tenant == cell.tenant)
    sites = (
        conn.execute(sa.select(s.site).where(s.run_id == cell.run_id, s.tenant == cell.tenant).order_by(s.site))
        .scalars()
        .all()
    )
    columns = (b.attempt, b.rank, b.site, b.step0, b.num_records, b.body, b.front_bytes)
    for start in range(0, len(sites), 256):
        source = (b.attempt == attempt, b.rank == rank, b.site.in_(sites[start : start + 256]), b.step0 == cell.step0)
        rows = conn.execute(sa.select(*columns).where(*of_run, *source, b.front_bytes > 0).order_by(b.site)).all()
        done.num_blocks += len(rows)
        if rows:
            yield blocks.decode(rows, blocks.ALL_FIELDS, check=True)
