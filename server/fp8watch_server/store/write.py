"""The hot path of writing: registrations and batches, each in the transaction of the caller.

Upstream:   fp8watch_server.ingest    Downstream: fp8watch_server.store.hot, fp8watch_server.worker
Shapes:     one wire.Batch + its body -> one hot_batch row and one scalar row per step
Thread:     ingest pool

Everything here is idempotent. A batch is known by (run, session, rank, seq) and the hash of its body.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import STEP_SCALARS, Site
from fp8watch_agent.wire import Batch

from . import schema as t
from .dialect import upsert

CAPTURE_STEPS = 16
"""How many steps past an incident's last one its sites' full tile maps are asked for."""
MAX_CAPTURE_SITES = 64


class KeyReused(Exception):
    """A body under a key that another body has taken."""


class Unknown(Exception):
    """A run, session or sites that nobody has registered: register and send again."""

    def __init__(self, what: str, ids: list[int] | None = None) -> None:
        super().__init__(what)
        self.what = what  # run | session | sites
        self.ids = ids


class RankMismatch(Exception):
    """A batch whose rank is not that of its session."""

    def __init__(self, rank: int, registered: int) -> None:
        super().__init__(f"rank {rank}; the session is registered as rank {registered}")


@dataclass(frozen=True)
class SessionFacts:
    """What is stored of one attach of one process."""

    session: str
    rank: int
    world_size: int
    mesh: dict[str, int]
    host: str
    pid: int
    started_at: float | None
    versions: dict[str, str]
    recipe: str
    fingerprint: str
    backend: str
    facts: dict[str, Any]


def register_run(
    conn: Connection,
    run_id: str,
    *,
    name: str,
    recipe: str,
    backend: str,
    world_size: int,
    now: float,
    tenant: str = t.DEFAULT_TENANT,
) -> None:
    """Add a run, or renew what is said of it."""
    row: dict[str, Any] = {"run_id": run_id, "tenant": tenant, "name": name, "recipe": recipe, "backend": backend}
    row |= {"world_size": world_size, "created_at": now, "last_seen_at": now}
    upsert(conn, t.run, [row], update=["name", "recipe", "backend", "world_size", "last_seen_at"])


def register_session(
    conn: Connection, run_id: str, facts: SessionFacts, *, now: float, tenant: str = t.DEFAULT_TENANT
) -> int:
    """Add a session, or renew its facts. Its attempt is the order in which the sessions of its rank first came.

    Returns:
        The attempt, from 1.

    Raises:
        Unknown: the run.
    """
    renewed = conn.execute(
        sa.update(t.run).where(t.run.c.run_id == run_id, t.run.c.tenant == tenant).values(last_seen_at=now)
    )
    if renewed.rowcount == 0:
        raise Unknown("run")
    s = t.session.c
    of_run = (s.run_id == run_id, s.tenant == tenant)
    known = conn.execute(sa.select(s.attempt, s.rank).where(*of_run, s.session == facts.session)).first()
    if known is not None and known.rank != facts.rank:
        raise RankMismatch(facts.rank, known.rank)
    if known is None:
        newest = conn.execute(sa.select(sa.func.max(s.attempt)).where(*of_run, s.rank == facts.rank)).scalar()
        attempt = int(newest or 0) + 1
    else:
        attempt = int(known.attempt)
    row = {"run_id": run_id, "tenant": tenant, "attempt": attempt, "registered_at": now, "last_seen_at": now}
    row |= facts.__dict__
    keep = {"run_id", "tenant", "session", "rank", "attempt", "registered_at"}
    upsert(conn, t.session, [row], update=[name for name in row if name not in keep])
    conn.execute(
        sa.update(t.run)
        .where(t.run.c.run_id == run_id, t.run.c.tenant == tenant, t.run.c.attempt < attempt)
        .values(attempt=attempt)
    )
    return attempt


def register_sites(
    conn: Connection,
    run_id: str,
    session: str,
    sites: Iterable[Site],
    *,
    now: float,
    tenant: str = t.DEFAULT_TENANT,
) -> None:
    """Add sites of a run, or renew their static facts.

    Raises:
        Unknown: the session (or its run).
    """
    _session(conn, run_id, session, tenant)
    rows = [
        {
            "run_id": run_id,
            "tenant": tenant,
            "site": site.id,
            "module": site.module,
            "operand": site.operand,
            "direction": site.direction,
            "gemm": site.gemm,
            "flow_order": site.order,
            "num_rows": site.shape[0],
            "num_columns": site.shape[1],
            "tile_rows": site.tile[0],
            "tile_columns": site.tile[1],
            "format": site.format,
            "power_2_scale": site.power_2_scale,
            "eps": site.eps,
            "recipe": site.recipe,
            "backend": site.backend,
            "evidence": site.evidence,
            "updated_at": now,
        }
        for site in sites
    ]
    upsert(conn, t.site, rows)


def _session(conn: Connection, run_id: str, session: str, tenant: str) -> Any:
    s = t.session.c
    row = conn.execute(
        sa.select(s.rank, s.attempt).where(s.run_id == run_id, s.tenant == tenant, s.session == session)
    ).first()
    if row is None:
        r = t.run.c
        run = conn.execute(sa.select(r.run_id).where(r.run_id == run_id, r.tenant == tenant)).first()
        raise Unknown("run" if run is None else "session")
    return row


def require_session(conn: Connection, run_id: str, session: str, rank: int, tenant: str) -> int:
    """The attempt of a registered session.

    Raises:
        Unknown: the run or the session.
        RankMismatch: the session belongs to another rank.
    """
    row = _session(conn, run_id, session, tenant)
    if row.rank != rank:
        raise RankMismatch(rank, row.rank)
    return int(row.attempt)


def require_sites(conn: Connection, run_id: str, ids: npt.NDArray[Any], tenant: str) -> None:
    """Check that sites are registered.

    Raises:
        Unknown: those that are not, by id.
    """
    c = t.site.c
    known = set(conn.execute(sa.select(c.site).where(c.run_id == run_id, c.tenant == tenant)).scalars())
    missing = [i for i in np.unique(ids).tolist() if i not in known]
    if missing:
        raise Unknown("sites", missing)


def commit_batch(
    conn: Connection, batch: Batch, body: bytes, sha256: bytes, *, now: float, tenant: str = t.DEFAULT_TENANT
) -> bool:
    """Write one checked batch.

    Returns:
        False when this very batch had come before: nothing was written.

    Raises:
        KeyReused, Unknown, RankMismatch: and nothing was written.
    """
    h = batch.header
    b = t.hot_batch.c
    key = (b.run_id == h.run, b.tenant == tenant, b.session == h.session, b.rank == h.rank, b.seq == h.seq)
    there = conn.execute(sa.select(b.body_sha256).where(*key)).scalar()
    if there is not None:
        if bytes(there) != sha256:
            raise KeyReused
        return False
    attempt = require_session(conn, h.run, h.session, h.rank, tenant)
    require_sites(conn, h.run, batch.site, tenant)
    steps = batch.steps["step"]
    last = int(steps[-1]) if len(steps) else None
    arrival = _touch_run(conn, h.run, tenant, attempt, last, now)
    row = {"run_id": h.run, "tenant": tenant, "session": h.session, "rank": h.rank, "seq": h.seq}
    row |= {"body": body, "body_sha256": sha256, "attempt": attempt, "arrival": arrival, "received_at": now}
    row |= {"step_min": int(steps[0]) if len(steps) else None, "step_max": last, "num_records": h.num_records}
    conn.execute(sa.insert(t.hot_batch), [row])
    upsert(conn, t.scalar, _scalars(batch, attempt, tenant), newest_by="seq")
    s = t.session.c
    this = (s.run_id == h.run, s.tenant == tenant, s.session == h.session)
    values: dict[str, Any] = {"last_seen_at": now}
    if h.health.get("ended"):
        values["ended"] = True
    conn.execute(sa.update(t.session).where(*this).values(**values))
    if h.health:
        newer = sa.update(t.session).where(*this, s.health_seq < h.seq)
        conn.execute(newer.values(health=h.health, health_seq=h.seq))
    return True


def _touch_run(conn: Connection, run_id: str, tenant: str, attempt: int, last: int | None, now: float) -> int:
    r = t.run.c
    this = (r.run_id == run_id, r.tenant == tenant)
    # not RETURNING: SQLite has it from 3.35 on only
    conn.execute(sa.update(t.run).where(*this).values(num_batches=r.num_batches + 1, last_seen_at=now))
    arrival = conn.execute(sa.select(r.num_batches).where(*this)).scalar_one()
    if last is not None:
        newer = sa.or_(
            r.last_step.is_(None),
            r.last_step_attempt < attempt,
            sa.and_(r.last_step_attempt == attempt, r.last_step < last),
        )
        conn.execute(sa.update(t.run).where(*this, newer).values(last_step=last, last_step_attempt=attempt))
    return int(arrival)


def classify(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int8]:
    """0 finite, 1 NaN, 2 +Inf, 3 −Inf."""
    kinds = np.zeros(len(values), dtype=np.int8)
    kinds[np.isnan(values)] = 1
    kinds[np.isposinf(values)] = 2
    kinds[np.isneginf(values)] = 3
    return kinds


def _scalars(batch: Batch, attempt: int, tenant: str) -> list[dict[str, Any]]:
    h, steps = batch.header, batch.steps
    named = {name: (steps[name].tolist(), classify(steps[name]).tolist()) for name in STEP_SCALARS}
    rows: list[dict[str, Any]] = []
    for i, (step, status, present, time) in enumerate(
        zip(
            steps["step"].tolist(),
            steps["status"].tolist(),
            steps["present"].tolist(),
            steps["time"].tolist(),
            strict=True,
        )
    ):
        batch_id = h.batch_ids[i] if h.batch_ids else None
        row: dict[str, Any] = {"run_id": h.run, "tenant": tenant, "attempt": attempt, "rank": h.rank, "step": step}
        row |= {"seq": h.seq, "status": status, "time": time if math.isfinite(time) else None}
        row["batch_id"] = None if batch_id is None else batch_id.replace("\0", "")  # PostgreSQL has no NUL in text
        for name, bit in STEP_SCALARS.items():
            values, kinds = named[name]
            given = present & bit
            row[name] = values[i] if given and kinds[i] == 0 else None
            row[f"{name}_class"] = kinds[i] if given else None
        rows.append(row)
    return rows


def captures_wanted(conn: Connection, run_id: str, *, tenant: str = t.DEFAULT_TENANT) -> list[dict[str, Any]]:
    """Full tile maps to ask the agents for: of the sites of open incidents, for the steps that follow."""
    c = t.incident.c
    open_ones = conn.execute(
        sa.select(c.sites, c.last_step)
        .where(c.run_id == run_id, c.tenant == tenant, c.status != "resolved")
        .order_by(c.updated_at.desc())
        .limit(16)
    )
    wanted: dict[int, list[int]] = {}
    for sites, last_step in open_ones:
        for site in sites:
            if len(wanted) < MAX_CAPTURE_SITES:
                wanted.setdefault(int(site), [int(last_step), int(last_step) + CAPTURE_STEPS])
    return [{"site": site, "steps": steps} for site, steps in wanted.items()]
