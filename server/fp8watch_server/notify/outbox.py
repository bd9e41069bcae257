"""The dispatcher: takes messages out of the outbox and delivers them, at least once, a thread per channel.

Upstream:   fp8watch_server.incidents.messages (table outbox)
Downstream: fp8watch_server.notify.channels.base
Shapes:     rows of outbox -> HTTP requests
Thread:     one per channel, so that a slow or broken receiver keeps nobody else waiting

A row is leased before it is sent and marked after. A crash between the two sends it once more, with the same
Idempotency-Key. Without a crash nothing is sent twice. What each answer leads to:

    2xx                        sent
    429                        the whole channel waits for Retry-After
    408, 425, 5xx, no answer   again, with full-jitter back-off, for a day
    anything else              dead: another try would be refused as well

Where several notices went together and the message as a whole is refused (400, 413, 422, or it cannot be made), they
are sent one by one: the one that is bad harms no other.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from fp8watch_server.db import schema
from fp8watch_server.db.dialect import writing
from fp8watch_server.db.fence import is_fenced, unfenced
from fp8watch_server.incidents.payload import MessagePayload
from fp8watch_server.notify.channels import channels_of
from fp8watch_server.notify.channels.base import Channel
from fp8watch_server.notify.delivery_status import record_outcome
from fp8watch_server.notify.fanout import MAX_AGE_S, Route, fan_out, give_up_strangers, waits_for_all
from fp8watch_server.notify.flight_text import flight_text
from fp8watch_server.notify.group import choose
from fp8watch_server.notify.outbox_lease import (
    ALIVE,
    MAX_RETRY_AFTER_S,
    Leased,
    Raced,
    due_again,
    lease,
    release_leases_of_the_dead,
)
from fp8watch_server.notify.safe_http import Unreachable
from fp8watch_server.settings.webhook_url import TargetError

POLL_S = 0.5
LEASE_S = 12.0
BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 8.0
"""In the first ten minutes, so that a receiver that recovers hears within ten seconds; later MAX_LATE_BACK_OFF_S."""
MAX_LATE_BACK_OFF_S = 300.0
LATE_S = 600.0
FENCED_S = 2.0
"""How long what became of a message of a run that is being moved is kept: other messages of its channel wait as long."""
_WRITE_OPTION = "fp8watch_write"  # of store.dialect: an engine made for writing must not lock the database to look

_RETRIED = frozenset({408, 425})
_TOGETHER_ONLY = frozenset({400, 413, 422})
"""Refusals of what a message holds, not of who sends it: of several notices, each gets a message of its own."""
MIN_WAIT_S = 0.02

__all__ = ["Dispatcher", "channels_of", "counts"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of one attempt."""

    state: str  # sent | pending | dead | apart: each of its notices alone
    wait_s: float = 0.0
    error: str | None = None
    pause_channel: bool = False


class Dispatcher:
    """Delivers what is in the outbox until it is stopped. Without channels it does nothing, and rows stay pending."""

    def __init__(
        self,
        engine: sa.Engine,
        channels: Sequence[Channel],
        *,
        route: Route | None = None,
        clock: Callable[[], float] = time.time,
        poll_s: float = POLL_S,
        lease_s: float = LEASE_S,
    ) -> None:
        if len({c.name for c in channels}) != len(channels):
            raise ValueError("two channels of one name; each needs its own")
        self._engine, self._channels, self._clock = engine, list(channels), clock
        everybody = [c.name for c in channels]
        self._route: Route = route or (lambda payload: everybody)
        self._reading = engine.execution_options(**{_WRITE_OPTION: False})
        self._poll_s, self._lease_s = poll_s, lease_s
        self._name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex}"
        self._stop = threading.Event()
        self._wakes = {c.name: threading.Event() for c in channels}
        self._not_before = {c.name: 0.0 for c in channels}  # by time.monotonic(): a clock may be set back
        self._wait_s = {c.name: poll_s for c in channels}  # until a message is due, as far as is known
        self._said: dict[str, str | None] = {}  # of a channel: why its last attempt failed
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads; what a dead process of this machine had leased is taken back first."""
        if self._threads:
            return
        ALIVE.add(self._name)
        with writing(self._engine) as conn:
            release_leases_of_the_dead(conn)
            num_strange = give_up_strangers(conn, [c.name for c in self._channels], self._clock())
        if num_strange and self._channels:
            _log.warning("%d messages wait for channels that are not configured any more", num_strange)
        for channel in self._channels:
            thread = threading.Thread(
                target=self._run, args=(channel,), name=f"fp8watch-notify-{channel.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def wake(self) -> None:
        """Something was committed to the outbox: look now. Never blocks."""
        for event in self._wakes.values():
            event.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop taking messages, and wait for those that are being sent."""
        self._stop.set()
        self.wake()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(t.is_alive() for t in self._threads):
            ALIVE.discard(self._name)

    def _run(self, channel: Channel) -> None:
        wake = self._wakes[channel.name]
        while not self._stop.is_set():
            sent = False
            try:
                sent = self.deliver_one(channel)
            except DBAPIError as e:
                _log.warning("outbox: database not available (%s); trying again", type(e.orig).__name__)
                self._wait_s[channel.name] = self._poll_s
            except Exception:  # noqa: BLE001  (the thread must outlive whatever one row does)
                _log.exception("outbox: unexpected error on channel %s; trying again", channel.name)
                self._wait_s[channel.name] = self._poll_s
            if not sent:
                wake.wait(max(MIN_WAIT_S, min(self._poll_s, self._wait_s[channel.name])))
                wake.clear()

    def deliver_one(self, channel: Channel) -> bool:
        """Send the next message that is due on a channel. False where there is none."""
        now = self._clock()
        if (left_s := self._not_before[channel.name] - time.monotonic()) > 0:
            self._wait_s[channel.name] = left_s
            return False
        if not self._anything_due(channel, now):
            return False
        try:
            with writing(self._engine) as conn:
                fan_out(conn, self._route, now)
                leased = lease(conn, channel, self._name, now, self._lease_s)
        except Raced:
            return False
        if leased is None:  # what was fanned out waits for company, and no longer than it must
            with self._reading.connect() as conn:
                self._wait_s[channel.name] = _wait_s(conn, channel, self._clock())
            return False
        outcome = self._attempt(channel, leased)
        after = self._clock()
        self._not_before[channel.name] = time.monotonic() + max(
            channel.pace.min_interval_s, outcome.wait_s if outcome.pause_channel else 0.0
        )
        self._settle(channel, leased, outcome, after)
        return True

    def _attempt(self, channel: Channel, leased: Leased) -> Outcome:
        try:
            payload = self._with_flight(channel, leased)
            answer = channel.send(payload, leased.kind, leased.idempotency_key, self._clock())
        except Unreachable as e:
            return Outcome("pending", self._back_off_s(leased), str(e))
        except TargetError as e:
            return Outcome("dead", error=str(e))
        except Exception as e:  # noqa: BLE001  (a payload that cannot be rendered must not stop those behind it)
            return Outcome("apart" if leased.others else "dead", error=f"message cannot be made: {type(e).__name__}")
        error = f"HTTP {answer.status} {answer.text}".strip()
        if 200 <= answer.status < 300:
            return Outcome("sent")
        if answer.status == 429 or (answer.status == 503 and answer.retry_after_s is not None):
            wait = min(1.0 if answer.retry_after_s is None else answer.retry_after_s, MAX_RETRY_AFTER_S)
            return Outcome("pending", wait, error, pause_channel=True)
        if answer.status >= 500 or answer.status in _RETRIED:
            return Outcome("pending", self._back_off_s(leased), error)
        if answer.status in _TOGETHER_ONLY and leased.others:
            return Outcome("apart", error=error)
        if 300 <= answer.status < 400:
            error += ": redirects are not followed; give the final URL"
        return Outcome("dead", error=error)

    def _with_flight(self, channel: Channel, leased: Leased) -> MessagePayload:
        """The payload, with the flight recorder where the channel shows it. A message never fails for its picture."""
        if leased.kind != "firing" or leased.others or not getattr(channel, "shows_flight", False):
            return leased.payload
        try:
            with self._reading.connect() as conn:
                return {**leased.payload, "flight": flight_text(conn, leased.payload["incident"])}
        except Exception as e:  # noqa: BLE001
            _log.info("outbox: the message goes without the flight recorder (%s)", type(e).__name__)
            return leased.payload

    def _back_off_s(self, leased: Leased) -> float:
        late = self._clock() - leased.created_at > LATE_S
        limit = MAX_LATE_BACK_OFF_S if late else MAX_BACK_OFF_S
        return random.uniform(0.05, min(limit, BACK_OFF_S * 2.0 ** min(leased.num_attempts, 16)))

    def _anything_due(self, channel: Channel, now: float) -> bool:
        """Looked up without the right to write, which is asked for only when there is something to send."""
        with self._reading.connect() as conn:
            t = schema.outbox.c
            fresh = sa.and_(t.state == "pending", t.num_attempts == 0)
            of_channel = (t.channel == channel.name, unfenced(t.run_id))
            wanted = sa.select(t.id).where(*of_channel, sa.or_(fresh, due_again(now))).limit(1)
            self._wait_s[channel.name] = self._poll_s
            if waits_for_all(conn):
                return True
            if conn.execute(wanted).first() is None:
                return False
            if conn.execute(wanted.where(due_again(now))).first() is not None:
                return True
            self._wait_s[channel.name] = _wait_s(conn, channel, now)
            return self._wait_s[channel.name] <= 0

    def _settle(self, channel: Channel, leased: Leased, outcome: Outcome, now: float) -> None:
        """Write what became of it. A busy database is waited for: giving up here would send the message again."""
        state, error = outcome.state, outcome.error
        if state == "pending" and now - leased.created_at > MAX_AGE_S:
            state, error = "dead", f"given up after a day: {error}"
        if state == "sent":
            self._said.pop(channel.name, None)
        else:  # a receiver that is away is told once, a message that nobody gets each time
            again = state == "pending" and self._said.get(channel.name) == error
            level = logging.INFO if again else logging.WARNING
            _log.log(level, "message %s on %s: %s (%s)", leased.id, channel.name, state, error)
            self._said[channel.name] = error
        until = time.monotonic() + FENCED_S
        while True:
            try:
                with writing(self._engine) as conn:
                    record_outcome(conn, leased, self._name, state, error, now, outcome.wait_s)
                return
            except DBAPIError as e:
                if is_fenced(e) and time.monotonic() > until:
                    _log.warning(
                        "message %s on %s: its run is being moved, so it may be sent again", leased.id, channel.name
                    )
                    return
                if self._stop.wait(0.2):
                    raise


def _wait_s(conn: sa.Connection, channel: Channel, now: float) -> float:
    """Until a message is due among those that were never tried."""
    pick = choose(conn, channel, now)
    return 0.0 if pick.rows else pick.wait_s


def counts(conn: sa.Connection) -> dict[tuple[str, str], int]:
    """Messages by (channel, state), for /metrics and for seeing dead letters; channel "" is not yet fanned out."""
    t = schema.outbox
    rows = conn.execute(sa.select(t.c.channel, t.c.state, sa.func.count()).group_by(t.c.channel, t.c.state))
    return {(str(channel), str(state)): int(count) for channel, state, count in rows}
