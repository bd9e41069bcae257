"""Many long questions at once: ingest, detection and /readyz go on beside them, and each question is answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from collector.kit import Agent, Recorder, make_site

from fp8watch_server.db import schema as t
from fp8watch_server.db.pools import for_requests
from fp8watch_server.pipeline import detect_worker
from fp8watch_server.store import queries

pytestmark = pytest.mark.parametrize("database_kind", ["postgresql"])

SITE = make_site("up")
NUM_READERS, QUESTION_S = 96, 0.2
SOON_S = 5.0


def eventually(there: Callable[[], Any]) -> None:
    until = time.monotonic() + 20
    while not there():
        assert time.monotonic() < until
        time.sleep(0.02)


@contextmanager
def every_connection_taken(engine: sa.Engine) -> Any:
    pool: Any = engine.pool
    with ExitStack() as stack:
        for _ in range(pool.size() + pool._max_overflow - pool.checkedout()):
            stack.enter_context(engine.connect())
        yield


def detected(app: Any) -> list[int]:
    with app.state.engine.connect() as conn:
        return list(conn.execute(sa.select(t.hot_batch.c.detected)).scalars())


def test_more_readers_than_connections_hinder_neither_ingest_nor_each_other(
    client: httpx.Client, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(client).register([SITE])
    agent.send([SITE], [0])
    agent.patient = False
    real, asked = queries.run, []

    def slowly(conn: sa.Connection, run_id: str) -> Any:
        asked.append(run_id)
        time.sleep(QUESTION_S)
        return real(conn, run_id)

    monkeypatch.setattr(queries, "run", slowly)
    with httpx.Client(base_url=client.base_url, timeout=60, limits=httpx.Limits()) as readers:
        with ThreadPoolExecutor(NUM_READERS) as threads:
            asking = [threads.submit(readers.get, "/api/v1/runs/run-1") for _ in range(NUM_READERS)]
            eventually(lambda: asked)
            others = 0
            while not all(asked.done() for asked in asking):
                others += 1
                answer = agent.post(agent.body([SITE], [others]))
                assert answer.status_code == 200, answer.text
                assert client.get("/readyz", timeout=SOON_S).status_code == 200
        statuses = [asked.result().status_code for asked in asking]
    assert others > 3
    assert statuses == [200] * NUM_READERS


def test_ingest_goes_on_where_requests_have_taken_every_connection(client: httpx.Client, app: Any) -> None:
    agent = Agent(client).register([SITE])
    agent.patient = False
    with every_connection_taken(for_requests(app.state.engine)):
        assert agent.post(agent.body([SITE], [1])).status_code == 200
        assert app.state.worker.drain() == 1
        assert client.get("/readyz").status_code == 200


def test_a_worker_that_finds_no_connection_keeps_the_engines_of_all_runs(
    client: httpx.Client, app: Any, recorder: Recorder
) -> None:
    agents = [Agent(client, run=run).register([SITE]) for run in ("a", "b")]
    for agent in agents:
        agent.send([SITE], [1])
    worker = app.state.worker
    worker.start()
    try:
        eventually(lambda: detected(app) == [1, 1])
        with every_connection_taken(app.state.engine):
            failed = worker._rounds.num_failures
            worker.wake()
            eventually(lambda: worker._rounds.num_failures > failed)
        for agent in agents:
            agent.send([SITE], [2])
        eventually(lambda: detected(app) == [1] * 4)
    finally:
        worker.stop()
    assert [[seq for _, seq in engine.seen] for engine in recorder.engines] == [[1, 2]] * 2


def test_what_was_seen_and_not_committed_is_seen_once_by_the_engine_that_goes_on(
    client: httpx.Client, app: Any, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = [Agent(client, run=run).register([SITE]) for run in ("a", "b")]
    for agent in agents:
        agent.send([SITE], [1])
    worker, writing, failed = app.state.worker, detect_worker.writing, []
    assert worker.drain() == 2

    def at_first_none_is_free(engine: sa.Engine) -> Any:
        if not failed:
            failed.append(engine)
            raise sa.exc.TimeoutError("none is free")
        return writing(engine)

    monkeypatch.setattr(detect_worker, "writing", at_first_none_is_free)
    agents[0].send([SITE], [2])
    worker.start()
    try:
        eventually(lambda: detected(app) == [1] * 3)
        agents[1].send([SITE], [2])
        eventually(lambda: detected(app) == [1] * 4)
    finally:
        worker.stop()
    assert failed
    first, of_b, again = ([seq for _, seq in engine.seen] for engine in recorder.engines)
    assert (first, of_b, again) == ([1, 2], [1, 2], [1, 2])
