"""What helped against a cause: how the next run without it differs from the last one that had it.

Shapes:     an incident -> the two runs and the settings that differ, or None
Thread:     worker threads of the server

Only what somebody can set is named: what a run saved or counted follows from it. Where FP8 is not the cause no setting of
FP8 has helped: there the learning rate and the batch of the step are held against each other, and nothing else.
"""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from fp8watch_server.compare.fact_kinds import is_consequence
from fp8watch_server.db import schema as t
from fp8watch_server.pages import formatting
from fp8watch_server.pages.coverage import left_out
from fp8watch_server.store.incident_states import FIXED
from fp8watch_server.store.rows import IncidentRow

MAX_DIFFERENCES = 12
MAX_TIMES = 8
"""Of the newest runs with the cause, so many are asked what came after."""
MAX_ASKED = 64
"""Of the newest runs without it, so many are asked whether they prove something."""
OF_SESSION = ("recipe", "backend", "world_size")
LEFT_OUT = "left_out"
"""Fact of a session: which Linears stay in high precision, and why."""
AFTER_STEPS = 32
"""A run proves something when it came past the first incident of the cause, or so many steps past its first step."""
_STEM = re.compile(r"[^\s\d]*")


def what_helped(conn: Connection, incident: IncidentRow) -> dict[str, Any] | None:
    """Of the first later run that came as far and had it not; where the cause came back since, of the last time that it left.

    {id, name, left_fp8, again, after, broke_at, came_to, fixed_by, here, differences: [(fact, before, after)], besides,
    num_more}. `left_fp8`: why the module that broke stayed in high precision there, "" where it did not, and `besides` are
    the differences without that; `again`: it came back since; `after` is the id of the last run with it before, `broke_at`
    its step there, `fixed_by` who closed it as fixed (None: nobody), and `here` what the facts are in the run of this
    incident. Runs of the same name come before others. A run of another job, one that did not come past the step at which
    it broke, or in which that place was neither looked at nor taken out of FP8, proves nothing; nor does one of a shared
    failure in which learning rate and batch were the same.
    """
    if not incident["cause_id"]:
        return None
    r, c = t.run.c, t.incident.c
    job = _same_job(conn, incident["run_id"])
    far = sa.case((c.last_step < c.first_step + AFTER_STEPS, c.last_step), else_=c.first_step + AFTER_STEPS)
    of_cause = (c.tenant == t.DEFAULT_TENANT, c.cause_id == incident["cause_id"])
    broke = sa.select(c.run_id, sa.func.min(c.first_step).label("broke_at"), sa.func.min(far).label("far"))
    hit = broke.where(*of_cause).group_by(c.run_id).subquery("hit")
    hits = conn.execute(
        sa.select(t.run, hit.c.broke_at, hit.c.far)
        .join(hit, hit.c.run_id == r.run_id)
        .where(r.tenant == t.DEFAULT_TENANT, job)
        .order_by(r.created_at.desc())
        .limit(MAX_TIMES)
    ).all()
    if not hits:
        return None
    # The newest run that proves something says after which of them it was gone: one question, however often it came.
    later = [r.tenant == t.DEFAULT_TENANT, r.last_step >= min(row.far for row in hits), job]
    later += [r.created_at > hits[-1].created_at, r.run_id.not_in(sa.select(hit.c.run_id))]
    asked = sa.select(r.run_id).where(*later).order_by(r.created_at.desc()).limit(MAX_ASKED).subquery("asked")
    where = [r.tenant == t.DEFAULT_TENANT, r.run_id.in_(sa.select(asked.c.run_id)), _proof(incident)]
    newest = conn.execute(sa.select(sa.func.max(r.created_at)).where(*where)).scalar()
    for k, last in enumerate(hits if newest is not None else ()):
        if last.created_at >= newest:
            continue
        until = [r.created_at < hits[k - 1].created_at] if k else []
        if clean := _next_without(conn, incident, last, [job, *until]):
            found = _differences(conn, last, clean, incident)
            if incident["verdict"] == "shared" and not found["differences"]:
                return None
            return {**found, "again": k > 0, "fixed_by": _closed_by(conn, incident, last.run_id)}
    return None


def _same_job(conn: Connection, run_id: str) -> sa.ColumnElement[bool]:
    """Runs whose names begin alike, up to the first digit or space: another model breaks elsewhere, or not at all."""
    r = t.run.c
    name = conn.execute(sa.select(r.name).where(r.run_id == run_id, r.tenant == t.DEFAULT_TENANT)).scalar() or ""
    found = _STEM.match(name)
    stem = found[0] if found else ""
    return r.name.startswith(stem, autoescape=True) if stem else r.name == name


def _closed_by(conn: Connection, incident: IncidentRow, run_id: str) -> str | None:
    """Who closed the cause as fixed in a run; "" where that was not said, None where nobody did."""
    c, e = t.incident.c, t.incident_event.c
    closed = conn.execute(
        sa.select(c.id, c.owner)
        .where(c.tenant == t.DEFAULT_TENANT, c.cause_id == incident["cause_id"])
        .where(c.run_id == run_id, c.closed_as == FIXED)
        .limit(1)
    ).first()
    if closed is None:
        return None
    events = sa.select(e.detail).where(e.incident_id == closed.id, e.kind == FIXED).order_by(e.at.desc()).limit(1)
    detail = conn.execute(events).scalar()
    return str((detail or {}).get("by") or closed.owner or "")


def _proof(incident: IncidentRow) -> sa.ColumnElement[bool]:
    """Runs in which that place was looked at, or kept out of FP8 where FP8 may have been the cause."""
    r, s, n = t.run.c, t.site.c, t.session.c
    place = incident["place"]
    looked = [s.run_id == r.run_id, s.tenant == r.tenant]
    looked += [s[name] == place[name] for name in ("module", "operand") if place.get(name)]
    proof: sa.ColumnElement[bool] = sa.exists().where(*looked)
    if _leaves_fp8(incident):
        of_run = (n.run_id == r.run_id, n.tenant == r.tenant, n.attempt == r.attempt)
        said = sa.literal("; ").concat(sa.type_coerce(n.facts, sa.JSON)["left_out"].as_string())
        proof = sa.or_(proof, sa.exists().where(*of_run, said.contains(f"; {place['module']} (", autoescape=True)))
    return proof


def _leaves_fp8(incident: IncidentRow) -> bool:
    """Whether a run in which the module stays in high precision says anything: what BF16 would do too goes on there, unseen."""
    return bool(incident["place"].get("module")) and incident["verdict"] != "shared"


def _next_without(conn: Connection, incident: IncidentRow, last: Any, where: list[sa.ColumnElement[bool]]) -> Any:
    """The run that proves something: it began after the last one with the cause, and before the next one with it."""
    r = t.run.c
    return conn.execute(
        sa.select(t.run)
        .where(r.tenant == t.DEFAULT_TENANT, r.created_at > last.created_at, r.last_step >= last.far)
        .where(_proof(incident), *where)
        .order_by(sa.case((r.name == last.name, 0), else_=1), r.created_at)
        .limit(1)
    ).first()


def _differences(conn: Connection, last: Any, clean: Any, incident: IncidentRow) -> dict[str, Any]:
    module, shared = incident["place"].get("module"), incident["verdict"] == "shared"
    read = _of_training if shared else _facts
    before = read(conn, last.run_id, last.broke_at)
    after, here = read(conn, clean.run_id, last.broke_at), read(conn, incident["run_id"], incident["first_step"])
    left = _why_left(after.get(LEFT_OUT), module) if module and _leaves_fp8(incident) else ""
    first = (LEFT_OUT, *OF_SESSION) if left else OF_SESSION
    other = before.get("recipe") != after.get("recipe")
    differ = [
        n for n in {*before, *after} if before.get(n) != after.get(n) and not is_consequence(n, other_recipe=other)
    ]
    if shared:  # what one of them did not log says nothing
        differ = [n for n in differ if n in before and n in after]
    names = sorted(differ, key=lambda name: _rank(name, first))
    told = [(name, _said(before.get(name)), _said(after.get(name))) for name in names[:MAX_DIFFERENCES]]
    return {
        "id": clean.run_id,
        "name": clean.name,
        "left_fp8": left,
        "after": last.run_id,
        "broke_at": last.broke_at,
        "came_to": clean.last_step,
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
    return "not set" if value in (None, "") else formatting.cut(value)


def _of_training(conn: Connection, run_id: str, step: int) -> dict[str, Any]:
    """Learning rate and batch of a step, by name, where they were logged."""
    c = t.scalar.c
    row = conn.execute(
        sa.select(c.lr, c.lr_class, c.batch_id)
        .where(c.run_id == run_id, c.tenant == t.DEFAULT_TENANT, c.step == step)
        .order_by(c.attempt.desc(), c.rank)
        .limit(1)
    ).first()
    if row is None:
        return {}
    found = {"learning rate": formatting.number(row.lr)} if row.lr_class == 0 else {}
    return {**found, **({"batch": row.batch_id} if row.batch_id else {})}


def _facts(conn: Connection, run_id: str, step: int) -> dict[str, Any]:
    """What the newest session of a run said at attach."""
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
