"""The databases of a collector: its home, and shards that runs are spread over.

Shapes:     run id, incident id -> Engine; all databases -> one connection each
Thread:     any; each shard has a thread that looks after it

Each shard is a whole database of its own, with runs, their batches, incidents and messages. Home has the tokens, the
directory, and runs from before there were shards. A shard that does not answer is away: what needs it is refused at once, so that
nobody waits for it who does not need it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from fp8watch_server.db import migrations
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import CONNECT_S, make_engine
from fp8watch_server.db.directory import HOME, Directory, ShardMixedUp, claim_shard, order_of
from fp8watch_server.db.pools import for_requests

log = logging.getLogger("fp8watch.shards")

PROBE_EVERY_S, AWAY_AFTER_S = 1.0, 3.0
"""How often a shard is asked whether it is there, and how long it may be silent."""
MAX_KNOWN_INCIDENTS = 4096


class ShardAway(OperationalError):
    """A shard does not answer, or is none of this collector's."""

    def __init__(self, name: str) -> None:
        super().__init__("", None, Exception(f"shard {name!r} does not answer"))
        self.name = name


class Shard:
    """One further database.

    Args:
        name: in the directory.
        url: of the database.
        directory: id of the directory that it belongs to.

    `on_answer` is called from the thread of `start` whenever it is there, or there again, at this collector's revision.
    """

    def __init__(self, name: str, url: str, directory: str) -> None:
        self.name = name
        self.engine = make_engine(url)
        self.on_answer: Callable[[], None] = lambda: None
        self._directory = directory
        self._opened = False
        self._answered_at = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._said = ""

    @property
    def ready(self) -> bool:
        """Whether it answered of late."""
        watched = self._thread is not None
        return self._opened and (not watched or time.monotonic() - self._answered_at < AWAY_AFTER_S)

    def open(self) -> bool:
        """Bring it to this collector's revision, and ask whether it answers; says whether it does.

        Raises:
            ShardMixedUp, UnknownRevision: it is not to be used.
        """
        try:
            if not self._opened:
                migrations.upgrade(self.engine)
                claim_shard(self.engine, self._directory, self.name)
                self._opened = True
            with self.engine.connect() as conn:
                conn.execute(sa.text("SELECT 1"))
        except SQLAlchemyError as e:
            self._say(f"shard {self.name!r} is away: {str(e).splitlines()[0]}")
            return False
        self._answered_at = time.monotonic()
        self._say("")
        return True

    def start(self) -> None:
        """Look after it."""
        self._answered_at = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name=f"fp8watch-shard-{self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CONNECT_S)

    def _watch(self) -> None:
        there = False
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                answers = self.open()
                if answers and (not there or time.monotonic() - began > AWAY_AFTER_S):
                    self.on_answer()
                there = answers
            except Exception as e:  # noqa: BLE001  nothing may end the thread
                self._say(f"shard {self.name!r} is not used: {e}")
            self._stop.wait(PROBE_EVERY_S)

    def _say(self, what: str) -> None:
        if what and what != self._said:
            log.warning("%s", what)
        elif not what and self._said:
            log.warning("shard %r is there again", self.name)
        self._said = what


@dataclass(frozen=True)
class Everywhere:
    """A connection to each database that answers, home first, and the names of those that do not."""

    conns: tuple[Connection, ...]
    away: tuple[str, ...] = ()


class Shards:
    """Home and shards of one collector.

    Args:
        home: the database of FP8WATCH_DATABASE_URL.
        others: shards.
    """

    def __init__(self, home: Engine, others: Sequence[Shard] = ()) -> None:
        self.home = home
        self.others: Mapping[str, Shard] = {shard.name: shard for shard in others}
        self.directory = Directory(home)
        self._lock = threading.Lock()
        self._incidents: OrderedDict[str, str] = OrderedDict()

    @property
    def away(self) -> tuple[str, ...]:
        """Names of shards that do not answer."""
        return tuple(name for name, shard in self.others.items() if not shard.ready)

    def named(self, name: str) -> Engine:
        """The database of this name.

        Raises:
            ShardAway: it does not answer.
        """
        if name == HOME:
            return self.home
        shard = self.others.get(name)
        if shard is None or not shard.ready:
            raise ShardAway(name)
        return shard.engine

    def name_of_run(self, run_id: str, *, new: bool = False) -> str:
        """Name of the database that a run lies in; one that lies nowhere is looked for at home, or placed if it is `new`.

        Raises:
            SQLAlchemyError: the directory cannot be asked.
        """
        if not self.others:
            return HOME
        if not new:
            return self.directory.look_up(run_id) or HOME
        order = order_of(run_id, self.others)  # a shard that is away takes no new runs
        return self.directory.place(run_id, sorted(order, key=lambda name: not self.others[name].ready))

    def of_run(self, run_id: str) -> Engine:
        """The database that a run lies in.

        Raises:
            ShardAway: it does not answer.
            SQLAlchemyError: the directory cannot be asked.
        """
        return self.named(self.name_of_run(run_id))

    def of_incident(self, incident_id: str) -> Engine:
        """The database that has an incident; home where none has it.

        Raises:
            ShardAway: none that answers has it.
        """
        if not self.others:
            return self.home
        known = self._incidents.get(incident_id)
        if known is not None:
            return self.named(known)
        i, away = t.incident.c, self.away
        for name in (HOME, *(name for name in self.others if name not in away)):
            with self.named(name).connect() as conn:
                if conn.execute(sa.select(i.id).where(i.id == incident_id)).first() is not None:
                    with self._lock:
                        self._incidents[incident_id] = name
                        while len(self._incidents) > MAX_KNOWN_INCIDENTS:
                            self._incidents.popitem(last=False)
                    return self.named(name)
        if away:
            raise ShardAway(away[0])
        return self.home

    def answering(self) -> list[Engine]:
        """Home, and the shards that answer."""
        return [self.home, *(shard.engine for shard in self.others.values() if shard.ready)]

    def engines(self) -> list[Engine]:
        """All databases, for what must be done in each.

        Raises:
            ShardAway: one does not answer.
        """
        return [self.home, *(self.named(name) for name in self.others)]

    @contextmanager
    def connections(self) -> Iterator[Everywhere]:
        """A connection of requests to each database that answers.

        Raises:
            SQLAlchemyError: home does not.
        """
        with ExitStack() as stack:
            conns, away = [stack.enter_context(for_requests(self.home).connect())], []
            for name, shard in self.others.items():
                try:
                    conns.append(stack.enter_context(for_requests(self.named(name)).connect()))
                except SQLAlchemyError:
                    away.append(shard.name)
            yield Everywhere(tuple(conns), tuple(away))


def open_shards(home: Engine, urls: Mapping[str, str], directory: str) -> Shards:
    """Home and its shards; one that is away is opened later, by its thread.

    Raises:
        ShardMixedUp, UnknownRevision, DatabaseUrlError: one is not to be used.
    """
    made = Shards(home, [Shard(name, url, directory) for name, url in urls.items()])
    for shard in made.others.values():
        shard.open()
    return made


__all__ = ["Everywhere", "Shard", "ShardAway", "ShardMixedUp", "Shards", "open_shards"]
