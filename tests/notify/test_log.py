"""What became of a message can be seen, and a dead letter can be sent again."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from notify.receiver import Outbox, Receiver

from fp8watch_server.db import migrations
from fp8watch_server.notify import command
from fp8watch_server.notify.channels.webhook import WebhookChannel
from fp8watch_server.notify.group import UNDERWAY
from fp8watch_server.notify.log import STATES, delivery_log
from fp8watch_server.notify.outbox import Dispatcher
from fp8watch_server.notify.safe_http import Target


@pytest.fixture
def refused(outbox: Outbox, receiver_of: Callable[..., Receiver]) -> Dispatcher:
    """One message that is sent, and one that is refused."""
    receiver = receiver_of((404, {}, b"no_service"))
    dispatcher = Dispatcher(outbox.db, [WebhookChannel(Target(receiver.url, from_operator=True))], clock=lambda: 1e9)
    for incident, at in (("first", 1.0), ("second", 2.0)):
        outbox.put("firing", incident, at=1e9 - 10 + at, title=f"the {incident}\x1b[31m")
        assert dispatcher.deliver_one(dispatcher._channels[0])
    return dispatcher


def test_dead_letters_are_listed_with_the_reason(
    outbox: Outbox, refused: Dispatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["log", "--database-url", outbox.url], {}) == 0
    newest, oldest = capsys.readouterr().out.splitlines()
    assert "webhook firing sent · the second" in newest
    assert "webhook firing dead: HTTP 404 no_service · the first" in oldest
    assert "\x1b" not in oldest
    assert command.main(["log", "--database-url", outbox.url, "--state", "dead", "--json"], {}) == 0
    [entry] = json.loads(capsys.readouterr().out)
    assert (entry["incident_id"], entry["last_error"], entry["num_attempts"]) == ("first", "HTTP 404 no_service", 1)
    assert command.main(["log", "--database-url", outbox.url, "--channel", "x"], {}) == 0
    assert "no messages" in capsys.readouterr().out


def test_a_dead_letter_is_sent_again_when_somebody_asks(
    outbox: Outbox, refused: Dispatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    [dead] = [r for r in outbox.rows if r["state"] == "dead"]
    assert command.main(["retry", "--database-url", outbox.url], {}) == 2
    assert command.main(["retry", "zzz", "--database-url", outbox.url], {}) == 1
    assert command.main(["retry", dead["id"][:8], "--database-url", outbox.url], {}) == 0
    assert "1 messages are sent again" in capsys.readouterr().out
    assert refused.deliver_one(refused._channels[0])
    assert {r["state"] for r in outbox.rows} == {"sent"}


def test_the_log_knows_every_state(outbox: Outbox, refused: Dispatcher) -> None:
    assert set(UNDERWAY) <= set(STATES)
    with outbox.db.connect() as conn:
        assert delivery_log(conn, run_id="run-first")[0]["state"] == "dead"
        assert len(delivery_log(conn, limit=1)) == 1
    assert migrations.head()
