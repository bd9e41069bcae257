"""The PostgreSQL of a single machine, and that no query goes through another run's rows."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import sqlalchemy as sa
from store.filled_store import fill
from store.kit import UP, Feed
from support.database import fast_folder

from fp8watch_server.db import embedded
from fp8watch_server.store import queries

ROOT = Path(__file__).parents[2]


@pytest.mark.heavy(4, "server/fp8watch_server/db", first=True)
def test_it_starts_where_the_locale_is_missing_and_keeps_its_data() -> None:
    code = "import sys; from fp8watch_server.db import embedded; print(embedded.start(sys.argv[1]))"
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "xx_XX.UTF-8", "HOME": tempfile.gettempdir()}
    env["PYTHONPATH"] = f"{ROOT / 'server'}:{ROOT / 'agent'}"
    with tempfile.TemporaryDirectory(prefix="fp8pg-", dir=fast_folder() or "/tmp") as folder:
        command = [sys.executable, "-c", code, f"{folder}/data"]
        urls = [subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)]
        assert urls[0] == urls[1]
        assert urls[0].startswith("postgresql+psycopg://postgres@/fp8watch?host=")
        assert not list(Path(folder).glob("data/postmaster.pid")), "the server ends with the process"


def test_a_folder_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(embedded.EmbeddedError, match="choose a shorter one"):
        embedded.start(tmp_path / ("x" * 100))


def test_under_root_no_folder_is_opened_to_everybody() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        home = Path(made)
        folder = home / "fp8watch" / "pg"
        with pytest.raises(embedded.EmbeddedError, match="XDG_DATA_HOME"):
            embedded.refuse_private(folder, True)
        embedded.refuse_private(folder, False)
        home.chmod(0o755)
        embedded.refuse_private(folder, True)


def test_every_query_of_a_run_is_found_by_its_key(feed: Feed) -> None:
    fill(feed, 300)
    feed.compact()
    seen: list[tuple[str, object]] = []

    def note(conn: object, cursor: object, statement: str, parameters: object, context: object, many: bool) -> None:
        if statement.startswith("SELECT"):
            seen.append((statement, parameters))

    sa.event.listen(feed.engine, "before_cursor_execute", note)
    with feed.engine.connect() as conn:
        queries.series(conn, "run-1", UP.id, "amax_max", rank=0)
        queries.top(conn, "run-1", "amax_max")
        queries.heatmap(conn, "run-1", "amax_max", points=5)
        queries.scalars(conn, "run-1", "loss")
        queries.run(conn, "run-1")
    sa.event.remove(feed.engine, "before_cursor_execute", note)
    assert len(seen) > 15
    sqlite = feed.engine.dialect.name == "sqlite"
    with feed.engine.connect() as conn:
        if not sqlite:
            conn.exec_driver_sql("SET enable_seqscan = off")  # on a few rows a scan would be cheaper
        for statement, parameters in seen:
            plan = "\n".join(
                str(tuple(row))
                for row in conn.exec_driver_sql(f"EXPLAIN {'QUERY PLAN ' if sqlite else ''}{statement}", parameters)
            )
            assert "SCAN" not in plan if sqlite else "Seq Scan" not in plan, f"{statement}\n{plan}"
