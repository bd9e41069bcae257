"""With row-level security a tenant's reader sees the runs of its tenant and no other's, whatever SQL it sends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import sqlalchemy as sa
from store.filled_store import fill
from store.kit import Feed
from support.database import fresh_database

from fp8watch_server.auth.command import main as token_main
from fp8watch_server.db import row_security
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, parse_url, writing
from fp8watch_server.db.sql_views import SCHEMA
from fp8watch_server.store.command import migrate_main

A, B, ALL = "tenant_a_reader", "tenant_b_reader", "every_reader"
VIEWS = ("run", "site", "scalar", "incident", "value")
Sql = Callable[[str, str], list[sa.Row]]


@pytest.fixture
def url() -> Iterator[str]:
    with fresh_database("postgresql") as made:
        yield made


def token(url: str, tenant: str, runs: str) -> None:
    assert token_main(["--database-url", url, "create", tenant, "--tenant", tenant, "--runs", runs]) == 0


@pytest.fixture
def tenants(url: str) -> Iterator[sa.Engine]:
    """Runs a-1 and b-1, a token and a reader of each tenant, and a reader of all."""
    engine = make_engine(url)
    for run in ("a-1", "b-1"):
        feed = Feed(engine)
        fill(feed, 300, ranks=1, per_batch=100, run=run)
        feed.compact(everything=True)
    token(url, "team-a", "a-*,shared")
    token(url, "team-b", "b-*")
    for role, more in ((ALL, []), (A, ["--tenant", "team-a"]), (B, ["--tenant", "team-b"])):
        assert migrate_main(["--database-url", url, "--reader", role, *more]) == 0
        with writing(engine) as conn:
            conn.exec_driver_sql(f"ALTER ROLE {role} LOGIN PASSWORD 'x'")
    yield engine
    with writing(engine) as conn:
        row_security.turn_off(conn)
        for role in (A, B, ALL):
            conn.exec_driver_sql(f"DROP OWNED BY {role}")
            conn.exec_driver_sql(f"DROP ROLE {role}")
    engine.dispose()


@pytest.fixture
def as_reader(url: str, tenants: sa.Engine) -> Sql:
    """SQL sent in a session of a role's own, as Grafana's is."""
    engines = {
        role: sa.create_engine(parse_url(url).set(username=role, password="x"), poolclass=sa.NullPool)
        for role in (A, B, ALL)
    }

    def send(role: str, statement: str) -> list[sa.Row]:
        with engines[role].connect() as conn:
            return list(conn.exec_driver_sql(statement))

    return send


def test_a_reader_sees_no_run_of_another_tenant_in_any_view_or_table(as_reader: Sql, tenants: sa.Engine) -> None:
    with tenants.connect() as conn:
        tables = row_security._read_by_views(conn)
    assert {"run", "block", "scalar", "site"} <= set(tables)
    for role, own in ((A, {"a-1"}), (B, {"b-1"}), (ALL, {"a-1", "b-1"})):
        for name in [
            *(f"{SCHEMA}.{view}" for view in VIEWS),
            *(n for n in tables if "run_id" in t.metadata.tables[n].c),
        ]:
            seen = {row[0] for row in as_reader(role, f"SELECT DISTINCT run_id FROM {name}")}
            assert seen <= own, (role, name)
            if name in ("run", f"{SCHEMA}.run", "site", f"{SCHEMA}.value"):
                assert seen == own, (role, name)


def test_no_sql_of_a_reader_reaches_another_tenant(as_reader: Sql) -> None:
    leak = """CREATE FUNCTION pg_temp.leak(run text) RETURNS boolean LANGUAGE plpgsql COST 0.0000001 AS
    'BEGIN IF run LIKE ''b-%%'' THEN RAISE EXCEPTION ''seen %%'', run; END IF; RETURN true; END'"""
    assert as_reader(A, "SELECT * FROM run WHERE run_id = 'b-1'") == []
    assert as_reader(A, f"SELECT * FROM {SCHEMA}.series('b-1', (SELECT min(site) FROM site), 'amax_max', 0, 299)") == []
    assert as_reader(A, "SELECT r.run_id FROM run r FULL JOIN site s ON true WHERE r.run_id <> 'a-1'") == []
    assert {row[0] for row in as_reader(A, "SELECT tenancy.visible_runs()")} == {"a-1"}
    engine_leak = f"DO $do$ BEGIN EXECUTE $x${leak}$x$; PERFORM count(*) FROM run WHERE pg_temp.leak(run_id); END $do$"
    denied = [
        f"SET ROLE {B}",
        "SET SESSION AUTHORIZATION postgres",
        "SELECT * FROM token",
        "SELECT * FROM hot_batch",
        "SELECT * FROM tenancy.reader",
        "UPDATE tenancy.reader SET tenant = '*'",
        "ALTER TABLE run DISABLE ROW LEVEL SECURITY",
        "DROP POLICY fp8watch_tenant ON run",
        f"ALTER VIEW {SCHEMA}.run SET (security_invoker = false)",
    ]
    for statement in denied:
        with pytest.raises(sa.exc.ProgrammingError, match="permission denied|must be owner"):
            as_reader(A, statement)
    with pytest.raises(sa.exc.ResourceClosedError):  # no error of its own: the function saw no run of b
        as_reader(A, engine_leak)
    with pytest.raises(sa.exc.ProgrammingError, match="row-level security"):
        as_reader(A, "SET row_security = off; SELECT * FROM run")


def test_tokens_say_which_runs_are_a_tenants_and_a_revoked_one_says_nothing(
    as_reader: Sql, url: str, tenants: sa.Engine
) -> None:
    token(url, "team-a", "b-?")
    assert {row[0] for row in as_reader(A, "SELECT run_id FROM run")} == {"a-1", "b-1"}
    with writing(tenants) as conn:
        conn.execute(sa.update(t.token).where(t.token.c.tenant == "team-a").values(revoked_at=1.0))
    assert as_reader(A, "SELECT run_id FROM run") == []
    assert {row[0] for row in as_reader(B, "SELECT run_id FROM run")} == {"b-1"}


def test_a_view_that_a_migration_makes_is_of_the_asking_reader_too(as_reader: Sql, tenants: sa.Engine) -> None:
    with writing(tenants) as conn:
        conn.exec_driver_sql(f"CREATE VIEW {SCHEMA}.later AS SELECT run_id FROM session")
        conn.exec_driver_sql(f"GRANT SELECT ON {SCHEMA}.later TO {A}")
    try:
        assert (
            len(as_reader(A, f"SELECT DISTINCT run_id FROM {SCHEMA}.later")) == 2
        )  # why `renew` follows each migration
        with writing(tenants) as conn:
            row_security.renew(conn)
        assert as_reader(A, f"SELECT DISTINCT run_id FROM {SCHEMA}.later") == [("a-1",)]
    finally:
        with writing(tenants) as conn:
            conn.exec_driver_sql(f"DROP VIEW {SCHEMA}.later")


def test_turned_off_every_reader_reads_all_views_and_no_table(as_reader: Sql, url: str) -> None:
    assert migrate_main(["--database-url", url, "--no-row-security"]) == 0
    assert {row[0] for row in as_reader(A, f"SELECT run_id FROM {SCHEMA}.run")} == {"a-1", "b-1"}
    with pytest.raises(sa.exc.ProgrammingError, match="permission denied"):
        as_reader(A, "SELECT run_id FROM run")


def test_a_pattern_names_the_same_runs_in_sql_as_in_a_token(tenants: sa.Engine) -> None:
    rng = random.Random(5)
    letters = "ab-[]!^*?.\\]z"
    patterns = ["".join(rng.choice(letters) for _ in range(rng.randint(1, 6))) for _ in range(1500)]
    runs = ["".join(rng.choice("ab-[]!^.\\z") for _ in range(rng.randint(1, 4))) for _ in range(60)]
    sql = sa.text("SELECT run, coalesce(run ~ tenancy.regex_of(:p), false) FROM unnest(cast(:runs AS text[])) AS run")
    with tenants.connect() as conn:
        for pattern in patterns:
            for run, named in conn.execute(sql, {"p": pattern, "runs": runs}):
                if named:  # never more than the token; a range that runs backwards may name fewer
                    assert fnmatchcase(run, pattern), (pattern, run)
                else:
                    assert "[" in pattern or not fnmatchcase(run, pattern), (pattern, run)


def test_a_tenant_needs_a_reader_and_postgresql(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert migrate_main(["--database-url", url, "--tenant", "team-a"]) == 2
    assert migrate_main(["--database-url", url, "--reader", "x_reader", "--tenant", "*"]) == 2
    assert migrate_main(["--database-url", f"sqlite:///{tmp_path}/x.db", "--reader", "x_reader", "--tenant", "a"]) == 2
    assert "token" in capsys.readouterr().err
