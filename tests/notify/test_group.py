"""What goes together in one message, what waits, what is summed up, and who is never told."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from notify.receiver import Answer, Outbox, Receiver

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing
from fp8watch_server.notify import group
from fp8watch_server.notify.channels.alertmanager import AlertmanagerChannel
from fp8watch_server.notify.channels.base import Pace
from fp8watch_server.notify.channels.slack import SlackChannel
from fp8watch_server.notify.channels.webhook import WebhookChannel
from fp8watch_server.notify.outbox import Dispatcher
from fp8watch_server.notify.safe_http import Target

Receivers = Callable[..., Receiver]
GROUPED = Pace(group_wait_s=5.0, group_interval_s=60.0)


class Bench:
    """A dispatcher without threads, on a clock of its own."""

    def __init__(self, outbox: Outbox, receiver: Receiver, pace: Pace = GROUPED, **options: Any) -> None:
        self.outbox, self.receiver, self.now = outbox, receiver, time.time()
        self.channel = WebhookChannel(Target(receiver.url, from_operator=True), pace=pace)
        self.dispatcher = Dispatcher(outbox.db, [self.channel], clock=lambda: self.now, **options)

    def put(self, incident: str, kind: str = "firing", **facts: Any) -> None:
        self.outbox.put(kind, incident, run=facts.pop("run", "r"), at=self.now, **{"severity": "warning", **facts})

    def send(self) -> list[list[tuple[str, str]]]:
        """All that is due now: of each message the (status, incident) of its alerts."""
        before = len(self.receiver.got)
        while self.dispatcher.deliver_one(self.channel):
            self.dispatcher._not_before[self.channel.name] = 0.0
        return [[(a["status"], a["fingerprint"]) for a in g.body["alerts"]] for g in self.receiver.got[before:]]

    @property
    def states(self) -> dict[str, str]:
        return {f"{r['incident_id']}:{r['kind']}": r["state"] for r in self.outbox.rows}


@pytest.fixture
def bench(outbox: Outbox, receiver_of: Receivers) -> Callable[..., Bench]:
    def make(pace: Pace = GROUPED, *script: Answer, **options: Any) -> Bench:
        return Bench(outbox, receiver_of(*script), pace, **options)

    return make


def test_notices_of_one_run_within_the_wait_are_one_message(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.put("a")
    b.now += 4
    b.put("b")
    b.put("c", severity="critical")
    b.put("elsewhere", run="another")
    assert b.send() == []
    b.now += 1
    assert b.send() == [[("firing", "c"), ("firing", "a"), ("firing", "b")]]  # the most urgent leads
    b.now += 4
    assert b.send() == [[("firing", "elsewhere")]]
    assert set(b.states.values()) == {"sent"}
    assert b.receiver.got[0].headers["Idempotency-Key"] == "c:firing"


def test_a_notice_that_was_written_while_the_dispatcher_looked_waits_for_company_too(
    bench: Callable[..., Bench],
) -> None:
    b = bench()
    b.now += 0.01
    b.put("a")
    b.now -= 0.01  # the clock was read before the notice was
    assert b.send() == []
    b.now += 4
    b.put("b")
    b.now += 1.01
    assert b.send() == [[("firing", "a"), ("firing", "b")]]


def test_a_notice_of_a_clock_that_was_set_back_delays_nothing(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.now += 100
    b.put("a")
    b.now -= 100
    assert b.send() == [[("firing", "a")]]


def test_the_next_message_about_a_run_waits_for_the_interval_and_a_critical_one_does_not(
    bench: Callable[..., Bench],
) -> None:
    b = bench()
    b.put("a")
    b.now += 5
    assert len(b.send()) == 1
    b.now += 1
    b.put("b")
    b.now += 10
    assert b.send() == []
    b.put("c", severity="critical")
    b.now += 5
    assert [[i for _, i in m] for m in b.send()] == [["c", "b", "a"]]  # b goes along; a is still open
    b.put("d")
    b.now += 59
    assert b.send() == []
    b.now += 1
    assert [i for _, i in b.send()[0]][:1] == ["d"]


def test_a_group_is_resolved_when_the_last_of_it_is(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.put("a")
    b.put("b")
    b.now += 5
    b.send()
    b.put("a", "resolved", resolved_at=b.now)
    b.now += 60
    assert b.send() == [[("resolved", "a"), ("firing", "b")]]
    b.put("b", "resolved", resolved_at=b.now)
    b.now += 60
    assert b.send() == [[("resolved", "b")]]
    assert [g.body["status"] for g in b.receiver.got] == ["firing", "firing", "resolved"]
    assert {g.body["groupKey"] for g in b.receiver.got} == {'{}:{run="r"}'}


def test_a_resolve_carries_the_labels_of_its_firing(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.put("a", severity="warning", mode="delayed-clip")
    b.now += 5
    b.send()
    b.put("a", "resolved", severity="critical", mode="outlier-growth", resolved_at=b.now)
    b.now += 60
    b.send()
    first, second = (g.body["alerts"][0]["labels"] for g in b.receiver.got)
    assert first == second
    assert first["alertname"] == "delayed-clip"


def test_a_message_that_is_tried_again_holds_the_same_notices_under_the_same_key(bench: Callable[..., Bench]) -> None:
    b = bench(GROUPED, (500, {}, b""))
    b.put("a")
    b.put("b")
    b.now += 5
    b.send()
    assert Counter(b.states.values()) == {"pending": 1, "grouped": 1}
    b.put("late")
    b.now += 300
    b.send()
    b.now += 60
    b.send()
    first, again, other = b.receiver.got
    assert first.raw == again.raw
    assert first.headers["Idempotency-Key"] == again.headers["Idempotency-Key"]
    assert other.body["alerts"][0]["fingerprint"] == "late"
    assert set(b.states.values()) == {"sent"}


@pytest.mark.parametrize("status", [400, 413, 422])
def test_one_notice_that_is_refused_harms_no_other_of_its_group(bench: Callable[..., Bench], status: int) -> None:
    b = bench(GROUPED, (status, {}, b"no"), (status, {}, b"no"))
    for incident in "abc":
        b.put(incident)
    b.now += 5
    assert [len(m) for m in b.send()][:1] == [3]
    assert len(b.receiver.got) == 4
    assert Counter(b.states.values()) == {"sent": 2, "dead": 1}


def test_one_notice_that_cannot_be_made_harms_no_other_of_its_group(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.put("a")
    b.outbox.put("firing", "broken", lambda payload: payload["incident"].pop("place"), run="r", at=b.now)
    b.put("c", severity="critical")
    b.now += 5
    assert b.send() == [[("firing", "c")], [("firing", "a"), ("firing", "c")]]
    assert b.states == {"a:firing": "sent", "broken:firing": "dead", "c:firing": "sent"}


def test_past_the_hours_limit_one_summary_tells_the_rest(bench: Callable[..., Bench]) -> None:
    b = bench(Pace(group_wait_s=0.0, group_interval_s=0.0, max_per_hour=3))
    for i in range(20):
        b.put(f"i{i}", run=f"r{i}")
        b.send()
        b.now += 20
    sizes = [len(g.body["alerts"]) for g in b.receiver.got]
    assert sizes[:4] == [1, 1, 1, 1]  # three, and the first summary
    assert sizes[4:] == [15]  # 300 seconds of what was held, in one
    assert b.receiver.got[4].body["groupLabels"] == {}
    b.now += group.SUMMARY_EVERY_S
    b.send()
    assert Counter(b.states.values()) == {"sent": 6, "summarised": 14}  # each message is led by one of its notices
    assert sum(len(g.body["alerts"]) for g in b.receiver.got) == 20
    b.put("i10", "resolved", run="r10", resolved_at=b.now)  # told in a summary only
    b.now += 3600
    assert b.send() == []
    assert b.states["i10:resolved"] == "untold"
    b.put("after", run="r")
    assert b.send() == [[("firing", "after")]]


def test_a_resolve_of_what_was_never_told_is_not_sent(bench: Callable[..., Bench]) -> None:
    b = bench(Pace(group_wait_s=0.0, group_interval_s=0.0), (404, {}, b""))
    b.put("a")
    b.put("a", "resolved", resolved_at=b.now)
    b.put("unheard", "resolved", resolved_at=b.now)
    b.send()
    assert b.states == {"a:firing": "dead", "a:resolved": "untold", "unheard:resolved": "untold"}
    assert len(b.receiver.got) == 1


def test_a_resolve_goes_where_its_firing_went(outbox: Outbox, receiver_of: Receivers) -> None:
    page, other = receiver_of(), receiver_of()
    at_once = Pace(group_wait_s=0.0, group_interval_s=0.0)
    channels = [
        WebhookChannel(Target(r.url, from_operator=True), name=n, pace=at_once)
        for r, n in ((page, "page"), (other, "other"))
    ]

    def route(payload: Any) -> list[str]:
        return {"critical": ["page"], "warning": ["other"]}.get(payload["incident"]["severity"], [])

    dispatcher = Dispatcher(outbox.db, channels, route=route)
    outbox.put("firing", "c", severity="critical")
    outbox.put("firing", "w", severity="warning")
    outbox.put("firing", "i", severity="info")
    for incident in "cwi":
        outbox.put("resolved", incident, severity="critical", resolved_at=1.0)  # by then it was critical
    for _ in range(3):
        for channel in channels:
            dispatcher.deliver_one(channel)
    assert [g.body["alerts"][0]["fingerprint"] for g in page.got] == ["c", "c"]
    assert [g.body["alerts"][0]["fingerprint"] for g in other.got] == ["w", "w"]
    states = Counter((r["incident_id"], r["kind"], r["state"]) for r in outbox.rows)
    assert states["i", "firing", "unrouted"] == 1
    assert states["i", "resolved", "untold"] == 1


def test_what_waits_for_a_channel_that_is_gone_is_dead_after_a_day(outbox: Outbox, receiver_of: Receivers) -> None:
    outbox.put()
    with writing(outbox.db) as conn:
        conn.execute(sa.update(schema.outbox).values(channel="gone"))
    clock = [time.time()]
    channel = WebhookChannel(Target(receiver_of().url, from_operator=True))
    for state in ("pending", "dead"):
        dispatcher = Dispatcher(outbox.db, [channel], clock=lambda: clock[0])
        dispatcher.start()
        dispatcher.stop()
        assert outbox.rows[0]["state"] == state
        clock[0] += 86_401


def test_several_notices_are_one_slack_message_within_its_limits(outbox: Outbox, receiver_of: Receivers) -> None:
    receiver = receiver_of()
    channel = SlackChannel(Target(receiver.url, from_operator=True), pace=Pace(group_wait_s=0.0))
    dispatcher = Dispatcher(outbox.db, [channel])
    hostile = "<!channel> & " * 300
    for i in range(30):
        outbox.put(
            "firing", f"i{i}", run="r", severity="critical" if i == 29 else "warning", title=hostile, cause=hostile
        )
    assert dispatcher.deliver_one(channel)
    [got] = receiver.got
    blocks = got.body["blocks"]
    assert blocks[0]["text"]["text"] == "🔴 30 incidents (30 new) in run r"
    assert blocks[-1]["elements"][0]["text"] == "22 more on the pages"
    assert len(blocks) == 10
    assert len(got.raw) < 13_000 * 1.2
    texts = [b["text"]["text"] for b in blocks if b["type"] == "section"]
    assert all(len(text) <= 3000 for text in texts)
    assert not any("<!channel>" in text for text in [*texts, got.body["text"]])
    assert texts[0].startswith("*🔴 critical: ")
    assert "https://watch.example/incidents/" in texts[0]


def test_an_alertmanager_gets_alerts_that_do_not_run_out_and_end_when_they_are_over(
    outbox: Outbox, receiver_of: Receivers
) -> None:
    receiver, clock = receiver_of(), [1_700_000_000.0]
    channel = AlertmanagerChannel(Target(receiver.url, from_operator=True))
    dispatcher = Dispatcher(outbox.db, [channel], clock=lambda: clock[0])
    outbox.put("firing", "a", run="r", severity="warning", at=clock[0])
    assert dispatcher.deliver_one(channel)
    [firing] = receiver.got[0].body_list
    assert set(firing) == {"labels", "annotations", "startsAt", "endsAt", "generatorURL"}
    assert firing["endsAt"] > "2023-12-14"  # resolve_timeout would have ended it after five minutes
    assert firing["labels"]["alertname"] == "inf-laundering"
    outbox.put("resolved", "a", run="r", severity="critical", at=clock[0], resolved_at=clock[0] + 60)
    assert dispatcher.deliver_one(channel)
    [over] = receiver.got[1].body_list
    assert over["labels"] == firing["labels"]
    assert over["endsAt"] == "2023-11-14T22:14:20.000000Z"


def test_an_alertmanager_is_told_that_a_warning_ended_when_it_became_critical(
    outbox: Outbox, receiver_of: Receivers
) -> None:
    receiver = receiver_of()
    channel = AlertmanagerChannel(Target(receiver.url, from_operator=True))
    dispatcher = Dispatcher(outbox.db, [channel])
    outbox.put("firing", "a", severity="critical", was_severity="warning")
    assert dispatcher.deliver_one(channel)
    alerts = receiver.got[0].body_list
    assert [(a["labels"]["severity"], a["endsAt"] > "2026-12") for a in alerts] == [
        ("critical", True),
        ("warning", False),
    ]
