"""A queue in front of shards: a batch waits in the queue for the shard of its run, and for no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("nats", reason="pip install 'fp8watch[nats]'")

from cluster.kit import arrivals, crewing, eventually
from cluster.nats_servers import Node
from collector.killing import SITES
from collector.kit import Agent, Recorder, served
from support.database import fresh_database

from fp8watch_server.app import create_app
from fp8watch_server.db.dialect import make_engine
from fp8watch_server.db.directory import order_of
from fp8watch_server.db.shards import Shard
from fp8watch_server.moving.move import Move
from fp8watch_server.queue import subjects
from fp8watch_server.settings import Settings

OF_A, OF_B = (next(run for run in map("run-{}".format, range(64)) if order_of(run, "ab")[0] == n) for n in "ab")


@pytest.fixture
def urls(database_url: str) -> Iterator[dict[str, str]]:
    """Home, and two shards."""
    with fresh_database("postgresql") as a, fresh_database("postgresql") as b:
        yield {"home": database_url, "a": a, "b": b}


@pytest.fixture
def settings(urls: dict[str, str], node: Node) -> Settings:
    shards = f"a={urls['a']} b={urls['b']}"
    return Settings(database_url=urls["home"], shards=shards, queue=node.url, queue_replicas=1, queue_bytes=64 << 20)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of shards that do not answer."""
    names: set[str] = set()
    monkeypatch.setattr(Shard, "ready", property(lambda self: self._opened and self.name not in names))
    return names


@pytest.fixture
def front_app(settings: Settings) -> Any:
    return create_app(settings, detection=Recorder().detection(), dispatcher=lambda e, s: None, pages=False)


@pytest.fixture
def front(front_app: Any) -> Iterator[httpx.Client]:
    app = front_app
    ingests = [app.state.ingest, *app.state.ingests.values()]
    with served(app) as url, httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        eventually(lambda: all(ingest.committer.queue_ready for ingest in ingests))
        yield client
        for ingest in ingests:
            ingest.stop()
        for engine in app.state.shards.engines():
            engine.dispose()


def stored(url: str) -> list[tuple[str, int, int]]:
    engine = make_engine(url)
    try:
        return arrivals(engine)
    finally:
        engine.dispose()


def test_a_shard_that_is_away_holds_back_its_own_runs(
    front: httpx.Client, settings: Settings, urls: dict[str, str], away: set[str]
) -> None:
    agents = [Agent(front, run=run, session=f"{i:032x}").register(SITES) for i, run in enumerate((OF_A, OF_B))]
    for agent in agents:
        agent.send(SITES, [1])
    with crewing(settings):
        eventually(lambda: stored(urls["a"]) == [(OF_A, 0, 1)] and stored(urls["b"]) == [(OF_B, 0, 1)])
    away.add("b")
    assert front.put(agents[1].path, json={"name": "x"}).status_code == 503  # to register needs the shard
    with crewing(settings) as crew:
        for step in range(2, 6):
            for agent in agents:  # accepted: it waits in the queue
                agent.send(SITES, [step])
        eventually(lambda: stored(urls["a"]) == [(OF_A, 0, seq) for seq in range(1, 6)])
        assert stored(urls["b"]) == [(OF_B, 0, 1)]
        away.clear()
        body = agents[1].body(SITES, [6])
        assert [agents[1].post(body).status_code for _ in range(2)] == [200, 200]
        eventually(lambda: len(stored(urls["b"])) == 6, said=lambda: stored(urls["b"]))
        assert crew.num_refused == 0
    assert stored(urls["b"]) == [(OF_B, 0, seq) for seq in range(1, 7)]
    assert stored(urls["home"]) == []


def test_lanes_of_shards_are_their_own() -> None:
    """No consumer reads the batches of another database, and each batch has one."""
    places = [("", lane) for lane in range(8)] + [(name, lane) for name in "ab" for lane in range(4)]
    filters = [subjects.lane_subject(subjects.HEALTHY, lane, shard).split(".") for shard, lane in places]
    assert len({subjects.consumer_of(lane, shard) for shard, lane in places}) == len(places)

    def matches(of: list[str], subject: list[str]) -> bool:
        return len(of) == len(subject) and all(f in ("*", s) for f, s in zip(of, subject, strict=True))

    for shard in ("", "a", "b"):
        for rank in range(0, 4096, 64):
            subject = subjects.subject_of(subjects.HEALTHY, "default", "x.y", rank, shard).split(".")
            assert sum(matches(of, subject) for of in filters) == 1


def test_what_was_accepted_for_the_old_place_is_passed_on(
    front: httpx.Client, settings: Settings, urls: dict[str, str], front_app: Any
) -> None:
    """A run moves while a batch of it waits in the queue, as where a collector has not heard of the move."""
    agent = Agent(front, run=OF_A).register(SITES)
    agent.send(SITES, [1])
    Move(front_app.state.shards, OF_A, "b").run()
    broken = agent.body(SITES, [2], fields={"num_inf": 1})
    assert agent.post(broken).status_code == 200  # this one has not heard of it either
    with crewing(settings) as crew:
        eventually(lambda: len(stored(urls["b"])) == 2, said=lambda: crew.workers["a"].counts)
        front_app.state.shards.directory.refresh()
        agent.send(SITES, [3])
        assert agent.post(broken).status_code == 200
        eventually(lambda: len(stored(urls["b"])) == 3)
        assert (crew.workers["a"].counts.passed_on, crew.num_refused) == (2, 0)
    assert stored(urls["a"]) == []
    assert len(set(stored(urls["b"]))) == 3
