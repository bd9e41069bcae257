"""Every released schema comes to the newest with its data, on both databases."""

from __future__ import annotations

import numpy as np
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from store import freeze
from store.kit import SITES, Feed, made_up
from support.database import fresh_database

from fp8watch_server.db import migrations
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import for_writing, make_engine
from fp8watch_server.incidents.causes import cause_id
from fp8watch_server.store.check import check
from fp8watch_server.store.incident_states import state_of


@pytest.mark.parametrize("release", ["0004"])
def test_a_database_of_a_release_keeps_its_data(database_kind: str, release: str) -> None:
    """A release that is missing from the list has not been frozen: see store/freeze.py."""
    frozen = freeze.load(database_kind, release)
    with fresh_database(database_kind, migrated=False) as url:
        engine = make_engine(url)
        to(engine, release)
        put(engine, frozen)
        assert migrations.upgrade(engine) == release

        with engine.connect() as conn:
            assert compare_metadata(MigrationContext.configure(conn), t.metadata) == []
        feed = Feed(engine)
        assert freeze.answers(feed) == frozen.answers
        feed.compact(everything=True)
        assert feed.count(t.sheet) == 1
        assert feed.count(t.block, t.block.c.front_bytes > 0) == len(SITES)  # as they were
        assert feed.count(t.hot_batch) == 0
        engine.dispose()


@pytest.mark.parametrize("release", ["0004"])
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_blocks_of_a_release_take_late_records_and_other_ranks(
    database_kind: str, release: str, ranks: tuple[int, ...]
) -> None:
    """Answers are the same before and after the blocks became sheets, of one rank and as one of two in a roll-up."""
    with fresh_database(database_kind, migrated=False) as url:
        engine = make_engine(url)
        to(engine, release)
        put(engine, freeze.load(database_kind, release))
        migrations.upgrade(engine)
        feed, rng = Feed(engine), np.random.default_rng(4)
        for rank in ranks:
            feed.send(feed.agent(rank=rank), list(range(3, 40)), SITES[:2], fields=made_up(rng, 37, 2), seq=999)
        before, records = freeze.answers(feed), [feed.records(rank=rank) for rank in (None, 0, 1)]
        feed.compact(everything=True)
        assert feed.count(t.hot_batch) == 0
        assert freeze.answers(feed) == before
        assert [feed.records(rank=rank) for rank in (None, 0, 1)] == records
        assert feed.count(t.block, t.block.c.front_bytes > 0, t.block.c.rank == 0) == (0 if 0 in ranks else len(SITES))
        assert check(engine).problems == []
        engine.dispose()


def test_incidents_of_before_have_their_cause_and_ask_for_nobody(database_kind: str) -> None:
    with fresh_database(database_kind, migrated=False) as url:
        engine = make_engine(url)
        to(engine, "0004")
        tables = sa.MetaData()
        tables.reflect(engine)
        place = {"module": "layers.11.mlp.up", "operand": "input"}
        row = dict.fromkeys(("title", "verdict", "cause", "fingerprint"), "x")
        row |= dict.fromkeys(("attempt", "first_step", "last_step", "num_events", "num_sites"), 1)
        row |= {"run_id": "r", "mode": "m", "origin": True, "severity": "critical", "opened_at": 1.0, "updated_at": 9.0}
        json: dict[str, list[str]] = {name: [] for name in ("sites", "evidence", "fix", "alternatives")}
        with for_writing(engine).begin() as conn:
            of_run = {"run_id": "r", "name": "r", "created_at": 1.0, "last_seen_at": 1.0}
            conn.execute(sa.insert(tables.tables["run"]), [of_run])
            incident = t.metadata.tables["incident"]
            known = sa.table("incident", *(sa.column(c.name, c.type) for c in incident.c))
            for id_, status, over in (("a", "open", None), ("b", "resolved", 5.0)):
                values = {**row, **json, "place": place, "id": id_, "status": status, "resolved_at": over}
                conn.execute(sa.insert(known).values(**values))
        migrations.upgrade(engine)
        with engine.connect() as conn:
            rows = conn.execute(sa.select(incident).order_by(incident.c.id)).mappings().all()
        assert [r["cause_id"] for r in rows] == [cause_id("m", {"module": "layers.2.mlp.up", "operand": "input"})] * 2
        assert [state_of(r) for r in rows] == ["open", "seen"]
        engine.dispose()


def test_the_newest_revision_is_frozen_before_it_is_released() -> None:
    """Fails after a new revision until a release is frozen; until then, name it here."""
    unreleased = {"0007", "0008", "0009", "0010", "0011", "0012", "0013", "0014", "0015"}
    assert migrations.head() in unreleased | {"0004"}


def test_a_revision_from_before_the_first_release_is_told_apart(database_kind: str) -> None:
    with fresh_database(database_kind, migrated=False) as url:
        engine = make_engine(url)
        migrations.upgrade(engine)
        with engine.begin() as conn:
            conn.execute(sa.text("UPDATE alembic_version SET version_num = '0003'"))
        with pytest.raises(migrations.UnknownRevision, match=r"revision 0003.*this collector does not know.*upgrade"):
            migrations.upgrade(engine)
        engine.dispose()


def test_down_and_up_again(database_kind: str) -> None:
    with fresh_database(database_kind) as url:
        engine = make_engine(url)
        to(engine, "base", down=True)
        assert set(sa.inspect(engine).get_table_names()) == {"alembic_version"}
        to(engine, "head")
        with engine.connect() as conn:
            assert compare_metadata(MigrationContext.configure(conn), t.metadata) == []
        engine.dispose()


def to(engine: sa.Engine, revision: str, *, down: bool = False) -> None:
    made = migrations.config()
    with for_writing(engine).begin() as conn:
        made.attributes["connection"] = conn
        (command.downgrade if down else command.upgrade)(made, revision)


def put(engine: sa.Engine, frozen: freeze.Frozen) -> None:
    """The rows of a release into its own tables."""
    tables = sa.MetaData()
    tables.reflect(engine)
    with for_writing(engine).begin() as conn:
        for name, rows in frozen.tables.items():
            conn.execute(sa.delete(tables.tables[name]))
            conn.execute(sa.insert(tables.tables[name]), rows)
