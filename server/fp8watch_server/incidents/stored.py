"""What the database knows of a run's incidents: those that findings may belong to, and those of before.

Shapes:     rows of incident and incident_event -> list[Open]
Thread:     detect worker, inside one write transaction
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from fp8watch_server.db import schema
from fp8watch_server.detect.finding import Finding
from fp8watch_server.incidents.match import Open


def load(conn: sa.Connection, run_id: str, tenant: str, attempt: int, status: sa.ColumnElement[bool]) -> list[Open]:
    """Incidents of an attempt that `status` selects, the earliest first; locked until the transaction ends."""
    t, e = schema.incident, schema.incident_event
    rows = conn.execute(
        sa.select(t)
        .where(t.c.run_id == run_id, t.c.tenant == tenant, t.c.attempt == attempt, status)
        .order_by(t.c.id)
        .with_for_update(key_share=True)  # what people do meanwhile comes after
    )
    found = sorted(rows.mappings(), key=lambda row: row["first_step"])
    told: dict[str, list[Any]] = {row["id"]: [] for row in found}
    columns = sa.select(e.c.incident_id, e.c.kind, e.c.detail, e.c.step)
    of_run = (e.c.run_id == run_id, e.c.tenant == tenant)
    theirs = columns.where(*of_run, e.c.incident_id.in_(list(told))).order_by(e.c.seq)
    for incident_id, *event in conn.execute(theirs) if told else ():
        told[incident_id].append(event)
    out = []
    for row in found:
        events = told[row["id"]]
        details = [detail for _, detail, _ in events]
        roots = [detail for detail in details if "flow" in detail]
        root = roots[-1] if roots else {}
        out.append(
            Open(
                row=dict(row),
                flow=int(root.get("flow", 0)),
                weight_born=bool(root.get("weight_born", False)),
                origin_rank=int(root.get("rank", 0)),
                kind=str(root.get("kind", "")),
                topic=root.get("topic"),
                earliest=root.get("earliest"),
                was_told=(row["mode"], row["verdict"]),
                opened=next((step for kind, _, step in events if kind == "opened"), None),
                stride=max((int(detail.get("stride", 1)) for detail in details), default=1),
                muted=frozenset(detail["muted"] for detail in details if "muted" in detail),
                names=frozenset(detail["scalar"] for detail in details if detail.get("scalar")),
                told_severity=row["severity"],
                num_events=len(events),
                ranks=frozenset(row["place"].get("ranks", ())),
            )
        )
    return out


def resolved_near(findings: Sequence[Finding], window_steps: int) -> sa.ColumnElement[bool]:
    """Selects the resolved incidents of which one may cover (`match.covering`) one of these findings: of its mode, and near its step."""
    t, steps = schema.incident.c, [finding.step for finding in findings]
    window = window_steps * max(int(finding.extra.get("stride", 1)) for finding in findings)
    of_mode = t.mode.in_({finding.mode for finding in findings})
    near = (t.first_step <= max(steps) + window, t.last_step >= min(steps) - window)
    return sa.and_(t.status == "resolved", of_mode, *near)


def was_resolved(conn: sa.Connection, run_id: str, tenant: str, attempt: int, finding: Finding) -> bool:
    """Whether an incident of its mode that began before it is resolved."""
    t = schema.incident
    return (
        conn.execute(
            sa.select(t.c.id)
            .where(
                t.c.run_id == run_id,
                t.c.tenant == tenant,
                t.c.attempt == attempt,
                t.c.mode == finding.mode,
                t.c.status == "resolved",
                t.c.first_step <= finding.step,
            )
            .limit(1)
        ).first()
        is not None
    )


def note_regression(conn: sa.Connection, incident: Open) -> None:
    """Note when the same failure at the same place was resolved before."""
    t, row = schema.incident, incident.row
    earlier = conn.execute(
        sa.select(t.c.id, t.c.attempt, t.c.first_step, t.c.last_step, t.c.place)
        .where(
            t.c.run_id == row["run_id"],
            t.c.tenant == row["tenant"],
            t.c.mode == row["mode"],
            t.c.status == "resolved",
        )
        .order_by(t.c.opened_at.desc())
        .limit(32)
    )
    for got in earlier:
        if all(got.place.get(name) == row["place"].get(name) for name in ("module", "operand", "expert")):
            where = "" if got.attempt == row["attempt"] else f" of attempt {got.attempt}"
            row["cause"] += f" It was here before: steps {got.first_step} to {got.last_step}{where}, resolved."
            kind, step, detail = incident.events[0]
            incident.events[0] = (kind, step, {**detail, "regression_of": got.id})
            return
