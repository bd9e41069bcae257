"""fp8watch prune, check, migrate and backup."""

from __future__ import annotations

import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from store.filled_store import fill
from store.kit import SITES, Feed
from support.database import KINDS, fresh_database

from fp8watch_server.db import migrations
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.store.backup import backup, pg_dumps
from fp8watch_server.store.command import backup_main, check_main, migrate_main, prune_main
from fp8watch_server.store.retention import Policy, prune


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch, database_url: str) -> None:
    monkeypatch.setenv("FP8WATCH_DATABASE_URL", database_url)


def test_check_finds_every_kind_of_damage(feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    fill(feed, 290)
    feed.compact()
    assert check_main([]) == 0
    assert "whole" in capsys.readouterr().out
    x, m, c, h = t.sheet.c, t.block_meta.c, t.cell.c, t.hot_batch.c
    with feed.engine.connect() as conn:
        body, buckets = map(bytes, conn.execute(sa.select(x.body, x.histograms).where(x.rank == 1)).one())
    damages = [
        (sa.update(t.hot_batch).where(h.rank == 0).values(body=b"x"), "not the one that was received"),
        (sa.update(t.sheet).where(x.rank == 1).values(body=body[:-1] + b"?"), "CRC-32"),
        (sa.update(t.sheet).where(x.rank == 1).values(histograms=buckets[:-1] + b"?"), "CRC-32"),
        (sa.delete(t.sheet).where(x.rank == 0), "were compacted"),
        (sa.delete(t.sheet).where(x.rank == t.ROLLED_RANK), "not that of the blocks"),
        (sa.delete(t.block_meta).where(m.step0 == 0), "no summary"),
        (sa.update(t.cell).where(c.step0 == 0).values(num_records=1), "were compacted"),
    ]
    for damage, word in damages:
        with feed.engine.connect() as conn:
            before = {
                table: conn.execute(sa.select(table)).mappings().all()
                for table in (t.hot_batch, t.sheet, t.block_meta, t.cell)
            }
        with writing(feed.engine) as conn:
            conn.execute(damage)
        assert check_main([]) == 1, word
        assert word in capsys.readouterr().out
        with writing(feed.engine) as conn:
            for table, rows in before.items():
                conn.execute(sa.delete(table))
                if rows:
                    conn.execute(sa.insert(table), [dict(row) for row in rows])
    assert check_main(["--run", "run-1"]) == 0
    assert check_main(["--run", "run-9"]) == 2
    assert "known are 'run-1'" in capsys.readouterr().err


def test_prune_says_what_goes_and_lets_it_go(feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    fill(feed, 700, ranks=1)
    feed.compact(everything=True)
    assert prune_main(["--keep-steps", "100", "--dry-run"]) == 0
    assert "would go" in capsys.readouterr().out
    assert feed.count(t.sheet) == 3
    assert prune_main(["--run", "run-1", "--keep-steps", "100", "--remember"]) == 0
    assert "blocks of 2 cells" in capsys.readouterr().out
    assert feed.count(t.sheet) == 1
    assert feed.count(t.block) in (0, len(SITES))  # arrays for SQL
    assert feed.count(t.retention, t.retention.c.keep_steps == 100) == 1
    assert check_main([]) == 0
    assert prune_main(["--delete"]) == 2
    assert prune_main(["--delete", "--run", "run-1"]) == 0
    assert [feed.count(table) for table in (t.run, t.session, t.sheet, t.block, t.cell, t.scalar)] == [0] * 6
    assert prune_main(["--keep-steps", "-1"]) == 2
    assert "0 or more" in capsys.readouterr().err


def test_a_run_that_is_to_keep_everything_does(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8WATCH_KEEP_DAYS", "900")
    fill(feed, 700, ranks=1)
    feed.compact(everything=True)
    assert prune_main(["--run", "run-1", "--keep-steps", "0", "--remember"]) == 0
    with feed.engine.connect() as conn:
        row = conn.execute(sa.select(t.retention.c.keep_steps, t.retention.c.keep_days)).one()
    assert tuple(row) == (0, None)  # of the environment nothing is remembered
    prune(feed.engine, Policy(keep_steps=100), feed.now + 10)
    assert feed.count(t.sheet) == 3
    assert prune_main(["--run", "run-1", "--keep-steps", "300"]) == 0  # what is said now counts now
    assert feed.count(t.sheet) == 2


def test_remember_says_what_it_cannot_keep(feed: Feed, capsys: pytest.CaptureFixture[str]) -> None:
    fill(feed, 10, ranks=1)
    for more in ([], ["--detail-hours", "3"], ["--keep-steps", "5", "--detail-hours", "3"]):
        assert prune_main(["--run", "run-1", "--remember", *more]) == 2
        assert "--keep-steps" in capsys.readouterr().err
    assert feed.count(t.retention) == 0


def test_a_backup_is_whole_while_batches_come(
    feed: Feed, database_url: str, database_kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(feed, 290, ranks=1)
    feed.compact()
    want = feed.answers(ranks=(None, 0))
    target = tmp_path / "copy"
    assert backup_main([str(target)]) == 0
    feed.send(feed.agent(rank=1), [1000])
    assert backup_main([str(target)]) == 2
    assert "never written over" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["copy"]
    with fresh_database(database_kind, migrated=False) as url:
        if database_kind == "sqlite":
            with sqlite3.connect(target) as copy:
                assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            copy.close()
            url = f"sqlite:///{target}"
        else:
            restore = pg_dumps()[-1].replace("pg_dump", "pg_restore")
            given = make_engine(url).url
            command = [restore, "-U", "postgres", "-h", str(given.query.get("host") or given.host)]
            subprocess.run([*command, "-d", str(given.database), str(target)], check=True)
        restored = Feed(make_engine(url))
        assert restored.answers(ranks=(None, 0)) == want
        assert migrate_main(["--database-url", url]) == 0
        assert check_main(["--database-url", url]) == 0
        restored.engine.dispose()


@pytest.mark.parametrize("database_kind", ["sqlite"])  # pg_dump has a snapshot of its own
def test_a_backup_ends_though_others_commit_all_the_while(feed: Feed, tmp_path: Path) -> None:
    feed.agent()
    path = str(feed.engine.url.database)
    with sqlite3.connect(path) as conn:
        conn.execute("CREATE TABLE ballast (x BLOB)")
        conn.executemany("INSERT INTO ballast VALUES (zeroblob(?))", [(1 << 20,)] * 64)
    over = threading.Event()

    def commits() -> None:
        with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as conn:
            while not over.wait(0.001):
                conn.execute("UPDATE run SET last_seen_at = last_seen_at + 1")

    others = threading.Thread(target=commits)
    others.start()
    copies = threading.Thread(target=backup, args=(f"sqlite:///{path}", tmp_path / "copy"), daemon=True)
    copies.start()
    copies.join(30)
    over.set()  # with nobody else there every copy ends
    others.join()
    assert (tmp_path / "copy").exists()
    with closing(sqlite3.connect(tmp_path / "copy")) as copy:
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize("kind", KINDS)
def test_migrate_brings_nothing_to_the_newest(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_database(kind, migrated=False) as url:
        assert migrate_main(["--database-url", url]) == 0
        assert migrate_main(["--database-url", url]) == 0
        said = capsys.readouterr().out.splitlines()
        assert f"from nothing to {migrations.head()}" in said[0]
        assert "already" in said[1]


def test_a_database_that_is_not_there_or_not_ready_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = f"sqlite:///{tmp_path / 'none.db'}"
    for main, args in ((check_main, []), (prune_main, []), (backup_main, [str(tmp_path / "b")])):
        assert main([*args, "--database-url", missing]) == 2
        assert "none.db" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    with fresh_database("sqlite", migrated=False) as url:
        make_engine(url).connect().close()
        assert check_main(["--database-url", url]) == 2
        assert "fp8watch migrate" in capsys.readouterr().err
    assert check_main(["--database-url", "postgresql://nobody@127.0.0.1:1/none"]) == 2
    assert "check that it is there" in capsys.readouterr().err
