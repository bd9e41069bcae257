"""`fp8watch shards list | move`: where runs lie, and moves between databases.

Thread:     main

Settings are those of the collectors: FP8WATCH_DATABASE_URL, FP8WATCH_SHARDS and, where there is one, FP8WATCH_QUEUE.
"""

from __future__ import annotations

import argparse
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from fp8watch_server.db.directory import HOME, ShardMixedUp, open_directory
from fp8watch_server.db.shards import ShardAway, Shards, open_shards
from fp8watch_server.moving.move import CannotMove, CrashPoint, Move, no_crash, places
from fp8watch_server.settings import Settings
from fp8watch_server.store.command import Unusable, opened, parser_of, run_command

HOME_NAME = "home"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = parser_of(
        "shards",
        "Show where runs lie, and move them between the databases of FP8WATCH_DATABASE_URL (home) and FP8WATCH_SHARDS.",
        "queue",
        "queue_replicas",
        "queue_bytes",
    )
    commands = made.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="each run with its shard, and moves that were cut short")
    move = commands.add_parser("move", help="move a run while it trains; started again, it finishes what was cut short")
    move.add_argument("run", help="id of the run")
    move.add_argument("to", help=f"name of a shard; {HOME_NAME}: the database of FP8WATCH_DATABASE_URL")
    return made


def main(argv: list[str] | None = None, crash: CrashPoint = no_crash) -> int:
    """Exit status 0: done. 2: it cannot be done, and nothing is lost; the reason is said."""
    return run_command("shards", parser(), argv, lambda args, settings: _run(args, settings, crash))


def _run(args: Any, settings: Settings, crash: CrashPoint) -> int:
    with opened(settings) as home:
        try:
            shards = open_shards(home, settings.shard_urls, open_directory(home, settings.shard_urls))
            if args.command == "list":
                with home.connect() as conn:
                    for run, shard, under_way in places(conn):
                        print(f"{shard:<20}  {run}{f'  ({under_way})' if under_way else ''}")
                return 0
            return _move(args, settings, shards, crash)
        except (CannotMove, ShardMixedUp) as e:
            raise Unusable(str(e)) from e
        except ShardAway as e:
            raise Unusable(f"{e.orig}; start it again when it does") from e


def _move(args: Any, settings: Settings, shards: Shards, crash: CrashPoint) -> int:
    to = HOME if args.to == HOME_NAME and args.to not in shards.others else args.to
    if to != HOME and to not in shards.others:
        known = ", ".join([HOME_NAME, *shards.others])
        raise CannotMove(f"shard {args.to!r} is not in FP8WATCH_SHARDS; known are {known}")
    drain = None
    if settings.queue:
        from fp8watch_server.moving.draining import drain_of

        drain = drain_of(settings, args.run)
    try:
        done = Move(shards, args.run, to, drain=drain, crash=crash).run()
    except SQLAlchemyError as e:
        if isinstance(e, ShardAway):
            raise
        raise CannotMove(f"{str(e).splitlines()[0]}; start it again when the databases are there") from e
    finally:
        for shard in shards.others.values():
            shard.engine.dispose()
    print(
        f"run {args.run!r} lies on {args.to}: {done.num_rows} rows copied, batches refused for {done.refused_s:.1f} s"
    )
    return 0
