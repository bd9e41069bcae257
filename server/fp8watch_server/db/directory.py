"""The directory of shards: which database each run lies in.

Shapes:     run id -> name of a shard, "" for the home database
Thread:     any

A new run goes to the shard that comes first for it: each name is hashed with the run id, and the order of the hashes is
the order of choice (rendezvous hashing), so a shard that is added draws its share of new runs from all others. What was
chosen is written down, and the directory alone counts from then on. A run stays where it is, so an answer never changes.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import upsert, writing

HOME = ""
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
        d, r, tenant = t.shard_of_run.c, t.run.c, t.DEFAULT_TENANT
        with self._home.connect() as conn:
            found = conn.execute(sa.select(d.shard).where(d.run_id == run_id, d.tenant == tenant)).scalar()
            if found is None:  # from before there were shards
                here = conn.execute(sa.select(r.run_id).where(r.run_id == run_id, r.tenant == tenant)).first()
                found = HOME if here is not None else None
        return None if found is None else self._remember(run_id, found)

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
