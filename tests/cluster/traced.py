"""Where the seconds between acknowledgement and incident go: times of broken batches at each stage, told by the processes themselves.

A process of the cluster under test that is started with FP8WATCH_TEST_TRACE=FILE appends a line `time stage run seconds` to it
whenever a run whose name begins with `broken-` passes a stage, and for whatever takes longer than SLOW_S.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

VARIABLE = "FP8WATCH_TEST_TRACE"
SLOW_S = 0.3


def _tell(stage: str, run: str, seconds: float = 0.0) -> None:
    line = f"{time.time():.3f} {stage} {run} {seconds:.3f} {os.getpid()}\n"
    file = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, line.encode())
    os.close(file)


def _broken(runs: Iterable[str]) -> list[str]:
    return sorted({run for run in runs if run.startswith("broken-")})


def _around(of: Any, name: str, stage: str, runs: Callable[..., Iterable[str]]) -> None:
    """Tell of the end of each call, and of its seconds."""
    plain = getattr(of, name)

    @functools.wraps(plain)
    def told(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        worked = "!"
        try:
            out = plain(*args, **kwargs)
            worked = ""
            return out
        finally:
            took = time.monotonic() - began
            found = _broken(runs(*args, **kwargs))
            for run in found:
                _tell(stage + worked, run, took)
            if took > SLOW_S and not found:
                _tell(f"slow:{stage}{worked}", "-", took)

    setattr(of, name, told)


def _around_async(of: Any, name: str, stage: str, runs: Callable[..., Iterable[str]]) -> None:
    plain = getattr(of, name)

    @functools.wraps(plain)
    async def told(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        worked, out = "!", None
        try:
            out = await plain(*args, **kwargs)
            worked = ""
            return out
        finally:
            took = time.monotonic() - began
            found = _broken(runs(out, *args, **kwargs))
            for run in found:
                _tell(stage + worked, run, took)
            if took > SLOW_S and not found and stage != "fetched":
                _tell(f"slow:{stage}{worked}", "-", took)

    setattr(of, name, told)


def install() -> None:
    """Wrap the stages of this process."""
    if VARIABLE not in os.environ:
        return
    from fp8watch_server.db.leader import Leader
    from fp8watch_server.db.shards import Shard
    from fp8watch_server.ingest.group_commit import Committer
    from fp8watch_server.ingest.queue_front import QueueFront
    from fp8watch_server.pipeline.detect_worker import DetectWorker
    from fp8watch_server.pipeline.run_engines import RunEngines
    from fp8watch_server.queue.jetstream import JetStream, Reader
    from fp8watch_server.worker.loop import Worker

    def of_items(_: Any, items: Any, **__: Any) -> list[str]:
        return [item.batch.header.run for item in items]

    _around(QueueFront, "_write", "published", of_items)
    _around(Committer, "_write_once", "committed", of_items)
    _around(DetectWorker, "wake_for", "heard", lambda _, run, tenant: [run])
    _around(DetectWorker, "_judge", "judged", lambda _, key, *more: [key[0]])
    _around(DetectWorker, "_commit", "detected", lambda _, key, *more: [key[0]])
    _around(DetectWorker, "drain", "drain", lambda *a: [])
    _around(RunEngines, "of", "engine", lambda *a: [])
    _around(Leader, "_held", "leader", lambda *a: [])
    _around(Shard, "open", "shard", lambda *a: [])
    _around_async(Reader, "pull", "fetched", lambda out, *a: [m.subject.split(".")[2] for m in out or ()])
    _around_async(JetStream, "begin_lane", "lane", lambda *a: [])
    _around_async(JetStream, "acknowledge", "acknowledge", lambda *a: [])
    _around_async(JetStream, "open", "open", lambda *a: [])
    _around_async(Worker, "_commit", "commit_all", lambda *a: [])
    _around_async(Worker, "_share", "share", lambda *a: [])
    _around_async(Worker, "_let_go", "let_go", lambda *a: [])


if __name__ == "__main__":
    from fp8watch_server.worker.command import main

    install()
    sys.exit(main(sys.argv[1:]))
