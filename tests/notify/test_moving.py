"""Notices of a run that is being moved wait for it, and nothing waits for them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from notify.receiver import Outbox, Receiver
from notify.senders import webhook

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing
from fp8watch_server.db.fence import raise_fence, take_down
from fp8watch_server.notify import outbox as module
from fp8watch_server.notify.outbox import Dispatcher
from fp8watch_server.notify.stale_run import StalledWatch

MOVES = "a/run ü"


@pytest.fixture
def database_kind() -> str:
    return "postgresql"


@pytest.fixture
def outbox(tmp_path: Path, database_url: str) -> Iterator[Outbox]:
    made = Outbox(tmp_path, database_url)
    with writing(made.db) as conn:
        for run in (MOVES, "other"):
            conn.execute(sa.insert(schema.run), [{"run_id": run, "name": run, "created_at": 0.0, "last_seen_at": 0.0}])
    yield made
    take_down(made.db, MOVES)
    made.db.dispose()


def states(outbox: Outbox) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in outbox.rows:
        found.setdefault(row["run_id"], []).append(row["state"])
    return found


def deliver_all(dispatcher: Dispatcher, channel: Any) -> None:
    while dispatcher.deliver_one(channel):
        pass


def change(outbox: Outbox, **values: Any) -> None:
    with writing(outbox.db) as conn:
        conn.execute(sa.update(schema.outbox).where(schema.outbox.c.run_id == MOVES).values(**values))


BEFORE: dict[str, dict[str, Any]] = {
    "for everybody": {},
    "never tried": {"channel": "webhook"},
    "tried before": {"channel": "webhook", "num_attempts": 1},
    "its holder died": {
        "channel": "webhook",
        "state": "leased",
        "leased_by": f"{socket.gethostname()}:4194301:x",
        "leased_until": 1.0,
    },
    "its firing is dead": {"channel": "webhook", "kind": "resolved"},
    "its channel is gone": {"channel": "gone", "created_at": 1.0},
}


@pytest.mark.parametrize("case", BEFORE)
def test_they_hold_up_no_other(outbox: Outbox, receiver_of: Any, case: str) -> None:
    receiver: Receiver = receiver_of()
    channel = webhook(receiver)
    outbox.put(run=MOVES, at=None)
    if BEFORE[case]:
        change(outbox, **BEFORE[case])
    before = outbox.rows
    raise_fence(outbox.db, MOVES)
    outbox.put(run="other")
    dispatcher = Dispatcher(outbox.db, [channel], poll_s=0.05)
    dispatcher.start()  # a collector that starts meanwhile
    outbox.wait_for(["sent", before[0]["state"]])
    dispatcher.stop()
    assert not dispatcher._anything_due(channel, dispatcher._clock()), "it would look again and again"
    assert [row for row in outbox.rows if row["run_id"] == MOVES] == before
    take_down(outbox.db, MOVES)
    if case in ("for everybody", "never tried", "tried before"):
        deliver_all(Dispatcher(outbox.db, [channel]), channel)
        assert states(outbox) == {MOVES: ["sent"], "other": ["sent"]}


def test_a_fence_that_is_raised_while_a_message_is_sent_stops_its_channel_for_a_moment(
    outbox: Outbox, receiver_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FENCED_S", 0.3)
    channel = webhook(receiver_of())
    outbox.put(run=MOVES)
    dispatcher = Dispatcher(outbox.db, [channel])
    attempt = dispatcher._attempt

    def raises(*args: Any) -> Any:
        raise_fence(outbox.db, MOVES)
        return attempt(*args)

    monkeypatch.setattr(dispatcher, "_attempt", raises)
    assert dispatcher.deliver_one(channel)
    monkeypatch.undo()
    outbox.put(run="other")
    deliver_all(dispatcher, channel)
    assert states(outbox) == {MOVES: ["leased"], "other": ["sent"]}


def test_silence_of_a_run_that_moves_is_told_later_and_that_of_others_now(outbox: Outbox) -> None:
    now = 1000.0
    with writing(outbox.db) as conn:
        session = dict.fromkeys(("host", "recipe", "fingerprint", "backend"), "") | {
            n: {} for n in ("mesh", "versions", "facts")
        }
        for run in (MOVES, "other"):
            facts = {"run_id": run, "session": "a" * 32, "rank": 0, "attempt": 1, "world_size": 1, "pid": 1}
            conn.execute(sa.insert(schema.session), [{**session, **facts, "registered_at": 0.0, "last_seen_at": 0.0}])
    raise_fence(outbox.db, MOVES)
    watch = StalledWatch(outbox.db, 90.0, clock=lambda: now)
    watch._began = 0.0
    assert watch.look() == 1
    assert states(outbox) == {"other": ["pending"]}
    take_down(outbox.db, MOVES)
    assert watch.look() == 1
    raise_fence(outbox.db, MOVES)
    assert watch.look() == 0
    assert {row["kind"] for row in outbox.rows} == {"firing"}
