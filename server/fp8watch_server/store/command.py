"""`fp8watch prune | check | migrate | backup`: maintenance of a collector's database.

Thread:     main

Options and variables come from the table of settings.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from fp8watch_server.db import migrations, row_security
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import DatabaseUrlError, engine_of, parse_url, upsert, writing
from fp8watch_server.db.sql_views import RoleError
from fp8watch_server.settings import SETTINGS, SettingError, Settings
from fp8watch_server.store.backup import BackupError, backup
from fp8watch_server.store.check import check
from fp8watch_server.store.retention import policy_of, prune

EXIT_USAGE = 2
Delete = Callable[[sa.Connection, str, Settings], None]
LIMITS = ("keep_days", "keep_steps", "keep_bytes")


class Unusable(Exception):
    """A command that cannot run, with the remedy."""


def parser_of(name: str, description: str, *settings: str) -> argparse.ArgumentParser:
    """A parser with the options of some settings, the database among them."""
    made = argparse.ArgumentParser(prog=f"fp8watch {name}", description=description)
    for s in SETTINGS:
        if s.name in ("database_url", *settings):
            made.add_argument(f"--{s.name.replace('_', '-')}", default=None, help=f"{s.help} [{s.variable}]")
    return made


def run_command(
    name: str, parser: argparse.ArgumentParser, argv: list[str] | None, work: Callable[[Any, Settings], int]
) -> int:
    """Do a command's work with its arguments and the settings; what cannot be done is said, with exit status 2."""
    args = vars(parser.parse_args(argv))
    known = {s.name for s in SETTINGS}
    url = None
    try:
        settings = Settings.from_environ(**{k: v for k, v in args.items() if k in known})
        url = settings.database_url
        return work(argparse.Namespace(**args), settings)
    except (BackupError, DatabaseUrlError, RoleError, SettingError, Unusable, migrations.UnknownRevision) as e:
        print(f"fp8watch {name}: {e}", file=sys.stderr)
    except SQLAlchemyError as e:
        shown = parse_url(url).render_as_string(hide_password=True) if url else "?"
        reason = str(getattr(e, "orig", None) or e).splitlines()[0]
        print(f"fp8watch {name}: database {shown}: {reason}; check that it is there and runs", file=sys.stderr)
    return EXIT_USAGE


@contextmanager
def opened(settings: Settings) -> Iterator[Engine]:
    """Open the database, which must exist: none of these commands creates one. Closed afterwards in any case."""
    with engine_of(settings.database_url, must_exist=True) as engine:
        with engine.connect() as conn:
            revision = migrations.current(conn)
        if revision != migrations.head():
            raise Unusable(
                f"the database is at revision {revision}, this program works at {migrations.head()}; "
                "run fp8watch migrate, or the other version of fp8watch"
            )
        yield engine


def require_run(engine: Engine, run_id: str) -> None:
    """Raise Unusable, with the runs that there are, where this one is not."""
    with engine.connect() as conn:
        known = list(conn.execute(sa.select(t.run.c.run_id).order_by(t.run.c.last_seen_at.desc())).scalars())
    if run_id not in known:
        raise Unusable(f"there is no run {run_id!r}; known are {', '.join(map(repr, known[:20])) or 'none'}")


def _delete_rows(conn: sa.Connection, run_id: str, settings: Settings) -> None:
    conn.execute(sa.delete(t.run).where(t.run.c.run_id == run_id))


def prune_main(argv: list[str], delete: Delete = _delete_rows) -> int:
    """Apply retention now. Exit status 0: done.

    Args:
        delete: what --delete does to the rows of a run, in the transaction that it is given.
    """
    parser = parser_of("prune", "Let go of what the retention policy does not keep.", "detail_hours", *LIMITS)
    parser.add_argument("--run", default=None, help="only this run (default: all)")
    parser.add_argument("--remember", action="store_true", help="keep the limits given as those of --run from now on")
    parser.add_argument("--delete", action="store_true", help="delete --run with everything that belongs to it")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    return run_command("prune", parser, argv, lambda args, settings: _prune(args, settings, delete))


def _prune(args: Any, settings: Settings, delete: Delete) -> int:
    if (args.remember or args.delete) and args.run is None:
        raise Unusable("--remember and --delete are for one run; name it with --run")
    given = [name for name in LIMITS if getattr(args, name) is not None]
    if args.remember and (not given or args.detail_hours is not None):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in LIMITS)
        raise Unusable(f"--remember keeps {options} alone; give at least one of them, and --detail-hours without it")
    with opened(settings) as engine:
        if args.run is not None:
            require_run(engine, args.run)
        if args.delete:
            if not args.dry_run:
                with writing(engine) as conn:
                    delete(conn, args.run, settings)
            print(f"run {args.run!r} {'would be' if args.dry_run else 'is'} deleted")
            return 0
        if args.remember and not args.dry_run:
            with writing(engine) as conn:
                row = {name: getattr(settings, name) for name in given}  # 0: no limit, whatever the collector's
                upsert(conn, t.retention, [{"run_id": args.run, "tenant": t.DEFAULT_TENANT, **row}], update=given)
        done = prune(engine, policy_of(settings), time.time(), run_id=args.run, dry_run=args.dry_run, given=given)
    print(
        f"{'would go' if args.dry_run else 'gone'}: single ranks of {done.num_cells_to_rollup} cells, "
        f"blocks of {done.num_cells_to_summary} cells ({done.num_bytes} bytes); a cell is {t.BLOCK_STEPS} steps of a run"
    )
    return 0


def check_main(argv: list[str]) -> int:
    """Check everything stored. Exit status 0: intact; 1: not."""
    parser = parser_of("check", "Read all that is stored, against its hashes and counts. Changes nothing.")
    parser.add_argument("--run", default=None, help="only this run (default: all)")
    return run_command("check", parser, argv, _check)


def _check(args: Any, settings: Settings) -> int:
    with opened(settings) as engine:
        if args.run is not None:
            require_run(engine, args.run)
        done = check(engine, args.run)
    for problem in done.problems:
        print(problem)
    read = f"{done.num_batches} batches, {done.num_blocks} blocks, {done.num_cells} cells"
    print(f"{read}: {f'{len(done.problems)} problems' if done.problems else 'whole'}")
    return 1 if done.problems else 0


def migrate_main(argv: list[str]) -> int:
    """Upgrade the database to this program's revision. Exit status 0: done."""
    parser = parser_of("migrate", "Bring the database to the newest revision.")
    text = "PostgreSQL role, made where it is missing, that may SELECT from the views for Grafana and nothing else"
    parser.add_argument("--reader", default=None, metavar="ROLE", help=text)
    parser.add_argument(
        "--tenant",
        default=None,
        metavar="TENANT",
        help="with --reader: of the runs of this tenant alone, those that its ingest tokens name. Row-level security is on from "
        "then on; a reader without a tenant reads all runs",
    )
    parser.add_argument("--no-row-security", action="store_true", help="turn it off: each reader reads all runs again")
    return run_command("migrate", parser, argv, _migrate)


def _migrate(args: Any, settings: Settings) -> int:
    if args.tenant is not None and args.reader is None:
        raise Unusable(f"--tenant {args.tenant} without --reader: name the role that is to read its runs")
    if args.no_row_security and args.reader is not None:
        raise Unusable("--no-row-security beside --reader: give one of them")
    with engine_of(settings.database_url) as engine:
        before = migrations.upgrade(engine)
        if args.no_row_security:
            with writing(engine) as conn:
                row_security.turn_off(conn)
            print("row-level security is off: readers read all runs")
        if args.reader is not None:
            with writing(engine) as conn:
                made = row_security.grant_tenant_reader(conn, args.reader, args.tenant)
            remedy = f"; let it log in: ALTER ROLE {args.reader} LOGIN PASSWORD '…'" if made else ""
            runs = "" if args.tenant is None else f", the runs of tenant {args.tenant} alone"
            print(f"role {args.reader} reads the views of schema grafana{runs}{remedy}")
    head = migrations.head()
    print(f"database at {head} already" if before == head else f"database brought from {before or 'nothing'} to {head}")
    return 0


def backup_main(argv: list[str]) -> int:
    """Write a backup while the collector runs. Exit status 0: complete."""
    parser = parser_of("backup", "Copy the database into one file, while the collector runs.")
    parser.add_argument("file", type=Path, help="to write; never written over")
    return run_command("backup", parser, argv, _backup)


def _backup(args: Any, settings: Settings) -> int:
    size = backup(settings.database_url, args.file)
    restore = "put it where the database was" if settings.database_url.startswith("sqlite") else "pg_restore reads it"
    print(f"{args.file}: {size} bytes; to restore: {restore}")
    return 0
