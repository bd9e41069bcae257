"""Every released schema comes to the newest with its data, on both databases."""

from __future__ import annotations

import numpy as np
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from database import fresh_database
from store.kit import SITES, Feed, made_up

from fp8watch_server.db import migrations
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import for_writing, make_engine
from fp8watch_server.store import queries


def test_a_filled_database_of_the_first_release_keeps_its_data(database_kind: str) -> None:
    with fresh_database(database_kind) as source_url, fresh_database(database_kind, migrated=False) as url:
        source, old = make_engine(source_url), make_engine(url)
        feed = Feed(source)
        agent = feed.agent()
        rng = np.random.default_rng(2)
        for first in range(0, 300, 50):
            steps = list(range(first, first + 50))
            logs: dict[str, list[float | None]] = {"aux": [float("inf"), None, *map(float, range(48))]}
            feed.send(agent, steps, fields=made_up(rng, 50, 3), scalars={"loss": list(rng.normal(2, 1, 50))}, logs=logs)
        want = feed.answers()
        with source.connect() as conn:
            aux = queries.scalars(conn, "run-1", "aux", points=1000)

        made = migrations.config()
        with for_writing(old).begin() as conn:
            made.attributes["connection"] = conn
            command.upgrade(made, "0001")
        _copy(source, old)
        assert migrations.upgrade(old) == "0001"

        with old.connect() as conn:
            assert compare_metadata(MigrationContext.configure(conn), t.metadata) == []
            assert queries.scalars(conn, "run-1", "aux", points=1000) == aux
        migrated = Feed(old)
        assert migrated.answers() == want
        migrated.compact(everything=True)
        assert migrated.answers() == want
        assert migrated.count(t.block) == 2 * len(SITES)
        source.dispose()
        old.dispose()


def _copy(source: sa.Engine, old: sa.Engine) -> None:
    """The rows of the tables that the first release had, column by column."""
    first = sa.MetaData()
    first.reflect(old)
    with source.connect() as from_, for_writing(old).begin() as into:
        for name in ("run", "session", "site", "hot_batch", "scalar"):
            columns = first.tables[name].columns.keys()
            table = t.metadata.tables[name]
            rows = from_.execute(sa.select(*(table.c[c] for c in columns))).mappings().all()
            into.execute(sa.insert(table), [dict(row) for row in rows])


def test_down_and_up_again(database_kind: str) -> None:
    with fresh_database(database_kind) as url:
        engine = make_engine(url)
        made = migrations.config()
        for revision in ("0001", "head"):
            with for_writing(engine).begin() as conn:
                made.attributes["connection"] = conn
                (command.downgrade if revision == "0001" else command.upgrade)(made, revision)
        with engine.connect() as conn:
            assert compare_metadata(MigrationContext.configure(conn), t.metadata) == []
        engine.dispose()
