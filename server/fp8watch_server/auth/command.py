"""`fp8watch token`: create, list and revoke the tokens of a collector.

Thread:     main

A token is 256 random bits, shown once; only its SHA-256 is stored. A running collector picks up changes within seconds.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from datetime import datetime, timezone

import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from fp8watch_server.auth.grant import ALL_RUNS, patterns_of
from fp8watch_server.auth.tokens import RELOAD_AFTER_S, SCOPES, SETTINGS_NAME, new_token, token_sha256
from fp8watch_server.db import migrations
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import DatabaseUrlError, engine_of, parse_url, writing
from fp8watch_server.settings import SettingError, Settings

EXIT_USAGE = 2
ID_CHARS = 12


class Unusable(Exception):
    """A command that cannot run, with the remedy."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="fp8watch token", description="Make, list and revoke tokens of a collector.")
    made.add_argument("--database-url", default=None, help="database of the collector [FP8WATCH_DATABASE_URL]")
    commands = made.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="make a token and show it, this once")
    create.add_argument("name", help="who will use it; for the list")
    create.add_argument(
        "--scopes",
        default="ingest",
        help="comma-separated: ingest (agents), read (people, Grafana), admin (default: ingest)",
    )
    create.add_argument(
        "--runs",
        default=ALL_RUNS,
        metavar="PATTERNS",
        help="runs that it may write, as shell patterns of their ids separated by commas, such as 'team-a-*'; for the "
        "scope ingest (default: all)",
    )
    create.add_argument(
        "--expires",
        default=None,
        metavar="WHEN",
        help="when it ends: so many days or hours from now (90d, 12h), or a day (2030-01-31, UTC) (default: never)",
    )
    create.add_argument("--tenant", default=t.DEFAULT_TENANT, help=f"label for the list (default: {t.DEFAULT_TENANT})")
    commands.add_parser("list", help="show names, scopes and ids; never a token")
    revoke = commands.add_parser("revoke", help="make tokens useless")
    revoke.add_argument("which", help="a name, or an id from the list")
    return made


def end_of(text: str | None, now: float) -> float | None:
    """Seconds since 1970 at which a token ends; None: never. Raises Unusable."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,4})([dh])", text.strip())
    if match is not None:
        return now + int(match[1]) * (86_400 if match[2] == "d" else 3600)
    try:
        at = datetime.strptime(text.strip(), "%Y-%m-%d").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        at = -1.0
    if at <= now:
        raise Unusable(f"expires {text[:40]!r}: must be like 90d, 12h, or a day to come as 2030-01-31")
    return at


def create(
    engine: Engine, name: str, scopes: str, tenant: str, runs: str = ALL_RUNS, expires_at: float | None = None
) -> str:
    """Create a token and return it. Raises Unusable."""
    wanted = [s.strip() for s in scopes.split(",") if s.strip()]
    unknown = sorted(set(wanted) - set(SCOPES))
    if unknown or not wanted:
        raise Unusable(f"scopes {scopes!r}: must be some of {', '.join(SCOPES)}, separated by commas")
    for what, value in (("name", name), ("tenant", tenant)):
        if not 1 <= len(value) <= 100 or not value.isprintable():
            raise Unusable(f"{what} {value[:100]!r}: must be 1 to 100 printable characters; choose another")
    if name == SETTINGS_NAME:
        raise Unusable(f"name {name!r} is that of the token in FP8WATCH_TOKEN; choose another")
    try:
        patterns = patterns_of(runs)
    except ValueError as e:
        raise Unusable(str(e)) from e
    if patterns != (ALL_RUNS,) and wanted != ["ingest"]:
        raise Unusable(
            f"runs {runs[:100]!r} with scopes {scopes!r}: only the scope ingest is held to runs; make one token for "
            "agents and another for people"
        )
    token = new_token()
    row = {"token_sha256": token_sha256(token), "tenant": tenant, "name": name, "created_at": time.time()}
    row |= {"runs": ",".join(patterns), "expires_at": expires_at}
    with writing(engine) as conn:
        conn.execute(sa.insert(t.token), [{**row, "scopes": ",".join(s for s in SCOPES if s in wanted)}])
    return token


def listing(engine: Engine) -> list[str]:
    """One line per token."""
    c = t.token.c
    with engine.connect() as conn:
        rows = conn.execute(sa.select(t.token).order_by(c.created_at)).all()
    days = f"{'made':<16}  {'expires':<16}  {'revoked':<16}"
    out = [f"{'id':<{ID_CHARS}}  {'scopes':<17}  {'tenant':<10}  {days}  {'runs':<16}  name"]
    for row in rows:
        made, ends, gone = (_day(value) for value in (row.created_at, row.expires_at, row.revoked_at))
        id_, days = row.token_sha256[:ID_CHARS], f"{made:<16}  {ends:<16}  {gone:<16}"
        out.append(f"{id_}  {row.scopes:<17}  {row.tenant:<10}  {days}  {row.runs:<16}  {row.name}")
    return out


def _day(at: float | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M")


def revoke(engine: Engine, which: str) -> int:
    """Revoke by name or id; returns how many. Raises Unusable."""
    c = t.token.c
    these = c.name == which
    if len(which) >= ID_CHARS and all(ch in "0123456789abcdef" for ch in which):
        these = sa.or_(these, c.token_sha256.startswith(which))
    with writing(engine) as conn:
        done = conn.execute(sa.update(t.token).where(these, c.revoked_at.is_(None)).values(revoked_at=time.time()))
    if done.rowcount == 0:
        raise Unusable(f"no token in use is named or numbered {which!r}; see `fp8watch token list`")
    return int(done.rowcount)


def main(argv: list[str] | None = None) -> int:
    """Entry point of `fp8watch token`."""
    args = parser().parse_args(argv)
    try:
        settings = Settings.from_environ(database_url=args.database_url)
        with engine_of(settings.database_url) as engine:
            migrations.upgrade(engine)
            if args.command == "create":
                token = create(
                    engine, args.name, args.scopes, args.tenant, args.runs, end_of(args.expires, time.time())
                )
                print(token)
                print(
                    "Keep it: it is not shown again. Agents read FP8WATCH_TOKEN or FP8WATCH_TOKEN_FILE.",
                    file=sys.stderr,
                )
            elif args.command == "list":
                print("\n".join(listing(engine)))
            else:
                count = revoke(engine, args.which)
                print(f"revoked {count}; a collector that runs notices within {RELOAD_AFTER_S:.0f} s")
    except (Unusable, SettingError, DatabaseUrlError, migrations.UnknownRevision) as e:
        print(f"fp8watch token: {e}", file=sys.stderr)
        return EXIT_USAGE
    except SQLAlchemyError as e:
        shown = parse_url(settings.database_url).render_as_string(hide_password=True)
        print(
            f"fp8watch token: database {shown} cannot be used ({str(e).splitlines()[0]}); is it there?", file=sys.stderr
        )
        return EXIT_USAGE
    return 0
