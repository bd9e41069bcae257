"""Writes a database of this release beside the tests: `python -m store.freeze` in tests/, once before each release.

What is written is never written again: these rows are what collectors out there have stored. One file a kind of database,
because PostgreSQL has arrays where SQLite has packed bytes alone: the revision, the rows of every table, and what the
release answered when it was asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import sqlalchemy as sa
import zstandard
from store.kit import Feed, made_up
from support.database import KINDS, fresh_database

from fp8watch_server.db import migrations
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.store import queries

FROZEN = Path(__file__).parent / "frozen"


class Frozen(msgspec.Struct):
    """A database as it was."""

    revision: str
    tables: dict[str, list[dict[str, Any]]]  # parents before children
    answers: bytes  # msgpack of `answers`


def answers(feed: Feed) -> bytes:
    """What the pages may ask of the run, and what training logged by itself."""
    with feed.engine.connect() as conn:
        logged = queries.scalars(conn, "run-1", "aux", points=1000)
    return msgspec.msgpack.encode([feed.answers(), logged])


def fill(feed: Feed) -> None:
    """300 steps, of which 256 have become blocks; everything that a record may hold."""
    agent, rng = feed.agent(), np.random.default_rng(2)
    for first in range(0, 300, 50):
        logs: dict[str, list[float | None]] = {"aux": [float("inf"), None, *map(float, range(48))]}
        fields, losses = made_up(rng, 50, 3), list(rng.normal(2, 1, 50))
        feed.send(agent, list(range(first, first + 50)), fields=fields, scalars={"loss": losses}, logs=logs)
    feed.compact()
    assert feed.count(t.sheet)
    assert feed.count(t.hot_batch)


def rows_of(engine: sa.Engine) -> dict[str, list[dict[str, Any]]]:
    """Rows of every table that has some, as the database has them: no type of the schema of today is in between."""
    found = sa.MetaData()
    found.reflect(engine)
    with engine.connect() as conn:
        return {
            table.name: [dict(row) for row in rows]
            for table in found.sorted_tables
            if table.name != "alembic_version" and (rows := conn.execute(sa.select(table)).mappings().all())
        }


def load(kind: str, revision: str) -> Frozen:
    """What was frozen."""
    data = (FROZEN / f"{kind}-{revision}.msgpack.zst").read_bytes()
    return msgspec.msgpack.decode(zstandard.decompress(data), type=Frozen)


def main() -> None:
    """Freeze."""
    FROZEN.mkdir(exist_ok=True)
    for kind in KINDS:
        with fresh_database(kind) as url:
            engine = make_engine(url)
            feed = Feed(engine)
            fill(feed)
            frozen = Frozen(migrations.head(), rows_of(engine), answers(feed))
            path = FROZEN / f"{kind}-{frozen.revision}.msgpack.zst"
            if path.exists():
                raise SystemExit(f"{path.name} is there: a release is frozen once")
            path.write_bytes(zstandard.compress(msgspec.msgpack.encode(frozen), 19))
            engine.dispose()


if __name__ == "__main__":
    main()
