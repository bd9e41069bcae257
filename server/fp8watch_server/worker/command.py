"""`fp8watch worker`: commits the batches of a queue, until SIGINT or SIGTERM.

Thread:     main

Settings are those of `fp8watch serve`. Any number of workers share the lanes of the queue.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from typing import Any

from sqlalchemy.exc import DBAPIError

from fp8watch_server.db import migrations
from fp8watch_server.db.dialect import DatabaseUrlError, make_engine, parse_url
from fp8watch_server.db.directory import ShardMixedUp, open_directory
from fp8watch_server.db.migrations import UnknownRevision
from fp8watch_server.db.shards import open_shards
from fp8watch_server.http import logs
from fp8watch_server.settings import SETTINGS, SettingError, Settings

TAKEN = ("database_url", "queue", "queue_replicas", "queue_bytes", "log_format", "log_level")
EXIT_USAGE = 2
END_S = 20.0
"""How long an end may take."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="fp8watch worker",
        description="Commit the batches that collectors have accepted into a queue (FP8WATCH_QUEUE). Start as many as are "
        "needed, on any machine that reaches the queue and the database.",
    )
    for s in SETTINGS:
        if s.name in TAKEN:
            text = f"{s.help} [{' or '.join(s.variables)}]".replace("%", "%%")
            made.add_argument(f"--{s.name.replace('_', '-')}", default=None, help=text)
    return made


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: ended by a signal. 2: it cannot work as it is configured."""
    args: dict[str, Any] = vars(parser().parse_args(argv))
    try:
        settings = Settings.from_environ(**args)
        if not settings.queue:
            raise SettingError(
                "FP8WATCH_QUEUE is not set; a worker needs the queue of its collectors: nats://host:4222"
            )
        logs.set_up(settings)
        return _run(settings)
    except (SettingError, DatabaseUrlError, UnknownRevision, ShardMixedUp) as e:
        print(f"fp8watch worker: {e}", file=sys.stderr)
    except ModuleNotFoundError as e:
        print(f"fp8watch worker: FP8WATCH_QUEUE needs a package ({e}); pip install 'fp8watch[nats]'", file=sys.stderr)
    except DBAPIError as e:
        shown = parse_url(settings.database_url).render_as_string(hide_password=True)
        print(f"fp8watch worker: database {shown} cannot be opened ({str(e.orig).splitlines()[0]})", file=sys.stderr)
    return EXIT_USAGE


def _run(settings: Settings) -> int:
    from fp8watch_server.worker.crew import Crew

    engine = make_engine(settings.database_url)
    migrations.upgrade(engine)
    shards = open_shards(engine, settings.shard_urls, open_directory(engine, settings.shard_urls))
    database = parse_url(settings.database_url).render_as_string(hide_password=True)
    more = f" and shards {', '.join(shards.others)}" if shards.others else ""

    async def work() -> None:
        crew = Crew(shards, settings)

        def stop() -> None:
            end = threading.Timer(END_S, _end)
            end.daemon = True
            end.start()
            crew.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        print(f"fp8watch worker: commits to {database}{more}", flush=True)
        await crew.run()
        committed, refused = crew.num_committed, crew.num_refused
        print(f"fp8watch worker: {committed} batches committed, {refused} refused", flush=True)

    try:
        asyncio.run(work())
    finally:
        for of in (engine, *(shard.engine for shard in shards.others.values())):
            of.dispose()
    return 0


def _end() -> None:
    """A database that hangs keeps threads for ever. What is not acknowledged to the queue comes again."""
    print(
        f"fp8watch worker: a database has not answered for {END_S:g} s; ended without it", file=sys.stderr, flush=True
    )
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
