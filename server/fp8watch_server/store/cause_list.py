"""Causes over all runs: incidents of one failure mode at one kind of place, one row each, what asks for somebody first.

Shapes:     what is asked for -> rows of one page, each with the incident to look at
Thread:     query pool
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.store.incident_states import (
    ACKNOWLEDGED,
    FALSE_ALARM,
    FIXED,
    OPEN,
    SEEN,
    STATES,
    UNSEEN,
    asks,
    is_in,
    unseen,
)
from fp8watch_server.store.queries import as_incident
from fp8watch_server.store.rows import CauseRow, IncidentOfRun, IncidentRow

PAGE_CAUSES = 50
MAX_PAGE = 10_000
REGRESSED = "regressed"
CAUSE_STATES = (REGRESSED, *STATES)
MAX_OF_ONE = 12


@dataclass(frozen=True)
class Wanted:
    """Which causes. An empty text is no condition."""

    q: str = ""
    """Words that all stand in the mode, the title, the module, the owner or the run."""
    state: str = ""
    mode: str = ""
    severity: str = ""
    owner: str = ""
    page: int = 1


@dataclass(frozen=True)
class Found:
    """One page of causes."""

    causes: list[CauseRow]
    num_causes: int
    num_asking: int
    page: int

    @property
    def num_pages(self) -> int:
        """At least 1."""
        return max(1, -(-self.num_causes // PAGE_CAUSES))


def _key() -> sa.ColumnElement[str]:
    """An incident of a collector from before has no cause, and is one by itself."""
    c = t.incident.c
    return sa.case((c.cause_id == "", c.id), else_=c.cause_id)


def find(conn: Connection, wanted: Wanted) -> Found:
    """One page of the causes that match. A page after the last is the last."""
    return find_over([conn], wanted)[0]


def find_over(conns: Sequence[Connection], wanted: Wanted) -> tuple[Found, dict[str, Connection]]:
    """The same over several databases; and id of a cause -> the connection to the one that has its incident."""
    groups = _groups(wanted)
    g = groups.c
    if len(conns) == 1:
        totals = sa.select(sa.func.count(), sa.func.sum(sa.case((g.need > 1, 1), else_=0))).select_from(groups)
        num_causes, num_asking = (int(num or 0) for num in conns[0].execute(totals).one())
    else:  # a cause may have incidents in each of them
        merged = _merged(row for conn in conns for row in conn.execute(sa.select(groups)).mappings())
        num_causes, num_asking = len(merged), sum(row["need"] > 1 for row in merged)
    page = min(max(1, wanted.page), max(1, -(-num_causes // PAGE_CAUSES)))
    rows: Sequence[Mapping[Any, Any]]
    if len(conns) == 1:
        query = sa.select(groups).order_by(g.need.desc(), g.last_seen.desc(), g.key)
        rows = conns[0].execute(query.limit(PAGE_CAUSES).offset((page - 1) * PAGE_CAUSES)).mappings().all()
    else:
        rows = merged[(page - 1) * PAGE_CAUSES : page * PAGE_CAUSES]
    newest = _newest(conns, [row["key"] for row in rows])
    causes: list[CauseRow] = [
        {
            "cause_id": row["key"],
            "state": _state(newest[row["key"]][0]),
            "need": row["need"],
            "num_incidents": row["num_incidents"],
            "num_runs": row["num_runs"],
            "first_seen": row["first_seen"],
            "last_seen": row["last_seen"],
            "incident": newest[row["key"]][0],
        }
        for row in rows
        if row["key"] in newest
    ]
    return Found(causes, num_causes, num_asking, page), {key: conn for key, (_, conn) in newest.items()}


def _merged(rows: Iterable[Mapping[Any, Any]]) -> list[dict[str, Any]]:
    """Causes of several databases as one list, in the order of a page."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = found.setdefault(row["key"], dict(row))
        if one == dict(row):
            continue
        for name in ("num_incidents", "num_runs"):  # a run lies in one database
            one[name] += row[name]
        one["need"] = max(one["need"], row["need"])
        one["first_seen"] = min(one["first_seen"], row["first_seen"])
        one["last_seen"] = max(one["last_seen"], row["last_seen"])
    return sorted(found.values(), key=lambda one: (-one["need"], -one["last_seen"], one["key"]))


def _groups(wanted: Wanted) -> sa.Subquery:
    """Causes of one database."""
    c, key = t.incident.c, _key()

    def some(*where: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
        return sa.func.max(sa.case((sa.and_(*where), 1), else_=0))

    critical, is_open = c.severity == "critical", c.status == OPEN
    need = sa.case(
        (some(is_open, c.regression_of.is_not(None), asks()) == 1, 6),
        (some(is_open, critical) == 1, 5),
        (some(unseen(), critical) == 1, 4),
        (some(is_open, asks()) == 1, 3),
        (some(unseen()) == 1, 2),
        (some(c.status == ACKNOWLEDGED) == 1, 1),
        else_=0,
    ).label("need")
    return (
        sa.select(
            key.label("key"),
            need,
            sa.func.count().label("num_incidents"),
            sa.func.count(c.run_id.distinct()).label("num_runs"),
            sa.func.min(c.opened_at).label("first_seen"),
            sa.func.max(c.opened_at).label("last_seen"),
        )
        .where(c.tenant == t.DEFAULT_TENANT, *_conditions(wanted))
        .group_by(key)
        .subquery("causes")
    )


def _state(incident: IncidentRow) -> str:
    return REGRESSED if incident["regression_of"] and incident["state"] == OPEN else incident["state"]


def _newest(conns: Sequence[Connection], keys: list[str]) -> dict[str, tuple[IncidentRow, Connection]]:
    """Key -> the incident to look at, and where it lies: the newest of those that ask for somebody, else the newest."""
    c, key = t.incident.c, _key()
    asking = sa.case((asks(), 0), (c.status != "resolved", 1), else_=2)
    place = sa.func.row_number().over(partition_by=key, order_by=(asking, c.opened_at.desc(), c.id)).label("place")
    of_keys = (c.tenant == t.DEFAULT_TENANT, sa.or_(c.cause_id.in_(keys), sa.and_(c.cause_id == "", c.id.in_(keys))))
    first = sa.select(c.id, key.label("key"), asking.label("asking"), place).where(*of_keys).subquery("first")
    query = sa.select(first.c.key, first.c.asking, t.incident).join(t.incident, c.id == first.c.id)
    rows = [(row, conn) for conn in conns for row in conn.execute(query.where(first.c.place == 1))]
    rows.sort(key=lambda found: (found[0].asking, -found[0].opened_at, found[0].id), reverse=True)
    return {row.key: (as_incident(row), conn) for row, conn in rows}  # the first of the order is written last


def _conditions(wanted: Wanted) -> list[sa.ColumnElement[bool]]:
    c, r = t.incident.c, t.run.c
    out: list[sa.ColumnElement[bool]] = []
    for word in wanted.q.lower().split()[:8]:
        columns: tuple[sa.ColumnElement[str], ...] = (c.mode, c.title, c.owner, c.run_id)
        named = sa.exists().where(
            r.run_id == c.run_id, r.tenant == c.tenant, sa.func.lower(r.name).contains(word, autoescape=True)
        )
        out.append(sa.or_(named, *(sa.func.lower(column).contains(word, autoescape=True) for column in columns)))
    if wanted.state == REGRESSED:
        out.append(sa.and_(c.status == OPEN, c.regression_of.is_not(None)))
    elif wanted.state in STATES:
        out.append(is_in(wanted.state))
    pairs = ((c.mode, wanted.mode), (c.severity, wanted.severity), (c.owner, wanted.owner))
    return [*out, *(column == value for column, value in pairs if value)]


def same_cause(conn: Connection, incident: IncidentRow) -> list[IncidentOfRun]:
    """Other incidents of a cause, the newest first, at most MAX_OF_ONE, each with the name of its run."""
    if not incident["cause_id"]:
        return []
    c, r = t.incident.c, t.run.c
    query = (
        sa.select(t.incident, r.name.label("run_name"))
        .join(t.run, sa.and_(r.run_id == c.run_id, r.tenant == c.tenant))
        .where(c.tenant == t.DEFAULT_TENANT, c.cause_id == incident["cause_id"], c.id != incident["id"])
    )
    rows = conn.execute(query.order_by(c.opened_at.desc()).limit(MAX_OF_ONE))
    return [{**as_incident(row), "run_name": row.run_name} for row in rows]


def runs_of(conns: Sequence[Connection], keys: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Key of a cause -> (id, name) of runs that it hit, the newest first, at most MAX_OF_ONE of each database."""
    c, r, key = t.incident.c, t.run.c, _key()
    of_keys = (c.tenant == t.DEFAULT_TENANT, sa.or_(c.cause_id.in_(keys), sa.and_(c.cause_id == "", c.id.in_(keys))))
    hit = sa.select(key.label("key"), c.run_id, sa.func.max(c.opened_at).label("at")).where(*of_keys)
    hit_runs = hit.group_by(key, c.run_id).subquery("hit")
    h = hit_runs.c
    place = sa.func.row_number().over(partition_by=h.key, order_by=(h.at.desc(), h.run_id)).label("place")
    placed = sa.select(h.key, h.run_id, h.at, place).subquery("placed")
    query = (
        sa.select(placed.c.key, placed.c.run_id, placed.c.at, r.name)
        .join(t.run, sa.and_(r.run_id == placed.c.run_id, r.tenant == t.DEFAULT_TENANT))
        .where(placed.c.place <= MAX_OF_ONE)
    )
    out: dict[str, list[tuple[str, str]]] = {}
    for row in sorted((row for conn in conns for row in conn.execute(query)), key=lambda row: -row.at):
        out.setdefault(row.key, []).append((row.run_id, row.name))
    return out


def run_of(conn: Connection, incident_id: str | None, beside: str = "") -> str:
    """Name and id of the run of an incident, the id alone where the name is that of a run beside it; "" where there is none."""
    c, r = t.incident.c, t.run.c
    query = (
        sa.select(r.run_id, r.name)
        .join(t.incident, sa.and_(r.run_id == c.run_id, r.tenant == c.tenant))
        .where(c.tenant == t.DEFAULT_TENANT, c.id == incident_id)
    )
    row = conn.execute(query).first() if incident_id else None
    if row is None:
        return ""
    return f"{row.name} ({row.run_id})" if row.name not in ("", row.run_id, beside) else str(row.run_id)


def choices(conn: Connection) -> dict[str, list[str]]:
    """What the filters offer."""
    c, out = t.incident.c, {}
    for name, column in (("mode", c.mode), ("owner", c.owner)):
        query = sa.select(column).where(c.tenant == t.DEFAULT_TENANT, column != "").distinct()
        out[name] = list(conn.execute(query.order_by(column).limit(100)).scalars())
    return out


def wanted_of(query: Any) -> Wanted:
    """From a query string; what it cannot mean is no condition."""
    page = str(query.get("page", ""))
    text = {name: str(query.get(name, ""))[:200].replace("\0", "") for name in ("q", "mode", "owner")}
    return Wanted(
        state=query.get("state", "") if query.get("state", "") in CAUSE_STATES else "",
        severity=query.get("severity", "") if query.get("severity", "") in ("critical", "warning", "info") else "",
        page=min(MAX_PAGE, int(page)) if page.isascii() and page.isdigit() and len(page) < 9 else 1,
        **text,
    )


WORDS = {
    REGRESSED: "regressed",
    OPEN: "open",
    UNSEEN: "not seen yet",
    ACKNOWLEDGED: "acknowledged",
    SEEN: "seen",
    FIXED: "fixed",
    FALSE_ALARM: "false alarm",
}
"""States as people read them."""
