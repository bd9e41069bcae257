"""`fp8watch replay RUN`: the engine again over what is stored, with other thresholds; changes nothing.

Shapes:     batches of a run, as the ranks took turns -> incidents in a database in memory
Thread:     main

Read are blocks, and bodies that are still as they came. Steps of which retention has left only the roll-up over ranks,
or less, are not replayed; the command says how many those are.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.pool import StaticPool

from fp8watch_server.db import schema as t
from fp8watch_server.detect.engine import DetectionEngine
from fp8watch_server.detect.finding import facts_of
from fp8watch_server.detect.rules import RulesError, load_rules
from fp8watch_server.detect.sessions import sessions_of
from fp8watch_server.detect.thresholds import DEFAULTS, Thresholds
from fp8watch_server.pipeline.engine_restore import sites_of
from fp8watch_server.settings import Settings
from fp8watch_server.store import history
from fp8watch_server.store.command import opened, parser_of, run_command

TENANT = t.DEFAULT_TENANT
ALL_CAME_S = 86_400.0
DESCRIPTION = (
    "The engine again over what is stored, with other thresholds; changes nothing. Read are blocks, and bodies that are still as "
    "they came. Steps of which retention has left only the roll-up over ranks, or less, are not replayed; how many those are is said."
)


@dataclass(frozen=True)
class Replayed:
    """Incidents that would have been raised."""

    incidents: list[dict[str, Any]]
    num_batches: int
    first_step: int | None
    num_cells_left_out: int  # cells of 256 steps without the detail of any rank


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
    engine = DetectionEngine(sites, thresholds)
    s = t.session.c
    engine.add_sessions(sessions_of(conn.execute(sa.select(t.session).where(s.run_id == run_id, s.tenant == TENANT))))
    num_batches, first_step, after = 0, None, int(thresholds.close_after_steps)
    last: history.PastBatch | None = None
    for old in history.batches(conn, run_id, TENANT):
        num_batches, last = num_batches + 1, old
        if len(old.batch.steps):
            step = int(old.batch.steps["step"][0])
            first_step = step if first_step is None else min(first_step, step)
        found = engine.observe(old.batch, at=old.at)
        with scratch.begin() as made:
            where = (made, run_id, TENANT, old.attempt)
            fold(*where, found, sites, old.at, after_clean_steps=after)
            if engine.delivered_step is not None:
                close_quiet(*where, engine.delivered_step, old.at, after, engine.stride)
    if last is not None:  # nobody is waited for any more
        found = engine.tick(last.at + ALL_CAME_S)
        with scratch.begin() as made:
            fold(made, run_id, TENANT, last.attempt, found, sites, last.at, after_clean_steps=after)
    with scratch.begin() as made:
        got = [dict(r) for r in made.execute(sa.select(t.incident).order_by(t.incident.c.first_step)).mappings()]
    scratch.dispose()
    return Replayed(got, num_batches, first_step, history.num_without_detail(conn, run_id, TENANT))


def _say(text: object, to: TextIO | None = None) -> None:
    (to or sys.stdout).write(f"{text}\n")


def main(argv: list[str]) -> int:
    """Exit status 0: replayed. 1: no such run, or nothing of it is left. 2: usage."""
    parser = parser_of("replay", DESCRIPTION)
    parser.add_argument("run", help="run id")
    parser.add_argument("--rules", type=Path, help="a rules file instead of the defaults")
    return run_command("replay", parser, argv, _replay)


def _replay(args: Any, settings: Settings) -> int:
    c = t.incident.c
    try:
        thresholds = load_rules(args.rules).thresholds_for(args.run) if args.rules else DEFAULTS
    except (RulesError, OSError) as e:
        _say(e, sys.stderr)
        return 1
    with opened(settings) as database, database.connect() as conn:
        got = replay(conn, args.run, thresholds)
        raised = conn.execute(
            sa.select(c.first_step, c.last_step, c.severity, c.mode, c.title)
            .where(c.run_id == args.run, c.tenant == TENANT)
            .order_by(c.first_step)
        ).all()
    if not got.num_batches:
        _say(
            f"run {args.run!r}: no stored batches; give the id of a run whose ranks are still kept in detail",
            sys.stderr,
        )
        return 1
    _say(f"{got.num_batches} batches from step {got.first_step} on; {len(thresholds.changed())} thresholds changed")
    if got.num_cells_left_out:
        _say(f"{got.num_cells_left_out} × 256 steps are left out: of them the roll-up over ranks is kept, or less")
    _say("would be raised:")
    for i in got.incidents:
        _say(f"  {i['first_step']:>8} – {i['last_step']:<8} {i['severity']:<8} {i['mode']:<28} {i['title']}")
    _say("was raised:")
    for row in raised:
        _say(f"  {row.first_step:>8} – {row.last_step:<8} {row.severity:<8} {row.mode:<28} {row.title}")
    return 0
