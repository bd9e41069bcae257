"""What people do to all incidents of a cause while detection has some of them in hand."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from collector.filled_run import SITES, an_incident
from collector.kit import Agent

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import writing
from fp8watch_server.incidents.stored import load

CAUSE = "c" * 16


@pytest.mark.parametrize("database_kind", ["postgresql"])
def test_neither_waits_for_the_other_with_what_the_other_wants_in_hand(client: httpx.Client, app: Any) -> None:
    Agent(client).register(SITES)
    engine, status = app.state.engine, t.incident.c.status
    with writing(engine) as conn:
        for name, state in (("0b", "resolved"), ("a1", "open")):
            conn.execute(sa.insert(t.incident), [an_incident(id=name, status=state, cause_id=CAUSE)])
    with ThreadPoolExecutor(1) as person, writing(engine) as conn:
        assert [i.row["id"] for i in load(conn, "run-1", "default", 1, status != "resolved")] == ["a1"]
        acting = person.submit(client.post, f"/api/v1/causes/{CAUSE}/seen", timeout=60)
        until = time.monotonic() + 20
        while not _waiting(engine):
            assert time.monotonic() < until
            time.sleep(0.02)
        assert [i.row["id"] for i in load(conn, "run-1", "default", 1, status == "resolved")] == ["0b"]
        conn.commit()
        answer = acting.result()
    assert (answer.status_code, answer.json()["num_changed"]) == (200, 2), answer.text


def _waiting(engine: sa.Engine) -> bool:
    asked = "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE NOT granted AND datname = current_database()"
    with engine.connect() as conn:
        return bool(conn.exec_driver_sql(asked).scalar())
