"""A collector that stops closes its connections, also those on which a query goes on whose client has gone."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from pages.collector import make_app, serving
from support.database import KINDS, fresh_database

from fp8watch_server.db import dialect

HELD_S = 0.6


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
        asking.join()
        assert id(held[0]) in closed


def test_one_that_never_answers_is_not_waited_for(tmp_path: Path) -> None:
    engine = dialect.make_engine(f"sqlite:///{tmp_path / 'a.db'}")
    with engine.connect() as conn:
        conn.execute(sa.text("SELECT 1"))
        began = time.monotonic()
        dialect.close(engine, within_s=0.1)
        assert 0.1 <= time.monotonic() - began < 30
    dialect.close(engine)
