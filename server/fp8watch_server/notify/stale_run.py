"""Silence of a run as a message: it lives, as far as is known, and no data has come for a while.

Shapes:     rows of run and session -> rows of outbox
Thread:     its own, where a routes file asks for it

An agent sends when there are steps to send, so a long evaluation or a checkpoint is silence too: only the people who
train know how long is too long. Without `stalled_after` in a routes file the pages say `stalled`, and nobody is told.
The collector's own absence is not held against a run: the time counts from its start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing
from fp8watch_server.db.fence import unfenced
from fp8watch_server.db.leader import Leader
from fp8watch_server.incidents.messages import queue
from fp8watch_server.incidents.payload import Incident
from fp8watch_server.incidents.silences import silences_of
from fp8watch_server.store import queries
from fp8watch_server.store.rows import IncidentPlace, RunWithSessions

STALLED = "run-stalled"
PREFIX = f"{STALLED}:"
FORGET_AFTER_S = 7 * 86_400.0
"""A run that has been silent for longer is over, whatever it said."""
_NOWHERE: IncidentPlace = {
    "ranks": [], "module": None, "gemm": None, "operand": None, "direction": None, "tile": None, "element": None,
    "expert": None,
}  # fmt: skip

_log = logging.getLogger(__name__)


class StalledWatch:
    """Looks every now and then, until it is stopped.

    Args:
        after_s: of silence.
        wake: called when there is something in the outbox.
    """

    def __init__(
        self,
        engine: sa.Engine,
        after_s: float,
        *,
        public_url: str = "",
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._after_s, self._public_url = engine, after_s, public_url
        self._wake, self._clock, self._began = wake, clock, clock()
        self._leader = Leader(engine, "stalled")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="fp8watch-notify-stalled", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.wait(min(10.0, self._after_s / 10)):
            try:
                if self._leader.held() and self.look():
                    self._wake()
            except SQLAlchemyError as e:
                _log.warning("stalled runs: database not available (%s); trying again", type(e).__name__)
        self._leader.release()

    def look(self) -> int:
        """Tell of runs that fell silent, and of those that are back. Returns how many notices that made."""
        now = self._clock()
        if 0 <= now - self._began < self._after_s:  # who is silent is not known yet, and nobody is back for that
            return 0
        with self._engine.connect() as conn:
            silent = self._silent(conn, now)
            told, ever = _told(conn), _ever_told(conn)
        over = [key for key in told if key not in silent]
        new = [key for key in silent if key not in ever]  # of one silence is told once
        if not over and not new:
            return 0
        with writing(self._engine) as conn:
            told, ever = _told(conn), _ever_told(conn)  # somebody else may have been quicker
            for key in new:
                if key not in ever and not silences_of(
                    conn, schema.DEFAULT_TENANT, silent[key]["id"], STALLED, "", now
                ):
                    queue(conn, schema.DEFAULT_TENANT, self._incident(key, silent[key], now), "firing", now)
            for key in over:
                if key in told:
                    incident: Incident = {**told[key], "status": "resolved", "resolved_at": now}
                    queue(conn, schema.DEFAULT_TENANT, incident, "resolved", now)
        return len(over) + len(new)

    def _silent(self, conn: sa.Connection, now: float) -> dict[str, RunWithSessions]:
        """Runs that have been silent for too long, by the id of their notice; not those that are being moved."""
        r = schema.run.c
        quiet = r.last_seen_at.between(now - FORGET_AFTER_S, now - self._after_s)
        here = (r.tenant == schema.DEFAULT_TENANT, unfenced(r.run_id))
        ids = conn.execute(sa.select(r.run_id).where(*here, quiet)).scalars().all()
        runs = [run for run in (queries.run(conn, i, now=now) for i in ids) if run is not None]
        return {f"{PREFIX}{run['id']}:{run['last_seen_at']:.3f}": run for run in runs if run["status"] == "stalled"}

    def _incident(self, key: str, run: RunWithSessions, now: float) -> Incident:
        """The notice in the form of an incident."""
        step = run["last_step"] or 0
        silent_s = round(now - run["last_seen_at"])
        base = self._public_url.rstrip("/")
        url = f"{base}/runs/{quote(run['id'], safe='')}"
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run["last_seen_at"]))
        return {
            "id": key,
            "run_id": run["id"],
            "attempt": run["attempt"],
            "mode": STALLED,
            "title": f"No data for {silent_s / 60:.0f} minutes, last step {run['last_step']}",
            "severity": "warning",
            "status": "open",
            "verdict": "unknown",
            "first_step": step,
            "last_step": step,
            "num_events": 1,
            "origin": True,
            "place": _NOWHERE,
            "num_sites": 0,
            "evidence": [{"field": "silent_s", "value": silent_s, "baseline": None, "unit": "s", "since_step": step}],
            "cause": f"Nothing has come from this run since {since}, and it did not say that it ends: it hangs, it was "
            "killed, its agent cannot reach the collector, or a step takes longer than usual.",
            "fix": [{"kind": "hardware", "text": "Look whether its processes live, and what they wait for."}],
            "alternatives": [],
            "opened_at": now,
            "resolved_at": None,
            "fingerprint": key,
            "url": url,
            "runbook_url": url,
        }


def _ever_told(conn: sa.Connection) -> set[str]:
    """The ids of all notices, over or not."""
    t = schema.outbox.c
    of_silence = (t.tenant == schema.DEFAULT_TENANT, t.incident_id.startswith(PREFIX))
    return set(conn.execute(sa.select(t.incident_id).where(*of_silence).distinct()).scalars())


def _told(conn: sa.Connection) -> dict[str, Incident]:
    """The notices that are not over, by id; not of runs that are being moved."""
    t, over = schema.outbox.c, schema.outbox.alias("over").c
    ended = sa.exists().where(
        over.run_id == t.run_id, over.tenant == t.tenant, over.incident_id == t.incident_id, over.kind == "resolved"
    )
    rows = conn.execute(
        sa.select(t.incident_id, t.payload)
        .where(t.tenant == schema.DEFAULT_TENANT, t.incident_id.startswith(PREFIX), t.kind != "resolved", ~ended)
        .where(unfenced(t.run_id))
    )
    return {incident_id: payload["incident"] for incident_id, payload in rows}
