"""A fence around a run in a PostgreSQL: while it stands, nobody but the mover changes a row of the run.

Shapes:     Engine, run id -> triggers on all tables of runs
Thread:     `fp8watch shards move` raises and takes down; whoever writes meets it as FENCED

Making a trigger waits for the transactions that have written to its table, and what comes later is refused by the database
itself, so that nothing is written to the old copy of a run by anybody: not by a collector that hung meanwhile, nor by one of
another version.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import for_writing

FENCED = "ZF801"
"""SQLSTATE of what the fence refuses: of no class that drivers take for a lost connection."""
LOCK_MS = 300
"""How long others wait behind a trigger that waits for its table."""
PATIENCE_S = 60.0
PREFIX, HASH_CHARS = "fp8watch_moves_", 24
"""Of the names of triggers: each has a part of the SHA-256 of its run's id."""

_FUNCTION = f"""
CREATE OR REPLACE FUNCTION fp8watch_run_moves() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('fp8watch.mover', true) = 'on' THEN
        IF TG_OP = 'DELETE' THEN RETURN OLD; END IF;
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'the run is being moved to another shard' USING ERRCODE = '{FENCED}';
END $$
"""


class RunHasMoved(Exception):
    """The run lies on another shard by now, `to`."""

    def __init__(self, to: str) -> None:
        super().__init__("the run has been moved to another shard")
        self.to = to


def is_fenced(e: BaseException | None) -> bool:
    """Whether the database has refused this because its run is being moved."""
    return isinstance(e, DBAPIError) and getattr(e.orig, "sqlstate", None) == FENCED


def lost_its_run(e: BaseException) -> bool:
    """Whether a run is being moved, or is gone from this database."""
    return is_fenced(e) or isinstance(e, IntegrityError)


def tables_of_runs() -> list[sa.Table]:
    """All tables whose rows belong to a run and move with it, parents first."""
    elsewhere = {t.shard_of_run, t.moved_run, t.silence}
    return [table for table in t.metadata.sorted_tables if "run_id" in table.c and table not in elsewhere]


def moved_to(conn: Connection, run_id: str, tenant: str = t.DEFAULT_TENANT) -> str | None:
    """Where a run has gone that lay in this database; None: it was never moved away."""
    c = t.moved_run.c
    found = conn.execute(sa.select(c.moved_to).where(c.run_id == run_id, c.tenant == tenant)).scalar()
    return None if found is None else str(found)


class unfenced(FunctionElement[bool]):
    """Condition on a column of run ids: no fence stands around the notices of that run. True on SQLite."""

    name = "unfenced"
    type = sa.Boolean()
    inherit_cache = True


@compiles(unfenced)
def _no_fences(element: unfenced, compiler: Any, **kw: Any) -> str:
    return "1 = 1"


@compiles(unfenced, "postgresql")
def _no_fence_around(element: unfenced, compiler: Any, **kw: Any) -> str:
    run_id = compiler.process(element.clauses, **kw)
    return (
        f"left(encode(sha256(convert_to({run_id}, 'UTF8')), 'hex'), {HASH_CHARS}) NOT IN (SELECT substr(tgname::text, "
        f"{len(PREFIX) + 1}, {HASH_CHARS}) FROM pg_trigger WHERE tgrelid = to_regclass('outbox') "
        f"AND left(tgname::text, {len(PREFIX)}) = '{PREFIX}')"
    )


def raise_fence(engine: Engine, run_id: str) -> None:
    """Let nobody change the run. Returns when all that was under way has ended.

    Raises:
        OperationalError: a table stays busy for PATIENCE_S.
    """
    with for_writing(engine).begin() as conn:
        conn.exec_driver_sql("SELECT pg_advisory_xact_lock(0x66703872)")  # two that replace a function at once fail
        conn.exec_driver_sql(_FUNCTION)
    for table in tables_of_runs():
        _briefly(engine, partial(_guard, table, run_id))


def take_down(engine: Engine, run_id: str) -> None:
    """Take the fence away, or what there is of it."""
    for table in tables_of_runs():
        with for_writing(engine).begin() as conn:
            there = conn.execute(
                sa.text("SELECT 1 FROM pg_trigger WHERE tgrelid = to_regclass(:of) AND tgname = ANY(:names)"),
                {"of": table.name, "names": list(_names(run_id))},
            ).first()
        if there is not None:
            _briefly(engine, partial(_open, table, run_id))


def _names(run_id: str) -> tuple[str, str]:
    of_run = hashlib.sha256(run_id.encode()).hexdigest()[:HASH_CHARS]
    return f"{PREFIX}{of_run}_w", f"{PREFIX}{of_run}_d"


def _guard(table: sa.Table, run_id: str, conn: Connection) -> None:
    from psycopg import sql  # fences stand on PostgreSQL only

    session: Any = conn.connection.driver_connection
    quoted = sql.Literal(run_id).as_string(session).replace("%", "%%")
    for name, of, row in zip(_names(run_id), ("INSERT OR UPDATE", "DELETE"), ("NEW", "OLD"), strict=True):
        conn.exec_driver_sql(
            f'CREATE OR REPLACE TRIGGER {name} BEFORE {of} ON "{table.name}" FOR EACH ROW '
            f"WHEN ({row}.run_id = {quoted}) EXECUTE FUNCTION fp8watch_run_moves()"
        )


def _open(table: sa.Table, run_id: str, conn: Connection) -> None:
    for name in _names(run_id):
        conn.exec_driver_sql(f'DROP TRIGGER IF EXISTS {name} ON "{table.name}"')


def _briefly(engine: Engine, work: Callable[[Connection], None]) -> None:
    """In a transaction of one table, so that locks of two can never wait for each other; again while others hold it."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            with for_writing(engine).begin() as conn:
                conn.exec_driver_sql(f"SET LOCAL lock_timeout = {LOCK_MS}")
                work(conn)
            return
        except OperationalError as e:
            if getattr(e.orig, "sqlstate", None) not in ("55P03", "40P01") or time.monotonic() > until:
                raise
            time.sleep(0.1)
