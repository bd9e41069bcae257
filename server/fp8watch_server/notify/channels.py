"""The channels that messages go out on, from the settings of the collector.

Upstream:   fp8watch_server.notify.slack, fp8watch_server.notify.webhook    Downstream: fp8watch_server.notify.outbox
Shapes:     outbox payload -> one HTTP request
Thread:     dispatcher, one per channel
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from fp8watch_server.settings import Settings

from . import slack, webhook
from .target import Answer, Target


class Channel(Protocol):
    """Somewhere to send messages to."""

    @property
    def name(self) -> str:
        """As stored in outbox.channel; one per process."""
        ...

    @property
    def min_interval_s(self) -> float:
        """Least time between two messages."""
        ...

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        ...

    def send(self, payload: dict[str, Any], kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt. Raises Unreachable or TargetError."""
        ...


@dataclass(frozen=True)
class SlackChannel:
    """A Slack incoming webhook; Slack allows one message a second per URL."""

    target: Target
    name: str = "slack"
    min_interval_s: float = 1.0

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        return self.target.masked

    def send(self, payload: dict[str, Any], kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt."""
        body = msgspec.json.encode(slack.message(payload, kind))
        return self.target.post(body, {"Content-Type": "application/json", "Idempotency-Key": idempotency_key})


@dataclass(frozen=True)
class WebhookChannel:
    """A generic receiver of Alertmanager's webhook body."""

    target: Target
    secret: str = field(default="", repr=False)
    name: str = "webhook"
    min_interval_s: float = 0.0

    @property
    def masked(self) -> str:
        """Where it goes, without the secret."""
        return self.target.masked

    def send(self, payload: dict[str, Any], kind: str, idempotency_key: str, now: float) -> Answer:
        """One attempt."""
        body = msgspec.json.encode(webhook.message(payload, kind))
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key}
        if self.secret:
            headers["X-Fp8watch-Timestamp"] = str(int(now))
            headers["X-Fp8watch-Signature"] = webhook.signature(self.secret, int(now), body)
        return self.target.post(body, headers)


def channels_of(settings: Settings) -> list[Channel]:
    """The channels that a collector's settings name; none is fine."""
    channels: list[Channel] = []
    if settings.slack_webhook_url:
        channels.append(SlackChannel(Target(settings.slack_webhook_url, from_operator=True)))
    if settings.webhook_url:
        target = Target(settings.webhook_url, from_operator=True)
        channels.append(WebhookChannel(target, secret=settings.webhook_secret))
    return channels
