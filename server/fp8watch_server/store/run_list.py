"""The list of runs: searched, filtered, sorted by what needs somebody, and cut into pages, by the database.

Shapes:     what is asked for -> rows of one page, and how many there are
Thread:     query pool

Ten thousand runs are one statement: runs with incidents that ask for somebody, with sessions that go on, and with facts of
those are sets of ids; a page is cut from the result before anything else is read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_server.db import schema as t
from fp8watch_server.store.incident_states import asks
from fp8watch_server.store.queries import STALLED_AFTER_S, as_runs
from fp8watch_server.store.rows import ListedRun, RunRow

PAGE_RUNS = 50
MAX_PAGE = 10_000
MAX_CHOICES = 100
"""Of a filter: more are found by searching."""
STATUSES = ("running", "stalled", "ended")
CRITICAL_OPEN, CRITICAL_UNSEEN, NOT_WATCHING, WARNING_OPEN, SILENT, WARNING_UNSEEN, NOTHING = 6, 5, 4, 3, 2, 1, 0
"""What a run needs, the most pressing first. What somebody looks after (acknowledged) needs nobody else."""
SORTS = ("need", "name", "owner", "status", "step", "recipe", "tags", "ranks", "seen", "created")
_DESCENDING = ("need", "step", "ranks", "seen", "created")
_TEXT = {"recipe": 4096, "mode": 100, "tag": 100, "host": 512, "owner": 100}


@dataclass(frozen=True)
class Wanted:
    """Which runs, in which order. An empty text is no condition."""

    q: str = ""
    """Words that all stand in the run's name, id, note, tags or hosts."""
    status: str = ""
    recipe: str = ""
    mode: str = ""
    severity: str = ""
    tag: str = ""
    host: str = ""
    owner: str = ""
    archived: bool = False
    """The archive instead of the list."""
    sort: str = "need"
    reverse: bool = False
    page: int = 1


@dataclass(frozen=True)
class Found:
    """One page of runs."""

    runs: list[ListedRun]
    num_runs: int
    num_need: int
    """Of all that match, how many need somebody."""
    page: int

    @property
    def num_pages(self) -> int:
        """At least 1."""
        return max(1, -(-self.num_runs // PAGE_RUNS))


def find(conn: Connection, wanted: Wanted, *, now: float | None = None) -> Found:
    """One page of the runs that match. A page after the last is the last."""
    return find_over([conn], wanted, now=now)[0]


def find_over(
    conns: Sequence[Connection], wanted: Wanted, *, now: float | None = None
) -> tuple[Found, dict[str, Connection]]:
    """The same over several databases; and run id -> the connection to the one that it lies in."""
    now = time.time() if now is None else now
    r, status = t.run.c, _status(now)
    need = _need(status)
    where = [r.tenant == t.DEFAULT_TENANT, *_conditions(wanted)]
    if wanted.status in STATUSES:
        where.append(status == wanted.status)
    totals = sa.select(sa.func.count(), sa.func.sum(sa.case((need > NOTHING, 1), else_=0))).select_from(t.run)
    counted = [conn.execute(totals.where(*where)).one() for conn in conns]
    num_runs, num_need = (sum(int(counts[i] or 0) for counts in counted) for i in (0, 1))
    page = min(max(1, wanted.page), max(1, -(-num_runs // PAGE_RUNS)))
    first, descending = _sorting(wanted, need, status)
    nothing = sa.case((first.is_(None), 1), else_=0)  # what has none stands behind what has, in either order
    order = (nothing, first.desc() if descending else first.asc(), r.last_seen_at.desc(), r.run_id)
    query = sa.select(t.run, need.label("need"), first.label("sorted_by")).where(*where).order_by(*order)
    if len(conns) == 1:
        rows = [(row, conns[0]) for row in conns[0].execute(query.limit(PAGE_RUNS).offset((page - 1) * PAGE_RUNS))]
    else:  # what comes first anywhere may all lie in one database
        rows = [(row, conn) for conn in conns for row in conn.execute(query.limit(page * PAGE_RUNS))]
        rows.sort(key=lambda found: (-found[0].last_seen_at, found[0].run_id))
        rows.sort(key=lambda found: "" if found[0].sorted_by is None else found[0].sorted_by, reverse=descending)
        rows.sort(key=lambda found: found[0].sorted_by is None)
        rows = rows[(page - 1) * PAGE_RUNS : page * PAGE_RUNS]
    runs: dict[str, ListedRun] = {}
    for conn in conns:
        here = [row for row, of in rows if of is conn]
        reasons = _reasons(conn, [row.run_id for row in here if row.need == NOT_WATCHING])
        owners = _owners(conn, [row.run_id for row in here])
        for run, row in zip(as_runs(conn, here, now), here, strict=True):
            reason, of = reasons.get(row.run_id, ""), owners.get(row.run_id, [])
            runs[row.run_id] = {**run, "need": row.need, "not_watching": reason, "owners": of}
    shown = [runs[row.run_id] for row, _ in rows]
    return Found(shown, num_runs, num_need, page), {row.run_id: conn for row, conn in rows}


def _status(now: float) -> sa.ColumnElement[str]:
    r, s = t.run.c, t.session.c
    # `IN` and no join: a database that has no statistics of the tables yet reads each of them once all the same
    goes_on = r.run_id.in_(sa.select(s.run_id).where(*alive()))
    return sa.case(
        (sa.and_(r.attempt > 0, ~goes_on), "ended"),
        (r.last_seen_at < now - STALLED_AFTER_S, "stalled"),
        else_="running",
    )


def _need(status: sa.ColumnElement[str]) -> sa.ColumnElement[int]:
    r, i, s = t.run.c, t.incident.c, t.session.c

    def some(*where: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
        return r.run_id.in_(sa.select(i.run_id).where(i.tenant == t.DEFAULT_TENANT, asks(), *where))

    stuck = r.run_id.in_(sa.select(s.run_id).where(*alive(), s.rank == 0, _no_step_ended() != ""))
    critical = i.severity == "critical"
    return sa.case(
        (some(i.status == "open", critical), CRITICAL_OPEN),
        (some(critical), CRITICAL_UNSEEN),
        (stuck, NOT_WATCHING),
        (some(i.status == "open"), WARNING_OPEN),
        (status == "stalled", SILENT),
        (some(), WARNING_UNSEEN),
        else_=NOTHING,
    )


def alive() -> list[sa.ColumnElement[bool]]:
    """Sessions that have not ended, and are the newest of their rank."""
    s, later = t.session.c, t.session.alias().c
    newer = sa.select(sa.literal(1)).where(
        later.run_id == s.run_id, later.tenant == s.tenant, later.rank == s.rank, later.attempt > s.attempt
    )
    return [s.tenant == t.DEFAULT_TENANT, s.ended.is_(False), ~newer.exists()]


def _no_step_ended() -> sa.ColumnElement[str]:
    said: sa.ColumnElement[str] = sa.type_coerce(t.session.c.facts, sa.JSON)["no_step_ended"].as_string()
    return said


def _reasons(conn: Connection, run_ids: list[str]) -> dict[str, str]:
    """Run -> why none of its steps ends, as its rank 0 says."""
    s = t.session.c
    rows = conn.execute(sa.select(s.run_id, _no_step_ended()).where(s.run_id.in_(run_ids), s.rank == 0, *alive()))
    return {run_id: reason or "" for run_id, reason in rows}


def _owners(conn: Connection, run_ids: list[str]) -> dict[str, list[str]]:
    """Run -> who its incidents are assigned to, in alphabetical order."""
    i = t.incident.c
    query = sa.select(i.run_id, i.owner).where(i.run_id.in_(run_ids), i.tenant == t.DEFAULT_TENANT, i.owner != "")
    out: dict[str, list[str]] = {}
    for run_id, owner in conn.execute(query.distinct().order_by(i.owner)):
        out.setdefault(run_id, []).append(owner)
    return out


def _like(column: sa.ColumnElement[str], text: str) -> sa.ColumnElement[bool]:
    return sa.func.lower(column).contains(text, autoescape=True)


def _some(table: sa.Table, *where: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """Whether a run has such a row."""
    r = t.run.c
    return sa.exists().where(table.c.run_id == r.run_id, table.c.tenant == r.tenant, *where)


def _words(q: str) -> list[sa.ColumnElement[bool]]:
    """Each word stands in the run's name, id, note, tags or hosts."""
    r, s, g = t.run.c, t.session.c, t.run_tag.c
    out: list[sa.ColumnElement[bool]] = []
    for word in q.lower().split()[:8]:
        of_run = (_like(r.name, word), _like(r.run_id, word), _like(r.note, word))
        out.append(sa.or_(*of_run, _some(t.run_tag, _like(g.tag, word)), _some(t.session, _like(s.host, word))))
    return out


def _conditions(wanted: Wanted) -> list[sa.ColumnElement[bool]]:
    r, i, s, g = t.run.c, t.incident.c, t.session.c, t.run_tag.c

    out: list[sa.ColumnElement[bool]] = [r.archived_at.is_not(None) if wanted.archived else r.archived_at.is_(None)]
    out += _words(wanted.q)
    if wanted.recipe:
        out.append(r.recipe == wanted.recipe)
    if wanted.tag:
        out.append(_some(t.run_tag, g.tag == wanted.tag))
    if wanted.host:
        out.append(_some(t.session, s.host == wanted.host))
    of_incident = [
        c == v for c, v in ((i.mode, wanted.mode), (i.severity, wanted.severity), (i.owner, wanted.owner)) if v
    ]
    return [*out, _some(t.incident, *of_incident)] if of_incident else out


def _sorting(wanted: Wanted, need: Any, status: Any) -> tuple[Any, bool]:
    """What runs are sorted by first, and whether the largest comes first."""
    r, i, g = t.run.c, t.incident.c, t.run_tag.c
    by: dict[str, Any] = {
        "need": need,
        "name": sa.func.lower(r.name),
        "owner": _first_of(i.owner, i.owner != ""),
        "status": status,
        "step": sa.func.coalesce(r.last_step, -1),
        "recipe": r.recipe,
        "tags": _first_of(g.tag),
        "ranks": r.world_size,
        "seen": r.last_seen_at,
        "created": r.created_at,
    }
    name = wanted.sort if wanted.sort in by else "need"
    return by[name], (name in _DESCENDING) != wanted.reverse


def _first_of(column: sa.Column[str], *where: sa.ColumnElement[bool]) -> sa.ScalarSelect[str]:
    """The first in alphabetical order of what a run has several of; NULL where it has none."""
    r, c = t.run.c, column.table.c
    of_run = (c.run_id == r.run_id, c.tenant == r.tenant)
    return sa.select(sa.func.min(sa.func.lower(column))).where(*of_run, *where).correlate(t.run).scalar_subquery()


def newest(conn: Connection, q: str, limit: int) -> tuple[list[tuple[str, str]], int]:
    """(id, name) of the newest runs in which all words of `q` stand, archived ones too; and how many there are."""
    return newest_over([conn], q, limit)


def newest_over(conns: Sequence[Connection], q: str, limit: int) -> tuple[list[tuple[str, str]], int]:
    """The same over several databases."""
    r = t.run.c
    where = [r.tenant == t.DEFAULT_TENANT, *_words(q)]
    count = sa.select(sa.func.count()).select_from(t.run).where(*where)
    query = sa.select(r.run_id, r.name, r.created_at).where(*where).order_by(r.created_at.desc(), r.run_id)
    rows = [row for conn in conns for row in conn.execute(query.limit(limit))]
    rows.sort(key=lambda row: (-row.created_at, row.run_id))
    num = sum(int(conn.execute(count).scalar_one()) for conn in conns)
    return [(row.run_id, row.name or row.run_id) for row in rows[:limit]], num


def run_before(conn: Connection, run: RunRow) -> tuple[str, str] | None:
    """Id and name of the run to hold this one against: of those that began before it and had a step and are not archived,
    the newest of the same name, else the newest.
    """
    r = t.run.c
    query = sa.select(r.run_id, r.name).where(
        r.tenant == t.DEFAULT_TENANT,
        r.created_at < run["created_at"],
        r.last_step.is_not(None),
        r.archived_at.is_(None),
    )
    same = sa.case((r.name == run["name"], 0), else_=1)
    found = conn.execute(query.order_by(same, r.created_at.desc(), r.run_id).limit(1)).first()
    return None if found is None else (found.run_id, found.name)


def choices(conn: Connection) -> dict[str, list[str]]:
    """What the filters offer: values that occur, at most MAX_CHOICES of each in alphabetical order."""
    r, i, s, g = t.run.c, t.incident.c, t.session.c, t.run_tag.c
    columns = {"recipe": r.recipe, "mode": i.mode, "tag": g.tag, "host": s.host, "owner": i.owner}
    out = {}
    for name, column in columns.items():
        query = sa.select(column).where(column.table.c.tenant == t.DEFAULT_TENANT, column != "").distinct()
        out[name] = list(conn.execute(query.order_by(column).limit(MAX_CHOICES)).scalars())
    return out


def wanted_of(query: Any) -> Wanted:
    """From a query string; what it cannot mean is no condition."""
    text = {name: str(query.get(name, ""))[:length].replace("\0", "") for name, length in _TEXT.items()}
    page = str(query.get("page", ""))
    return Wanted(
        q=str(query.get("q", ""))[:200].replace("\0", ""),
        status=query.get("status", "") if query.get("status", "") in STATUSES else "",
        severity=query.get("severity", "") if query.get("severity", "") in ("critical", "warning", "info") else "",
        archived=query.get("archived", "") == "1",
        sort=query.get("sort", "") if query.get("sort", "") in SORTS else "need",
        reverse=query.get("reverse", "") == "1",
        page=min(MAX_PAGE, int(page)) if page.isascii() and page.isdigit() and len(page) < 9 else 1,
        **text,
    )
