"""The channels that messages go out on: what each kind sends, and how many messages it bears.

Upstream:   fp8watch_server.notify.slack, fp8watch_server.notify.webhook, fp8watch_server.notify.alertmanager
Downstream: fp8watch_server.notify.outbox
Shapes:     outbox payload -> one HTTP request
Thread:     dispatcher, one per channel
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from fp8watch_server.notify import alertmanager, slack, webhook
from fp8watch_server.notify.safe_http import Answer, Target
from fp8watch_server.settings import Settings


@dataclass(frozen=True)
class Pace:
    """How many messages a channel bears, and what goes together in one."""

    min_interval_s: float = 0.0
    """Least time between two messages of the channel."""
    group_wait_s: float = 0.3
    """How long the first notice of a run waits for others, to go with them in one message."""
    group_interval_s: float = 10.0
    """Least time between two messages about one run; a new critical incident does not wait for it."""
    max_per_hour: int = 0
    """Messages within an hour; what comes after is told in summaries. 0: any number."""


SLACK_PACE = Pace(min_interval_s=1.0, max_per_hour=60)
"""Slack allows one message a second per URL, and nobody reads more than one a minute."""


class Channel(Protocol):
    """Somewhere to send messages to."""

    @property
    def name(self) -> str:
        """As stored in outbox.channel; one per process."""
        ...

    @property
    def pace(self) -> Pace:
        """How many messages it bears."""
        ...

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        ...

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log and no error may show."""
        ...

    def send(self, payload: dict[str, Any], kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt. Raises Unreachable or TargetError."""
        ...


@dataclass(frozen=True)
class SlackChannel:
    """A Slack incoming webhook."""

    target: Target
    name: str = "slack"
    pace: Pace = SLACK_PACE

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        return self.target.masked

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log and no error may show."""
        return (self.target.url,)

    def send(self, payload: dict[str, Any], kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt."""
        return self.target.post(msgspec.json.encode(slack.message(payload, kind)), _headers(idempotency_key))


@dataclass(frozen=True)
class WebhookChannel:
    """A generic receiver of Alertmanager's webhook body."""

    target: Target
    secret: str = field(default="", repr=False)
    name: str = "webhook"
    pace: Pace = Pace()

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        return self.target.masked

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log and no error may show."""
        return (self.target.url, self.secret) if self.secret else (self.target.url,)

    def send(self, payload: dict[str, Any], kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt."""
        body = msgspec.json.encode(webhook.message(payload, kind, receiver=self.name))
        headers = _headers(idempotency_key)
        if self.secret:
            headers["X-Fp8watch-Timestamp"] = str(int(now))
            headers["X-Fp8watch-Signature"] = webhook.signature(self.secret, int(now), body)
        return self.target.post(body, headers)


@dataclass(frozen=True)
class AlertmanagerChannel:
    """An Alertmanager, which groups, limits and silences by itself: it is told at once, and each time."""

    target: Target
    name: str = "alertmanager"
    pace: Pace = Pace(group_wait_s=0.0, group_interval_s=0.0)

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        return self.target.masked

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no log and no error may show."""
        return (self.target.url,)

    def send(self, payload: dict[str, Any], kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt."""
        return self.target.post(msgspec.json.encode(alertmanager.alerts(payload, kind, now)), _headers(idempotency_key))


def _headers(idempotency_key: str) -> dict[str, str]:
    return {"Content-Type": "application/json", "Idempotency-Key": idempotency_key}


def channels_of(settings: Settings) -> list[Channel]:
    """The channels that the environment of a collector names; none is fine."""
    channels: list[Channel] = []
    if settings.slack_webhook_url:
        channels.append(SlackChannel(Target(settings.slack_webhook_url, from_operator=True)))
    if settings.webhook_url:
        target = Target(settings.webhook_url, from_operator=True)
        channels.append(WebhookChannel(target, secret=settings.webhook_secret))
    return channels
