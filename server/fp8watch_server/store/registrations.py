"""Registration of runs, sessions and sites, in the caller's transaction; and the checks of batches against them.

Shapes:     facts of a run, a session, sites -> one row each
Thread:     ingest pool

Everything here is idempotent.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import Site
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert
from fp8watch_server.db.fence import RunHasMoved, moved_to

RESTART_COUNT = "restart_count"
SEEN_S = 5.0
"""How far behind the time may be at which a run was last seen, so that its ranks do not queue for its row."""
ASKED_OF_ATTEMPT = 8
"""Sessions of an attempt that are asked for its count of restarts: a launcher gives all of them the same."""
OVER_AFTER_S = 300.0
"""An attempt that has been silent for so long, and begun so long before a new session, is over."""
MAX_TAGS = 50
MAX_TAG_CHARS = 100


class KeyReused(Exception):
    """A different body under an existing batch key."""


class Unknown(Exception):
    """An unregistered run, session or sites: register and send again."""

    def __init__(self, what: str, ids: list[int] | None = None) -> None:
        super().__init__(what)
        self.what = what  # run | session | sites
        self.ids = ids


class RankMismatch(Exception):
    """A batch whose rank differs from that of its session."""

    def __init__(self, rank: int, registered: int) -> None:
        super().__init__(f"rank {rank}; the session is registered as rank {registered}")


class WrongKey(Exception):
    """A session that was registered with another key, or any key where one was given."""


def key_fits(key_sha256: str | None, shown_sha256: str) -> bool:
    """Whether a session takes a key. One that was registered without any takes all."""
    return key_sha256 is None or hmac.compare_digest(key_sha256, shown_sha256)


@dataclass(frozen=True)
class StoredSession:
    """Stored description of one attach of one process."""

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
    tags: Sequence[str] = (),
    tenant: str = t.DEFAULT_TENANT,
) -> None:
    """Insert or update a run; one that was archived is back. Tags are added to those it has.

    Raises:
        RunHasMoved: to another shard.
    """
    to = moved_to(conn, run_id, tenant)
    if to is not None:
        raise RunHasMoved(to)
    row: dict[str, Any] = {"run_id": run_id, "tenant": tenant, "name": name, "recipe": recipe, "backend": backend}
    row |= {"world_size": world_size, "created_at": now, "last_seen_at": now, "archived_at": None}
    upsert(conn, t.run, [row], update=["name", "recipe", "backend", "world_size", "last_seen_at", "archived_at"])
    _add_tags(conn, run_id, tags, tenant)


def is_registered(conn: Connection, run_id: str, facts: dict[str, Any], now: float) -> bool:
    """Whether a run said the same a moment ago: each of many ranks registers it, and writing would make them queue for its row.

    Args:
        facts: columns of the run.
    """
    r = t.run.c
    row = conn.execute(sa.select(t.run).where(r.run_id == run_id, r.tenant == t.DEFAULT_TENANT)).first()
    if row is None or row.archived_at is not None or not 0 <= now - row.last_seen_at < SEEN_S:
        return False
    return all(getattr(row, name) == value for name, value in facts.items())


def set_tags(conn: Connection, run_id: str, tags: Sequence[str], *, tenant: str = t.DEFAULT_TENANT) -> None:
    """Give a run these tags and no others."""
    conn.execute(sa.delete(t.run_tag).where(t.run_tag.c.run_id == run_id, t.run_tag.c.tenant == tenant))
    _add_tags(conn, run_id, tags, tenant)


def _add_tags(conn: Connection, run_id: str, tags: Sequence[str], tenant: str) -> None:
    rows = [
        {"run_id": run_id, "tenant": tenant, "tag": tag} for tag in dict.fromkeys(tag.strip() for tag in tags) if tag
    ]
    if rows:
        upsert(conn, t.run_tag, rows)


def register_session(
    conn: Connection,
    run_id: str,
    facts: StoredSession,
    *,
    now: float,
    key_sha256: str = "",
    tenant: str = t.DEFAULT_TENANT,
    alone: bool = False,
) -> int:
    """Insert or update a session, and find out its attempt.

    Args:
        alone: no other session of the run registers meanwhile. Without it, two of one rank that come at the same moment raise
            IntegrityError, and the caller begins again with it: that is rare, and a run has many ranks.
        key_sha256: of the session's key; kept the first time, and asked for from then on. Empty: none.

    Returns:
        The attempt, from 1.

    Raises:
        Unknown: the run.
        WrongKey: the session is somebody else's.
        RankMismatch: the session belongs to another rank.
    """
    r, s = t.run.c, t.session.c
    this_run = (r.run_id == run_id, r.tenant == tenant)
    which_run = sa.select(r.attempt, r.last_seen_at).where(*this_run)
    run = conn.execute(which_run.with_for_update() if alone else which_run).first()
    if run is None:
        raise Unknown("run")
    of_run = (s.run_id == run_id, s.tenant == tenant)
    which = sa.select(s.attempt, s.rank, s.key_sha256).where(*of_run, s.session == facts.session)
    known = conn.execute(which).first()
    if known is not None and not key_fits(known.key_sha256, key_sha256):
        raise WrongKey
    if known is not None and known.rank != facts.rank:
        raise RankMismatch(facts.rank, known.rank)
    if known is None:
        attempt = _attempt(conn, of_run, facts, int(run.attempt), now)
    else:
        attempt = int(known.attempt)
    row = {"run_id": run_id, "tenant": tenant, "attempt": attempt, "registered_at": now, "last_seen_at": now}
    row |= {**facts.__dict__, "key_sha256": key_sha256 or None}
    keep = {"run_id", "tenant", "session", "rank", "attempt", "registered_at", "key_sha256"}
    upsert(conn, t.session, [row], update=[name for name in row if name not in keep])
    if attempt > run.attempt:
        conn.execute(sa.update(t.run).where(*this_run, r.attempt < attempt).values(attempt=attempt))
    if not 0 <= now - run.last_seen_at < SEEN_S:
        conn.execute(sa.update(t.run).where(*this_run).values(last_seen_at=now))
    return attempt


def _attempt(conn: Connection, of_run: tuple[Any, ...], facts: StoredSession, of_all: int, now: float) -> int:
    """Attempt number of a new session.

    When the launcher counts its restarts (`restart_count`, TORCHELASTIC_RESTART_COUNT), the sessions of one count are
    one attempt, even of ranks that are new. Else it is the order of the sessions of the rank, and of one that has missed
    attempts the one that it began with.

    Args:
        of_all: the newest attempt of the run; 1 where there is no session yet.
    """
    s, count = t.session.c, facts.facts.get(RESTART_COUNT)
    newest = int(conn.execute(sa.select(sa.func.max(s.attempt)).where(*of_run, s.rank == facts.rank)).scalar() or 0)
    if newest >= of_all:
        return of_all + 1
    if count is None:
        return _begun_with(conn, of_run, facts.started_at, newest, of_all, now)
    some = sa.select(s.facts).where(*of_run, s.attempt == of_all).limit(ASKED_OF_ATTEMPT)
    others = conn.execute(some).scalars().all()
    together = not others or any(other.get(RESTART_COUNT) == count for other in others)
    return of_all if together else of_all + 1


def _begun_with(
    conn: Connection, of_run: tuple[Any, ...], started_at: float | None, after: int, of_all: int, now: float
) -> int:
    """The attempt `after` that of its rank in which a session began nearest to this one: the rank was not in those between, or is told
    of later. The next one, where the newest is over: silent for long, and begun long before, each by one clock.
    """
    s = t.session.c
    newest = sa.select(s.rank).where(*of_run, s.attempt == of_all).limit(1)
    if started_at is None or conn.execute(newest).first() is None:
        return of_all
    goes_on = sa.or_(s.last_seen_at >= now - OVER_AFTER_S, s.started_at >= started_at - OVER_AFTER_S)
    if conn.execute(newest.where(goes_on)).first() is None:
        return of_all + 1
    nearest = (sa.func.abs(s.started_at - started_at), s.attempt.desc())
    begun = sa.select(s.attempt).where(*of_run, s.attempt > after, s.started_at.is_not(None)).order_by(*nearest)
    found = of_all if of_all == after + 1 else conn.execute(begun.limit(1)).scalar()
    return int(found or of_all)


def unregistered_sites(
    conn: Connection, run_id: str, sites: Sequence[Site], *, tenant: str = t.DEFAULT_TENANT
) -> tuple[list[Site], bool]:
    """Sites that are new or changed: every rank registers them all, and one write is enough.

    Returns:
        Them, and whether any has other facts than before.
    """
    c = t.site.c
    rows = conn.execute(
        sa.select(t.site).where(c.run_id == run_id, c.tenant == tenant, c.site.in_([site.id for site in sites]))
    )
    known = {row.site: {name: row._mapping[name] for name in _SITE_FACTS} for row in rows}
    fresh = [site for site in sites if known.get(site.id) != _site_row(site)]
    return fresh, any(site.id in known for site in fresh)


_SITE_FACTS = tuple(c.name for c in t.site.c if c.name not in ("run_id", "tenant", "site", "updated_at"))


def _site_row(site: Site) -> dict[str, Any]:
    return {
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
    }


def register_sites(
    conn: Connection,
    run_id: str,
    session: str,
    sites: Iterable[Site],
    *,
    now: float,
    tenant: str = t.DEFAULT_TENANT,
) -> None:
    """Insert or update sites of a run.

    Raises:
        Unknown: the session (or its run).
    """
    _session(conn, run_id, session, tenant)
    where = {"run_id": run_id, "tenant": tenant, "updated_at": now}
    rows = [{**where, "site": site.id, **_site_row(site)} for site in sites]
    upsert(conn, t.site, rows)


def require_registered(
    conn: Connection, run_id: str, session: str, key_sha256: str = "", tenant: str = t.DEFAULT_TENANT
) -> float:
    """Check that a session is registered, under this key.

    Returns:
        When its run was made: one that was deleted and came again is another.

    Raises:
        Unknown: the session, or its run.
        WrongKey: the session is somebody else's.
    """
    s, r = t.session.c, t.run.c
    both = (s.run_id == r.run_id, s.tenant == r.tenant, s.session == session)
    row = conn.execute(
        sa.select(r.created_at, s.key_sha256).where(r.run_id == run_id, r.tenant == tenant, *both)
    ).first()
    if row is None:
        _session(conn, run_id, session, tenant)
        raise Unknown("run")
    if not key_fits(row.key_sha256, key_sha256):
        raise WrongKey
    return float(row.created_at)


def _session(conn: Connection, run_id: str, session: str, tenant: str) -> Any:
    s = t.session.c
    row = conn.execute(
        sa.select(s.rank, s.attempt, s.key_sha256)
        .where(s.run_id == run_id, s.tenant == tenant, s.session == session)
        .with_for_update(key_share=True)
    ).first()
    if row is None:
        r = t.run.c
        run = conn.execute(sa.select(r.run_id).where(r.run_id == run_id, r.tenant == tenant)).first()
        raise Unknown("run" if run is None else "session")
    return row


def require_session(conn: Connection, run_id: str, session: str, rank: int, tenant: str, key_sha256: str = "") -> int:
    """Attempt of a registered session.

    Raises:
        Unknown: the run or the session.
        WrongKey: the session is somebody else's.
        RankMismatch: the session belongs to another rank.
    """
    row = _session(conn, run_id, session, tenant)
    if not key_fits(row.key_sha256, key_sha256):
        raise WrongKey
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
