"""A run that falls silent is told, once, where a routes file asks for it; and so is its return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from notify.receiver import Receiver
from support.database import fresh_database

from fp8watch_server.db import schema as t
from fp8watch_server.db.dialect import make_engine, writing
from fp8watch_server.notify.channels import slack, webhook
from fp8watch_server.notify.channels.slack import SlackChannel
from fp8watch_server.notify.outbox import Dispatcher
from fp8watch_server.notify.safe_http import Target
from fp8watch_server.notify.stale_run import STALLED, StalledWatch

HEARTBEAT_S, MISSING = 30.0, 3


class World:
    """A database with one run, and a watch on a clock of its own."""

    def __init__(self, url: str) -> None:
        self.db, self.now = make_engine(url), 10_000.0
        self.watch = StalledWatch(
            self.db, HEARTBEAT_S * MISSING, clock=lambda: self.now, public_url="https://w.example"
        )
        with writing(self.db) as conn:
            run = {"run_id": "team/run", "name": "a run", "created_at": self.now, "last_seen_at": self.now}
            conn.execute(sa.insert(t.run), [{**run, "attempt": 1, "last_step": 41}])
            session = dict.fromkeys(("host", "recipe", "fingerprint", "backend"), "") | {
                n: {} for n in ("mesh", "versions", "facts")
            }
            session |= {"run_id": "team/run", "session": "a" * 32, "rank": 0, "attempt": 1, "world_size": 1, "pid": 1}
            conn.execute(sa.insert(t.session), [{**session, "registered_at": self.now, "last_seen_at": self.now}])

    def data_comes(self, **session: Any) -> None:
        with writing(self.db) as conn:
            conn.execute(sa.update(t.run).values(last_seen_at=self.now))
            if session:
                conn.execute(sa.update(t.session).values(**session))

    @property
    def notices(self) -> list[tuple[str, str]]:
        with self.db.connect() as conn:
            rows = conn.execute(sa.select(t.outbox.c.kind, t.outbox.c.payload).order_by(t.outbox.c.created_at))
            return [(kind, payload["incident"]["title"]) for kind, payload in rows]


@pytest.fixture
def world() -> Any:
    with fresh_database("sqlite") as url:
        made = World(url)
        yield made
        made.db.dispose()


def test_three_missing_heartbeats_are_told_once_and_so_is_the_return(world: World) -> None:
    for _ in range(20):
        world.now += HEARTBEAT_S
        world.data_comes()
        world.watch.look()
    assert world.notices == []
    world.now += HEARTBEAT_S * MISSING - 1
    world.watch.look()
    assert world.notices == []
    for _ in range(10):
        world.now += 2
        world.watch.look()
    assert world.notices == [("firing", "No data for 2 minutes, last step 41")]
    world.data_comes()
    world.watch.look()
    world.watch.look()
    assert [kind for kind, _ in world.notices] == ["firing", "resolved"]
    world.now += 1000
    world.watch.look()
    assert [kind for kind, _ in world.notices] == ["firing", "resolved", "firing"]


def test_a_run_that_said_that_it_ends_is_not_silent(world: World) -> None:
    world.data_comes(ended=True)
    world.now += 1000
    world.watch.look()
    assert world.notices == []


def test_the_collectors_own_absence_is_not_held_against_a_run(world: World) -> None:
    world.now += 5000
    watch = StalledWatch(world.db, 90.0, clock=lambda: world.now)
    watch.look()
    assert world.notices == []
    world.now += 100
    watch.look()
    assert len(world.notices) == 1


def test_a_restart_ends_no_silence_and_tells_none_again(world: World) -> None:
    world.now += 1000
    world.watch.look()
    assert [kind for kind, _ in world.notices] == ["firing"]
    world.watch = StalledWatch(world.db, 90.0, clock=lambda: world.now)
    for _ in range(10):
        world.now += 20
        world.watch.look()
    assert [kind for kind, _ in world.notices] == ["firing"]
    world.data_comes()
    world.watch.look()
    assert [kind for kind, _ in world.notices] == ["firing", "resolved"]


def test_a_silence_that_was_over_is_not_told_twice(world: World) -> None:
    """A clock that was set back makes a silent run look as if it were not, and later so again."""
    world.now += 1000
    world.watch.look()
    began, world.now = world.now, world.now - 950
    world.watch._began = 0.0
    world.watch.look()
    assert sorted(kind for kind, _ in world.notices) == ["firing", "resolved"]
    world.now = began + 10
    world.watch.look()
    assert sorted(kind for kind, _ in world.notices) == ["firing", "resolved"]


def test_a_silence_covers_it(world: World) -> None:
    with writing(world.db) as conn:
        row = {"run_id": "team/*", "id": "s", "mode": STALLED, "created_at": 0.0, "expires_at": 1e9}
        conn.execute(sa.insert(t.silence), [row])
    world.now += 1000
    world.watch.look()
    assert world.notices == []


def test_the_message_can_be_read(world: World, receiver_of: Callable[..., Receiver]) -> None:
    world.now += 1000
    world.watch.look()
    receiver = receiver_of()
    channel = SlackChannel(Target(receiver.url, from_operator=True))
    world.now += 1
    assert Dispatcher(world.db, [channel], clock=lambda: world.now).deliver_one(channel)
    body = receiver.got[0].body
    assert body["text"].startswith("🟠 warning: No data for 17 minutes, last step 41")
    assert "https://w.example/runs/team%2Frun" in str(body["blocks"])
    with world.db.connect() as conn:
        payload = conn.execute(sa.select(t.outbox.c.payload)).scalar_one()
    assert webhook.message(payload, "firing")["alerts"][0]["labels"]["alertname"] == STALLED
    assert slack.message(payload, "resolved")["text"].startswith("✅ Resolved")
