"""SQL rows of incident and incident_event, shared by folding and auto-resolution.

Shapes:     a row of incident as a dict -> SQL
Thread:     detect worker, inside one write transaction
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from fp8watch_server.db import schema

Change = Literal["opened", "updated", "rerooted", "resolved"]


@dataclass(frozen=True)
class IncidentChange:
    """What a call did to one incident."""

    incident_id: str
    change: Change
    mode: str
    severity: str
    title: str
    step: int


def key_of(table: sa.Table, row: Mapping[str, Any]) -> list[sa.ColumnElement[bool]]:
    """Primary-key condition of an incident's row."""
    return [table.c.run_id == row["run_id"], table.c.tenant == row["tenant"], table.c.id == row["id"]]


def num_events(conn: sa.Connection, row: Mapping[str, Any]) -> int:
    """Number of incident_event rows of an incident."""
    e = schema.incident_event
    return int(
        conn.execute(
            sa.select(sa.func.coalesce(sa.func.max(e.c.seq), 0)).where(
                e.c.run_id == row["run_id"], e.c.tenant == row["tenant"], e.c.incident_id == row["id"]
            )
        ).scalar_one()
    )


def write_event(
    conn: sa.Connection, row: Mapping[str, Any], seq: int, kind: str, now: float, step: int, detail: dict[str, Any]
) -> None:
    """Append one row to the history of an incident."""
    conn.execute(
        sa.insert(schema.incident_event).values(
            run_id=row["run_id"],
            tenant=row["tenant"],
            incident_id=row["id"],
            seq=seq,
            kind=kind,
            at=now,
            step=step,
            detail=detail,
        )
    )


def change_of(row: Mapping[str, Any], change: Change) -> IncidentChange:
    """The change, for the caller."""
    return IncidentChange(
        incident_id=row["id"],
        change=change,
        mode=row["mode"],
        severity=row["severity"],
        title=row["title"],
        step=int(row["last_step"]),
    )
