"""Retention: detail per rank is deleted after a day, blocks by the run's policy; incidents keep theirs.

Shapes:     a policy -> cells of which less is left: the roll-up, or the summary; and of each step the scalars of one rank
Thread:     compactor, `fp8watch prune`
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.store.cell_records import SITES_AT_ONCE, bytes_of
from fp8watch_server.store.compact import ROLLED, CellChanged, CrashPoint, no_crash, touch
from fp8watch_server.store.rolled_past import mark_of

DAY_S = 86_400.0
KEEP_AROUND_INCIDENT_STEPS = 64


@dataclass(frozen=True)
class Policy:
    """What is kept of a run; None keeps everything."""

    detail_hours: float | None = 24.0  # of each rank, once there is a roll-up
    keep_days: float | None = None  # since the steps were compacted
    keep_steps: int | None = None  # newest ones
    keep_bytes: int | None = None  # of blocks, those that were compacted last


class _Limits(Protocol):
    """Limits from the settings; 0: no limit."""

    @property
    def detail_hours(self) -> float: ...
    @property
    def keep_days(self) -> float: ...
    @property
    def keep_steps(self) -> int: ...
    @property
    def keep_bytes(self) -> int: ...


def policy_of(settings: _Limits) -> Policy:
    """The policy of the settings."""
    return Policy(
        detail_hours=settings.detail_hours or None,
        keep_days=settings.keep_days or None,
        keep_steps=settings.keep_steps or None,
        keep_bytes=settings.keep_bytes or None,
    )


@dataclass
class Pruned:
    """What was deleted."""

    num_cells_to_rollup: int = 0
    num_cells_to_summary: int = 0
    num_bytes: int = 0


def prune(
    engine: Engine,
    policy: Policy,
    now: float,
    *,
    run_id: str | None = None,
    heard_since: float | None = None,
    crash: CrashPoint = no_crash,
    stop: Callable[[], bool] = lambda: False,
    dry_run: bool = False,
    given: Collection[str] = (),
) -> Pruned:
    """Apply the policy to one run or to all. Idempotent and resumable.

    Args:
        heard_since: of all runs those that have been heard of since then, and those that have limits of their own.
        given: limits of `policy` that hold for runs with limits of their own, too.
    """
    done = Pruned()
    with engine.connect() as conn:
        runs = _runs(conn, run_id, heard_since)
    for run in runs:
        with engine.connect() as conn:
            own = _policy_of(conn, run, policy, given)
            cells = _cells(conn, run)
            spans, odd = _incidents(conn, run)
        old = _too_old(cells, own, run.last_step, now)
        for cell in cells:
            if stop():
                return done
            if cell.shown_rank is None or _near(cell, spans):
                continue
            keep = t.KEPT_SUMMARY if cell.step0 in old else t.KEPT_ROLLUP if _detail_goes(cell, own, now) else cell.kept
            goes = [s for s in cell.sources if keep == t.KEPT_SUMMARY or (keep == t.KEPT_ROLLUP and s[1] not in odd)]
            goes = [s for s in goes if s != mark_of(cell.sources)]
            unfinished = keep < t.KEPT_DETAIL and (goes or (keep == t.KEPT_SUMMARY and cell.num_bytes > 0))
            if keep >= cell.kept and not unfinished:
                continue
            done.num_cells_to_rollup += keep == t.KEPT_ROLLUP
            done.num_cells_to_summary += keep == t.KEPT_SUMMARY
            done.num_bytes += cell.num_bytes if keep == t.KEPT_SUMMARY else 0
            if not dry_run:
                _drop(engine, cell, min(keep, cell.kept), goes, crash)
    return done


def settled_after_s(policy: Policy) -> float:
    """How long after its last batch a run has nothing more that a policy of time deletes: what is compacted late takes a day more."""
    return max((policy.detail_hours or 0.0) * 3600, (policy.keep_days or 0.0) * DAY_S) + DAY_S


def _runs(conn: Connection, run_id: str | None, heard_since: float | None) -> Sequence[Any]:
    r, own = t.run.c, t.retention.c
    query = sa.select(r.run_id, r.tenant, r.last_step)
    if run_id is not None:
        query = query.where(r.run_id == run_id)
    if heard_since is not None:
        limits = sa.select(sa.literal(1)).where(own.run_id == r.run_id, own.tenant == r.tenant).exists()
        query = query.where(sa.or_(r.last_seen_at >= heard_since, limits))
    return conn.execute(query).all()


def _policy_of(conn: Connection, run: Any, policy: Policy, given: Collection[str]) -> Policy:
    """A run's own limits, where it has some, before those of `policy`; 0 of its own: no limit."""
    c = t.retention.c
    own = conn.execute(
        sa.select(c.keep_days, c.keep_steps, c.keep_bytes).where(c.run_id == run.run_id, c.tenant == run.tenant)
    ).first()
    if own is None:
        return policy
    of_run = {name: value or None for name, value in own._mapping.items() if value is not None and name not in given}
    return replace(policy, **of_run)


def _cells(conn: Connection, run: Any) -> Sequence[Any]:
    """Newest first: those that were compacted last. A run that begins again under its name has lower steps than it had."""
    c = t.cell.c
    of_run = sa.select(t.cell).where(c.run_id == run.run_id, c.tenant == run.tenant)
    return conn.execute(of_run.order_by(c.compacted_at.desc(), c.step0.desc())).all()


def _incidents(conn: Connection, run: Any) -> tuple[list[tuple[int, int]], set[int]]:
    """Steps and ranks whose detail is kept because an incident names them."""
    i = t.incident.c
    rows = conn.execute(
        sa.select(i.first_step, i.last_step, i.place).where(i.run_id == run.run_id, i.tenant == run.tenant)
    ).all()
    # both ends: an incident that lasts would keep all of its run
    ends = {end for first, last, _ in rows for end in (first, last)}
    spans = [(end - KEEP_AROUND_INCIDENT_STEPS, end + KEEP_AROUND_INCIDENT_STEPS) for end in sorted(ends)]
    named = {rank for _, _, place in rows for rank in (place or {}).get("ranks") or []}
    return spans, {rank for rank in named if isinstance(rank, int)}


def _near(cell: Any, spans: Sequence[tuple[int, int]]) -> bool:
    end = cell.step0 + t.BLOCK_STEPS - 1
    return any(first <= end and last >= cell.step0 for first, last in spans)


def _too_old(cells: Sequence[Any], policy: Policy, last_step: int | None, now: float) -> set[int]:
    """First steps of the cells that the policy deletes; `cells` come newest first."""
    out, num_bytes = set(), 0
    for cell in cells:
        num_bytes += 0 if cell.kept == t.KEPT_SUMMARY else cell.num_bytes
        old = policy.keep_days is not None and cell.compacted_at < now - policy.keep_days * DAY_S
        far = policy.keep_steps is not None and last_step is not None and cell.step_max <= last_step - policy.keep_steps
        if old or far or (policy.keep_bytes is not None and num_bytes > policy.keep_bytes):
            out.add(cell.step0)
    return out


def _detail_goes(cell: Any, policy: Policy, now: float) -> bool:
    """Delete per-rank detail, only where a roll-up exists."""
    rolled = (cell.shown_attempt, cell.shown_rank) == ROLLED
    return policy.detail_hours is not None and rolled and cell.compacted_at < now - policy.detail_hours * 3600


def _drop(engine: Engine, cell: Any, kept: int, goes: Sequence[list[int]], crash: CrashPoint) -> None:
    """First mark in the cell what is left of it, so that nobody reads the rest; then delete, one source at a time."""
    left, num_bytes = [list(source) for source in cell.sources], cell.num_bytes
    mark = mark_of(left)
    left += [mark] if mark is not None and mark not in left else []
    with engine.connect() as conn:
        told = _told_by(conn, cell)
    try:
        with writing(engine) as conn:
            touch(conn, cell, kept=kept, sources=sorted(left))
            crash("prune.marked")
        revision = cell.revision + 1
        gone = [list(ROLLED), *goes] if kept == t.KEPT_SUMMARY else list(goes)
        for attempt, rank in gone:
            left = [source for source in left if source != [attempt, rank]]
            with writing(engine) as conn:
                size = bytes_of(conn, cell.run_id, cell.tenant, [(attempt, rank)], cell.step0)
                num_bytes = max(0, num_bytes - size)
                touch(conn, _At(cell, revision), sources=left, num_bytes=num_bytes)
                _delete_blocks(conn, cell, attempt, rank)
                if rank > 0:
                    _delete_steps(conn, cell, attempt, rank, told.get((attempt, rank), set()))
                crash("prune.source")
            revision += 1
        if kept == t.KEPT_SUMMARY:
            with writing(engine) as conn:
                touch(conn, _At(cell, revision), num_bytes=0)  # nothing is left to delete
    except CellChanged:  # a late batch: next round
        return
    crash("prune.done")


def _delete_steps(conn: Connection, cell: Any, attempt: int, rank: int, told: set[int]) -> None:
    """Of a step the scalars of one rank stay, for SQL; those over ranks are in the cell's scalar_block. Of each logged name its first
    rank stays.

    Args:
        told: steps that this rank tells.
    """
    lower = t.logged.alias("lower")
    of_name = (lower.c[column] == t.logged.c[column] for column in ("run_id", "tenant", "name", "attempt"))
    first = sa.select(sa.func.min(lower.c.rank)).where(*of_name).scalar_subquery()
    for table, goes in ((t.scalar, ~t.scalar.c.step.in_(sorted(told))), (t.logged, t.logged.c.rank > first)):
        c = table.c
        source = (c.run_id == cell.run_id, c.tenant == cell.tenant, c.attempt == attempt, c.rank == rank)
        conn.execute(sa.delete(table).where(*source, *_of_cell(table, cell), goes))


def _of_cell(table: sa.Table, cell: Any) -> tuple[sa.ColumnElement[bool], ...]:
    """Rows of the steps of a cell."""
    return (table.c.step >= cell.step0, table.c.step < cell.step0 + t.BLOCK_STEPS)


def _told_by(conn: Connection, cell: Any) -> dict[tuple[int, int], set[int]]:
    """(attempt, rank) -> steps whose scalars no lower rank tells.

    Not every rank has a loss (of a pipeline the last stage alone), and not every rank breaks.
    """
    s = t.scalar.c
    telling = (s.loss_class.is_not(None), sa.or_(s.loss_class > 0, s.grad_norm_class > 0), s.status != 0)
    first = [sa.func.min(sa.case((tells, s.rank))) for tells in telling]
    found: dict[tuple[int, int], set[int]] = {}
    of_run = (s.run_id == cell.run_id, s.tenant == cell.tenant)
    query = sa.select(s.attempt, s.step, *first).where(*of_run, *_of_cell(t.scalar, cell))
    for attempt, step, *ranks in conn.execute(query.group_by(s.attempt, s.step)):
        for rank in ranks:
            if rank is not None:
                found.setdefault((attempt, rank), set()).add(step)
    return found


class _At:
    """The row of a cell at a later revision."""

    def __init__(self, cell: Any, revision: int) -> None:
        self.run_id, self.tenant, self.step0, self.revision = cell.run_id, cell.tenant, cell.step0, revision


def _delete_blocks(conn: Connection, cell: Any, attempt: int, rank: int) -> None:
    """Delete by complete keys, looked up one by one, to avoid scanning the run's other blocks."""
    b, s, x = t.block.c, t.site.c, t.sheet.c
    source = (x.run_id == cell.run_id, x.tenant == cell.tenant, x.attempt == attempt, x.rank == rank)
    conn.execute(sa.delete(t.sheet).where(*source, x.step0 == cell.step0))
    of_run = (b.run_id == cell.run_id, b.tenant == cell.tenant)
    sites = list(conn.execute(sa.select(s.site).where(s.run_id == cell.run_id, s.tenant == cell.tenant)).scalars())
    for start in range(0, len(sites), SITES_AT_ONCE):
        part = sites[start : start + SITES_AT_ONCE]
        this = (b.attempt == attempt, b.rank == rank, b.site.in_(part), b.step0 == cell.step0)
        conn.execute(sa.delete(t.block).where(*of_run, *this))
