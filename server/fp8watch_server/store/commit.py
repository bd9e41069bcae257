"""Group commit: checked batches of many agents written in one transaction.

Upstream:   fp8watch_server.ingest.group_commit
Downstream: fp8watch_server.store.hot_batches (table hot_batch), fp8watch_server.store.compact (table hot_batch)
Shapes:     [Incoming] -> [Committed or what was wrong with it]; one hot_batch row each, one scalar row per step
Thread:     committer

Everything here is idempotent: a batch is identified by (run, session, rank, seq) and the hash of its body. The number
of statements per group does not depend on the number of batches. On PostgreSQL the run's row is locked first, so that
several collectors give every batch of a run its own place in the order of arrival.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import STEP_SCALARS
from fp8watch_agent.update_names import SKETCHES
from fp8watch_agent.urgency import is_urgent
from fp8watch_agent.wire import Batch
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import Json, upsert
from fp8watch_server.db.fence import RunHasMoved, moved_to
from fp8watch_server.store import batch_dedup
from fp8watch_server.store.last_step import Told, now_at
from fp8watch_server.store.registrations import KeyReused, RankMismatch, Unknown, WrongKey, key_fits

CAPTURE_STEPS = 16
"""Number of steps after an incident's last one for which full tile maps are requested."""
CAPTURED_SPAN_STEPS = 256
"""An incident that lasts longer is asked about no more: what lasts is seen from its first steps, and its maps would fill the disk."""
MAX_CAPTURE_SITES = 64
MAX_KNOWN_RUNS = 256
MAX_ALIKE, MAX_ALIKE_BYTES = 16, 1 << 13
"""Limits of the cached known site sets per run: number, and size of each."""

_Seen = tuple[str, int, int]  # session, rank, seq


@dataclass(frozen=True)
class Incoming:
    """A checked batch and the body it was decoded from."""

    batch: Batch
    body: bytes
    sha256: bytes
    key_sha256: str = ""  # of the session key that it came with


@dataclass(frozen=True)
class Committed:
    """Result of committing one batch."""

    seq: int
    stored: bool  # False: the same batch was committed before
    captures: list[dict[str, Any]]


Outcome = Committed | KeyReused | RankMismatch | RunHasMoved | Unknown | WrongKey


class SitesOfRun:
    """Cached registered sites of a run.

    Args:
        created_at: when the run was made; one that was deleted and came again is another.
        known: [n] uint64, ids of its sites.
    """

    def __init__(self, created_at: float, known: npt.NDArray[np.uint64]) -> None:
        self.created_at, self._known = created_at, known
        self._alike: OrderedDict[tuple[int, int], npt.NDArray[np.uint64]] = OrderedDict()

    def __len__(self) -> int:
        """How many sites there are."""
        return len(self._known)

    def missing(self, ids: npt.NDArray[np.uint64]) -> list[int]:
        """Those of `ids` that are not among them."""
        return [] if self.hold(ids) else [int(i) for i in np.unique(ids[~np.isin(ids, self._known)])]

    def hold(self, ids: npt.NDArray[np.uint64]) -> bool:
        """Whether all of these are registered. Batches are alike, so most often the answer is cached."""
        if not len(ids):
            return True
        looks = (len(ids), int(ids[0]))
        before = self._alike.get(looks)
        if before is not None and np.array_equal(before, ids):
            return True
        if not bool(np.isin(ids, self._known).all()):
            return False
        if ids.nbytes <= MAX_ALIKE_BYTES:
            self._alike[looks] = ids
            while len(self._alike) > MAX_ALIKE:
                self._alike.popitem(last=False)
        return True


class KnownSites:
    """Registered sites per run, cached between groups; a run that was deleted and registered again is read anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], SitesOfRun] = OrderedDict()

    def missing(self, conn: Connection, run: Any, ids: npt.NDArray[np.uint64]) -> list[int]:
        """Those of `ids` that are not registered."""
        key = (run.run_id, run.tenant)
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None and kept.created_at == run.created_at and kept.hold(ids):
            return []
        c = t.site.c
        rows = conn.execute(sa.select(c.site).where(c.run_id == run.run_id, c.tenant == run.tenant)).scalars()
        known = np.array(list(rows), dtype=np.uint64)
        with self._lock:
            self._kept[key] = SitesOfRun(run.created_at, known)
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KNOWN_RUNS:
                self._kept.popitem(last=False)
        return [int(i) for i in np.unique(ids[~np.isin(ids, known)])]


def commit_group(
    conn: Connection,
    group: Sequence[Incoming],
    known: KnownSites,
    *,
    now: float,
    replays: bool,
    tenant: str = t.DEFAULT_TENANT,
) -> list[Outcome]:
    """Write checked batches; refused ones are left out, and the others go on.

    Args:
        replays: look every key up first. Without it, one key that was taken before raises IntegrityError, and the
            caller begins again with it: hardly any batch comes twice, and then many do.
    """
    outcomes: list[Outcome | None] = [None] * len(group)
    by_run: dict[str, list[int]] = {}
    for i, item in enumerate(group):
        by_run.setdefault(item.batch.header.run, []).append(i)
    for run_id in sorted(by_run):  # one order everywhere, so that two collectors cannot deadlock
        _commit_run(conn, group, by_run[run_id], outcomes, known, (run_id, tenant), now=now, replays=replays)
    assert all(o is not None for o in outcomes)
    return [o for o in outcomes if o is not None]


_r, _s, _b = t.run.c, t.session.c, t.hot_batch.c
_LOCK_RUN = (
    sa.select(_r.run_id, _r.tenant, _r.created_at, _r.num_batches, _r.last_step, _r.last_step_attempt)
    .where(_r.run_id == sa.bindparam("run"), _r.tenant == sa.bindparam("of_tenant"))
    .with_for_update(key_share=True)
)
_SESSIONS = sa.select(_s.session, _s.rank, _s.attempt, _s.ledger_seq_max, _s.key_sha256).where(
    _s.run_id == sa.bindparam("run"),
    _s.tenant == sa.bindparam("of_tenant"),
    _s.session.in_(sa.bindparam("sessions", expanding=True)),
)
_STORED = sa.select(_b.body_sha256).where(
    _b.run_id == sa.bindparam("run"),
    _b.tenant == sa.bindparam("of_tenant"),
    _b.session == sa.bindparam("in_session"),
    _b.rank == sa.bindparam("of_rank"),
    _b.seq == sa.bindparam("at_seq"),
)
_INSERT = sa.insert(t.hot_batch)
_TOUCH_RUN = (
    sa.update(t.run)
    .where(_r.run_id == sa.bindparam("run"), _r.tenant == sa.bindparam("of_tenant"))
    .values(
        num_batches=sa.bindparam("batches"),
        last_seen_at=sa.bindparam("now"),
        last_step=sa.bindparam("step"),
        last_step_attempt=sa.bindparam("step_attempt"),
    )
)
_newer = sa.and_(sa.bindparam("has_health", type_=sa.Boolean), _s.health_seq < sa.bindparam("at_seq"))
_TOUCH_SESSION = (
    sa.update(t.session)
    .where(
        _s.run_id == sa.bindparam("run"),
        _s.tenant == sa.bindparam("of_tenant"),
        _s.session == sa.bindparam("in_session"),
    )
    .values(
        last_seen_at=sa.bindparam("now"),
        ended=sa.or_(_s.ended, sa.bindparam("has_ended", type_=sa.Boolean)),
        health=sa.case((_newer, sa.bindparam("of_health", type_=Json)), else_=_s.health),
        health_seq=sa.case((_newer, sa.bindparam("at_seq")), else_=_s.health_seq),
    )
)


def _commit_run(
    conn: Connection,
    group: Sequence[Incoming],
    at: list[int],
    outcomes: list[Outcome | None],
    known: KnownSites,
    where: tuple[str, str],
    *,
    now: float,
    replays: bool,
) -> None:
    """Commit the batches of one run, group[i] for i in `at`."""
    run_id, tenant = where
    of_run = {"run": run_id, "of_tenant": tenant}
    run = conn.execute(_LOCK_RUN, of_run).first()
    if run is None:
        to = moved_to(conn, run_id, tenant)
        for i in at:
            outcomes[i] = Unknown("run") if to is None else RunHasMoved(to)
        return
    names = sorted({group[i].batch.header.session for i in at})
    sessions = {row.session: row for row in conn.execute(_SESSIONS, {**of_run, "sessions": names})}
    captures = captures_wanted(conn, run_id, tenant=tenant)
    seen: dict[_Seen, bytes] = {}
    arrival = run.num_batches
    told: list[Told] = []
    batches: list[dict[str, Any]] = []
    scalars: list[dict[str, Any]] = []
    logs: list[dict[str, Any]] = []
    newest: dict[str, tuple[int, dict[str, float], bool]] = {}
    for i in at:
        item, h = group[i], group[i].batch.header
        session = sessions.get(h.session)
        key = (h.session, h.rank, h.seq)
        if session is None:
            outcomes[i] = Unknown("session")
            continue
        if not key_fits(session.key_sha256, item.key_sha256):
            outcomes[i] = WrongKey()
            continue
        if session.rank != h.rank:
            outcomes[i] = RankMismatch(h.rank, session.rank)
            continue
        there = seen.get(key)
        if there is None and replays:
            params = {**of_run, "in_session": h.session, "of_rank": h.rank, "at_seq": h.seq}
            found = conn.execute(_STORED, params).scalar()
            there = None if found is None else bytes(found)
        if there is None and h.seq <= session.ledger_seq_max:  # its body may be compacted already
            there = batch_dedup.digest_of(conn, run_id, tenant, h.session, h.rank, h.seq)
        if there is not None:
            outcomes[i] = Committed(h.seq, False, captures) if there == item.sha256[: len(there)] else KeyReused()
            continue
        missing = known.missing(conn, run, item.batch.site)
        if missing:
            outcomes[i] = Unknown("sites", missing)
            continue
        seen[key] = item.sha256
        arrival += 1
        batches.append(_row(item, run_id, tenant, session.attempt, arrival, now))
        scalars += _scalars(item.batch, session.attempt, tenant)
        logs += _logs(item.batch, session.attempt, tenant)
        steps = item.batch.steps
        if len(steps):
            step_max, began_at = int(steps["step"][-1]), float(steps["time"][0])
            told.append(Told(session.attempt, h.rank, h.parent_seq, step_max, began_at))
        before = newest.get(h.session, (-1, {}, False))
        health = (h.parent_seq, h.health) if h.health and h.parent_seq > before[0] else before[:2]
        newest[h.session] = (*health, before[2] or bool(h.health.get("ended")))
        outcomes[i] = Committed(h.seq, True, captures)
    if not batches:
        return
    conn.execute(_INSERT, batches)
    upsert(conn, t.scalar, scalars, newest_by="seq")
    upsert(conn, t.logged, logs, newest_by="seq")
    attempt, step = now_at(conn, run, told)
    conn.execute(_TOUCH_RUN, {**of_run, "batches": arrival, "now": now, "step_attempt": attempt, "step": step})
    touched = [
        {**of_run, "in_session": name, "now": now, "has_ended": ended}
        | {"has_health": bool(health), "of_health": health, "at_seq": seq}
        for name, (seq, health, ended) in sorted(newest.items())
    ]
    conn.execute(_TOUCH_SESSION, touched)


def _row(item: Incoming, run_id: str, tenant: str, attempt: int, arrival: int, now: float) -> dict[str, Any]:
    h, steps = item.batch.header, item.batch.steps["step"]
    return {
        "run_id": run_id,
        "tenant": tenant,
        "session": h.session,
        "rank": h.rank,
        "seq": h.seq,
        "body": item.body,
        "body_sha256": item.sha256,
        "attempt": attempt,
        "arrival": arrival,
        "received_at": now,
        "step_min": int(steps[0]) if len(steps) else None,
        "step_max": int(steps[-1]) if len(steps) else None,
        "num_records": h.num_records,
        "urgent": is_urgent(item.batch),
    }


def classify(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int8]:
    """0 finite, 1 NaN, 2 +Inf, 3 −Inf."""
    kinds = np.zeros(len(values), dtype=np.int8)
    if not np.isfinite(values).all():
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
        row: dict[str, Any] = {"run_id": h.run, "tenant": tenant, "attempt": attempt, "rank": h.rank, "step": step}
        row |= {"seq": h.parent_seq, "status": status, "time": time if math.isfinite(time) else None}
        row["batch_id"] = h.batch_ids[i] if h.batch_ids else None
        for name, bit in STEP_SCALARS.items():
            values, kinds = named[name]
            given = present & bit
            row[name] = values[i] if given and kinds[i] == 0 else None
            row[f"{name}_class"] = kinds[i] if given else None
        rows.append(row)
    return rows


_i = t.incident.c
_OPEN_INCIDENTS = (
    sa.select(_i.sites, _i.last_step)
    .where(_i.run_id == sa.bindparam("run"), _i.tenant == sa.bindparam("of_tenant"), _i.status != "resolved")
    .where(_i.last_step <= _i.first_step + CAPTURED_SPAN_STEPS)
    .where(  # of the newest attempt: one that begins behind the failure of another would send maps until it is past it
        _i.attempt
        >= sa.select(t.run.c.attempt).where(t.run.c.run_id == _i.run_id, t.run.c.tenant == _i.tenant).scalar_subquery()
    )
    .order_by(_i.updated_at.desc())
    .limit(16)
)


def _logs(batch: Batch, attempt: int, tenant: str) -> list[dict[str, Any]]:
    h, rows = batch.header, []
    steps = batch.steps["step"].tolist()
    for name, values in h.logs.items():
        if name.startswith(SKETCHES):  # several a step and rank, and nobody reads them again
            continue
        given = np.array([math.nan if v is None else v for v in values], dtype=np.float64)
        for step, value, number, kind in zip(steps, values, given.tolist(), classify(given).tolist(), strict=True):
            row: dict[str, Any] = {"run_id": h.run, "tenant": tenant, "name": name}
            row |= {"attempt": attempt, "rank": h.rank, "step": step, "seq": h.parent_seq}
            row["value"] = number if value is not None and kind == 0 else None
            row["value_class"] = None if value is None else kind
            rows.append(row)
    return rows


def captures_wanted(conn: Connection, run_id: str, *, tenant: str = t.DEFAULT_TENANT) -> list[dict[str, Any]]:
    """Sites whose full tile maps the agents should send: those of open incidents, for the steps that follow."""
    wanted: dict[int, list[int]] = {}
    for sites, last_step in conn.execute(_OPEN_INCIDENTS, {"run": run_id, "of_tenant": tenant}):
        for site in sites:
            if len(wanted) < MAX_CAPTURE_SITES:
                wanted.setdefault(int(site), [int(last_step), int(last_step) + CAPTURE_STEPS])
    return [{"site": site, "steps": steps} for site, steps in wanted.items()]
