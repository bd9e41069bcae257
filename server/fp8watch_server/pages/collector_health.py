"""The collector's own health: what waits, what failed, what was refused, what was not told.

Shapes:     tables and counters -> rows of the page /collector
Thread:     worker threads of the server
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from fp8watch_agent.version import __version__
from fp8watch_server.db import migrations
from fp8watch_server.db import schema as t
from fp8watch_server.db.shards import Shards
from fp8watch_server.ingest.ingest_stats import IngestStats

LATE_S = 10.0
"""A batch that the detectors have not seen for so long waits too long."""
MAX_ROWS = 20


def health(
    conns: Sequence[Connection], stats: IngestStats, now: float | None = None, *, away: Sequence[str] = ()
) -> dict[str, Any]:
    """{problems: sentences, calm: what is said where there are none, facts: [(name, value, explanation)], failed, dead, outcomes}.

    Args:
        conns: connections to the databases that answer, home first.
        away: names of the shards that do not.
    """
    now = time.time() if now is None else now
    b, o = t.hot_batch.c, t.outbox.c

    def total(query: sa.Select[Any]) -> int:
        return sum(int(conn.execute(query).scalar_one()) for conn in conns)

    def newest(query: sa.Select[Any], at: sa.Column[Any]) -> list[Any]:
        rows = [row for conn in conns for row in conn.execute(query.order_by(at.desc()).limit(MAX_ROWS)).mappings()]
        return sorted(rows, key=lambda row: -row[at.name])[:MAX_ROWS]

    pending, broken = b.detected == t.BATCH_PENDING, b.detected == t.BATCH_FAILED
    waiting = total(sa.select(sa.func.count()).where(pending))
    oldest = [conn.execute(sa.select(sa.func.min(b.received_at)).where(pending)).scalar() for conn in conns]
    num_failed = total(sa.select(sa.func.count()).where(broken))
    of_batch = (b.run_id, b.rank, b.step_min, b.detect_error, b.received_at)
    failed = newest(sa.select(*of_batch).where(broken), b.received_at)
    states = Counter[str]()
    for conn in conns:
        for state, num in conn.execute(sa.select(o.state, sa.func.count()).group_by(o.state)):
            states[state] += int(num)
    of_message = (o.run_id, o.incident_id, o.channel, o.last_error, o.created_at)
    dead = newest(sa.select(*of_message).where(o.state == "dead"), o.created_at)
    late = max([0.0, *(now - at for at in oldest if at is not None)])
    problems = []
    if late > LATE_S:
        problems.append(f"{waiting} batches wait for the detectors, the oldest for {late:.0f} s: alerts come late.")
    if num_failed:
        problems.append(f"The detectors broke on {num_failed} batches: what was in them raised nothing.")
    if states.get("dead"):
        problems.append(f"{states['dead']} messages could not be delivered, and are not tried again.")
    problems += [
        f"Shard {name} does not answer: its runs are refused, and what happens to them is not seen." for name in away
    ]
    runs, conn = total(sa.select(sa.func.count()).select_from(t.run)), conns[0]
    facts = [
        ("Version", __version__, "of this collector"),
        ("Database", conn.dialect.name, f"at revision {migrations.head()}"),
        ("Database size", _size(conn), ""),
        ("Runs", runs, ""),
        ("Batches waiting", waiting, "committed, and not seen by the detectors yet"),
        ("Messages waiting", states.get("pending", 0) + states.get("leased", 0), "in the outbox"),
        ("In memory", f"{stats.inflight_bytes / 1024:.0f} KiB", "bodies that are being taken in"),
        ("Taken in", f"{stats.num_bytes / (1 << 20):.1f} MiB", "since this process started"),
    ]
    outcomes = sorted(stats.outcomes.items())
    seen = f"{waiting} batches wait, none for longer than {LATE_S:.0f} s" if waiting else "Every batch was looked at"
    return {
        "calm": f"{seen}, and every message was delivered or waits for its turn.",
        "problems": problems,
        "facts": facts,
        "failed": failed,
        "dead": dead,
        "outcomes": outcomes,
    }


def of_shards(shards: Shards) -> list[dict[str, Any]]:
    """{name, num_runs: placed on it, waiting: batches, None where it is away} of each shard."""
    if not shards.others:
        return []
    num_runs, out = shards.directory.num_runs(), []
    b = t.hot_batch.c
    query = sa.select(sa.func.count()).where(b.detected == t.BATCH_PENDING)
    for name in shards.others:
        try:
            with shards.named(name).connect() as conn:
                waiting = int(conn.execute(query).scalar_one())
        except sa.exc.SQLAlchemyError:
            waiting = None
        out.append({"name": name, "num_runs": num_runs.get(name, 0), "waiting": waiting})
    return out


def _size(conn: Connection) -> str:
    if conn.dialect.name == "postgresql":
        return str(conn.execute(sa.text("SELECT pg_size_pretty(pg_database_size(current_database()))")).scalar())
    path = conn.engine.url.database
    try:
        return f"{Path(str(path)).stat().st_size / (1 << 20):.1f} MiB"
    except OSError:
        return "–"
