"""The copy of a run: into tables beside the real ones, then what has changed since, then into place at once.

Shapes:     rows of a run in one PostgreSQL -> the same rows in another
Thread:     `fp8watch shards move`

The target's collectors see nothing of the copy until it is whole: it lies in a schema of its own. What changed in the
source is found by the transaction that wrote each row (xmin), so that a pass reads keys and not bodies.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from typing import Any

import sqlalchemy as sa
from psycopg import sql
from sqlalchemy.engine import Connection, Engine

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import for_writing
from fp8watch_server.db.fence import tables_of_runs

BYTES_AT_ONCE = 1 << 20


class CopyDiffers(Exception):
    """The copy has other rows than the run: a defect, and nothing was switched."""


class StagedCopy:
    """A copy of a run on its way.

    Args:
        source: where it lies.
        target: where it goes.
        run_id: the run.
    """

    def __init__(self, source: Engine, target: Engine, run_id: str) -> None:
        self._source, self._target, self._run_id = source, target, run_id
        self._schema = "fp8watch_move_" + hashlib.sha256(run_id.encode()).hexdigest()[:24]
        self._horizon: int | None = None
        self._counts: dict[str, int] = {}
        self.num_rows = 0

    def clear(self) -> None:
        """Take away what an earlier try has left."""
        with for_writing(self._target).begin() as conn:
            conn.exec_driver_sql(f"DROP SCHEMA IF EXISTS {self._schema} CASCADE")

    def begin(self) -> None:
        """Make empty tables for it."""
        self.clear()
        with for_writing(self._target).begin() as conn:
            conn.exec_driver_sql(f"CREATE SCHEMA {self._schema}")
            for table in tables_of_runs():
                key = ", ".join(f'"{c.name}"' for c in table.primary_key)
                conn.exec_driver_sql(f'CREATE UNLOGGED TABLE {self._schema}."{table.name}" (LIKE "{table.name}")')
                conn.exec_driver_sql(f'ALTER TABLE {self._schema}."{table.name}" ADD PRIMARY KEY ({key})')

    def catch_up(self, *, last: bool = False) -> int:
        """Copy what has changed since the last pass; the first one copies all. Returns the number of rows.

        Args:
            last: the source changes no more: what was deleted there goes here, too.
        """
        num = 0
        with ExitStack() as stack:
            source = stack.enter_context(self._source.connect())  # one snapshot
            target = stack.enter_context(for_writing(self._target).begin())
            at = int(source.exec_driver_sql("SELECT pg_snapshot_xmin(pg_current_snapshot())::text").scalar_one())
            for table in tables_of_runs():
                num += self._changed(source, target, table)
                if last:
                    self._counts[table.name] = self._without_deleted(source, target, table)
        self._horizon = at
        self.num_rows += num
        return num

    def put_in_place(self, conn: Connection) -> None:
        """Insert the whole run, in the caller's transaction on the target.

        Raises:
            CopyDiffers: rows are missing, or too many.
        """
        conn.execute(sa.delete(t.moved_run).where(t.moved_run.c.run_id == self._run_id))
        for table in tables_of_runs():
            names = _names(table)
            conn.exec_driver_sql(
                f'INSERT INTO "{table.name}" ({names}) SELECT {names} FROM {self._schema}."{table.name}"'
            )
            found = conn.execute(sa.select(sa.func.count()).where(table.c.run_id == self._run_id)).scalar_one()
            if found != self._counts[table.name]:
                raise CopyDiffers(f"{table.name}: {found} rows of {self._counts[table.name]}")
        conn.exec_driver_sql(f"DROP SCHEMA {self._schema} CASCADE")

    def _changed(self, source: Connection, target: Connection, table: sa.Table) -> int:
        where = sql.SQL("run_id = {}").format(sql.Literal(self._run_id))
        if self._horizon is not None:
            where += sql.SQL(" AND (xmin::text::bigint - {} + 4294967296) % 4294967296 < 2147483648").format(
                sql.Literal(self._horizon % (1 << 32))
            )
        names = sql.SQL(_names(table))
        what = sql.SQL("SELECT {} FROM {} WHERE {}").format(names, sql.Identifier(table.name), where)
        into = sql.Identifier(self._schema, table.name)
        if self._horizon is None:
            return _copy(source, target, what, into, names)
        target.exec_driver_sql(f'CREATE TEMP TABLE fresh (LIKE "{table.name}") ON COMMIT DROP')
        num = _copy(source, target, what, sql.Identifier("fresh"), names)
        key = {c.name for c in table.primary_key}
        rest = ", ".join(f'"{c.name}" = EXCLUDED."{c.name}"' for c in table.c if c.name not in key)
        then = f"UPDATE SET {rest}" if rest else "NOTHING"
        of_key = ", ".join(f'"{name}"' for name in key)
        target.exec_driver_sql(
            f'INSERT INTO {self._schema}."{table.name}" SELECT * FROM fresh ON CONFLICT ({of_key}) DO {then}'
        )
        target.exec_driver_sql("DROP TABLE fresh")
        return num

    def _without_deleted(self, source: Connection, target: Connection, table: sa.Table) -> int:
        """Delete what the source has no more; returns how many rows it has."""
        of_run = sa.select(sa.func.count()).where(table.c.run_id == self._run_id)
        wanted = int(source.execute(of_run).scalar_one())
        staged = f'{self._schema}."{table.name}"'
        if wanted != target.exec_driver_sql(f"SELECT count(*) FROM {staged}").scalar_one():
            key = ", ".join(f'"{c.name}"' for c in table.primary_key)
            what = sql.SQL("SELECT {} FROM {} WHERE run_id = {}").format(
                sql.SQL(key), sql.Identifier(table.name), sql.Literal(self._run_id)
            )
            target.exec_driver_sql(f'CREATE TEMP TABLE kept ON COMMIT DROP AS SELECT {key} FROM "{table.name}" LIMIT 0')
            _copy(source, target, what, sql.Identifier("kept"), sql.SQL(key))
            same = " AND ".join(f'kept."{c.name}" = s."{c.name}"' for c in table.primary_key)
            target.exec_driver_sql(f"DELETE FROM {staged} s WHERE NOT EXISTS (SELECT 1 FROM kept WHERE {same})")
            target.exec_driver_sql("DROP TABLE kept")
        return wanted


def _names(table: sa.Table) -> str:
    return ", ".join(f'"{c.name}"' for c in table.c)


def _copy(source: Connection, target: Connection, what: Any, into: Any, names: Any) -> int:
    """Pass rows through as they are, in PostgreSQL's binary format; returns how many."""
    out = sql.SQL("COPY ({}) TO STDOUT (FORMAT BINARY)").format(what)
    back = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(into, names)
    reads: Any = source.connection.driver_connection
    writes: Any = target.connection.driver_connection
    with reads.cursor() as reader, writes.cursor() as writer:
        with reader.copy(out) as rows, writer.copy(back) as taken:
            for piece in rows:
                taken.write(piece)
        return int(writer.rowcount)
