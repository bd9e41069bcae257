"""What HTTP takes of a batch: the way of a request through server, authorisation and routes, with a committer that does nothing.

The server runs in this process, the client in another, so that this process's CPU time is the server's. A request with one batch
beside requests with several, as a relay sends them. Not a test: nothing here asserts on time.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from collector.kit import served

from benchmarks.table import machine, table, write
from fp8watch_agent.joined import JOINED_CONTENT_TYPE, JOINED_PATH, join_bodies
from fp8watch_agent.wire import BATCH_CONTENT_TYPE
from fp8watch_server.app import create_app
from fp8watch_server.ingest.group_commit import Committer
from fp8watch_server.load.stream import LoadPlan, RankStream
from fp8watch_server.settings import Settings
from fp8watch_server.store.commit import Committed

JOINED = (1, 8, 32, 128)
CLIENTS = 4


def _send(urls: Any, body: bytes, path: str, content_type: str, num: int, done: Any) -> None:
    url = urls.get()
    conn = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    headers = {"Content-Type": content_type, "Content-Encoding": "zstd", "Fp8watch-Session-Key": "0" * 32}
    for _ in range(num):
        conn.request("POST", path, body, headers)
        answer = conn.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
    done.put(True)


def one(body: bytes, together: int, num_batches: int) -> float:
    """CPU milliseconds a batch."""
    if together == 1:
        sent, path, content_type = body, "/v1/batches", BATCH_CONTENT_TYPE
    else:
        sent, path, content_type = join_bodies([("0" * 32, body)] * together), JOINED_PATH, JOINED_CONTENT_TYPE
    context = multiprocessing.get_context("fork")  # before the server has threads: a client imports nothing
    urls, done = context.Queue(), context.Queue()
    num = max(1, num_batches // together // CLIENTS)
    clients = [
        context.Process(target=_send, args=(urls, sent, path, content_type, num, done), daemon=True)
        for _ in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(database_url=f"sqlite:///{Path(folder) / 'x.db'}"))
        with served(app, lifespan="on") as url:
            time.sleep(1.0)
            began = time.process_time()
            for _ in clients:
                urls.put(url)
            for _ in clients:
                done.get(timeout=300)
            spent = time.process_time() - began
    return spent / (num * CLIENTS * together) * 1e3


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=8192)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--print", action="store_true", help="do not write the page")
    args = parser.parse_args()
    plan = LoadPlan(num_sites=160, num_steps=8, steps_per_batch=8, every=16, run="http")
    (body,) = [b.data for b in RankStream(plan)]

    def commit(self: Committer, body: bytes, sender: object = None) -> object:
        future: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()
        future.set_result(Committed(1, True, []))
        return future, lambda: 0.0

    Committer.commit = commit  # type: ignore[method-assign,assignment]
    found: dict[int, list[float]] = {together: [] for together in JOINED}
    for _ in range(args.repetitions):
        for together in JOINED:
            found[together].append(one(body, together, args.batches))
    rows = [(n, f"{statistics.median(of):.3f}", f"{min(of):.3f} … {max(of):.3f}") for n, of in found.items()]
    head = (
        f"## What HTTP takes of a batch\n\nBodies of {len(body):,} bytes; the committer answers at once, so this is the way of a request "
        "through server, authorisation, limits and routes alone. More than one batch a request: as a relay sends them. Goal: "
        f"≤ 0.3 ms. Medians of {args.repetitions}. Load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.\n"
    )
    shown = table(("batches a request", "CPU ms a batch", "least … most"), rows)
    if args.print:
        print(head, shown, sep="\n")
    else:
        write("http_share", f"{head}\n{shown}\n\n{machine('uvicorn', 'uvloop', 'httptools', 'starlette')}")


if __name__ == "__main__":
    main()
