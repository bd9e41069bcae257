"""`fp8watch replay RUN`: the engine again over what is stored, with other thresholds; changes nothing.

Upstream:   fp8watch_server.store.hot        Downstream: fp8watch_server.detect.engine, fp8watch_server.incidents.fold
Shapes:     hot_batch rows of a run, in the order of their commit -> incidents in a database in memory
Thread:     main

Read are the bodies that are still as they came. Steps that have been compacted away are not replayed; the command
says from which step on it could.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.pool import StaticPool

from fp8watch_server.rebuild import sites_of
from fp8watch_server.settings import default_database_url
from fp8watch_server.store import hot
from fp8watch_server.store import schema as t
from fp8watch_server.store.dialect import DatabaseUrlError, engine_of

from .engine import Engine
from .finding import facts_of
from .rules import RulesError, load_rules
from .sessions import sessions_of
from .thresholds import DEFAULTS, Thresholds

TENANT = t.DEFAULT_TENANT


@dataclass(frozen=True)
class Replayed:
    """What would have been raised."""

    incidents: list[dict[str, Any]]
    num_batches: int
    first_step: int | None


def replay(conn: Connection, run_id: str, thresholds: Thresholds = DEFAULTS) -> Replayed:
    """Run the engine over the stored batches of a run.

    Args:
        conn: of the collector's database; only read.
        run_id: the run.
        thresholds: instead of the collector's.
    """
    from fp8watch_server.incidents.fold import close_quiet, fold

    scratch = sa.create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
    t.metadata.create_all(scratch)
    with scratch.begin() as made:
        made.execute(sa.insert(t.run).values(run_id=run_id, tenant=TENANT, name="", created_at=0.0, last_seen_at=0.0))
    registered: list[Any] = sites_of(conn, run_id, TENANT)
    sites = facts_of(registered)
    engine = Engine(sites, thresholds)
    s, b = t.session.c, t.hot_batch.c
    engine.add_sessions(sessions_of(conn.execute(sa.select(t.session).where(s.run_id == run_id, s.tenant == TENANT))))
    rows = conn.execute(
        sa.select(b.run_id, b.tenant, b.session, b.rank, b.seq, b.attempt, b.received_at, b.step_min)
        .where(b.run_id == run_id, b.tenant == TENANT)
        .order_by(b.arrival)
    ).all()
    for row in rows:
        batch = hot.load(conn, row)
        if batch is None:
            continue
        found = engine.observe(batch, at=row.received_at)
        with scratch.begin() as made:
            where = (made, run_id, TENANT, row.attempt)
            fold(*where, found, sites, row.received_at)
            if engine.settled_step is not None:
                close_quiet(*where, engine.settled_step, row.received_at, stride=engine.stride)
    with scratch.begin() as made:
        got = [dict(r) for r in made.execute(sa.select(t.incident).order_by(t.incident.c.first_step)).mappings()]
    scratch.dispose()
    steps = [row.step_min for row in rows if row.step_min is not None]
    return Replayed(got, len(rows), min(steps) if steps else None)


def _say(text: object, to: TextIO | None = None) -> None:
    (to or sys.stdout).write(f"{text}\n")


def main(argv: list[str]) -> int:
    """Exit status 0: replayed. 1: no such run, or nothing of it is left. 2: usage."""
    parser = argparse.ArgumentParser(prog="fp8watch replay", description=__doc__)
    parser.add_argument("run", help="run id")
    parser.add_argument("--rules", type=Path, help="a rules file instead of the defaults")
    parser.add_argument("--database-url", default=None, help="default: that of `fp8watch serve`")
    args = parser.parse_args(argv)
    c = t.incident.c
    try:
        thresholds = load_rules(args.rules).thresholds_for(args.run) if args.rules else DEFAULTS
        with engine_of(args.database_url or default_database_url()) as database, database.connect() as conn:
            got = replay(conn, args.run, thresholds)
            raised = conn.execute(
                sa.select(c.first_step, c.last_step, c.severity, c.mode, c.title)
                .where(c.run_id == args.run, c.tenant == TENANT)
                .order_by(c.first_step)
            ).all()
    except (RulesError, DatabaseUrlError, OSError) as e:
        _say(e, sys.stderr)
        return 1
    if not got.num_batches:
        _say(f"run {args.run!r}: no stored batches; give the id of a run that was compacted not yet", sys.stderr)
        return 1
    _say(f"{got.num_batches} batches from step {got.first_step} on; {len(thresholds.changed())} thresholds changed")
    _say("would be raised:")
    for i in got.incidents:
        _say(f"  {i['first_step']:>8} – {i['last_step']:<8} {i['severity']:<8} {i['mode']:<28} {i['title']}")
    _say("was raised:")
    for row in raised:
        _say(f"  {row.first_step:>8} – {row.last_step:<8} {row.severity:<8} {row.mode:<28} {row.title}")
    return 0
