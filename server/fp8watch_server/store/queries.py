"""Read queries for API and pages: plain functions that return plain dicts, each of a type of `store.rows`.

Upstream:   fp8watch_server.store.series
Downstream: fp8watch_server.api.routes, fp8watch_server.pages.routes
Shapes:     (Connection, …) -> dicts, or lists of them, that JSON can hold; `*_page` -> (list, cursor | None)
Thread:     query pool

Times are seconds since 1970, floats. Non-finite numbers are data: null with an entry in `nonfinite` in charts, the
strings "nan", "inf" and "-inf" inside an incident. An unknown id gives None.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import PROBE
from fp8watch_server.db import schema as t
from fp8watch_server.store import incident_states
from fp8watch_server.store.charts import heatmap, top
from fp8watch_server.store.fields import SERIES_FIELDS, FieldError
from fp8watch_server.store.hot_batches import MAX_STEP
from fp8watch_server.store.incident_states import state_of
from fp8watch_server.store.rows import (
    IncidentEvent,
    IncidentRow,
    IncidentWithEvents,
    RunRow,
    RunWithSessions,
    SessionRow,
    SilenceRow,
    SiteRow,
)
from fp8watch_server.store.series import histogram, newest, scalars, series, several_scalars, several_series
from fp8watch_server.store.tile_maps import kept_map, steps_available, tile_map

__all__ = [
    "MAX_STEP",
    "SERIES_FIELDS",
    "CursorError",
    "FieldError",
    "IncidentsOfRun",
    "as_incident",
    "as_runs",
    "encode_cursor",
    "heatmap",
    "histogram",
    "incident",
    "incidents",
    "incidents_of",
    "incidents_page",
    "kept_map",
    "newest",
    "run",
    "runs",
    "runs_page",
    "scalars",
    "series",
    "sessions_page",
    "several_scalars",
    "several_series",
    "silences",
    "sites",
    "steps_available",
    "tile_map",
    "top",
]

STALLED_AFTER_S = 90.0
DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
_HIDDEN = ("run_id", "tenant", "health_seq", "ledger_seq_max", "key_sha256")
_OF_INCIDENT = tuple(column.name for column in t.incident.columns if column.name != "tenant")


@dataclass(frozen=True)
class IncidentsOfRun:
    """The first incidents of a run, and how many there are."""

    first: list[IncidentRow]
    num_going_on: int
    """Open, acknowledged, or over and not seen."""
    num_over: int
    """Closed, or over and seen, or a notice that is over."""


class CursorError(ValueError):
    """A cursor that this collector did not issue."""


def encode_cursor(at: float, id_: str) -> str:
    """The cursor of the page after this place."""
    return base64.urlsafe_b64encode(msgspec.msgpack.encode([at, id_])).decode().rstrip("=")


def _decode_cursor(cursor: str) -> tuple[float, str]:
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return msgspec.msgpack.decode(raw, type=tuple[float, str])
    except (ValueError, msgspec.MsgspecError) as e:
        raise CursorError(f"cursor {cursor!r} was not made by this collector; take `next` of the page before") from e


def _page(
    conn: Connection, query: sa.Select[Any], at: sa.Column[Any], id_: sa.Column[Any], cursor: str | None, limit: int
) -> tuple[list[Any], str | None]:
    """Newest first, by (at, id)."""
    limit = min(max(limit, 1), MAX_LIMIT)
    if cursor is not None:
        before, last = _decode_cursor(cursor)
        query = query.where(sa.or_(at < before, sa.and_(at == before, id_ < last)))
    rows = list(conn.execute(query.order_by(at.desc(), id_.desc()).limit(limit + 1)))
    if len(rows) <= limit:
        return rows, None
    end = rows[limit - 1]._mapping
    return rows[:limit], encode_cursor(float(end[at]), str(end[id_]))


def runs(conn: Connection, *, now: float | None = None) -> list[RunRow]:
    """Runs, the newest first, at most MAX_LIMIT."""
    return runs_page(conn, limit=MAX_LIMIT, now=now)[0]


def runs_page(
    conn: Connection, *, cursor: str | None = None, limit: int = DEFAULT_LIMIT, now: float | None = None
) -> tuple[list[RunRow], str | None]:
    """A page of runs, the newest first, and the cursor of the page after it.

    Raises:
        CursorError: a cursor that this collector has not made.
    """
    query = sa.select(t.run).where(t.run.c.tenant == t.DEFAULT_TENANT)
    rows, following = _page(conn, query, t.run.c.created_at, t.run.c.run_id, cursor, limit)
    return as_runs(conn, rows, now), following


def run(conn: Connection, run_id: str, *, now: float | None = None) -> RunWithSessions | None:
    """One run, with its sessions."""
    r = t.run.c
    rows = conn.execute(sa.select(t.run).where(r.run_id == run_id, r.tenant == t.DEFAULT_TENANT)).all()
    if not rows:
        return None
    s = t.session.c
    sessions = conn.execute(
        sa.select(t.session)
        .where(s.run_id == run_id, s.tenant == t.DEFAULT_TENANT)
        .order_by(s.attempt.desc(), s.rank)
        .limit(MAX_LIMIT)
    ).mappings()
    return {**as_runs(conn, rows, now)[0], "sessions": [_as_session(row) for row in sessions]}


def sessions_page(
    conn: Connection, run_id: str, *, cursor: str | None = None, limit: int = DEFAULT_LIMIT
) -> tuple[list[SessionRow], str | None]:
    """A page of the sessions of a run with the health of their agents, the newest first, and the cursor after it.

    Raises:
        CursorError: a cursor that this collector has not made.
    """
    s = t.session.c
    query = sa.select(t.session).where(s.run_id == run_id, s.tenant == t.DEFAULT_TENANT)
    rows, following = _page(conn, query, s.registered_at, s.session, cursor, limit)
    return [_as_session(row._mapping) for row in rows], following


def _as_session(row: sa.RowMapping) -> SessionRow:
    return cast(SessionRow, {k: v for k, v in row.items() if k not in _HIDDEN})


def tags_of(conn: Connection, run_ids: Sequence[str]) -> dict[str, list[str]]:
    """Run -> its tags in alphabetical order."""
    c = t.run_tag.c
    rows = conn.execute(
        sa.select(c.run_id, c.tag).where(c.run_id.in_(run_ids), c.tenant == t.DEFAULT_TENANT).order_by(c.tag)
    )
    out: dict[str, list[str]] = {}
    for run_id, tag in rows:
        out.setdefault(run_id, []).append(tag)
    return out


def as_runs(conn: Connection, rows: list[Any] | Any, now: float | None) -> list[RunRow]:
    """Rows of `run` as the API gives them."""
    now = time.time() if now is None else now
    ids = [row.run_id for row in rows]

    def count(table: sa.Table, *where: Any) -> dict[str, int]:
        c = table.c
        query = sa.select(c.run_id, sa.func.count()).where(c.run_id.in_(ids), c.tenant == t.DEFAULT_TENANT, *where)
        return {run_id: int(n) for run_id, n in conn.execute(query.group_by(c.run_id))}

    num_sites = count(t.site)
    num_open = count(t.incident, t.incident.c.status != "resolved")
    num_unseen = count(t.incident, incident_states.unseen())
    alive = _runs_with_a_living_session(conn, ids)
    sessions = count(t.session)
    tags = tags_of(conn, ids)
    out: list[RunRow] = []
    for row in rows:
        if row.run_id in sessions and row.run_id not in alive:
            status = "ended"
        else:
            status = "stalled" if now - row.last_seen_at > STALLED_AFTER_S else "running"
        out.append(
            {
                "id": row.run_id,
                "name": row.name,
                "status": status,
                "attempt": row.attempt,
                "created_at": row.created_at,
                "last_seen_at": row.last_seen_at,
                "last_step": row.last_step,
                "recipe": row.recipe,
                "backend": row.backend,
                "world_size": row.world_size,
                "num_sites": num_sites.get(row.run_id, 0),
                "num_open_incidents": num_open.get(row.run_id, 0),
                "num_unseen_incidents": num_unseen.get(row.run_id, 0),
                "tags": tags.get(row.run_id, []),
                "note": row.note,
                "archived_at": row.archived_at,
            }
        )
    return out


def _runs_with_a_living_session(conn: Connection, ids: list[str]) -> set[str]:
    """Runs in which the newest session of some rank has not ended."""
    s, later = t.session.c, t.session.alias().c
    newer = sa.select(sa.literal(1)).where(
        later.run_id == s.run_id, later.tenant == s.tenant, later.rank == s.rank, later.attempt > s.attempt
    )
    query = sa.select(s.run_id).where(
        s.run_id.in_(ids), s.tenant == t.DEFAULT_TENANT, s.ended.is_(False), ~newer.exists()
    )
    return set(conn.execute(query.distinct()).scalars())


def sites(conn: Connection, run_id: str) -> list[SiteRow]:
    """The sites of a run in data-flow order."""
    c = t.site.c
    rows = conn.execute(
        sa.select(t.site)
        .where(c.run_id == run_id, c.tenant == t.DEFAULT_TENANT)
        .order_by(c.flow_order, c.module, c.operand, c.direction)
    )
    return [
        {
            "id": row.site,
            "module": row.module,
            "operand": row.operand,
            "direction": row.direction,
            "gemm": row.gemm,
            "order": row.flow_order,
            "shape": [row.num_rows, row.num_columns],
            "tile": [row.tile_rows, row.tile_columns],
            "format": row.format,
            "power_2_scale": row.power_2_scale,
            "eps": row.eps,
            "recipe": row.recipe,
            "backend": row.backend,
            "evidence": row.evidence,
        }
        for row in rows
    ]


def probes(conn: Connection, run_id: str) -> frozenset[int]:
    """Those of the sites of a run that no quantiser reads."""
    c = t.site.c
    told = sa.select(c.site).where(c.run_id == run_id, c.tenant == t.DEFAULT_TENANT)
    return frozenset(conn.execute(told.where(sa.or_(c.recipe == PROBE, c.operand == "output"))).scalars())


def as_incident(row: Any) -> IncidentRow:
    """A row of `incident` as the API gives it."""
    got = {name: row._mapping[name] for name in _OF_INCIDENT}
    links = {"runbook_url": f"/runbooks/{row.mode}", "url": f"/incidents/{row.id}"}
    return cast(IncidentRow, {**got, "state": state_of(got), **links})


def incidents(
    conn: Connection,
    run_id: str | None = None,
    status: str | None = None,
    severity: str | None = None,
    mode: str | None = None,
) -> list[IncidentRow]:
    """Incidents of a run (None: of all runs), the newest first, at most MAX_LIMIT; links are paths."""
    return incidents_page(conn, run_id, status, severity, mode, limit=MAX_LIMIT)[0]


def incidents_of(conn: Connection, run_ids: Sequence[str], most: int) -> dict[str, IncidentsOfRun]:
    """Run -> its incidents, of each at most so many (MAX_LIMIT): what asks for somebody first, then by state, then severe before mild."""
    c = t.incident.c
    order = (*incident_states.in_order(), c.first_step, c.id)
    ranked = (
        sa.select(
            c.run_id,
            c.id,
            sa.func.row_number().over(partition_by=c.run_id, order_by=order).label("nth"),
            sa.func.count().over(partition_by=c.run_id).label("num"),
            sa.func.sum(sa.case((incident_states.over(), 1), else_=0)).over(partition_by=c.run_id).label("num_over"),
        )
        .where(c.tenant == t.DEFAULT_TENANT, c.run_id.in_(run_ids))
        .subquery()
    )
    rows = conn.execute(
        sa.select(t.incident, ranked.c.num, ranked.c.num_over)
        .join(ranked, sa.and_(ranked.c.run_id == c.run_id, ranked.c.id == c.id))
        .where(c.tenant == t.DEFAULT_TENANT, ranked.c.nth <= min(most, MAX_LIMIT))
        .order_by(ranked.c.nth)
    )
    out: dict[str, IncidentsOfRun] = {}
    for row in rows:
        of = out.setdefault(row.run_id, IncidentsOfRun([], int(row.num) - int(row.num_over), int(row.num_over)))
        of.first.append(as_incident(row))
    return out


def incidents_page(
    conn: Connection,
    run_id: str | None = None,
    status: str | None = None,
    severity: str | None = None,
    mode: str | None = None,
    *,
    state: str | None = None,
    cursor: str | None = None,
    limit: int = DEFAULT_LIMIT,
) -> tuple[list[IncidentRow], str | None]:
    """A page of incidents, the newest first, and the cursor of the page after it.

    Args:
        state: one of incident_states.STATES, or "asks": those that ask for somebody.

    Raises:
        CursorError: a cursor that this collector has not made.
    """
    c = t.incident.c
    query = sa.select(t.incident).where(c.tenant == t.DEFAULT_TENANT)
    for column, value in ((c.run_id, run_id), (c.status, status), (c.severity, severity), (c.mode, mode)):
        if value is not None:
            query = query.where(column == value)
    if state is not None:
        query = query.where(incident_states.asks() if state == "asks" else incident_states.is_in(state))
    rows, following = _page(conn, query, c.opened_at, c.id, cursor, limit)
    return [as_incident(row) for row in rows], following


def incident(conn: Connection, incident_id: str) -> IncidentWithEvents | None:
    """One incident, with its events from first to last: {kind, at, step, detail}."""
    c, e = t.incident.c, t.incident_event.c
    row = conn.execute(sa.select(t.incident).where(c.id == incident_id, c.tenant == t.DEFAULT_TENANT)).first()
    if row is None:
        return None
    events = conn.execute(
        sa.select(e.seq, e.kind, e.at, e.step, e.detail)
        .where(e.run_id == row.run_id, e.tenant == row.tenant, e.incident_id == incident_id)
        .order_by(e.seq)
    ).mappings()
    return {**as_incident(row), "events": [cast(IncidentEvent, dict(event)) for event in events]}


def silences(conn: Connection, *, now: float | None = None) -> list[SilenceRow]:
    """Silences that have not expired."""
    c = t.silence.c
    now = time.time() if now is None else now
    rows = conn.execute(
        sa.select(t.silence).where(c.tenant == t.DEFAULT_TENANT, c.expires_at > now).order_by(c.expires_at)
    ).mappings()
    return [cast(SilenceRow, {k: v for k, v in row.items() if k != "tenant"}) for row in rows]
