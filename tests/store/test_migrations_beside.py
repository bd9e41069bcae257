"""Migrations on a PostgreSQL that others use, or migrate, at the same time."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from alembic import command
from support.database import fresh_database

from fp8watch_server.db import migrations
from fp8watch_server.db.dialect import for_writing, make_engine

UPGRADE = """
import sys
from fp8watch_server.db import migrations
from fp8watch_server.db.dialect import make_engine
engine = make_engine(sys.argv[1])
engine.connect().close()
print("ready", flush=True)
sys.stdin.readline()
migrations.upgrade(engine)
"""


def test_collectors_that_start_together_on_an_empty_database_all_start() -> None:
    with fresh_database("postgresql", migrated=False) as url:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [subprocess.Popen([sys.executable, "-c", UPGRADE, url], **pipes) for _ in range(3)]  # type: ignore[call-overload]
        for process in started:
            assert process.stdout.readline() == "ready\n"
        for process in started:
            process.stdin.write("\n")
            process.stdin.flush()
        for process in started:
            error = process.communicate(timeout=60)[1]
            assert process.returncode == 0, error
        engine = make_engine(url)
        with engine.connect() as conn:
            assert migrations.current(conn) == migrations.head()
        engine.dispose()


def test_who_asks_a_table_does_not_wait_behind_a_migration_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "LOCK_MS", 300)
    asked = "SELECT count(*) FROM hot_batch"
    waits = "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database WHERE NOT granted AND datname = current_database()"
    with fresh_database("postgresql", migrated=False) as url:
        engine = make_engine(url)
        made = migrations.config()
        with for_writing(engine).begin() as conn:
            made.attributes["connection"] = conn
            command.upgrade(made, "0004")
        with ThreadPoolExecutor(1) as other:
            with engine.connect() as reader:
                reader.exec_driver_sql(asked)  # a dump, or a long question of Grafana
                upgrading = other.submit(migrations.upgrade, engine)
                until = time.monotonic() + 30
                while True:
                    with engine.connect() as conn:
                        if conn.exec_driver_sql(waits).scalar():
                            break
                    assert time.monotonic() < until
                    time.sleep(0.01)
                with engine.connect() as conn:
                    conn.execute(sa.text("SET LOCAL statement_timeout = '10s'"))
                    assert conn.exec_driver_sql(asked).scalar() == 0
            assert upgrading.result(timeout=60) == "0004"
        engine.dispose()
