"""What helped against a cause: how the next run without it differs from the last one that had it.

Shapes:     an incident -> the two runs and the facts that differ, or None
Thread:     worker threads of the server
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.pages import formatting
from fp8watch_server.pages.coverage import left_out
from fp8watch_server.store.rows import IncidentRow

MAX_DIFFERENCES = 12
MAX_TIMES = 8
"""Of the newest runs with the cause, so many are asked what came after."""
OF_SESSION = ("recipe", "backend", "world_size")
LEFT_OUT = "left_out"
"""Fact of a session: which Linears stay in high precision, and why."""
NOT_COMPARED = frozenset({"restart_count", "no_step_ended"})


def what_helped(conn: Connection, incident: IncidentRow) -> dict[str, Any] | None:
    """Of the first later run that came as far and had it not; where the cause came back since, of the last time that it left.

    {id, name, left_fp8, again, after, here, differences: [(fact, before, after)], besides, num_more}. `left_fp8`: why the module that broke
    stayed in high precision there, "" where it did not, and `besides` are the differences without that; `again`: it came back since; `after` is the id of the last run with it
    before, and `here` what the facts are in the run of this incident. Runs of the same name come before others. A run that did
    not come to the step at which it broke, or in which that place was neither looked at nor taken out of FP8, proves nothing.
    """
    if not incident["cause_id"]:
        return None
    r, c = t.run.c, t.incident.c
    hit = sa.select(c.run_id).where(c.tenant == t.DEFAULT_TENANT, c.cause_id == incident["cause_id"])
    hits = conn.execute(
        sa.select(t.run)
        .where(r.tenant == t.DEFAULT_TENANT, r.run_id.in_(hit))
        .order_by(r.created_at.desc())
        .limit(MAX_TIMES)
    ).all()
    if not hits:
        return None
    # The newest run that proves something says after which of them it was gone: one question, however often it came.
    between = (r.created_at > hits[-1].created_at, r.run_id.not_in([row.run_id for row in hits]))
    newest = conn.execute(sa.select(sa.func.max(r.created_at)).where(*_proves(incident), *between)).scalar()
    for k, last in enumerate(hits if newest is not None else ()):
        if last.created_at < newest:
            clean = _next_without(conn, incident, last, hits[k - 1].created_at if k else None)
            return clean and {**_differences(conn, last.run_id, clean, incident), "again": k > 0}
    return None


def _proves(incident: IncidentRow) -> list[sa.ColumnElement[bool]]:
    """Runs that came as far, and in which that place was looked at, or kept out of FP8 where FP8 may have been the cause."""
    r, s, n = t.run.c, t.site.c, t.session.c
    place = incident["place"]
    looked = [s.run_id == r.run_id, s.tenant == r.tenant]
    looked += [s[name] == place[name] for name in ("module", "operand") if place.get(name)]
    proof: sa.ColumnElement[bool] = sa.exists().where(*looked)
    if _leaves_fp8(incident):
        of_run = (n.run_id == r.run_id, n.tenant == r.tenant, n.attempt == r.attempt)
        said = sa.literal("; ").concat(sa.type_coerce(n.facts, sa.JSON)["left_out"].as_string())
        proof = sa.or_(proof, sa.exists().where(*of_run, said.contains(f"; {place['module']} (", autoescape=True)))
    return [r.tenant == t.DEFAULT_TENANT, r.last_step >= incident["first_step"], proof]


def _leaves_fp8(incident: IncidentRow) -> bool:
    """Whether a run in which the module stays in high precision says anything: what BF16 would do too goes on there, unseen."""
    return bool(incident["place"].get("module")) and incident["verdict"] != "shared"


def _next_without(conn: Connection, incident: IncidentRow, last: Any, until: float | None) -> Any:
    """The run that proves something: it began after the last one with the cause, and before the next one with it."""
    r = t.run.c
    where = [] if until is None else [r.created_at < until]
    return conn.execute(
        sa.select(t.run)
        .where(r.created_at > last.created_at, *_proves(incident), *where)
        .order_by(sa.case((r.name == last.name, 0), else_=1), r.created_at)
        .limit(1)
    ).first()


def _differences(conn: Connection, last: str, clean: Any, incident: IncidentRow) -> dict[str, Any]:
    before, after, here = (_facts(conn, run_id) for run_id in (last, clean.run_id, incident["run_id"]))
    module = incident["place"].get("module")
    left = _why_left(after.get(LEFT_OUT), module) if module and _leaves_fp8(incident) else ""
    first = (LEFT_OUT, *OF_SESSION) if left else OF_SESSION
    differ = [n for n in {*before, *after} if before.get(n) != after.get(n) and n not in NOT_COMPARED]
    names = sorted(differ, key=lambda name: _rank(name, first))
    told = [(name, _said(before.get(name)), _said(after.get(name))) for name in names[:MAX_DIFFERENCES]]
    return {
        "id": clean.run_id,
        "name": clean.name,
        "left_fp8": left,
        "after": last,
        "here": {name: _said(here.get(name)) for name, _, _ in told},
        "differences": told,
        "besides": [d for d in told if not (left and d[0] == LEFT_OUT)],
        "num_more": max(0, len(names) - len(told)),
    }


def _why_left(said: object, module: str) -> str:
    """Why attach left a module in high precision; "" where it is not among those that did."""
    if f"; {module} (" not in f"; {said}":
        return ""
    return dict(left_out(said)).get(module) or "for a reason that was cut off"


def _rank(fact: str, first: tuple[str, ...]) -> tuple[int, str]:
    """What was chosen comes before what follows from it."""
    return (first.index(fact) if fact in first else len(first)), fact


def _said(value: object) -> str:
    return formatting.ABSENT if value in (None, "") else formatting.cut(value)


def _facts(conn: Connection, run_id: str) -> dict[str, Any]:
    s = t.session.c
    row = conn.execute(
        sa.select(t.session)
        .where(s.run_id == run_id, s.tenant == t.DEFAULT_TENANT)
        .order_by(s.attempt.desc(), s.rank)
        .limit(1)
    ).first()
    if row is None:
        return {}
    return {**(row.facts or {}), **(row.versions or {}), **{name: row._mapping[name] for name in OF_SESSION}}
