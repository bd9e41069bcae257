"""`fp8watch rules`: what a rules file says, and which alarms people called false, so that thresholds are learned from them.

Thread:     main
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from fp8watch_agent.terminal.text import plain
from fp8watch_server.db import migrations, schema
from fp8watch_server.db.dialect import DatabaseUrlError, engine_of
from fp8watch_server.detect import command
from fp8watch_server.settings import SettingError, Settings
from fp8watch_server.store.incident_states import FALSE_ALARM

EXIT_USAGE = 2
MAX_EVIDENCE = 4


def main(argv: list[str]) -> int:
    """Exit status 0: done. 1: a rules file that cannot be used. 2: usage, or a database that cannot be read."""
    return command.main(argv, _false_alarms)


def _false_alarms(database_url: str | None, mode: str | None) -> int:
    try:
        settings = Settings.from_environ(database_url=database_url)
        with engine_of(settings.database_url, must_exist=True) as engine, engine.connect() as conn:
            if migrations.current(conn) != migrations.head():
                print(
                    "fp8watch rules: no database of this version is there; name it, or run fp8watch migrate",
                    file=sys.stderr,
                )
                return EXIT_USAGE
            rows = _rows(conn, mode)
    except (DatabaseUrlError, SettingError) as e:
        print(f"fp8watch rules: {e}", file=sys.stderr)
        return EXIT_USAGE
    except SQLAlchemyError as e:
        reason = str(getattr(e, "orig", None) or e).splitlines()[0]
        print(f"fp8watch rules: the database cannot be read ({reason}); check that it is there", file=sys.stderr)
        return EXIT_USAGE
    for row in rows:
        print(plain(_line(row)))
    counts = Counter(row["mode"] for row in rows)
    print(", ".join(f"{mode}: {n}" for mode, n in counts.most_common()) or "no incident was marked as a false alarm")
    return 0


def _rows(conn: sa.Connection, mode: str | None) -> list[dict[str, Any]]:
    c, r = schema.incident.c, schema.run.c
    query = (
        sa.select(schema.incident, r.name)
        .join(schema.run, sa.and_(r.run_id == c.run_id, r.tenant == c.tenant))
        .where(c.tenant == schema.DEFAULT_TENANT, c.closed_as == FALSE_ALARM)
        .order_by(c.mode, c.opened_at)
    )
    query = query if mode is None else query.where(c.mode == mode)
    return [dict(row) for row in conn.execute(query).mappings()]


def _line(row: dict[str, Any]) -> str:
    """Mode, run, step and place, then what was measured against what was usual: what a threshold is set between."""
    evidence = [
        f"{e['field']} {e.get('value')} ({'no baseline' if e.get('baseline') is None else 'usual ' + str(e['baseline'])})"
        for e in (row["evidence"] or [])[:MAX_EVIDENCE]
    ]
    where = (
        " ".join(str(row["place"].get(key)) for key in ("module", "operand") if row["place"].get(key)) or "whole run"
    )
    return (
        f"{row['mode']}  run {row['name']} ({row['run_id']})  step {row['first_step']}  {where}: {'; '.join(evidence)}"
    )
