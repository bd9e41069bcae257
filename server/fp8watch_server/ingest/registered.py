"""What is registered, remembered: a batch is checked without waiting for the database.

Shapes:     checked batches -> what is wrong with each, or None; and the captures of its run
Thread:     committer asks; a thread of its own reads

A run that is known is read again while it sends, so that incidents and deletions are noticed. What is not known is waited
for, but not for long: the database may hang, and those whose runs are known must not.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from fp8watch_server.db import schema as t
from fp8watch_server.http.db_timeout import unavailable
from fp8watch_server.store.commit import Incoming, SitesOfRun, captures_wanted
from fp8watch_server.store.registrations import RankMismatch, Unknown, WrongKey, key_fits

READ_AGAIN_S = 1.0
WAIT_S = 0.5
MAX_RUNS = 1024


@dataclass
class _Run:
    sites: SitesOfRun
    sessions: dict[str, tuple[int, str | None]]  # rank, hash of its key
    captures: list[dict[str, Any]]
    read_at: float


class Registered:
    """One per collector.

    Args:
        engine: the database.
        clock: seconds, ascending.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, _Run] = OrderedDict()
        self._reading: OrderedDict[str, Future[None]] = OrderedDict()
        self._asked: dict[str, set[str]] = {}  # sessions of a run that its next reading looks for
        self._reader = ThreadPoolExecutor(1, "fp8watch-registered")

    def close(self) -> None:
        """Read no more."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def captures(self, run_id: str) -> list[dict[str, Any]]:
        """Sites whose full tile maps are wanted, as of about a second ago."""
        run = self._runs.get(run_id)
        return run.captures if run is not None else []

    def check(self, items: Sequence[Incoming]) -> list[Exception | None]:
        """What is wrong with each batch: Unknown, WrongKey, RankMismatch, or a Problem that says when to come back."""
        found = [self._wrong(item) for item in items]
        unknown: dict[str, set[str]] = {}
        for item, wrong in zip(items, found, strict=True):
            if isinstance(wrong, Unknown):
                unknown.setdefault(item.batch.header.run, set()).add(item.batch.header.session)
        away = {run_id: self._look_up(run_id, unknown[run_id]) for run_id in sorted(unknown)}  # perhaps of a moment ago
        for at, item in enumerate(items):
            if isinstance(found[at], Unknown):
                found[at] = away[item.batch.header.run] or self._wrong(item)
        for run_id in {i.batch.header.run for i in items} - set(unknown):
            run = self._runs.get(run_id)
            if run is not None and self._clock() - run.read_at > READ_AGAIN_S:
                self._start_reading(run_id, set())
        return found

    def _look_up(self, run_id: str, sessions: set[str]) -> Exception | None:
        """Read a run and these of its sessions now; what the database said, if it did not work."""
        try:
            self._start_reading(run_id, sessions).result(WAIT_S)
        except (FutureTimeoutError, SQLAlchemyError):
            return unavailable("the database does not say what is registered")
        return None

    def _start_reading(self, run_id: str, sessions: set[str]) -> Future[None]:
        """A reading of a run that begins from now on; one that waits for its turn is it."""
        with self._lock:
            self._asked.setdefault(run_id, set()).update(sessions)
            waiting = self._reading.get(run_id)
            if waiting is not None and not waiting.running() and not waiting.done():
                return waiting
            self._reading[run_id] = made = self._reader.submit(self._read, run_id)
            while len(self._reading) > MAX_RUNS:
                self._reading.popitem(last=False)
        return made

    def _wrong(self, item: Incoming) -> Exception | None:
        header = item.batch.header
        run = self._runs.get(header.run)
        if run is None:
            return Unknown("run")
        session = run.sessions.get(header.session)
        if session is None:
            return Unknown("session")
        rank, key_sha256 = session
        if not key_fits(key_sha256, item.key_sha256):
            return WrongKey()
        if rank != header.rank:
            return RankMismatch(header.rank, rank)
        missing = run.sites.missing(item.batch.site)
        return Unknown("sites", missing) if missing else None

    def _read(self, run_id: str) -> None:
        now = self._clock()
        with self._lock:
            asked = self._asked.pop(run_id, set())
        r, s, c = t.run.c, t.session.c, t.site.c
        before = self._runs.get(run_id)
        with self._engine.connect() as conn:
            tenant = t.DEFAULT_TENANT
            row = conn.execute(sa.select(r.created_at).where(r.run_id == run_id, r.tenant == tenant)).first()
            if row is None:
                with self._lock:
                    self._runs.pop(run_id, None)
                return
            same = before is not None and before.sites.created_at == row.created_at
            sessions = (
                before.sessions if before is not None and same else {}
            )  # they neither change nor go before their run
            if asked:
                these = (s.run_id == run_id, s.tenant == tenant, s.session.in_(sorted(asked)))
                rows = conn.execute(sa.select(s.session, s.rank, s.key_sha256).where(*these))
                sessions.update({found.session: (found.rank, found.key_sha256) for found in rows})
            num_sites = conn.execute(
                sa.select(sa.func.count()).where(c.run_id == run_id, c.tenant == tenant)
            ).scalar_one()
            if before is not None and same and len(before.sites) == num_sites:
                sites = before.sites
            else:
                ids = conn.execute(sa.select(c.site).where(c.run_id == run_id, c.tenant == tenant)).scalars()
                sites = SitesOfRun(row.created_at, np.array(list(ids), dtype=np.uint64))
            captures = captures_wanted(conn, run_id)
        with self._lock:
            self._runs[run_id] = _Run(sites, sessions, captures, now)
            self._runs.move_to_end(run_id)
            while len(self._runs) > MAX_RUNS:
                self._runs.popitem(last=False)
