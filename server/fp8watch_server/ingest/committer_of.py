"""Where batches are committed: into the database, or first into a queue.

Shapes:     settings -> Committer
Thread:     main

The queue's client is imported only where a queue is configured.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.engine import Engine

from fp8watch_agent.wire import Batch
from fp8watch_server.ingest.group_commit import Committer
from fp8watch_server.settings import SettingError, Settings


def committer_of(
    settings: Settings,
    engine: Engine,
    decode: Callable[[bytes], Batch],
    observe_commit: Callable[[float], None],
    hurry: Callable[[str, str], None],
    shard: str = "",
) -> Committer:
    """The committer of a collector for one of its databases; other arguments are those of `Committer`.

    Args:
        shard: name of the database; "": home.

    Raises:
        SettingError: a queue is configured, and its client is not installed.
    """
    if not settings.queue:
        return Committer(engine, decode, observe_commit=observe_commit, hurry=hurry)
    try:
        from fp8watch_server.ingest.queue_front import QueueFront
    except ModuleNotFoundError as e:
        raise SettingError(f"FP8WATCH_QUEUE needs a package ({e}); pip install 'fp8watch[nats]'") from e
    return QueueFront(engine, decode, settings, observe_commit=observe_commit, hurry=hurry, shard=shard)
