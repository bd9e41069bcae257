"""A collector that stops closes its connections, also those on which a query goes on whose client has gone."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from pages.collector import make_app, serving
from support.database import KINDS, fresh_database

from fp8watch_server.db.closing_pool import ClosingPool
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.pools import close, for_requests

HELD_S = 0.6
SOON_S = 2.0
PATIENCE_S = 5.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_outlives_its_client_leaves_no_connection_open(kind: str, tmp_path: Path) -> None:
    with fresh_database(kind) as url:
        app = make_app(tmp_path, url)
        held, closed = [], []
        sa.event.listen(app.state.engine, "close", lambda connection, record: closed.append(id(connection)))
        busy = threading.Event()

        def ask() -> None:
            with app.state.engine.connect() as conn:
                held.append(conn.connection.dbapi_connection)
                busy.set()
                time.sleep(HELD_S)

        with serving(app) as client:
            assert client.get("/").status_code == 200
            asking = threading.Thread(target=ask)
            asking.start()
            assert busy.wait(5)
        assert id(held[0]) in closed
        asking.join()


def test_one_that_never_answers_is_not_waited_for(tmp_path: Path) -> None:
    engine = make_engine(f"sqlite:///{tmp_path / 'a.db'}")
    with engine.connect() as conn:
        conn.execute(sa.text("SELECT 1"))
        began = time.monotonic()
        close(engine, within_s=0.1)
        assert 0.1 <= time.monotonic() - began < 30
    close(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_back_to_a_pool_that_was_disposed_of_is_closed(kind: str) -> None:
    """Of requests, too, whose pool goes with that of their engine."""
    with fresh_database(kind) as url:
        engine = make_engine(url)
        for asking in (engine, for_requests(engine)):
            closed: list[int] = []
            sa.event.listen(asking, "close", lambda connection, record, into=closed: into.append(id(connection)))
            with asking.connect() as conn:
                held = conn.connection.dbapi_connection
                engine.dispose()
                assert conn.execute(sa.text("SELECT 1")).scalar_one() == 1
                assert closed == []
            assert closed == [id(held)]


def test_who_waits_at_a_pool_that_is_disposed_of_has_the_next_connection(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    engine = sa.create_engine(url, poolclass=ClosingPool, pool_size=1, max_overflow=0, pool_timeout=PATIENCE_S)
    answers: list[int] = []

    def ask() -> None:
        with engine.connect() as conn:
            answers.append(conn.execute(sa.text("SELECT 1")).scalar_one())

    with engine.connect():
        waiting = threading.Thread(target=ask)
        waiting.start()
        time.sleep(0.1)
        engine.dispose()
    waiting.join(SOON_S)
    assert answers == [1]
