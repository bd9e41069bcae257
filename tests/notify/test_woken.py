"""Nothing on the way of a message waits for a poll: with every pause a minute long it arrives all the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from collector.kit import Agent, make_site, served
from fastapi import FastAPI
from notify.receiver import Outbox, Receiver
from notify.senders import AT_ONCE, webhook

from fp8watch_server.app import create_app
from fp8watch_server.db import schema as t
from fp8watch_server.notify.channels.base import Pace
from fp8watch_server.notify.channels.slack import SlackChannel
from fp8watch_server.notify.outbox import Dispatcher
from fp8watch_server.notify.safe_http import Target
from fp8watch_server.pipeline import detect_worker
from fp8watch_server.settings import Settings

LONG_S = 90.0
"""The pauses; what is told within a third of it was not told by a poll."""
SOON_S = LONG_S / 3
SITES = [make_site("up", order=0), make_site("down", order=1)]
Receivers = Callable[..., Receiver]


@pytest.fixture(autouse=True)
def pauses_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PACE_S", "MAX_PACE_S", "IDLE_S"):
        monkeypatch.setattr(detect_worker, name, LONG_S)
    monkeypatch.setitem(Dispatcher.__init__.__kwdefaults__, "poll_s", LONG_S)  # type: ignore[arg-type]


@pytest.fixture
def collector(tmp_path: Path, receiver_of: Receivers) -> Iterator[tuple[httpx.Client, FastAPI, Receiver]]:
    receiver = receiver_of()
    settings = Settings(database_url=f"sqlite:///{tmp_path / 'fp8watch.db'}", webhook_url=receiver.url)
    app = create_app(settings, pages=False)
    with served(app, lifespan="on") as url, httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        yield client, app, receiver


def judged(app: FastAPI, run: str) -> int:
    b = t.hot_batch.c
    with app.state.engine.connect() as conn:
        query = sa.select(sa.func.count()).where(b.run_id == run, b.detected == t.BATCH_DETECTED)
        return int(conn.execute(query).scalar_one())


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_non_finite_batch_wakes_everyone_on_its_way(collector: tuple[httpx.Client, FastAPI, Receiver]) -> None:
    client, app, receiver = collector
    well = Agent(client, run="well").register(SITES)
    well.send(SITES, [1])
    wait_until(lambda: judged(app, "well") == 1)
    well.send(SITES, [2])  # the detectors rest: nothing of this is urgent
    began = time.monotonic()
    ill = Agent(client, run="ill", session="b" * 32).register(SITES)
    ill.send(SITES, [1], fields={"num_inf": [1, 0], "num_sentinel_tiles": [1, 0]})
    [got] = receiver.wait_for(1, SOON_S)
    assert got.at - began < SOON_S
    assert got.body["alerts"][0]["labels"]["run"] == "ill"


def test_what_waits_for_company_waits_no_longer(outbox: Outbox, receiver_of: Receivers) -> None:
    receiver = receiver_of()
    dispatcher = Dispatcher(outbox.db, [webhook(receiver, pace=Pace(group_wait_s=0.3))])
    dispatcher.start()
    began = time.monotonic()
    outbox.put()
    dispatcher.wake()
    [got] = receiver.wait_for(1, SOON_S)
    dispatcher.stop()
    assert 0.2 < got.at - began < SOON_S


def test_the_next_message_of_a_channel_leaves_when_it_may(outbox: Outbox, receiver_of: Receivers) -> None:
    receiver = receiver_of()
    pace = Pace(min_interval_s=0.5, group_wait_s=AT_ONCE.group_wait_s)
    dispatcher = Dispatcher(outbox.db, [SlackChannel(Target(receiver.url, from_operator=True), pace=pace)])
    dispatcher.start()
    outbox.put()
    outbox.put()
    dispatcher.wake()
    first, second = receiver.wait_for(2, SOON_S)
    dispatcher.stop()
    assert 0.45 < second.at - first.at < SOON_S
