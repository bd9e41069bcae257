"""The engines of the runs that send, each with what its run has registered.

Shapes:     run, sessions of its next batches -> Running
Thread:     detect worker

To restore the engine of a large run takes seconds; meanwhile urgent batches of other runs are processed. What is registered is looked at before each group of batches. Of a run of many ranks that look is long, so a session is read when
its first batch comes, and all of them again only after a while.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy.engine import Connection, Engine

from fp8watch_server.pipeline import engine_restore
from fp8watch_server.pipeline.detection import DetectEngine, Detection

log = logging.getLogger("fp8watch.detect")

MAX_ENGINES, MAX_SETTLING = 64, 128
"""In memory; more while they hold steps back, which are lost with them."""
MANY_SESSIONS = 256
LOOK_AGAIN_S = 0.0005
"""For each session of a run of many: how long it takes until another fact of a known session is noticed."""

Key = tuple[str, str]  # run id, tenant


@dataclass
class Running:
    """One engine."""

    engine: DetectEngine
    sites: Mapping[int, Any]
    seen: engine_restore.Registered
    sessions: set[str] = field(default_factory=set)
    looked_at: float = 0.0
    since_saved: int = 0  # batches
    saved_at: float = 0.0
    save_took_s: float = 0.0
    arrival: int = 0  # last batch that it has seen and that is marked

    def knows(self, sessions: set[str], now: float) -> bool:
        """Whether sessions need not be looked at: there are many, these are among them, and the last look is not long ago."""
        num = len(self.sessions)
        return num > MANY_SESSIONS and now - self.looked_at < num * LOOK_AGAIN_S and sessions <= self.sessions


class RunEngines:
    """The engines that are in memory, the MAX_ENGINES that were used last.

    Args:
        db: where the runs are.
        detection: makes engines.
        meanwhile: is called again and again while an engine is being restored, with the runs whose engines cannot be used
            yet; may ask for the engines of others.
        put_away: is called with an engine that leaves memory, to save it: of more runs than MAX_ENGINES each asks for its
            engine in turn, and would have it built up again for every group of batches.
    """

    def __init__(
        self,
        db: Engine,
        detection: Detection,
        meanwhile: Callable[[Collection[Key]], None],
        put_away: Callable[[Key, Running], None] = lambda key, running: None,
    ) -> None:
        self._db, self._detection, self._meanwhile, self._put_away = db, detection, meanwhile, put_away
        self._restoring: set[Key] = set()
        self._running: OrderedDict[Key, Running] = OrderedDict()

    def kept(self, key: Key) -> Running:
        """The engine of a run that was asked for a moment ago."""
        return self._running[key]

    def items(self) -> list[tuple[Key, Running]]:
        """All of them."""
        return list(self._running.items())

    def drop(self, key: Key) -> None:
        """Forget one: it has seen what was not committed, or the run is elsewhere."""
        self._running.pop(key, None)

    def clear(self) -> None:
        """Forget all: another collector detects."""
        self._running.clear()

    def of(self, key: Key, before_arrival: int, sessions: set[str]) -> Running:
        """The engine of a run, with what is registered now.

        Args:
            before_arrival: its next batch; where there is no engine it is restored up to here.
            sessions: of its next batches.
        """
        running = self._running.get(key)
        with self._db.connect() as conn:
            if running is None:
                self._restoring.add(key)
                try:
                    running = self._restored(conn, key, before_arrival)
                finally:
                    self._restoring.discard(key)
                self._running[key] = running
            else:
                self._look(conn, key, running, sessions)
        self._running.move_to_end(key)
        while len(self._running) > MAX_ENGINES:
            others = [k for k in self._running if k != key]
            out = next((k for k in others if not self._running[k].engine.settling), None)
            if out is None and len(self._running) <= MAX_SETTLING:
                break
            out = out or others[0]
            self._put_away(out, self._running.pop(out))
        return running

    def _look(self, conn: Connection, key: Key, running: Running, sessions: set[str]) -> None:
        """Tell an engine what was registered since it was last looked at."""
        now, before = time.monotonic(), running.seen
        sites = engine_restore.registered_sites(conn, *key)
        if sites != before[:2]:
            facts = self._detection.make_facts(engine_restore.sites_of(conn, *key))
            running.engine.add_sites({i: f for i, f in facts.items() if running.sites.get(i) != f})
            running.sites = facts
        of_sessions = before[2:]
        fresh = sessions - running.sessions
        if (
            len(running.sessions) > MANY_SESSIONS
            and fresh
            and now - running.looked_at < len(running.sessions) * LOOK_AGAIN_S
        ):
            running.engine.add_sessions(self._sessions(conn, key, running, fresh))
        elif not running.knows(sessions, now):
            of_sessions = engine_restore.registered_sessions(conn, *key)
            if of_sessions != before[2:]:
                running.engine.add_sessions(self._sessions(conn, key, running, None))
            running.looked_at = now
        running.seen = *sites, *of_sessions

    def _sessions(self, conn: Connection, key: Key, running: Running | None, only: set[str] | None) -> Any:
        rows = engine_restore.sessions_of(conn, *key, only=only)
        if running is not None:
            running.sessions |= {row.session for row in rows}
        return self._detection.make_sessions(rows)

    def _restored(self, conn: Connection, key: Key, before_arrival: int) -> Running:
        """Restore an engine from its saved state and later batches; else rebuild it from the newest samples."""
        seen = *engine_restore.registered_sites(conn, *key), *engine_restore.registered_sessions(conn, *key)
        facts = self._detection.make_facts(engine_restore.sites_of(conn, *key))
        rows = engine_restore.sessions_of(conn, *key)
        sessions, now = self._detection.make_sessions(rows), time.monotonic()
        saved = engine_restore.saved(conn, *key, before_arrival)
        name = engine_restore.run_name(conn, *key)
        made: DetectEngine | None = None
        meanwhile = partial(self._meanwhile, self._restoring)
        if saved is not None and self._detection.load_engine is not None:
            try:
                made = self._detection.load_engine(saved.state, facts, key[0], name)
            except ValueError as e:
                log.info("run %r: what its detectors remembered is not used: %s", key[0], e)
            else:
                made.add_sessions(sessions)
                engine_restore.replay_since(conn, made, *key, saved.arrival, before_arrival, meanwhile)
        if made is None:
            made = self._detection.make_engine(facts, key[0], name)
            made.add_sessions(sessions)
            engine_restore.replay(conn, made, *key, before_arrival, meanwhile)
        made.take_notices()
        names = {row.session for row in rows}
        return Running(made, facts, seen, names, looked_at=now, saved_at=time.monotonic())
