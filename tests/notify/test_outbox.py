"""Messages arrive at least once, in order, soon; a broken receiver harms nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from detect.healthy_run import Run
from incidents.store import Store
from notify.receiver import Outbox, Receiver
from notify.senders import SENDER, webhook

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing
from fp8watch_server.notify import outbox as module
from fp8watch_server.notify.channels.slack import SlackChannel
from fp8watch_server.notify.outbox import Dispatcher, counts
from fp8watch_server.notify.safe_http import Target

Receivers = Callable[..., Receiver]
Dispatch = Callable[..., Dispatcher]


def test_a_message_goes_to_every_channel_once(outbox: Outbox, receiver_of: Receivers, dispatch: Dispatch) -> None:
    slack, hook = receiver_of(), receiver_of()
    key = outbox.put()
    dispatch(SlackChannel(Target(slack.url, from_operator=True)), webhook(hook))
    outbox.wait_for(["sent", "sent"])
    assert [g.headers["Idempotency-Key"] for g in slack.got + hook.got] == [key, key]
    assert set(slack.got[0].body) == {"text", "blocks"}
    assert hook.got[0].body["version"] == "4"
    with outbox.db.connect() as conn:
        assert counts(conn) == {("slack", "sent"): 1, ("webhook", "sent"): 1}


def test_an_incident_is_told_within_two_seconds_of_its_batch(tmp_path: Path, receiver_of: Receivers) -> None:
    receiver, run = receiver_of(), Run()
    store = Store(tmp_path, run)
    store.now = time.time()
    dispatcher = Dispatcher(store.db, [webhook(receiver)])  # as in the collector: nobody wakes it
    dispatcher.start()
    batch = run.batch([5], lambda rows, s, step: rows["num_inf"].put(0, 1))
    store.take(batch)
    [got] = receiver.wait_for(1, 15.0)
    assert module.POLL_S <= 0.5, "of the two seconds, what a message waits for to be seen"
    assert got.body["alerts"][0]["labels"]["alertname"] == "inf-laundering"
    assert got.body["alerts"][0]["annotations"]["run_name"] == "<b>my run</b>"
    dispatcher.stop()
    store.db.dispose()


def test_5xx_and_lost_answers_are_tried_again_until_they_are_taken(
    outbox: Outbox, receiver_of: Receivers, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BACK_OFF_S", 0.02)
    receiver = receiver_of((500, {}, b"x"), (503, {}, b""), (408, {}, b""))
    outbox.put()
    dispatch(webhook(receiver))
    [row] = outbox.wait_for(["sent"])
    assert len(receiver.got) == 4
    assert row["num_attempts"] == 4
    assert len({g.headers["Idempotency-Key"] for g in receiver.got}) == 1


@pytest.mark.parametrize("status", [400, 403, 404, 410, 302])
def test_a_refusal_is_dead_at_once_and_says_why(
    outbox: Outbox, receiver_of: Receivers, dispatch: Dispatch, status: int
) -> None:
    receiver = receiver_of((status, {"Location": "/elsewhere"}, b"no_service"))
    outbox.put()
    dispatch(webhook(receiver))
    [row] = outbox.wait_for(["dead"])
    assert len(receiver.got) == 1
    assert row["last_error"].startswith(f"HTTP {status} no_service")
    assert receiver.url not in row["last_error"]


def test_429_is_obeyed_for_the_whole_channel(outbox: Outbox, receiver_of: Receivers, dispatch: Dispatch) -> None:
    receiver = receiver_of((429, {"Retry-After": "3"}, b""))
    outbox.put()
    outbox.put()
    dispatch(webhook(receiver))
    outbox.wait_for(["sent", "sent"], 30.0)
    first, second, third = receiver.got
    assert second.at - first.at >= 3.0
    assert third.at - second.at < 2.9


def test_slack_gets_one_message_a_second(outbox: Outbox, receiver_of: Receivers, dispatch: Dispatch) -> None:
    receiver = receiver_of()
    outbox.put()
    outbox.put()
    dispatch(SlackChannel(Target(receiver.url, from_operator=True)))
    first, second = receiver.wait_for(2)
    assert second.at - first.at >= 0.95


def test_a_poison_receiver_among_five_keeps_nobody_waiting(
    outbox: Outbox, receiver_of: Receivers, dispatch: Dispatch
) -> None:
    names = ("stuck", "broken", "gone", "limited", "good")
    receivers = {name: receiver_of() for name in names}
    receivers["stuck"].hold = threading.Event()
    receivers["broken"].always = (500, {}, b"")
    receivers["gone"].always = (410, {}, b"")
    receivers["limited"].always = (429, {"Retry-After": "60"}, b"")
    keys = sorted(outbox.put() for _ in range(5))
    dispatch(*(webhook(receivers[name], name) for name in names))
    receivers["good"].wait_for(5, 25.0)  # the one that is stuck is held for thirty
    assert sorted(g.headers["Idempotency-Key"] for g in receivers["good"].got) == keys
    assert len(receivers["stuck"].got) == 1
    receivers["gone"].wait_for(5, 15.0)
    assert len(receivers["limited"].got) == 1  # the channel waits, not the message alone
    assert len(receivers["broken"].got) > 0
    assert len(receivers["gone"].got) == 5  # a refusal is not tried again
    receivers["stuck"].hold.set()
    receivers["stuck"].wait_for(5)


def test_a_resolve_waits_for_its_firing(
    outbox: Outbox, receiver_of: Receivers, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BACK_OFF_S", 0.05)
    receiver = receiver_of((500, {}, b""), (500, {}, b""))
    outbox.put("firing", "i1")
    outbox.put("resolved", "i1")
    dispatch(webhook(receiver))
    outbox.wait_for(["sent", "sent"])
    assert [g.body["status"] for g in receiver.got] == ["firing", "firing", "firing", "resolved"]


def test_a_message_that_cannot_be_made_does_not_stop_those_behind_it(
    outbox: Outbox, receiver_of: Receivers, dispatch: Dispatch
) -> None:
    receiver = receiver_of()
    outbox.put(change=lambda payload: payload.pop("incident"))
    outbox.put()
    dispatch(webhook(receiver))
    rows = outbox.wait_for(["dead", "sent"])
    assert rows[0]["last_error"] == "message cannot be made: KeyError"


def test_a_receiver_that_is_down_for_a_day_makes_a_dead_letter(outbox: Outbox, receiver_of: Receivers) -> None:
    receiver = receiver_of((500, {}, b""), (500, {}, b""))
    outbox.put()
    now = [time.time() + 1]
    dispatcher = Dispatcher(outbox.db, [webhook(receiver)], clock=lambda: now[0])
    channel = dispatcher._channels[0]
    assert dispatcher.deliver_one(channel)
    assert outbox.rows[0]["state"] == "pending"
    now[0] += module.MAX_AGE_S
    assert dispatcher.deliver_one(channel)
    assert outbox.rows[0]["state"] == "dead"
    assert "given up after a day" in outbox.rows[0]["last_error"]


def test_a_killed_sender_loses_nothing_and_repeats_under_the_same_key(
    outbox: Outbox, receiver_of: Receivers, dispatch: Dispatch
) -> None:
    receiver = receiver_of()
    receiver.hold = threading.Event()
    keys = {outbox.put() for _ in range(3)}
    process = subprocess.Popen([sys.executable, "-c", SENDER, outbox.url, receiver.url], stdin=subprocess.PIPE)
    try:
        receiver.wait_for(1)  # sent, and not answered yet: the worst moment
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert [r["state"] for r in outbox.rows].count("leased") == 1
    receiver.hold.set()
    dispatch(webhook(receiver))
    outbox.wait_for(["sent"] * 3)  # long before its lease would have run out
    sent = [g.headers["Idempotency-Key"] for g in receiver.got]
    assert set(sent) == keys
    assert len(sent) == 4  # one more than needed, and it can be told by its key


def test_a_lease_that_ran_out_is_taken_over_and_a_living_one_is_not(outbox: Outbox, receiver_of: Receivers) -> None:
    receiver = receiver_of()
    outbox.put()
    t = schema.outbox
    now = time.time()
    with writing(outbox.db) as conn:
        conn.execute(
            sa.update(t).values(state="leased", channel="webhook", leased_by="elsewhere:1:x", leased_until=now + 60)
        )
    clock = [now]
    dispatcher = Dispatcher(outbox.db, [webhook(receiver)], clock=lambda: clock[0])
    assert not dispatcher.deliver_one(dispatcher._channels[0])
    clock[0] += 61
    assert dispatcher.deliver_one(dispatcher._channels[0])
    assert len(receiver.got) == 1


def test_two_dispatchers_send_each_message_once(outbox: Outbox, receiver_of: Receivers, dispatch: Dispatch) -> None:
    receiver = receiver_of()
    keys = sorted(outbox.put() for _ in range(20))
    dispatch(webhook(receiver))
    dispatch(webhook(receiver))
    outbox.wait_for(["sent"] * 20)
    assert sorted(g.headers["Idempotency-Key"] for g in receiver.got) == keys


def test_without_channels_messages_stay_where_they_are(outbox: Outbox) -> None:
    outbox.put()
    dispatcher = Dispatcher(outbox.db, [])
    dispatcher.start()
    dispatcher.wake()
    dispatcher.stop()
    assert [r["state"] for r in outbox.rows] == ["pending"]


def test_a_clock_that_is_set_back_delays_no_message(outbox: Outbox, receiver_of: Receivers) -> None:
    receiver = receiver_of((200, {}, b""), (500, {}, b""))
    clock = [time.time() + 86_400]  # wrong by a day, until it is corrected
    dispatcher = Dispatcher(outbox.db, [webhook(receiver)], clock=lambda: clock[0])
    channel = dispatcher._channels[0]
    outbox.put()
    assert dispatcher.deliver_one(channel)
    outbox.put()
    with writing(outbox.db) as conn:
        conn.execute(sa.update(schema.outbox).values(next_attempt_at=clock[0]))
    assert dispatcher.deliver_one(channel)  # refused for now
    clock[0] -= 86_400
    outbox.put()  # queued by a clock that is right
    assert dispatcher.deliver_one(channel)
    assert dispatcher.deliver_one(channel)
    assert [r["state"] for r in outbox.rows] == ["sent"] * 3
