"""Checkpoints of a run: when they were written, and which hold an update of a step that failed.

Shapes:     sessions, logged values and incidents of a run -> one line a checkpoint
Thread:     worker threads of the server

A checkpoint is called by the last step whose update it holds. It is poisoned from the first failure on that a critical
incident of its attempt names, whenever that was found; an attempt that went on from a poisoned one is poisoned too. A
failure in steps whose update was skipped poisons nothing. `clean` says that no incident speaks against it, no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from fp8watch_agent.record import StepStatus
from fp8watch_server.db import schema as t

FACT = "checkpoints"
"""Of a session: steps, apart by spaces."""
LOGGED = "checkpoint_saved"
"""Name that `watch.log` is given with the step behind the checkpoint."""
MAX_SESSIONS = 512
MAX_CHECKPOINTS = 1000
UNSEEN_STEPS = {"silent-data-corruption": 100}
"""Mode -> steps for which it may have lasted before it could be seen: replicas are compared once in so many steps."""
CLEAN, SUSPECT, POISONED = "clean", "suspect", "poisoned"
_WORSE = {CLEAN: 0, SUSPECT: 1, POISONED: 2}


@dataclass(frozen=True)
class Bad:
    """From which step on the weights of an attempt hold a bad update, and why."""

    step: int
    state: str
    incident: str
    title: str
    since: int
    """The step in which it failed."""


@dataclass(frozen=True)
class Origin:
    """Where an attempt went on from."""

    attempt: int
    step: int
    """The last one whose update its first weights hold."""
    known: bool
    """Its session said so; else it follows from the number of its first step."""


def checkpoints(conn: Connection, run_id: str, tenant: str = t.DEFAULT_TENANT) -> dict[str, Any]:
    """{items: [{attempt, step, state, since, incident, title}], last_clean: {attempt, step} | None}, the newest first."""
    s = t.session.c
    rows = conn.execute(
        sa.select(s.session, s.attempt, s.rank, s.facts)
        .where(s.run_id == run_id, s.tenant == tenant)
        .order_by(s.rank, s.attempt.desc())
        .limit(MAX_SESSIONS)
    ).all()
    saved = {(int(r.attempt), step) for r in rows for step in steps_of((r.facts or {}).get(FACT))}
    c = t.logged.c
    logged = sa.select(c.attempt, c.step).where(
        c.run_id == run_id, c.tenant == tenant, c.name == LOGGED, c.value_class == 0, c.value != 0
    )
    newest = conn.execute(logged.order_by(c.attempt.desc(), c.step.desc()).limit(MAX_CHECKPOINTS)).all()
    saved |= {(int(r.attempt), int(r.step) - 1) for r in newest if r.step > 0}
    if not saved:
        return {"items": [], "last_clean": None}
    bad: dict[int, list[Bad]] = {}
    i = t.incident.c
    of_run = sa.select(t.incident).where(i.run_id == run_id, i.tenant == tenant, i.severity == "critical")
    for row in conn.execute(of_run.order_by(i.first_step)).mappings():
        if row["closed_as"] != "false-alarm":
            bad.setdefault(int(row["attempt"]), []).extend(_bad(conn, run_id, tenant, dict(row)))
    _inherit(bad, _origins(conn, run_id, tenant, rows))
    return listed(saved, bad)


def first_bad(conn: Connection, incident: Mapping[str, Any], tenant: str = t.DEFAULT_TENANT) -> int | None:
    """The first step whose update an incident spoiled, for certain or perhaps; None where no update holds any of it."""
    return min((b.step for b in _bad(conn, incident["run_id"], tenant, incident)), default=None)


def steps_of(fact: object) -> list[int]:
    """Steps out of the fact; what cannot be read is none."""
    return (
        [int(p) for p in fact.split() if p.isascii() and p.isdigit() and len(p) < 19] if isinstance(fact, str) else []
    )


def listed(saved: Iterable[tuple[int, int]], bad: Mapping[int, Sequence[Bad]]) -> dict[str, Any]:
    """As `checkpoints` gives it.

    Args:
        saved: (attempt, step).
        bad: of each attempt.
    """
    items: list[dict[str, Any]] = []
    for attempt, step in sorted(saved, reverse=True)[:MAX_CHECKPOINTS]:
        found = [b for b in bad.get(attempt, ()) if step >= b.step]
        worst = min(found, key=lambda b: (-_WORSE[b.state], b.step), default=None)
        said: dict[str, Any] = {"since": None, "incident": None, "title": None}
        if worst is not None:
            said = {"since": worst.since, "incident": worst.incident, "title": worst.title}
        items.append({"attempt": attempt, "step": step, "state": worst.state if worst else CLEAN, **said})
    clean = next(({k: x[k] for k in ("attempt", "step")} for x in items if x["state"] == CLEAN), None)
    return {"items": items, "last_clean": clean}


def _bad(conn: Connection, run_id: str, tenant: str, incident: Mapping[str, Any]) -> list[Bad]:
    first, last = int(incident["first_step"]), int(incident["last_step"])
    name = str(incident["id"]), str(incident["title"]), first
    if (incident["place"] or {}).get(
        "operand"
    ) == "weight":  # weights change by updates: by the one before at the latest
        found = [Bad(first - 1, POISONED, *name)]
    else:
        step = _first_update(conn, run_id, tenant, int(incident["attempt"]), first, last)
        found = [] if step is None else [Bad(step, POISONED, *name)]
    unseen = UNSEEN_STEPS.get(incident["mode"])
    return found if unseen is None else [*found, Bad(first - unseen, SUSPECT, *name)]


def _first_update(conn: Connection, run_id: str, tenant: str, attempt: int, first: int, last: int) -> int | None:
    """The first step from `first` to `last` that updated the weights; None where all were skipped or aborted."""
    c = t.scalar.c
    of = [c.run_id == run_id, c.tenant == tenant, c.attempt == attempt, c.step >= first, c.step <= last]
    updated = conn.execute(sa.select(sa.func.min(c.step)).where(*of, c.status == int(StepStatus.OK))).scalar()
    if updated is not None:
        return int(updated)
    known = conn.execute(sa.select(c.step).where(*of).limit(1)).first()
    return None if known is not None else first  # what is not known any more was an update


def _origins(conn: Connection, run_id: str, tenant: str, rows: Sequence[Any]) -> dict[int, Origin]:
    """Attempt -> where it went on from."""
    attempt_of = {str(r.session): int(r.attempt) for r in rows}
    found: dict[int, Origin] = {}
    for r in rows:
        facts, attempt = r.facts or {}, int(r.attempt)
        before, step = attempt_of.get(str(facts.get("checkpoint.session"))), facts.get("checkpoint.step")
        if attempt not in found and before is not None and before < attempt and isinstance(step, int):
            found[attempt] = Origin(before, step - 1, known=True)
    c = t.scalar.c
    for attempt in sorted(set(attempt_of.values()))[1:]:
        if attempt in found:
            continue
        of = (c.run_id == run_id, c.tenant == tenant, c.attempt == attempt)
        first = conn.execute(sa.select(sa.func.min(c.step)).where(*of)).scalar()
        if first:  # one that begins at step 0 begins anew
            found[attempt] = Origin(attempt - 1, int(first) - 1, known=False)
    return found


def _inherit(bad: dict[int, list[Bad]], origins: Mapping[int, Origin]) -> None:
    """What an attempt went on from stays in its weights."""
    for attempt in sorted(origins):
        origin = origins[attempt]
        for b in [b for b in bad.get(origin.attempt, ()) if origin.step >= b.step]:
            state = b.state if origin.known else SUSPECT
            bad.setdefault(attempt, []).append(Bad(-1, state, b.incident, b.title, b.since))
