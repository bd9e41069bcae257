"""What Grafana's SQL reads on PostgreSQL is what the API answers; and its role reads nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import sqlalchemy as sa
from store.filled_store import fill
from store.kit import UP, Feed, made_up
from support.database import fresh_database

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.db.sql_views import FIELDS
from fp8watch_server.store import queries
from fp8watch_server.store.command import migrate_main


@pytest.fixture
def url() -> Iterator[str]:
    with fresh_database("postgresql") as made:
        yield made


@pytest.fixture
def feed(url: str) -> Iterator[Feed]:
    made = Feed(make_engine(url))
    yield made
    made.engine.dispose()


def as_number(value: float | None) -> float | str | None:
    return "nan" if value is not None and math.isnan(value) else value


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_views_say_what_the_api_says(feed: Feed, ranks: int) -> None:
    fill(feed, 300, ranks=ranks)
    uneven = [*range(300, 320), 330, 331, 340]
    feed.send(feed.agent(), uneven, fields=made_up(np.random.default_rng(1), len(uneven), 3), seq=500)
    feed.compact(everything=True)
    with feed.engine.connect() as conn:
        for field in FIELDS:
            want = queries.series(conn, "run-1", UP.id, field, 20, 339, points=1000)
            marks = {i: float(name) for i, name in want["nonfinite"]}
            values = [as_number(marks.get(i, v)) for i, v in enumerate(want["values"])]
            rows = conn.execute(
                sa.text("SELECT * FROM grafana.series('run-1', :site, :field, 20, 339)"),
                {"site": UP.id, "field": field},
            ).all()
            assert [row.step for row in rows] == want["steps"], field
            assert [as_number(row.value) for row in rows] == values, field
        heat = conn.execute(sa.text("SELECT * FROM grafana.heatmap('run-1', 'num_nonfinite', 0, 299, 10)")).all()
        assert len(heat) == 30
        total = queries.heatmap(conn, "run-1", "num_nonfinite", 0, 299, 300)
        assert max(row.largest for row in heat) == max(max(row) for row in total["values"])
        (run,) = conn.execute(sa.text("SELECT run_id, last_step FROM grafana.run")).all()
        assert tuple(run) == ("run-1", 340)
        for view, columns in (
            ("site", "module, label"),
            ("scalar", "step, loss, time"),
            ("incident", "mode, opened_at"),
        ):
            conn.execute(sa.text(f"SELECT {columns} FROM grafana.{view}")).all()


def test_the_role_of_the_dashboards_reads_the_views_and_nothing_else(
    feed: Feed, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(feed, 300, ranks=1)
    feed.compact(everything=True)
    role = feed.engine.url.database
    assert migrate_main(["--database-url", url, "--reader", f"reader_{role}"]) == 0
    assert "ALTER ROLE" in capsys.readouterr().out
    assert migrate_main(["--database-url", url, "--reader", f"reader_{role}"]) == 0
    engine = feed.engine
    try:
        with engine.connect() as conn:
            conn.exec_driver_sql(f'SET ROLE "reader_{role}"')
            assert len(conn.execute(sa.text("SELECT * FROM grafana.value")).all()) == 900
            assert (
                conn.execute(sa.text("SELECT count(*) FROM grafana.series('run-1', 1, 'amax_max', 0, 9)")).scalar() == 0
            )
            conn.rollback()
        forbidden = [f'SELECT 1 FROM "{name}"' for name in t.metadata.tables]
        forbidden += ["DELETE FROM grafana.run", "CREATE TABLE x (y int)", "INSERT INTO run (run_id) VALUES ('x')"]
        for statement in forbidden:
            with engine.connect() as conn:
                conn.exec_driver_sql(f'SET ROLE "reader_{role}"')
                with pytest.raises(sa.exc.ProgrammingError, match="permission denied|cannot delete"):
                    conn.exec_driver_sql(statement)
    finally:
        with writing(engine) as conn:
            conn.exec_driver_sql(f'DROP OWNED BY "reader_{role}"')
            conn.exec_driver_sql(f'DROP ROLE "reader_{role}"')
    assert migrate_main(["--database-url", url, "--reader", "x; DROP TABLE run"]) == 2
    assert migrate_main(["--database-url", url, "--reader", "postgres"]) == 2
    assert "administrator" in capsys.readouterr().err


def test_on_sqlite_there_are_no_roles(capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_database("sqlite") as url:
        assert migrate_main(["--database-url", url, "--reader", "grafana"]) == 2
    assert "token" in capsys.readouterr().err
