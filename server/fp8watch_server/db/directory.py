"""The directory of shards: which database each run lies in.

Shapes:     run id -> name of a shard, "" for the home database
Thread:     any

A new run goes to the shard that comes first for it: each name is hashed with the run id, and the order of the hashes is
the order of choice (rendezvous hashing), so a shard that is added draws its share of new runs from all others. What was
chosen is written down, and the directory alone counts from then on. A run stays where it is until it is moved: of those that have
ever been, each collector asks again every second. Whoever has not heard of a move yet finds the old place closed.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert, writing

log = logging.getLogger("fp8watch.shards")

HOME = ""
REFRESH_EVERY_S = 1.0
"""How soon a collector notices that a run is being moved, or was."""
MAX_KNOWN_RUNS = 1 << 16
DIRECTORY, SHARD = "directory", "shard"
"""Facts: the id of a directory, in its home database; whose shard a database is, in each."""


class ShardMixedUp(ValueError):
    """A database that is another shard, another directory's, or one that the settings leave out."""


def order_of(run_id: str, names: Iterable[str]) -> list[str]:
    """Names of shards, the first choice of a run first."""
    return sorted(names, key=lambda name: hashlib.blake2b(f"{name}\0{run_id}".encode(), digest_size=16).digest())


class Directory:
    """The directory in a home database, remembered.

    Args:
        home: the database that it lies in.
    """

    def __init__(self, home: Engine) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._known: OrderedDict[str, str] = OrderedDict()
        self._refusing: frozenset[str] = frozenset()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Notice moves."""
        self._thread = threading.Thread(target=self._watch, name="fp8watch-directory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(REFRESH_EVERY_S)

    def _watch(self) -> None:
        while not self._stop.wait(REFRESH_EVERY_S):
            try:
                self.refresh()
            except SQLAlchemyError as e:
                log.debug("the directory cannot be asked: %s", str(e).splitlines()[0])
            except Exception:
                log.exception("the directory cannot be read")

    def refresh(self) -> None:
        """Ask again where the runs lie that were ever moved, and which are refused now.

        Raises:
            SQLAlchemyError: the home database cannot be asked.
        """
        d = t.shard_of_run.c
        moves = sa.or_(d.num_moves > 0, d.moving_to.is_not(None))
        with self._home.connect() as conn:
            rows = conn.execute(sa.select(d.run_id, d.shard, d.refuses).where(moves)).all()
        with self._lock:
            for run_id, shard, _ in rows:
                if run_id in self._known:
                    self._known[run_id] = shard
            self._refusing = frozenset(run_id for run_id, _, refuses in rows if refuses)

    def refuses(self, run_id: str) -> bool:
        """Whether a run takes nothing now, because it is being moved."""
        return run_id in self._refusing

    def known(self, run_id: str) -> str | None:
        """Where a run lies, if that was asked before."""
        return self._known.get(run_id)

    def look_up(self, run_id: str) -> str | None:
        """Where a run lies; None: nowhere.

        Raises:
            SQLAlchemyError: the home database cannot be asked.
        """
        found = self._known.get(run_id)
        if found is not None:
            return found
        found = self.read(run_id)
        return None if found is None else self._remember(run_id, found)

    def read(self, run_id: str) -> str | None:
        """Where a run lies, asked now.

        Raises:
            SQLAlchemyError: the home database cannot be asked.
        """
        d, r, tenant = t.shard_of_run.c, t.run.c, t.DEFAULT_TENANT
        with self._home.connect() as conn:
            found: str | None = conn.execute(sa.select(d.shard).where(d.run_id == run_id, d.tenant == tenant)).scalar()
            if found is None:  # from before there were shards
                here = conn.execute(sa.select(r.run_id).where(r.run_id == run_id, r.tenant == tenant)).first()
                found = HOME if here is not None else None
        return found

    def place(self, run_id: str, choices: Sequence[str]) -> str:
        """Where a run lies; one that lies nowhere is placed on the first of `choices`.

        Raises:
            SQLAlchemyError: the home database cannot be asked.
        """
        found = self.look_up(run_id)
        if found is not None:
            return found
        row = {"run_id": run_id, "tenant": t.DEFAULT_TENANT, "shard": choices[0], "placed_at": time.time()}
        with writing(self._home) as conn:
            upsert(conn, t.shard_of_run, [row], update=())  # of two collectors that place it, the first counts
            d = t.shard_of_run.c
            where = (d.run_id == run_id, d.tenant == t.DEFAULT_TENANT)
            found = str(conn.execute(sa.select(d.shard).where(*where)).scalar_one())
        return self._remember(run_id, found)

    def num_runs(self) -> dict[str, int]:
        """Shard -> number of runs that were placed on it."""
        d = t.shard_of_run.c
        with self._home.connect() as conn:
            rows = conn.execute(sa.select(d.shard, sa.func.count()).group_by(d.shard)).all()
        return {shard: int(num) for shard, num in rows}

    def _remember(self, run_id: str, shard: str) -> str:
        with self._lock:
            self._known[run_id] = shard
            while len(self._known) > MAX_KNOWN_RUNS:
                self._known.popitem(last=False)
        return shard


def open_directory(home: Engine, names: Iterable[str]) -> str:
    """Check a home database against the names of the shards; returns the id of its directory, "" where there are no shards.

    Raises:
        ShardMixedUp: runs lie on shards that are not among the names, or the home database is a shard itself.
    """
    placed, names = Directory(home).num_runs(), set(names)
    missing = {name: num for name, num in placed.items() if name not in names and name != HOME}
    if missing:
        raise ShardMixedUp(
            f"runs lie on shards that FP8WATCH_SHARDS does not name: {missing}; name them again, with their databases"
        )
    if not names:
        return ""
    own = claim(home, DIRECTORY, uuid.uuid4().hex)
    claim_shard(home, own, HOME)
    return own


def claim(engine: Engine, fact: str, value: str) -> str:
    """Write a fact unless it is there; returns what is there."""
    with writing(engine) as conn:
        upsert(conn, t.fact, [{"name": fact, "value": value}], update=())
        return str(conn.execute(sa.select(t.fact.c.value).where(t.fact.c.name == fact)).scalar_one())


def claim_shard(engine: Engine, directory: str, name: str) -> None:
    """Make a database the shard of this name, for good.

    Raises:
        ShardMixedUp: it is another one.
    """
    mine = f"{directory} {name}"
    found = claim(engine, SHARD, mine)
    if found != mine:
        whose = "of another directory" if found.split(" ")[0] != directory else f"named {found.split(' ')[1]!r}"
        raise ShardMixedUp(
            f"the database of shard {name!r} ({engine.url.render_as_string(hide_password=True)}) is a shard {whose}; "
            "FP8WATCH_SHARDS gives each database the name that it had first"
            if found.split(" ")[1:] != [HOME]
            else f"the database of shard {name!r} is the home database; FP8WATCH_SHARDS names further ones"
        )
