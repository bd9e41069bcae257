"""`fp8watch worker`: commits the batches of a queue, until SIGINT or SIGTERM.

Thread:     main

Settings are those of `fp8watch serve`. Any number of workers share the lanes of the queue.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from typing import Any

from sqlalchemy.exc import DBAPIError

from fp8watch_server.db import migrations
from fp8watch_server.db.dialect import DatabaseUrlError, make_engine, parse_url
from fp8watch_server.db.migrations import UnknownRevision
from fp8watch_server.http import logs
from fp8watch_server.settings import SETTINGS, SettingError, Settings

TAKEN = ("database_url", "queue", "queue_replicas", "queue_bytes", "log_format", "log_level")
EXIT_USAGE = 2


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
    except (SettingError, DatabaseUrlError, UnknownRevision) as e:
        print(f"fp8watch worker: {e}", file=sys.stderr)
    except ModuleNotFoundError as e:
        print(f"fp8watch worker: FP8WATCH_QUEUE needs a package ({e}); pip install 'fp8watch[nats]'", file=sys.stderr)
    except DBAPIError as e:
        shown = parse_url(settings.database_url).render_as_string(hide_password=True)
        print(f"fp8watch worker: database {shown} cannot be opened ({str(e.orig).splitlines()[0]})", file=sys.stderr)
    return EXIT_USAGE


def _run(settings: Settings) -> int:
    from fp8watch_server.queue.jetstream import JetStream
    from fp8watch_server.worker.loop import Worker

    engine = make_engine(settings.database_url)
    migrations.upgrade(engine)
    database = parse_url(settings.database_url).render_as_string(hide_password=True)

    async def work() -> None:
        queue = JetStream(
            settings.queue, replicas=settings.queue_replicas, max_bytes=settings.queue_bytes, client="fp8watch worker"
        )
        worker = Worker(engine, queue)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, worker.stop)
        print(f"fp8watch worker: commits to {database}", flush=True)
        await worker.run()
        c = worker.counts
        print(f"fp8watch worker: {c.committed} batches committed, {c.refused} refused", flush=True)

    try:
        asyncio.run(work())
    finally:
        engine.dispose()
    return 0


if __name__ == "__main__":
    sys.exit(main())
