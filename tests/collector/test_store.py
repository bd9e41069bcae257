"""The database: migrations, one writer in line, retention of tile maps, any order of batches."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from collector.filled_run import an_incident
from collector.kit import Agent, make_site, on_sqlite

from fp8watch_agent.record import TileMap
from fp8watch_server.db import dialect, migrations
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import finite_json, make_engine, writing
from fp8watch_server.store import queries, tile_maps

UP, DOWN = make_site("up", order=0), make_site("down", order=1)


def test_migrations_make_exactly_the_tables_of_the_schema(settings: Any) -> None:
    engine = make_engine(settings.database_url)
    with engine.connect() as conn:
        assert compare_metadata(MigrationContext.configure(conn), t.metadata) == []
        assert migrations.current(conn) == migrations.head()
    assert migrations.upgrade(engine) == migrations.head()  # once more does nothing
    engine.dispose()


def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(f"sqlite:///{tmp_path / 'x.db'}")

    def breaks(config: Any, revision: str) -> None:
        config.attributes["connection"].exec_driver_sql("CREATE TABLE half (x)")
        raise RuntimeError("power cut")

    monkeypatch.setattr(migrations.command, "upgrade", breaks)
    with pytest.raises(RuntimeError):
        migrations.upgrade(engine)
    with engine.connect() as conn:
        assert sa.inspect(conn).get_table_names() == []
    engine.dispose()


@on_sqlite
def test_sqlite_runs_in_wal_with_foreign_keys(app: Any) -> None:
    with app.state.engine.connect() as conn:
        assert conn.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert conn.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert conn.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    orphan = {
        "run_id": "none",
        "session": "s",
        "rank": 0,
        "attempt": 1,
        "world_size": 1,
        "mesh": {},
        "host": "",
        "pid": 1,
    }
    orphan |= {"versions": {}, "recipe": "", "fingerprint": "", "backend": "", "facts": {}}
    with pytest.raises(sa.exc.IntegrityError), writing(app.state.engine) as conn:
        conn.execute(sa.insert(t.session), [{**orphan, "registered_at": 0.0, "last_seen_at": 0.0}])


@on_sqlite
def test_writers_stand_in_line_and_readers_do_not_wait(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, order = app.state.engine, []
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with writing(engine) as conn:
            conn.execute(sa.select(t.run))
            inside.set()
            assert go_on.wait(5)
            order.append("first")

    def second() -> None:
        with writing(engine):
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(5)
    threads[1].start()
    with engine.connect() as conn:
        assert queries.runs(conn) == []
    monkeypatch.setattr(dialect, "BUSY_TIMEOUT_S", 0.01)
    with pytest.raises(sa.exc.OperationalError), writing(engine):
        pass
    go_on.set()
    for thread in threads:
        thread.join(5)
    assert order == ["first", "second"]


def test_json_columns_keep_what_json_has_no_word_for() -> None:
    value = {"a": [float("nan"), 1.0], "b": (float("inf"), -float("inf")), "c": "nan", "d": None}
    assert finite_json(value) == {"a": ["nan", 1.0], "b": ["inf", "-inf"], "c": "nan", "d": None}


def test_the_newest_tile_maps_and_those_around_incidents_are_kept(client: Any, app: Any) -> None:
    agent = Agent(client).register([UP])
    with writing(app.state.engine) as conn:
        conn.execute(sa.insert(t.incident), [an_incident(first_step=100, last_step=110)])

    def a_map(step: int) -> TileMap:
        one = np.ones(1)
        return TileMap(
            site=UP.id,
            step=step,
            shape=(1, 1),
            amax=one.astype(np.uint16),
            scale_inv=one.astype(np.float32),
            flags=one.astype(np.uint8),
            num_nonfinite=one.astype(np.uint16),
            num_underflow=one.astype(np.uint16),
        )

    for seq, start in enumerate(range(0, 600, 100)):
        assert agent.post_maps([a_map(s) for s in range(start, start + 100)], seq).status_code == 200
    with writing(app.state.engine) as conn:
        gone = tile_maps.prune(conn, "run-1")
    with app.state.engine.connect() as conn:
        kept = tile_maps.steps_available(conn, "run-1", UP.id)
    assert kept == [*range(84, 127), *range(344, 600)]
    assert gone == 600 - len(kept)


def test_batches_in_any_order_give_the_same_answers(client: Any, app: Any) -> None:
    rng = random.Random(3)
    answers = []
    for attempt in range(4):
        run = f"run-{attempt}"
        ranks = [Agent(client, run=run, session=f"{rank}" * 32, rank=rank).register([UP, DOWN]) for rank in (0, 1)]
        bodies = [
            (
                agent,
                agent.body(
                    [UP, DOWN], [s, s + 1], fields={"amax_max": float(s + agent.rank)}, scalars={"loss": [s, s]}
                ),
            )
            for agent in ranks
            for s in range(0, 12, 2)
        ]
        if attempt:
            bodies = rng.sample(bodies + bodies, 2 * len(bodies))
        for agent, body in bodies:
            assert agent.post(body).status_code == 200
        while app.state.worker.drain():
            pass
        with app.state.engine.connect() as conn:
            found = queries.run(conn, run)
            assert found is not None
            totals = conn.execute(
                sa.select(t.site_total.c.site, t.site_total.c.num_nonfinite, t.site_total.c.last_step)
                .where(t.site_total.c.run_id == run)
                .order_by(t.site_total.c.site)
            ).all()
            answers.append(
                [
                    queries.series(conn, run, UP.id, "amax_max"),
                    queries.heatmap(conn, run, "num_elements"),
                    queries.scalars(conn, run, "loss"),
                    queries.top(conn, run, "amax_max"),
                    found["last_step"],
                    [tuple(row) for row in totals],
                ]
            )
    assert answers[1:] == answers[:1] * 3
