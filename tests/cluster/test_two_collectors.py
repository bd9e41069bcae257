"""A batch that goes to two collectors of one database is stored once, with and without a queue, on whichever shard its run is."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

pytest.importorskip("nats", reason="pip install 'fp8watch[nats]'")

from cluster.kit import arrivals, crewing, eventually
from cluster.nats_servers import Node
from collector.killing import SITES
from collector.kit import Agent, Recorder, served
from support.database import fresh_database

from fp8watch_agent.relay import Relay
from fp8watch_agent.settings import AgentSettings
from fp8watch_server.app import create_app
from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.directory import order_of
from fp8watch_server.settings import Settings

RUNS = [next(run for run in map("run-{}".format, range(64)) if order_of(run, "ab")[0] == name) for name in "ab"]
NUM = 6
BROKEN = {"num_inf": [1, 0], "num_sentinel_tiles": [1, 0]}


@pytest.fixture
def shards(database_url: str) -> Iterator[dict[str, str]]:
    """Home's URL, and those of two shards."""
    with fresh_database("postgresql") as a, fresh_database("postgresql") as b:
        yield {"home": database_url, "a": a, "b": b}


@contextmanager
def two(settings: Settings) -> Iterator[list[httpx.Client]]:
    """Clients of two collectors."""
    with ExitStack() as stack:
        clients = []
        for _ in range(2):
            app = create_app(settings, detection=Recorder().detection(), dispatcher=lambda e, s: None, pages=False)
            url = stack.enter_context(served(app))
            clients.append(stack.enter_context(httpx.Client(base_url=url, trust_env=False, timeout=20)))
            ingests = [app.state.ingest, *app.state.ingests.values()]
            if settings.queue:
                eventually(lambda of=ingests: all(one.committer.queue_ready for one in of))
            for one in ingests:
                stack.callback(one.stop)
            for engine in app.state.shards.engines():
                stack.callback(engine.dispose)
        yield clients


def settings_of(shards: dict[str, str], queue: str) -> Settings:
    named = f"a={shards['a']} b={shards['b']}"
    given: dict[str, Any] = {"queue": queue, "queue_replicas": 1, "queue_bytes": 64 << 20} if queue else {}
    return Settings(database_url=shards["home"], shards=named, **given)


def stored(url: str) -> list[tuple[str, int, int]]:
    engine = make_engine(url)
    try:
        return arrivals(engine)
    finally:
        engine.dispose()


@pytest.mark.parametrize("queued", [False, True], ids=["direct", "queued"])
def test_the_same_batch_at_both_is_stored_once(shards: dict[str, str], node: Node, queued: bool) -> None:
    """At the same time and one after the other, broken ones (which a collector with a queue commits besides) and healthy ones."""
    settings = settings_of(shards, node.url if queued else "")
    with two(settings) as clients, ExitStack() as stack:
        if queued:
            crew = stack.enter_context(crewing(settings))
        for run in RUNS:
            agents = [Agent(client, run=run, session="a" * 32) for client in clients]
            agents[0].register(SITES)
            bodies = [agents[0].body(SITES, [n], seq=n, fields=BROKEN if n % 2 else {}) for n in range(1, NUM + 1)]
            with ThreadPoolExecutor(2 * len(clients)) as pool:
                for body in bodies:
                    answers = list(pool.map(lambda agent, raw=body: agent.post(raw), agents * 2))
                    assert [answer.status_code for answer in answers] == [200] * 4
            for body in bodies:
                assert [agent.post(body).status_code for agent in agents] == [200, 200]
            other = agents[0].body(SITES, [NUM], seq=NUM, fields={"num_saturated": 7})
            assert agents[0].post(other).status_code == 409
        for name, run in zip("ab", RUNS, strict=True):
            want = [(run, 0, n) for n in range(1, NUM + 1)]
            eventually(lambda w=want, n=name: sorted(stored(shards[n])) == w, said=lambda n=name: stored(shards[n]))
            engine = make_engine(shards[name])
            with engine.connect() as conn:
                assert conn.execute(sa.select(t.run.c.num_batches).where(t.run.c.run_id == run)).scalar() == NUM
                assert conn.execute(sa.select(sa.func.count()).select_from(t.scalar)).scalar() == NUM
            engine.dispose()
        if queued:
            assert crew.num_refused == 0


def test_a_relay_sends_to_both_and_each_batch_counts_once(tmp_path: Path, shards: dict[str, str], node: Node) -> None:
    """The second collector is asked besides as soon as the first one is slow; both have a queue, and the run lies on a shard."""
    settings = settings_of(shards, node.url)
    with two(settings) as clients, crewing(settings) as crew:
        relay = Relay(
            AgentSettings(spool_dir=tmp_path),
            [str(client.base_url) for client in clients],
            max_bytes=64 << 20,
            join_s=0.0,
            port=0,
        )
        relay.start()
        with httpx.Client(base_url=relay.url, trust_env=False) as client:
            agents = [Agent(client, run=run, session=f"{i:032x}").register(SITES) for i, run in enumerate(RUNS)]
            for step in range(1, NUM + 1):
                relay.collectors.failed(step % 2, "of this test")
                for agent in agents:
                    agent.send(SITES, [step], fields=BROKEN if step % 2 else {})
            eventually(lambda: relay.health()["waiting"] == 0, said=relay.health)
        relay.stop()
        for name, run in zip("ab", RUNS, strict=True):
            want = [(run, 0, n) for n in range(1, NUM + 1)]
            eventually(lambda w=want, n=name: sorted(stored(shards[n])) == w, said=lambda n=name: stored(shards[n]))
        assert crew.num_refused == 0
        assert relay.health()["refused"] == 0
