"""A collector with little of a processor: registrations and batches are taken, and nobody is told that the database is down."""

from __future__ import annotations

import gzip
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import zstandard
from collector.kit import Agent, Serving, make_site

from fp8watch_agent.uploader import SITES_PER_REQUEST
from fp8watch_server.db import schema as t
from fp8watch_server.http import db_timeout
from fp8watch_server.ingest import sites
from fp8watch_server.store import registrations

SITES = [make_site(f"layers.{i}") for i in range(2000)]
MAX_TRIES = 3


@pytest.fixture
def database_kind() -> str:
    return "sqlite"


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db_timeout, "WITHOUT_PROGRESS_S", 0.3)


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many want a core a thread that works gets less of it."""
    monkeypatch.setattr(db_timeout, "WORKED_S", 0.001)


@contextmanager
def throttled(pid: int, share: float, period_s: float = 0.3) -> Iterator[None]:
    """A process that runs for a share of the time, as in a container with a limit."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(period_s * (1 - share))
            os.kill(pid, signal.SIGCONT)
            time.sleep(period_s * share)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def tries_of(send: Any, at_most: int = 20) -> int:
    for i in range(1, at_most + 1):
        answer = send()
        if answer.status_code == 200:
            return i
        assert answer.status_code == 503, answer.text
        time.sleep(0.5)
    pytest.fail(f"{at_most} tries, and not taken: {answer.text}")


def test_two_thousand_sites_are_taken_by_a_collector_with_a_tenth_of_a_core(tmp_path: Path) -> None:
    with Serving(tmp_path, "--port", "0") as serving, httpx.Client(base_url=serving.url, timeout=60) as client:
        agent = Agent(client)
        assert agent.register_run().status_code == agent.register_session().status_code == 200
        agent.patient = False
        with throttled(serving.process.pid, 0.1):
            tries = tries_of(lambda: agent.register_sites(SITES))
            again = tries_of(lambda: agent.register_sites(SITES))
            batch = tries_of(lambda: agent.post(agent.body(SITES, [1], seq=1)))
        with sqlite3.connect(tmp_path / "served.db") as db:
            assert db.execute("SELECT count(*) FROM site").fetchone() == (len(SITES),)
        db.close()
        serving.kill(15)
    print(f"{tries} tries, then {again}; a batch {batch}")
    assert max(tries, again, batch) <= MAX_TRIES


def slowly(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, wait: Any) -> None:
    """A function that waits before it does what it does."""
    real = getattr(module, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        wait()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, slow)


def work() -> None:
    """Twice as long as a database may do nothing, with the processor."""
    until = time.thread_time() + 2 * db_timeout.WITHOUT_PROGRESS_S
    while time.thread_time() < until:
        sum(range(1000))


@pytest.fixture
def agent(client: httpx.Client) -> Agent:
    """One whose run and session are registered, and which takes every answer as it comes."""
    client.timeout = httpx.Timeout(60)
    made = Agent(client)
    assert made.register_run().status_code == made.register_session().status_code == 200
    made.patient = False
    return made


def test_a_slow_database_is_waited_for_while_it_gets_something_done(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db_timeout, "WITHOUT_PROGRESS_S", 3.0)  # to commit takes seconds on a busy disk
    monkeypatch.setattr(db_timeout, "WORKED_S", 1e9)  # as where the system does not say who uses the processor
    slowly(monkeypatch, registrations, "register_sites", lambda: time.sleep(0.3 * db_timeout.WITHOUT_PROGRESS_S))
    began = time.monotonic()
    answer = agent.register_sites(SITES[:1000])
    assert time.monotonic() - began > db_timeout.WITHOUT_PROGRESS_S
    assert (answer.status_code, answer.json()) == (200, {"run": "run-1", "num_sites": 1000})


def test_a_database_that_gets_nothing_done_is_not_waited_for(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    slowly(monkeypatch, registrations, "register_sites", lambda: over.wait(5))  # less than anybody is let wait
    try:
        answer = agent.register_sites(SITES[:1])
    finally:
        over.set()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_a_thread_that_worked_for_others_has_done_nothing_yet() -> None:
    clock, read_s = db_timeout.WorkClock(), []

    def request() -> None:
        work()  # of an earlier request: the pool uses its threads again
        clock.start()
        read_s.append(clock.read_s())

    thread = threading.Thread(target=request)
    thread.start()
    thread.join()
    assert read_s[0] < db_timeout.WORKED_S


@pytest.mark.usefixtures("crowded")
def test_work_on_a_registration_is_not_the_database(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch, sites, "decode", work)
    assert agent.register_sites(SITES[:1]).status_code == 200


@pytest.mark.usefixtures("crowded")
def test_to_decode_a_batch_is_not_the_database(app: Any, agent: Agent) -> None:
    agent.register_sites(SITES[:1])
    taker = app.state.ingest.committer
    decode = taker._decode

    def slow(body: bytes) -> Any:
        work()
        return decode(body)

    taker._decode = slow
    small = agent.body(SITES[:1], [1])
    assert agent.post(small).status_code == 200
    large = gzip.compress(zstandard.ZstdDecompressor().decompress(agent.body(SITES[:1], [2])))  # says no size
    assert agent.post(large, Content_Encoding="gzip").status_code == 200


def test_what_is_registered_is_known_without_a_look_at_it(
    agent: Agent, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.register_sites(SITES)
    other = Agent(client, session="b" * 32, rank=1)
    other.register_session()

    def look(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the sites were compared again")

    monkeypatch.setattr(registrations, "unregistered_sites", look)
    for rank in (agent, other):
        answer = rank.register_sites(SITES)
        assert (answer.status_code, answer.json()["num_sites"]) == (200, len(SITES))
    unknown = Agent(client, session="c" * 32).register_sites(SITES)
    assert (unknown.status_code, unknown.json()["error"]) == (424, "unknown-session")


def test_what_others_have_changed_is_registered_again(app: Any, agent: Agent) -> None:
    agent.register_sites(SITES[:3])
    changed = [replace(SITES[0], eps=1e-9)]
    for body, eps in ((changed, 1e-9), (SITES[:3], 0.0), (changed, 1e-9)):
        assert agent.register_sites(body).status_code == 200
        with app.state.engine.connect() as conn:
            assert conn.execute(sa.select(t.site.c.eps).where(t.site.c.site == SITES[0].id)).scalar() == eps
    with app.state.engine.begin() as conn:
        conn.execute(sa.delete(t.site))
        conn.execute(sa.delete(t.session))
        conn.execute(sa.delete(t.run))
    agent.register(changed)
    with app.state.engine.connect() as conn:
        assert conn.execute(sa.select(sa.func.count()).select_from(t.site)).scalar() == 1


def test_an_agent_registers_a_few_sites_at_a_time() -> None:
    assert SITES_PER_REQUEST <= 250
