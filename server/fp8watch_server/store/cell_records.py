"""Records of some sources of a cell in the database: sheets, blocks of earlier collectors, arrays for SQL.

Shapes:     (attempt, rank) of a cell <-> Parts, sorted by source, site and step
Thread:     compactor; the detect worker reads
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert
from fp8watch_server.store import blocks, sheets
from fp8watch_server.store.records import Parts, complete, join

SITES_AT_ONCE = 512


def joined(old: Parts, new: Parts) -> Parts:
    """Both, with defaults where one has no such column."""
    names = list(dict.fromkeys([*old.columns, *new.columns]))
    return join([complete(p, names) for p in (old, new) if len(p)], names)


def read_records(
    conn: Connection,
    run_id: str,
    tenant: str,
    keys: Sequence[tuple[int, int]],
    step0: int,
    sites: Sequence[int] | None = None,
    *,
    old: bool = True,
) -> Parts:
    """All columns that some sources of a cell have, of some sites or of all, sorted by source, site and step.

    Without `old` blocks of earlier collectors are not looked for.
    """
    rolled = any(key[1] == t.ROLLED_RANK for key in keys)
    names = blocks.ROLLED_FIELDS if rolled else blocks.ALL_FIELDS
    x = t.sheet.c
    where = [x.run_id == run_id, x.tenant == tenant, of_keys(x, keys), x.step0 == step0]
    if sites is not None:
        where += [x.site_min <= max(sites), x.site_max >= min(sites)]
    columns = (x.attempt, x.rank, x.step0, x.num_records, x.body, x.histograms)
    rows = conn.execute(sa.select(*columns).where(*where).order_by(x.attempt, x.rank, x.site_min)).all()
    found = sheets.decode(rows, names, sites=sites, absent=False)
    if not old:
        return found
    before = _blocks(conn, (run_id, tenant), keys, step0, sites)
    if not before:
        return found
    both = joined(blocks.decode(before, names, absent=False), found)
    return both.take(np.lexsort((both.step, both.site, both.rank, both.attempt)))


def _blocks(
    conn: Connection,
    of_run: tuple[str, str],
    keys: Sequence[tuple[int, int]],
    step0: int,
    sites: Sequence[int] | None,
) -> list[Any]:
    """Packed blocks by complete keys, looked up one by one, to avoid scanning the run's other blocks."""
    b, s = t.block.c, t.site.c
    if sites is None:
        query = sa.select(s.site).where(s.run_id == of_run[0], s.tenant == of_run[1])
        sites = list(conn.execute(query.order_by(s.site)).scalars())
    found: list[Any] = []
    for start in range(0, len(sites), SITES_AT_ONCE):
        found += conn.execute(
            sa.select(b.attempt, b.rank, b.site, b.step0, b.num_records, b.body, b.front_bytes).where(
                b.run_id == of_run[0],
                b.tenant == of_run[1],
                of_keys(b, keys),
                b.site.in_(sites[start : start + SITES_AT_ONCE]),
                b.step0 == step0,
                b.front_bytes > 0,
            )
        ).all()
    return found


def of_keys(c: Any, keys: Sequence[tuple[int, int]]) -> sa.ColumnElement[bool]:
    """Rows of some (attempt, rank). A term an attempt, for SQLite refuses more than a thousand; both lists apart, for its index."""
    ranks: dict[int, list[int]] = {}
    for attempt, rank in keys:
        ranks.setdefault(attempt, []).append(rank)
    terms = [sa.and_(c.attempt == attempt, c.rank.in_(some)) for attempt, some in ranks.items()]
    if len(terms) == 1:
        return terms[0]
    return sa.and_(c.attempt.in_(list(ranks)), c.rank.in_(sorted({rank for _, rank in keys})), sa.or_(*terms))


def size_of(encoded: Sequence[dict[str, Any]]) -> int:
    """Bytes of sheets, without the database's overhead."""
    return sum(len(row["body"]) + len(row["histograms"]) for row in encoded)


def bytes_of(conn: Connection, run_id: str, tenant: str, keys: Iterable[tuple[int, int]], step0: int) -> int:
    """Bytes of the sheets of some sources of a cell that are in the database, as `size_of` counts them."""
    x = t.sheet.c
    size = sa.func.sum(sa.func.length(x.body) + sa.func.length(x.histograms))
    num = 0
    for attempt, rank in keys:
        source = (x.run_id == run_id, x.tenant == tenant, x.attempt == attempt, x.rank == rank)
        num += int(conn.execute(sa.select(size).where(*source, x.step0 == step0)).scalar() or 0)
    return num


def put_records(
    conn: Connection,
    run_id: str,
    tenant: str,
    key: tuple[int, int],
    encoded: Sequence[dict[str, Any]],
    for_sql: Sequence[dict[str, Any]],
) -> None:
    """Insert or replace sheets of a source, and the arrays that SQL reads."""
    fixed = {"run_id": run_id, "tenant": tenant, "attempt": key[0], "rank": key[1]}
    upsert(conn, t.sheet, [{**fixed, **row} for row in encoded])
    arrays = [name for name in (for_sql[0] if for_sql else ()) if name not in ("body", "front_bytes")]
    upsert(conn, t.block, [{**fixed, **row} for row in for_sql], update=arrays)  # bytes of an earlier collector stay


def num_records_of(conn: Connection, run_id: str, tenant: str, keys: Iterable[tuple[int, int]], step0: int) -> int:
    """Number of the records of some sources of a cell in sheets, and in blocks of earlier collectors."""
    x, num = t.sheet.c, 0
    for key in keys:
        source = (x.run_id == run_id, x.tenant == tenant, x.attempt == key[0], x.rank == key[1])
        num += int(conn.execute(sa.select(sa.func.sum(x.num_records)).where(*source, x.step0 == step0)).scalar() or 0)
        num += sum(row.num_records for row in _blocks(conn, (run_id, tenant), [key], step0, None))
    return num


def rename_records(
    conn: Connection, run_id: str, tenant: str, key: tuple[int, int], into: tuple[int, int], step0: int
) -> None:
    """Give the sheets of a source in a cell, and its blocks, the key of another source that has none."""
    new = {"attempt": into[0], "rank": into[1]}
    x, b, s = t.sheet.c, t.block.c, t.site.c
    this = (x.run_id == run_id, x.tenant == tenant, x.attempt == key[0], x.rank == key[1], x.step0 == step0)
    conn.execute(sa.update(t.sheet).where(*this).values(new))
    source = (b.run_id == run_id, b.tenant == tenant, b.attempt == key[0], b.rank == key[1], b.step0 == step0)
    sites = list(conn.execute(sa.select(s.site).where(s.run_id == run_id, s.tenant == tenant)).scalars())
    for start in range(0, len(sites), SITES_AT_ONCE):
        conn.execute(sa.update(t.block).where(*source, b.site.in_(sites[start : start + SITES_AT_ONCE])).values(new))


def drop_records(
    conn: Connection, run_id: str, tenant: str, key: tuple[int, int], step0: int, sites: Sequence[int]
) -> None:
    """Delete all sheets of a source in a cell, and its blocks of some sites, looked up by complete keys."""
    x, b = t.sheet.c, t.block.c
    this = (x.run_id == run_id, x.tenant == tenant, x.attempt == key[0], x.rank == key[1], x.step0 == step0)
    conn.execute(sa.delete(t.sheet).where(*this))
    source = (b.run_id == run_id, b.tenant == tenant, b.attempt == key[0], b.rank == key[1])
    for start in range(0, len(sites), SITES_AT_ONCE):
        part = sites[start : start + SITES_AT_ONCE]
        conn.execute(sa.delete(t.block).where(*source, b.site.in_(part), b.step0 == step0))
